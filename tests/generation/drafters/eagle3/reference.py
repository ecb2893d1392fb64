"""A second, slow implementation of EAGLE-3, and checkpoints to try it on."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spec_trl.generation.drafters.checkpoints import write_checkpoint
from spec_trl.generation.drafters.eagle3.eagle3_network import Eagle3Config, Eagle3Network
from tests.generation.drafters.straight_line import StraightLine, draw_vocabulary


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
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
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


CONFIGS: dict[str, dict[str, Any]] = {
    "safeai": safeai(),
    "safeai, whole vocabulary": safeai(draft_vocab_size=None),
    "safeai, own embedding, narrow": safeai(hidden_size=32, head_dim=8, target_hidden_size=HIDDEN),
    "safeai, SpecForge's layer ids": safeai(eagle_config={IDS_KEY: [1, -1, 0]}, **{IDS_KEY: None}),
    "safeai, llama3": safeai(rope_theta=5000.0, rope_scaling=LLAMA3),
    "safeai, YaRN": safeai(rope_scaling=YARN),
    "safeai, bias": safeai(attention_bias=True, mlp_bias=True, rope_theta=1e6),
    "speculators, two layers' states": speculators(eagle_aux_hidden_state_layer_ids=[1, 2]),
    "speculators, qwen3": speculators({"model_type": "qwen3", "head_dim": 8, "rope_parameters": {
        "rope_type": "default", "rope_theta": 700.0}}),
    "speculators, two flags": speculators(norm_before_residual=True, fc_norm=True),
    "speculators, the other two": speculators(norm_before_fc=True, norm_output=True),
    "speculators, all flags": speculators(**dict.fromkeys(FLAGS, True)),
    "speculators, three layers": speculators({"num_hidden_layers": 3}, norm_before_residual=True),
}  # fmt: skip


def make_tensors(config: dict[str, Any], dtype: torch.dtype = torch.float64, depth: int = 2) -> dict[str, Tensor]:
    """Random weights by the names that the format's own files have, for a target of `depth` layers."""
    layer = config.get("transformer_layer_config", config)
    parsed = Eagle3Config.parse(config, depth, layer["num_hidden_layers"])
    brings = {"embed_tokens.weight"} if parsed.decoder.hidden_size != parsed.target_hidden_size else set()
    with torch.device("meta"):
        network = Eagle3Network(parsed, parsed.target_hidden_size * len(parsed.feature_layers), brings)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in network.state_dict().items():
        width, middle = 2 * tensor.shape[0] ** -0.5 if tensor.dim() == 2 else 0.2, float("norm" in name)
        # A million numbers, again and again where there are more: quick for tensors of real size.
        some = torch.empty(min(tensor.numel(), 10**6 + 3), dtype=dtype)
        some.uniform_(middle - width, middle + width, generator=generator)
        stored = name if "speculators_model_type" in config else name.replace("layers.0.", "midlayer.")
        tensors[stored] = some.repeat(-(-tensor.numel() // len(some)))[: tensor.numel()].view(tensor.shape)
    return tensors | draw_vocabulary(parsed.draft_vocabulary, parsed.decoder.vocab_size, generator)


def make_folder(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float64, depth: int = 2) -> Path:
    write_checkpoint(folder, config, make_tensors(config, dtype, depth))
    return folder


class Reference(StraightLine):
    """The facts of the two formats, written down once more: one row, one pair at a time, no cache."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], target: PreTrainedModel) -> None:
        super().__init__(
            config.get("transformer_layer_config", config),
            {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()},
        )
        self.config, self.target = config, target
        self.ids = config[IDS_KEY] or [i + 1 for i in config["eagle_config"][IDS_KEY]]

    def features(self, tokens: list[int]) -> list[Tensor]:
        states = self.target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        found = []
        for column in range(len(tokens)):
            g = torch.cat([states[i][0, column] for i in self.ids])
            if self.config.get("norm_before_fc"):
                g = self.norm(g, "input_norm")
            if self.config.get("fc_norm"):
                g = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(g.chunk(len(self.ids)))])
            found.append(self.linear(g, "fc"))
        return found

    def layer_output(self, pairs: list[tuple[int, Tensor]]) -> Tensor:
        """h of the last of the pairs (token, state), which all attend as the last one needs."""
        layers = self.sizes["num_hidden_layers"]
        first = 1 if layers > 1 else len(pairs)  # further layers attend to all
        outputs = [self.first_layer(pairs[:count]) for count in range(first, len(pairs) + 1)]
        for index in range(1, layers):
            layer, keys, values, further = f"layers.{index}", [], [], []
            for position, h in enumerate(outputs, start=1):
                a = self.norm(h, f"{layer}.input_layernorm")
                keys.append(self.turned(a, layer, "k", position))
                values.append(self.values(a, layer))
                further.append(
                    self.mlp(h + self.attend(self.turned(a, layer, "q", position), keys, values, layer), layer)
                )
            outputs = further
        return outputs[-1]

    def first_layer(self, pairs: list[tuple[int, Tensor]]) -> Tensor:
        embedding = self.tensors.get("embed_tokens.weight", self.target.get_input_embeddings().weight)
        layer, keys, values = "layers.0", [], []
        for position, (token, state) in enumerate(pairs, start=1):  # from 1, as speculators counts
            normed = self.norm(state, f"{layer}.hidden_norm")
            a = torch.cat([self.norm(embedding[token], f"{layer}.input_layernorm"), normed])
            keys.append(self.turned(a, layer, "k", position))
            values.append(self.values(a, layer))
        attended = self.attend(self.turned(a, layer, "q", len(pairs)), keys, values, layer)
        return self.mlp((normed if self.config.get("norm_before_residual") else state) + attended, layer)

    def logits(self, tokens: list[int], drafts: list[int]) -> Tensor:
        """Logits `[γ, V]` after `tokens`, the newest included, where `drafts` are drawn one after another."""
        states = self.features(tokens)[:-1]  # the newest token has not been fed to the target
        pairs = list(zip(tokens[1:], states, strict=True))
        found = []
        for token in drafts:
            h = self.layer_output(pairs)
            normed = self.norm(h, "norm")
            found.append(self.over_target_vocabulary(self.linear(normed, "lm_head"), self.sizes["vocab_size"]))
            pairs.append((token, normed if self.config.get("norm_output") else h))
        return torch.stack(found)
