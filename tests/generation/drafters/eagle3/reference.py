"""A second, slow implementation of EAGLE-3, checkpoints to try it on, and eyes on what the fast one does."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spec_trl.generation.drafters.autoregressive import CATCH_UP
from spec_trl.generation.drafters.checkpoints import write_checkpoint
from spec_trl.generation.drafters.eagle3.drafter import Eagle3Drafter
from spec_trl.generation.engine.noise import RoundNoise
from spec_trl.generation.engine.verification import Proposal


HIDDEN, VOCABULARY = 64, 64  # of the tiny target
LAYER = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "vocab_size": VOCABULARY,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
IDS_KEY = "eagle_aux_hidden_state_layer_ids"
IDS = {IDS_KEY: [2, 0, 1]}  # the tiny target has two layers: the default ids do not fit
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def safeai(**changes: Any) -> dict[str, Any]:
    """A config in the format of SafeAILab, AngelSlim and SpecForge."""
    return {"architectures": ["LlamaForCausalLMEagle3"], **LAYER, "draft_vocab_size": 40, **IDS} | changes


def speculators(layer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A config in the speculators format."""
    return {
        "speculators_model_type": "eagle3", "transformer_layer_config": LAYER | (layer or {}), "draft_vocab_size": 40,
        "speculators_config": {"algorithm": "eagle3"}, **IDS,
    } | changes  # fmt: skip


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


CONFIGS: dict[str, dict[str, Any]] = {
    "safeai": safeai(),
    "safeai, whole vocabulary": without(safeai(), "draft_vocab_size"),
    "safeai, own embedding, narrow": safeai(hidden_size=32, head_dim=8, target_hidden_size=HIDDEN),
    "safeai, SpecForge's layer ids": without(safeai(eagle_config={IDS_KEY: [1, -1, 0]}), IDS_KEY),
    "safeai, llama3": safeai(rope_theta=5000.0, rope_scaling=LLAMA3),
    "safeai, bias": safeai(attention_bias=True, mlp_bias=True, rope_theta=1e6),
    "speculators": speculators(),
    "speculators, two layers' states": speculators(eagle_aux_hidden_state_layer_ids=[1, 2]),
    "speculators, qwen3": speculators({"model_type": "qwen3", "head_dim": 8, "rope_parameters": {
        "rope_type": "default", "rope_theta": 700.0}}),
    **{f"speculators, {flag}": speculators(**{flag: True}) for flag in FLAGS},
    "speculators, all flags": speculators(**dict.fromkeys(FLAGS, True)),
}  # fmt: skip


def make_tensors(config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Random weights by the names that the format's own files have."""
    is_nested = "speculators_model_type" in config
    layer = config["transformer_layer_config"] if is_nested else config
    h, heads, kv = layer["hidden_size"], layer["num_attention_heads"], layer["num_key_value_heads"]
    d, inner = layer.get("head_dim", h // heads), layer["intermediate_size"]
    wide, vocabulary = config.get("target_hidden_size") or h, layer["vocab_size"]
    draft = config.get("draft_vocab_size", vocabulary)
    count = len(config.get(IDS_KEY, [1, 2, 3]))
    at = "layers.0." if is_nested else "midlayer."
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, count * wide), "norm.weight": (h,), "lm_head.weight": (draft, h),
        at + "self_attn.q_proj.weight": (heads * d, 2 * h), at + "self_attn.k_proj.weight": (kv * d, 2 * h),
        at + "self_attn.v_proj.weight": (kv * d, 2 * h), at + "self_attn.o_proj.weight": (h, heads * d),
        at + "hidden_norm.weight": (h,), at + "input_layernorm.weight": (h,),
        at + "post_attention_layernorm.weight": (h,), at + "mlp.gate_proj.weight": (inner, h),
        at + "mlp.up_proj.weight": (inner, h), at + "mlp.down_proj.weight": (h, inner),
    }  # fmt: skip
    if layer.get("attention_bias"):
        shapes |= {at + f"self_attn.{name}_proj.bias": (heads * d,) for name in "q"}
        shapes |= {at + f"self_attn.{name}_proj.bias": (kv * d,) for name in "kv"}
        shapes |= {at + "self_attn.o_proj.bias": (h,)}
    if layer.get("mlp_bias"):
        shapes |= {at + f"mlp.{name}_proj.bias": (inner,) for name in ("gate", "up")}
        shapes |= {at + "mlp.down_proj.bias": (h,)}
    if layer["model_type"] == "qwen3":
        shapes |= {at + f"self_attn.{name}_norm.weight": (d,) for name in "qk"}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (count * wide,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (wide,) for i in range(count)}
    if wide != h:
        shapes["embed_tokens.weight"] = (vocabulary, h)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        width, middle = 2 / h**0.5 if len(shape) == 2 else 0.2, float("norm" in name and len(shape) == 1)
        # A million numbers, again and again where there are more: quick for tensors of real size.
        size = math.prod(shape)
        some = torch.empty(min(size, 10**6 + 3), dtype=dtype)
        some.uniform_(middle - width, middle + width, generator=generator)
        tensors[name] = some.repeat(-(-size // len(some)))[:size].view(shape)
    if draft != vocabulary:
        ids = torch.randperm(vocabulary, generator=generator)[:draft].sort().values  # [draft]
        tensors["d2t"] = ids - torch.arange(draft)
        tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def make_folder(folder: Path, config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float64) -> Path:
    write_checkpoint(folder, config, make_tensors(config, seed, dtype))
    return folder


# ---- the straight-line implementation: one row, one pair at a time, no cache, nothing shared with the package ------


class Reference:
    """The facts of the two formats, written down once more, slowly."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], target: PreTrainedModel) -> None:
        layer = config.get("transformer_layer_config", config)
        self.t = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        self.config, self.layer, self.target = config, layer, target
        self.heads, self.kv = layer["num_attention_heads"], layer["num_key_value_heads"]
        self.d = layer.get("head_dim", layer["hidden_size"] // self.heads)
        ids = config.get(IDS_KEY)
        self.ids = ids if ids is not None else [i + 1 for i in config["eagle_config"][IDS_KEY]]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + self.layer["rms_norm_eps"]).sqrt() * self.t[name]

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = self.t[f"{name}.weight"] @ x
        return out + self.t[f"{name}.bias"] if f"{name}.bias" in self.t else out

    def rotate(self, x: Tensor, position: int) -> Tensor:
        half = self.d // 2
        out = x.clone()
        theta = self.layer.get("rope_theta") or self.layer.get("rope_parameters", {}).get("rope_theta") or 10000.0
        scaling = self.layer.get("rope_scaling")
        for j in range(half):
            frequency = theta ** (-2 * j / self.d)
            if scaling:  # Llama 3.1: long waves are stretched, short ones kept, those between interpolated
                turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
                low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
                share = min(max((turns - low) / (high - low), 0.0), 1.0)
                frequency = (1 - share) * frequency / scaling["factor"] + share * frequency
            turned = complex(x[j], x[half + j]) * complex(
                math.cos(position * frequency), math.sin(position * frequency)
            )
            out[j], out[half + j] = turned.real, turned.imag
        return out

    def features(self, tokens: list[int]) -> list[Tensor]:
        states = self.target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        found = []
        for column in range(len(tokens)):
            g = torch.cat([states[i][0, column] for i in self.ids])
            if self.config.get("norm_before_fc"):
                g = self.norm(g, "input_norm.weight")
            if self.config.get("fc_norm"):
                parts = g.chunk(len(self.ids))
                g = torch.cat([self.norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)])
            found.append(self.linear(g, "fc"))
        return found

    def layer_output(self, pairs: list[tuple[int, Tensor]]) -> Tensor:
        """h of the last of the pairs (token, state), which all attend as the last one needs."""
        embedding = self.t.get("embed_tokens.weight", self.target.get_input_embeddings().weight)
        keys, values = [], []
        for i, (token, state) in enumerate(pairs):
            normed = self.norm(state, "layers.0.hidden_norm.weight")
            a = torch.cat([self.norm(embedding[token], "layers.0.input_layernorm.weight"), normed])
            key = self.linear(a, "layers.0.self_attn.k_proj").view(self.kv, self.d)
            if "layers.0.self_attn.k_norm.weight" in self.t:
                key = torch.stack([self.norm(row, "layers.0.self_attn.k_norm.weight") for row in key])
            keys.append([self.rotate(row, i + 1) for row in key])  # from 1, as speculators counts
            values.append(self.linear(a, "layers.0.self_attn.v_proj").view(self.kv, self.d))
        query = self.linear(a, "layers.0.self_attn.q_proj").view(self.heads, self.d)
        if "layers.0.self_attn.q_norm.weight" in self.t:
            query = torch.stack([self.norm(row, "layers.0.self_attn.q_norm.weight") for row in query])
        attended = []
        for head in range(self.heads):
            q, group = self.rotate(query[head], len(pairs)), head // (self.heads // self.kv)
            scores = torch.stack([q @ key[group] / self.d**0.5 for key in keys])
            weights = scores.exp() / scores.exp().sum()
            attended.append(sum(weight * value[group] for weight, value in zip(weights, values, strict=True)))
        residual = normed if self.config.get("norm_before_residual") else state
        h = residual + self.linear(torch.cat(attended), "layers.0.self_attn.o_proj")
        x = self.norm(h, "layers.0.post_attention_layernorm.weight")
        gate = self.linear(x, "layers.0.mlp.gate_proj")
        up = self.linear(x, "layers.0.mlp.up_proj")
        return h + self.linear(gate / (1 + (-gate).exp()) * up, "layers.0.mlp.down_proj")

    def logits(self, tokens: list[int], drafts: list[int] | int) -> Tensor:
        """Logits `[γ, V]` behind `tokens`, the newest included; `drafts`: as drawn, or how many greedy ones."""
        states = self.features(tokens)[:-1]  # the newest token has not been fed to the target
        pairs = list(zip(tokens[1:], states, strict=True))
        found = []
        for step in range(drafts if isinstance(drafts, int) else len(drafts)):
            h = self.layer_output(pairs)
            short = self.linear(self.norm(h, "norm.weight"), "lm_head")
            whole = torch.full((self.layer["vocab_size"],), -math.inf, dtype=short.dtype)
            for i, logit in enumerate(short):
                whole[i + int(self.t["d2t"][i]) if "d2t" in self.t else i] = logit
            found.append(whole)
            token = int(whole.argmax()) if isinstance(drafts, int) else drafts[step]
            pairs.append((token, self.norm(h, "norm.weight") if self.config.get("norm_output") else h))
        return torch.stack(found)


def watch(drafter: Eagle3Drafter) -> list[tuple[list[int], list[int], Tensor]]:
    """Collects (committed tokens, drafts, logits `[γ, V]`) of each row and round."""
    seen: list[tuple[list[int], list[int], Tensor]] = []
    steps: list[Tensor] = []
    propose, over_target = drafter.propose, drafter._over_target

    def watched_logits(logits: Tensor) -> Tensor:
        steps.append(over_target(logits).clone())
        return steps[-1].clone()

    def watched(draft_length: int, noise: RoundNoise | None) -> Proposal:
        steps.clear()
        proposal = propose(draft_length, noise)
        rows, logits = drafter.session.rows, torch.cat(steps, dim=1)  # [B, γ, V]
        for row, (length, drafted) in enumerate(zip(rows.lengths.tolist(), proposal.lengths.tolist(), strict=True)):
            if drafted:
                seen.append((rows.tokens[row, :length].tolist(), proposal.tokens[row].tolist(), logits[row]))
        return proposal

    drafter.propose, drafter._over_target = watched, watched_logits  # type: ignore[method-assign]
    return seen


def watch_catching_up(drafter: Eagle3Drafter) -> list[tuple[int, int]]:
    """Collects, of each round, how many pairs were fed per row before drafting, and how far any row had grown."""
    found: list[tuple[int, int]] = []
    widths: list[int] = []
    before: dict[int, int] = {}
    catch_up, feed = drafter._catch_up, drafter._feed

    def watched_feed(columns: Tensor, *rest: Any, **more: Any) -> Tensor:
        widths.append(columns.shape[1])
        return feed(columns, *rest, **more)

    def watched() -> Tensor:
        widths.clear()
        rows = drafter.session.rows
        lengths = dict(zip(rows.requests.tolist(), rows.lengths.tolist(), strict=True))
        grown = max(length - before.get(request, length - 1) for request, length in lengths.items())
        before.update(lengths)
        h = catch_up()
        assert max(widths) <= CATCH_UP
        found.append((sum(widths), grown))
        return h

    drafter._catch_up, drafter._feed = watched, watched_feed  # type: ignore[method-assign]
    return found
