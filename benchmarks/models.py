"""Models to measure: a local checkpoint, or synthetic weights in a real model's shape.

Speed depends on shapes, acceptance on how well a drafter agrees with its target. `shape:NAME`
builds the first exactly and sets the second by hand, so a speed-up can be measured without any checkpoint. What the
built model really does (entropy, overlap) is measured on its own samples and belongs into every result made with it.
"""

import argparse
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
)
from transformers.initialization import no_init_weights

from spec_trl.quantization.rtn import GROUP_SIZES


SHAPE_PREFIX = "shape:"
GROUP = 128  # weights that share one scale in the quantized copy
LEVELS = 15  # 4 bit: codes 0..15
CODE_STD = 2.7  # of the codes -8..7: a Gaussian group of 128 spans about 15 steps
# The largest of V Gaussian logits with standard deviation s carry a Poisson-Dirichlet law with parameter
# m = sqrt(2 ln V) / s, whose mean entropy is psi(1) - psi(1 - m): 1.7 nats at 0.55, a trained model's range.
CONCENTRATION = 0.55
# Norm of all layers' outputs together over the embedding's, roughly: as in trained models no single layer dominates
# the stream, so rounding errors do not grow from layer to layer as they would in a stack of unit-gain layers. Much
# less, and the next token would depend on the last alone, and texts would fall into loops.
BRANCH_SHARE = 6.0
# Attention averages values over the context, so its output changes slowly; at full strength it would make every text
# repeat the tokens its context favours.
ATTENTION_SHARE = 0.5
CHUNK = 1 << 22  # weights drawn at a time: bounds the fp32 scratch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

SHAPES = {
    "qwen2.5-0.5b": Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "tiny": Qwen2Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
}  # fmt: skip

# Weight noise in quantization steps that gives a shape the agreement: found by bisection at seed 0 in bfloat16,
# where it measured 0.928, 0.851, 0.930 and 0.846. Results state what is measured again when the model is built.
NOISE: dict[tuple[str, float], float] = {
    ("qwen2.5-0.5b", 0.93): 0.0069,
    ("qwen2.5-0.5b", 0.85): 0.0302,
    ("tiny", 0.93): 0.0417,
    ("tiny", 0.85): 0.1041,
}

GRID_GROUP = 32
GRID_LINE = (
    "The checkpoint was read from a 4-bit file: its projections lie on a 4-bit grid (groups of 32), so a 4-bit copy "
    "agrees with it better than with a usual checkpoint. The grid does nothing for an 8-bit copy, which float32 on a "
    "CPU with a C++ compiler has by default. Training moves weights off the grid."
)


@dataclass(frozen=True)
class Agreement:
    """How a model and its 4-bit copy agree on the model's own samples at temperature 1.

    Overlap is the mean of sum_v min(p, q), the acceptance rate of rejection verification; entropy is in nats.
    """

    overlap_packed_head: float
    overlap_dense_head: float
    entropy: float
    distinct_tokens: float  # distinct generated tokens / generated tokens: near 0 would be a loop
    positions: int


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to measure, its tokenizer (None: synthetic weights), and what a result must state about it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    facts: dict[str, object]


def load_model(
    spec: str, dtype: torch.dtype, device: str, agreement: float = 0.93, seed: int = 0, measured: bool = True
) -> LoadedModel:
    """Load `spec`: a folder with a checkpoint, or `shape:` with a name of SHAPES; of those
    `agreement` is the overlap wanted with the 4-bit copy, and where `measured`, the one reached is among the facts."""
    if spec.startswith(SHAPE_PREFIX):
        model = shape_model(spec.removeprefix(SHAPE_PREFIX), agreement, seed, dtype, device)
        tokenizer = None
        facts: dict[str, object] = {"synthetic_weights": True, "model": spec}
        if measured:
            facts["agreement"] = asdict(measure_agreement(model, seed))
    else:
        model = AutoModelForCausalLM.from_pretrained(spec, dtype=dtype).to(device).eval()
        tokenizer = AutoTokenizer.from_pretrained(spec)
        facts = {"synthetic_weights": False, "model": Path(spec).name, "weights_on_4_bit_grid": on_4_bit_grid(model)}
    facts |= {
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(dtype).removeprefix("torch."),
    }
    return LoadedModel(model, tokenizer, facts)


def on_4_bit_grid(model: PreTrainedModel) -> bool:
    """Whether the first and the last projection hold at most 16 values in each group of 32, as a 4-bit file gives."""
    weights = [m.weight.detach() for m in model.base_model.modules() if isinstance(m, nn.Linear)]
    ends = [weight for weight in weights[:: max(len(weights) - 1, 1)] if weight.shape[1] % GRID_GROUP == 0]
    groups = [weight.reshape(-1, GRID_GROUP).sort(1).values for weight in ends]  # each [groups, 32]
    return len(ends) > 0 and all((each.diff(dim=1) != 0).sum(1).max() < 16 for each in groups)


def load_target(
    target: str, device: str, agreement: float = 0.93, seed: int = 0, measured: bool = True
) -> LoadedModel:
    """Loads `MODEL,DTYPE`."""
    spec, dtype = target.rsplit(",", 1)
    return load_model(spec, DTYPES[dtype], device, agreement, seed, measured)


def check_targets(parser: argparse.ArgumentParser, targets: Sequence[str]) -> None:
    """Ends with an error that names a target that is no `MODEL,DTYPE`."""
    for target in targets:
        spec, _, dtype = target.rpartition(",")
        if not spec or dtype not in DTYPES:
            parser.error(f"--models {target}: name a dtype after a comma, one of {', '.join(DTYPES)}")
        if not spec.startswith(SHAPE_PREFIX) and not Path(spec).is_dir():
            parser.error(f"--models {spec}: no such folder; name one, or {SHAPE_PREFIX}NAME")


def model_line(facts: Mapping[str, Any]) -> str:
    """A loaded model's name and dtype."""
    return f"{facts['model']}, {facts['dtype']}"


def weights_line(facts: Mapping[str, Any]) -> str:
    """A sentence about weights that are synthetic or on a 4-bit grid; empty for all others."""
    if "agreement" not in facts:
        on_grid = facts.get("weights_on_4_bit_grid", False)  # results of before have no such field
        return f" {GRID_LINE}" if on_grid else ""
    measured = facts["agreement"]
    return (
        f" Synthetic weights; on the model's own samples the overlap with the 4-bit copy is "
        f"{measured['overlap_packed_head']:.3f} and the entropy {measured['entropy']:.2f} nats."
    )


def shape_model(name: str, agreement: float, seed: int, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Build a model with synthetic weights whose 4-bit copy overlaps with it by about `agreement`.

    Raises:
        ValueError: `name` is not in SHAPES, or nothing is known that reaches `agreement`.
    """
    config = shape_config(name)
    if (name, agreement) not in NOISE:
        raise ValueError(f"shape {name!r}, agreement {agreement}: choose one of {sorted(NOISE)}")
    return build(config, NOISE[name, agreement], seed, dtype, device)


def shape_config(name: str) -> PreTrainedConfig:
    """The config of `shape:name`, without end of sequence: all rows of a rollout then have one length."""
    if name not in SHAPES:
        raise ValueError(f"shape {name!r} is unknown: name one of {sorted(SHAPES)}")
    config = copy.deepcopy(SHAPES[name])
    config.bos_token_id = None
    config.eos_token_id = None
    config.pad_token_id = 0
    return config


def build(config: PreTrainedConfig, noise: float, seed: int, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A model with weights on a 4-bit grid plus Gaussian noise of `noise` grid steps.

    Without noise the quantized copy is exact; the noise is then the copy's only error, so it tunes the agreement.
    """
    with no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    if "norm" not in dict(model.base_model.named_children()):
        raise ValueError(f"model_type={config.model_type!r} has no final norm named 'norm': use a Llama-like config")
    generator = torch.Generator(device).manual_seed(seed)
    residual_std = BRANCH_SHARE / math.sqrt(2 * config.num_hidden_layers * config.hidden_size)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                fill_grid(module.weight, 1.0, noise, generator)
            elif isinstance(module, nn.Linear):
                gain = residual_std if name.endswith(("o_proj", "down_proj")) else 1.0
                if name.endswith("v_proj"):
                    gain = ATTENTION_SHARE
                if module.weight is not model.get_input_embeddings().weight:
                    fill_grid(module.weight, gain, noise, generator)
                if module.bias is not None:
                    module.bias.normal_(std=0.1, generator=generator)
        head = model.get_output_embeddings().weight  # [vocab, hidden]
        logit_std = math.sqrt(2 * math.log(config.vocab_size)) / CONCENTRATION
        # The norm's output has unit RMS, so a logit has the deviation weight_std * sqrt(hidden) * gain.
        gain = logit_std / (head[:4096].float().std().item() * math.sqrt(config.hidden_size))
        signs = torch.randint(0, 2, (config.hidden_size,), generator=generator, device=device) * 2 - 1  # [hidden]
        # Random signs: with tied weights the last token's own embedding would otherwise top its logits for ever.
        model.base_model.norm.weight.copy_(gain * signs)
    return model.eval()


def fill_grid(weight: Tensor, gain: float, noise: float, generator: torch.Generator) -> None:
    """Fill `weight` [out, in] in place with codes -8..7 times a power of two near gain/sqrt(in)/CODE_STD, and noise.

    Each group holds both -8 and 7, so round-to-nearest finds the grid again; the power of two keeps codes exact in
    bfloat16.
    """
    rows, columns = weight.shape
    if columns % GROUP:
        raise ValueError(f"a weight has {columns} inputs, no multiple of {GROUP}: choose a shape whose widths are")
    step = 2.0 ** round(math.log2(gain / (CODE_STD * math.sqrt(columns))))
    for block in weight.split(max(1, CHUNK // columns)):  # [rows of the block, in]
        codes = torch.empty(block.shape[0], columns // GROUP, GROUP, device=weight.device)  # [rows, groups, group]
        codes.normal_(std=CODE_STD, generator=generator).round_().clamp_(-8, 7)
        codes.scatter_(-1, codes.argmin(-1, keepdim=True), -8.0)  # the extremes of a group, wherever they fell
        codes.scatter_(-1, codes.argmax(-1, keepdim=True), 7.0)
        codes.add_(torch.empty_like(codes).normal_(generator=generator), alpha=noise)
        block.copy_(codes.mul_(step).view_as(block))


@torch.no_grad()
def round_trip(weight: Tensor) -> Tensor:
    """`weight` [out, in] after asymmetric 4-bit round-to-nearest and back, same dtype (ER §C.3).

    Groups are of 128, or the largest smaller size that kernels take and that divides a row; without one the weight
    stays as it is.
    """
    group = next((size for size in GROUP_SIZES if weight.shape[1] % size == 0), None)
    if group is None:
        return weight.clone()
    out = torch.empty_like(weight)
    rows = max(1, CHUNK // weight.shape[1])
    for source, target in zip(weight.split(rows), out.split(rows), strict=True):
        w = source.float().view(source.shape[0], -1, group)  # [rows, groups, group]
        low = w.amin(-1, keepdim=True).clamp_(max=0)  # [rows, groups, 1]
        high = w.amax(-1, keepdim=True).clamp_(min=0)  # [rows, groups, 1]
        scale = ((high - low) / LEVELS).clamp_(min=1e-5).to(weight.dtype).float()  # [rows, groups, 1]
        zero = (-low / scale).round_().clamp_(0, LEVELS)  # [rows, groups, 1]
        codes = (w / scale).round_().add_(zero).clamp_(0, LEVELS)  # [rows, groups, group]
        target.copy_((codes.sub_(zero).mul_(scale)).view_as(target))
    return out


@torch.no_grad()
def quantized_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model` with projections and output head round-tripped; the embedding stays the model's own."""
    twin = copy.deepcopy(model)
    embedding = twin.get_input_embeddings().weight
    for module in twin.modules():
        if isinstance(module, nn.Linear):
            packed = round_trip(module.weight)
            if module.weight is embedding:  # tied: a Parameter of its own, the embedding keeps the dense weight
                module.weight = nn.Parameter(packed, requires_grad=False)
            else:
                module.weight.data = packed
    return twin


@torch.no_grad()
def own_texts(model: PreTrainedModel, seed: int, rows: int, new_tokens: int) -> tuple[Tensor, int]:
    """Texts [rows, prompt + new] that the model samples at temperature 1, none of which ends early, and the length of
    their prompts: the token that begins a text, or where there is none 8 seeded random ones."""
    generator = torch.Generator().manual_seed(seed)
    begin = model.config.bos_token_id
    if begin is None:
        prompts = torch.randint(model.config.vocab_size, (rows, 8), generator=generator)  # [rows, 8]
    else:
        prompts = torch.full((rows, 1), begin)  # [rows, 1]
    prompts = prompts.to(model.device)
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        texts = model.generate(
            input_ids=prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0, top_k=0,
            min_new_tokens=new_tokens, max_new_tokens=new_tokens,
        )  # fmt: skip  # [rows, prompt + new]
    return texts, prompts.shape[1]


@torch.no_grad()
def measure_agreement(model: PreTrainedModel, seed: int = 0, rows: int = 16, new_tokens: int = 32) -> Agreement:
    """Compare `model` with its 4-bit copy on `rows` texts that it samples at temperature 1."""
    texts, prompt_length = own_texts(model, seed, rows, new_tokens)
    twin = quantized_copy(model)
    totals = torch.zeros(3, dtype=torch.float64)  # overlap with packed head, with dense head, entropy
    for text in texts.split(4):  # [4, prompt + new]: logits over a large vocabulary are the largest tensors here
        hidden = model.base_model(input_ids=text[:, :-1]).last_hidden_state[:, prompt_length - 1 :]  # [4, new, hidden]
        drafted = twin.base_model(input_ids=text[:, :-1]).last_hidden_state[:, prompt_length - 1 :]  # [4, new, hidden]
        p = model.lm_head(hidden).float().log_softmax(-1)  # [4, new, vocab]
        packed = twin.lm_head(drafted).float().softmax(-1)  # [4, new, vocab]
        dense = model.lm_head(drafted).float().softmax(-1)  # [4, new, vocab]
        q = p.exp()  # [4, new, vocab]
        totals[0] += torch.minimum(q, packed).sum().item()
        totals[1] += torch.minimum(q, dense).sum().item()
        totals[2] -= (q * p).sum().item()
    generated = texts[:, prompt_length:]  # [rows, new]
    overlap_packed, overlap_dense, entropy = (totals / generated.numel()).tolist()
    distinct = generated.unique().numel() / generated.numel()
    return Agreement(overlap_packed, overlap_dense, entropy, distinct, generated.numel())
