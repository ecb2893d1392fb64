"""A second, slow implementation of DFlash, and checkpoints to try it on."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spec_trl.generation.drafters.checkpoints import write_checkpoint
from spec_trl.generation.drafters.dflash.dflash_network import DFlashConfig, DFlashNetwork
from tests.generation.drafters.straight_line import StraightLine, draw_vocabulary


VOCABULARY, EPS = 64, 1e-6
SIZES = dict(
    hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=128, rms_norm_eps=EPS, vocab_size=VOCABULARY, hidden_act="silu",
    attention_bias=False, rope_theta=5000.0, rope_scaling=None,
)  # fmt: skip
WINDOWED = dict(use_sliding_window=True, sliding_window=5, layer_types=["full_attention", "sliding_attention"])
LLAMA3 = dict(
    rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)


def zlab(**changes: Any) -> dict[str, Any]:
    inner = dict(target_layer_ids=[1, 0], mask_token_id=2) | changes.pop("dflash_config", {})
    own = dict(model_type="qwen3", block_size=6, num_target_layers=2, dflash_config=inner)
    return SIZES | own | changes


def speculators(inner: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    own = dict(
        speculators_model_type="dflash", block_size=6, draft_vocab_size=VOCABULARY, mask_token_id=2,
        aux_hidden_state_layer_ids=[0, 2], transformer_layer_config=SIZES | {"model_type": "qwen3"} | (inner or {}),
    )  # fmt: skip
    return own | changes


PRUNED = speculators(draft_vocab_size=40)
VARIANTS: dict[str, dict[str, Any]] = {
    "z-lab": zlab(),
    "z-lab, block size within dflash_config": zlab(block_size=None, dflash_config={"block_size": 3}),
    "z-lab, biases, RoPE of Llama 3": zlab(attention_bias=True, rope_scaling=LLAMA3, max_position_embeddings=4096),
    "z-lab, causal window": zlab(**WINDOWED),
    "z-lab, window to both sides": zlab(**WINDOWED | {"sliding_window": 3}, is_causal=False),
    "z-lab, scales and softcap": zlab(
        dflash_config=dict(input_embedding_scale=3.0, output_multiplier=0.5, final_logit_softcapping=2.0)
    ),
    "speculators": speculators(),
    "speculators, pruned": PRUNED,
    "speculators, window": speculators(WINDOWED),
    "speculators, window to both sides": speculators(WINDOWED, sliding_window_non_causal=True),
    "speculators, from the anchor": speculators(sample_from_anchor=True, draft_vocab_size=40),
}


def make_checkpoint(
    folder: Path, settings: dict[str, Any], features: int = 128, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """A checkpoint with random weights, with embedding and head of its own where the vocabulary is pruned."""
    config = DFlashConfig.parse(settings)
    is_pruned = config.draft_vocabulary != config.decoder.vocab_size
    with torch.device("meta"):
        network = DFlashNetwork(config, features, ("embed_tokens.weight", "lm_head.weight") if is_pruned else ())
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in network.state_dict().items():
        random = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        # Sharp enough that slots, positions and context all matter to the largest logit.
        tensors[name] = (1 + 0.3 * random if "norm" in name else 2.5 * random * tensor.shape[-1] ** -0.5).to(dtype)
    tensors |= draw_vocabulary(config.draft_vocabulary, config.decoder.vocab_size, generator)
    write_checkpoint(folder, settings, tensors)
    return tensors


# ---- the straight line: one row, one slot, one head at a time, everything recomputed --------------------------------


def sees(settings: dict[str, Any], layer: int, query: int, key: int, anchor: int, in_block: bool) -> bool:
    is_speculators = "speculators_model_type" in settings
    sizes = settings["transformer_layer_config"] if is_speculators else settings
    window = sizes["sliding_window"] if sizes.get("layer_types", [""] * 9)[layer] == "sliding_attention" else None
    if is_speculators:
        if window is None:
            return True
        return key >= anchor - window if not in_block else settings.get("sliding_window_non_causal") or key <= query
    causal = settings.get("is_causal", window is not None)
    return not (causal and key > query) and (window is None or abs(query - key) < window)


def straight_line(
    target: PreTrainedModel, weights: dict[str, Tensor], settings: dict[str, Any], row: Tensor
) -> Tensor:
    """Draft logits `[drafts, vocabulary]` after `row` `[n]` of committed tokens."""
    is_speculators = "speculators_model_type" in settings
    sizes = settings["transformer_layer_config"] if is_speculators else settings
    line, extra = StraightLine(sizes, weights), settings.get("dflash_config", {})
    block = settings["block_size"] or extra["block_size"]
    anchor = len(row) - 1
    context: list[Tensor] = []
    if anchor:
        states = target(row[None, :-1], output_hidden_states=True).hidden_states
        ids = settings["aux_hidden_state_layer_ids"] if is_speculators else [i + 1 for i in extra["target_layer_ids"]]
        for position in range(anchor):
            feature = torch.cat([states[i][0, position] for i in ids])  # [features]
            context.append(line.norm(line.linear(feature, "fc"), "hidden_norm"))
    table = weights.get("embed_tokens.weight", target.get_input_embeddings().weight)
    hidden = [table[t] * extra.get("input_embedding_scale", 1.0) for t in [int(row[-1])] + [2] * (block - 1)]
    for index in range(sizes["num_hidden_layers"]):
        layer = f"layers.{index}"
        inputs = [line.norm(x, f"{layer}.input_layernorm") for x in hidden]
        keys = [line.turned(x, layer, "k", position) for position, x in enumerate(context + inputs)]
        values = [line.values(x, layer) for x in context + inputs]
        for slot, x in enumerate(inputs):
            at = anchor + slot
            seen = [key for key in range(anchor + block) if sees(settings, index, at, key, anchor, key >= anchor)]
            queries = line.turned(x, layer, "q", at)
            attended = line.attend(queries, [keys[key] for key in seen], [values[key] for key in seen], layer)
            hidden[slot] = line.mlp(hidden[slot] + attended, layer)
    head = weights.get("lm_head.weight", target.get_output_embeddings().weight)
    cap, logits = extra.get("final_logit_softcapping"), []
    for state in hidden:
        scored = head @ line.norm(state, "norm") * extra.get("output_multiplier", 1.0)
        logits.append(line.over_target_vocabulary(torch.tanh(scored / cap) * cap if cap else scored, VOCABULARY))
    return torch.stack(logits[0 if settings.get("sample_from_anchor") else 1 :])
