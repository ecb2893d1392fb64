"""Checkpoints with random MTP heads under the names of published ones, written by nothing of the package."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.tiny_families import make


LAYOUTS = {
    "glm4_moe": "deepseek", "deepseek_v3": "deepseek", "glm4_moe_lite": "deepseek", "hy_v3": "deepseek",
    "qwen3_5_text": "qwen", "qwen3_5_moe_text": "qwen", "qwen3_next": "qwen", "exaone_moe": "qwen",
    "ernie4_5_moe": "ernie", "llama": "qwen",
}  # fmt: skip
PUBLISHED = {
    "exaone_moe": {"mlp.gate.e_score": "mlp.e_score"},
    "hy_v3": {"mlp.gate.": "mlp.router.gate.", "mlp.e_score_correction_bias": "mlp.expert_bias",
              "mlp.shared_experts.": "mlp.shared_mlp."},
}  # fmt: skip
"""Names that transformers has -> those of published checkpoints."""
_NAMES = {
    "qwen": ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0."],
    "deepseek": [
        "model.layers.{}.enorm", "model.layers.{}.hnorm", "model.layers.{}.eh_proj",
        "model.layers.{}.shared_head.norm", "model.layers.{}.",
    ],
    "ernie": [
        "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", None, "model.mtp_block.0.",
    ],
}  # fmt: skip


def random_head(model: PreTrainedModel, family: str, seed: int = 1) -> dict[str, Tensor]:
    """A head for `model`, shaped like its last decoder layer, which must attend."""
    layout = LAYOUTS[family]
    generator = torch.Generator().manual_seed(seed)
    depth, stored = model.config.num_hidden_layers, model.state_dict()
    (last,) = {name.split("self_attn")[0] for name in stored if f".{depth - 1}.self_attn.q" in name}
    embedding, hidden, fc, norm, block = (name and name.format(depth) for name in _NAMES[layout])
    size, dtype = model.config.hidden_size, model.dtype
    shift = {name: like for name, like in stored.items() if name.startswith(last)}
    head = dict(part for name, like in shift.items() for part in _unstacked(block + name.removeprefix(last), like))
    if layout == "ernie":  # a dense block
        head = {name: like for name, like in head.items() if ".mlp." not in name}
        wide = model.config.intermediate_size
        head |= {f"{block}mlp.{part}_proj.weight": torch.empty(wide, size, dtype=dtype) for part in ("gate", "up")}
        head[f"{block}mlp.down_proj.weight"] = torch.empty(size, wide, dtype=dtype)
    head[f"{fc}.weight"] = torch.empty(size, 2 * size, dtype=dtype)
    for name in filter(None, (embedding, hidden, norm)):
        head[f"{name}.weight"] = shift[f"{last}input_layernorm.weight"]
    head = {
        name: like + torch.randn(like.shape, generator=generator, dtype=like.dtype) * 0.1
        if like.ndim < 2 or "e_score" in name
        else torch.randn(like.shape, generator=generator, dtype=like.dtype) * 0.1
        for name, like in head.items()
    }
    if layout == "deepseek":
        head[f"{block}embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
        head[f"{block}shared_head.head.weight"] = stored["lm_head.weight"].clone()
    for ours, theirs in PUBLISHED.get(family, {}).items():
        head = {name.replace(ours, theirs): like for name, like in head.items()}
    return head


def _unstacked(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """Experts one by one, as published checkpoints have them."""
    experts, _, part = name.rpartition(".")
    if part == "down_proj":
        return [(f"{experts}.{index}.down_proj.weight", one) for index, one in enumerate(weight)]
    if part == "gate_up_proj":
        halves = [(index, one.chunk(2)) for index, one in enumerate(weight)]
        return [
            (f"{experts}.{index}.{half}_proj.weight", pair[place])
            for index, pair in halves
            for place, half in enumerate(("gate", "up"))
        ]
    return [(name, weight)]


def write_heads(folder: Path, family: str, shards: bool = False) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Writes a checkpoint of a tiny random model of `family` with a head, in one file or two `shards`; returns the
    model as loaded from there, and the head."""
    model = make(family)
    for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        setattr(model.config, name, 1)
    model.save_pretrained(folder)
    head = random_head(model, family)
    add(folder, head, shards)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    return loaded.eval(), head


def write_alone(folder: Path, model: PreTrainedModel) -> str:
    """Writes a head for a Llama without the `model`, as drafters are saved."""
    model.config.save_pretrained(folder)
    save_file(random_head(model, "llama"), folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def add(folder: Path, tensors: dict[str, Tensor], shards: bool = False) -> None:
    """Adds `tensors` to the one file of a checkpoint, or as a second shard with an index."""
    whole = folder / "model.safetensors"
    stored = load_file(whole)
    if not shards:
        save_file(stored | tensors, whole, metadata={"format": "pt"})
        return
    files = {"model-00001-of-00002.safetensors": stored, "model-00002-of-00002.safetensors": tensors}
    for name, part in files.items():
        save_file(part, folder / name, metadata={"format": "pt"})
    weights = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    whole.unlink()
