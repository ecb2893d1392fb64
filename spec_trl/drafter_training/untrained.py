"""Untrained checkpoints of the public formats, as a start for training a drafter.

A checkpoint does not hold what it borrows from the target: embeddings, and DFlash's head. A head of its own starts as
the target's rows, the final norm at the root mean square of the target's last hidden states, from which one is too far
for a short training. All other matrices are random with standard deviation 1 / sqrt(inputs), other norms are one. RoPE
is not scaled and has the target's theta, so that positions have no end.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..generation.drafters.borrowed import plain_embedding
from ..generation.drafters.checkpoints import write_checkpoint
from ..generation.drafters.dflash.network import DFlashConfig, DFlashNetwork, spaced_layers
from ..generation.drafters.eagle3.network import Eagle3Config, Eagle3Network
from ..generation.drafters.feature_network import FeatureNetwork
from ..generation.engine.shadow import observe
from .target_head import TargetHead


EAGLE3_FORMATS = ("safeai", "speculators")
DFLASH_FORMATS = ("z-lab", "speculators")
_LOOKED_AT = 64  # random tokens that tell how large the target's last hidden states are
_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a drafter's layers, by their names in a config; None: as the target's, like the hidden size."""

    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None


def write_eagle3(
    folder: str | Path,
    target: PreTrainedModel,
    *,
    format: str = "safeai",
    sizes: LayerSizes | None = None,
    layer_ids: list[int] | None = None,
    draft_vocab_size: int | None = None,
    token_counts: Tensor | None = None,
    seed: int = 0,
) -> None:
    """Writes an untrained EAGLE-3 checkpoint in the target's dtype, which `Eagle3Drafter` loads.

    Args:
        folder: made where it does not exist.
        target: what it is to draft for.
        format: `"safeai"` (SafeAILab, AngelSlim, SpecForge) or `"speculators"`.
        sizes: of its layer.
        layer_ids: the target's hidden states that it reads, in transformers' count. None: 2, L // 2 and L - 3 of L
            layers where these ascend, else three evenly from the first layer's output to the last's.
        draft_vocab_size: size of a pruned vocabulary, of the most frequent tokens; None: the whole one.
        token_counts: `[V]` int64, how often each token occurs, for a pruned vocabulary.
        seed: of its weights.

    Raises:
        ValueError: an argument does not fit the target.
    """
    _check_format(format, EAGLE3_FORMATS)
    own = target.config.get_text_config(decoder=True)
    depth, vocabulary = own.num_hidden_layers, own.vocab_size
    rule = [2, depth // 2, depth - 3]
    ids = layer_ids if layer_ids is not None else rule if rule == sorted(set(rule)) else _evenly(depth, 3)
    kept = _kept_tokens(vocabulary, draft_vocab_size, token_counts)  # [draft vocabulary]
    is_pruned = len(kept) < vocabulary
    layer = _layer_settings(target, sizes or LayerSizes()) | {"model_type": "llama", "num_hidden_layers": 1}
    config: dict[str, Any] = {"draft_vocab_size": len(kept)}
    if format == "speculators":
        config |= _speculators_config("eagle3", target, 5) | {
            "architectures": ["Eagle3Speculator"],
            "norm_before_residual": True,  # their training default; the class default is another
            "target_hidden_size": own.hidden_size,
            "transformer_layer_config": layer,
            _IDS: ids,
        }
    else:
        config |= layer | {"architectures": ["LlamaForCausalLMEagle3"]} | ({_IDS: ids} if ids != rule else {})
    parsed = Eagle3Config.parse(config, depth)
    parsed.check_target(own, {"d2t", "lm_head.weight"})
    network = Eagle3Network(parsed, own.hidden_size * len(ids), {"d2t", "t2d"} if is_pruned else ())
    _initialise(network, target, seed)
    assert network.lm_head is not None
    with torch.no_grad():
        network.lm_head.weight.copy_(_head_rows(target)[kept])
    if is_pruned:
        network.d2t.copy_(kept - torch.arange(len(kept)))
        network.t2d[kept] = True
    tensors = network.to(target.dtype).state_dict()
    if format == "safeai":
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    write_checkpoint(folder, config, tensors)


def write_dflash(
    folder: str | Path,
    target: PreTrainedModel,
    *,
    format: str = "z-lab",
    block_size: int = 16,
    layers: int = 5,
    sizes: LayerSizes | None = None,
    layer_ids: list[int] | None = None,
    mask_token: int | None = None,
    seed: int = 0,
) -> None:
    """Writes an untrained DFlash checkpoint in the target's dtype, which `DFlashDrafter` loads.

    Args:
        folder, target, sizes, seed: as of :func:`write_eagle3`.
        format: `"z-lab"` or `"speculators"`, which brings copies of the target's embedding and head.
        block_size: number of slots of a block, the anchor included.
        layers: number of the drafter's layers.
        layer_ids: the target's hidden states that it reads, in transformers' count (z-lab's own is one less). None: as
            many as it has layers, spaced as z-lab spaces them where these ascend, else evenly.
        mask_token: fills the slots to be drafted; a token that text does not contain. None: the target's pad token.

    Raises:
        ValueError: an argument does not fit the target, or the target has no pad token to take.
    """
    _check_format(format, DFLASH_FORMATS)
    own = target.config.get_text_config(decoder=True)
    depth, is_zlab = own.num_hidden_layers, format == "z-lab"
    if layers < 1 or block_size < 2:
        raise ValueError(f"layers={layers}, block_size={block_size}; give at least 1 layer and 2 slots.")
    rule = [index + 1 for index in spaced_layers(depth, layers)]
    fits = rule == sorted(set(rule)) and 1 <= rule[0] and rule[-1] <= depth
    ids = layer_ids if layer_ids is not None else rule if fits else _evenly(depth, min(layers, depth))
    if not ids or min(ids) < int(is_zlab) or max(ids) > depth:
        raise ValueError(f"layer_ids={ids}: {format} drafters read hidden states from {int(is_zlab)} to {depth} here.")
    mask = _mask_token(target, mask_token)
    layer = _layer_settings(target, sizes or LayerSizes()) | {"model_type": "qwen3", "num_hidden_layers": layers}
    layer |= {"layer_types": ["full_attention"] * layers, "use_sliding_window": False, "attention_bias": False}
    head = TargetHead(target)
    config: dict[str, Any] = {"architectures": ["DFlashDraftModel"], "block_size": block_size}
    if is_zlab:
        inner: dict[str, Any] = {"mask_token_id": mask, "target_layer_ids": [index - 1 for index in ids]}
        inner |= {"output_multiplier": head.factor} if head.factor != 1 else {}
        inner |= {"final_logit_softcapping": head.softcap} if head.softcap is not None else {}
        config |= layer | {"num_target_layers": depth, "dflash_config": inner}
    else:
        if head.softcap is not None:
            raise ValueError(f'{type(target).__name__} caps its logits at {head.softcap}: choose format="z-lab".')
        config |= _speculators_config("dflash", target, block_size - 1) | {
            "mask_token_id": mask,
            "draft_vocab_size": own.vocab_size,
            "aux_hidden_state_layer_ids": ids,
            "transformer_layer_config": layer,
        }
    own_tensors = () if is_zlab else ("embed_tokens.weight", "lm_head.weight")
    network = DFlashNetwork(DFlashConfig.parse(config), own.hidden_size * len(ids), own_tensors)
    _initialise(network, target, seed)
    if network.embed_tokens is not None and network.lm_head is not None:
        with torch.no_grad():
            tokens = torch.arange(own.vocab_size, device=target.device)
            network.embed_tokens.weight.copy_(plain_embedding(target)(tokens))
            network.lm_head.weight.copy_(_head_rows(target) * head.factor)
    write_checkpoint(folder, config, network.to(target.dtype).state_dict())


def _check_format(format: str, formats: tuple[str, ...]) -> None:
    if format not in formats:
        raise ValueError(f"format={format!r} is not one of {formats}.")


def _evenly(depth: int, count: int) -> list[int]:
    """Up to `count` different hidden states, from the first layer's output to the last's."""
    return sorted({round(1 + i * (depth - 1) / (count - 1)) for i in range(count)}) if count > 1 else [depth]


def _layer_settings(target: PreTrainedModel, sizes: LayerSizes) -> dict[str, Any]:
    """The keys of a Llama or Qwen3 config for a layer like the target's."""
    own = target.config.get_text_config(decoder=True)
    settings = own.to_dict()  # families leave out different keys
    heads = sizes.num_attention_heads or own.num_attention_heads
    shared = sizes.num_key_value_heads or min(settings.get("num_key_value_heads") or heads, heads)
    dimensions = sizes.head_dim or settings.get("head_dim") or own.hidden_size // own.num_attention_heads
    rope = settings.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)  # some families have one per layer type
    found = {
        "hidden_size": own.hidden_size,
        "intermediate_size": sizes.intermediate_size or settings.get("intermediate_size") or 4 * own.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": dimensions,
        "hidden_act": "silu",
        "rms_norm_eps": settings.get("rms_norm_eps") or 1e-6,
        "rope_theta": float(rope.get("rope_theta") or 10000.0),
        "max_position_embeddings": own.max_position_embeddings,
        "vocab_size": own.vocab_size,
        "tie_word_embeddings": False,
    }
    for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        if found[name] < 1:
            raise ValueError(f"sizes.{name}={found[name]}; it must be at least 1.")
    if heads % shared or dimensions % 2:
        raise ValueError(
            f"sizes give {heads} query heads of {dimensions} dimensions over {shared} key heads; the first must be a "
            "multiple of the last, and the dimensions even."
        )
    return found


def _speculators_config(algorithm: str, target: PreTrainedModel, tokens: int) -> dict[str, Any]:
    config = {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
        "verifier": {"name_or_path": target.name_or_path, "architectures": [type(target).__name__]},
    }
    return {"speculators_model_type": algorithm, "speculators_config": config}


def _kept_tokens(vocabulary: int, size: int | None, counts: Tensor | None) -> Tensor:
    """`[size]` int64, ascending: the most frequent tokens, of equally frequent ones the lowest; all without a size."""
    if size is None and counts is None:
        return torch.arange(vocabulary)
    if size is None or counts is None:
        raise ValueError("draft_vocab_size and token_counts belong together: give both, or neither.")
    if counts.shape != (vocabulary,) or not 1 <= size <= vocabulary:
        raise ValueError(
            f"draft_vocab_size={size} with token_counts of shape {list(counts.shape)}; the target has {vocabulary} "
            "tokens, so give counts of all of them and a size of at most that."
        )
    return counts.cpu().sort(descending=True, stable=True).indices[:size].sort().values


def _mask_token(target: PreTrainedModel, mask_token: int | None) -> int:
    own = target.config.get_text_config(decoder=True)
    if mask_token is None:
        pad = own.pad_token_id if own.pad_token_id is not None else target.generation_config.pad_token_id
        ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
        if pad is None or pad < 0 or pad in (*ends, own.bos_token_id):
            raise ValueError(
                f"{type(target).__name__} has no pad token of its own (pad_token_id={pad}) that could be the mask; "
                "give mask_token, a token that text does not contain."
            )
        return int(pad)
    if not 0 <= mask_token < own.vocab_size:
        raise ValueError(f"mask_token={mask_token}; the target's tokens are 0 to {own.vocab_size - 1}.")
    return mask_token


def _initialise(network: FeatureNetwork, target: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
    own = target.config.get_text_config(decoder=True)
    length = min(_LOOKED_AT, own.max_position_embeddings)
    tokens = torch.randint(own.vocab_size, (1, length), generator=generator).to(target.device)
    _, hidden = observe(target, tokens, ())  # [1, n, H_t]
    nn.init.constant_(network.norm.weight, float(hidden.float().square().mean().sqrt()))


@torch.no_grad()
def _head_rows(target: PreTrainedModel) -> Tensor:
    """The weight `[V, H_t]` of its output embedding, float32 on the CPU, whatever wraps it: the scores of unit
    vectors, without the bias."""
    scores = TargetHead(target).scores
    unit = torch.eye(target.config.get_text_config(decoder=True).hidden_size, device=target.device, dtype=target.dtype)
    return (scores(unit) - scores(torch.zeros_like(unit[:1]))).T.float().cpu()
