"""DFlash's two formats: which layers they read, the shapes of published checkpoints, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spec_trl.generation.drafters.checkpoints import write_checkpoint
from spec_trl.generation.drafters.dflash.config import DFlashConfig
from spec_trl.generation.drafters.dflash.drafter import DFlashDrafter
from spec_trl.generation.drafters.dflash.network import DFlashNetwork
from tests.generation.drafters.dflash.reference import PRUNED, SIZES, WINDOWED, make_checkpoint, speculators, zlab


def test_default_layers(tmp_path: Path) -> None:
    def layers(depth: int, count: int) -> list[int]:
        settings = zlab(num_target_layers=depth, num_hidden_layers=count)
        del settings["dflash_config"]["target_layer_ids"]
        return [index - 1 for index in DFlashConfig.parse(settings).target_layers]

    assert layers(36, 5) == [1, 9, 17, 25, 33]  # z-lab/Qwen3-8B-DFlash-b16
    assert layers(24, 5) == [1, 6, 11, 16, 21]
    assert layers(36, 1) == [18]
    assert layers(29, 3) == [1, 14, 26]  # 13.5 rounds to even


REAL = {"qwen2.5-0.5b": (896, 24), "qwen3-4b": (2560, 36), "qwen3-8b": (4096, 36)}


@pytest.mark.parametrize("name", REAL)
def test_shapes_of_real_checkpoints(shared: Callable[[str], Path], name: str) -> None:
    settings = json.loads(shared(f"configs/drafter/specforge_{name}-dflash.json").read_text())
    width, depth = REAL[name]
    config = DFlashConfig.parse(settings)
    network = DFlashNetwork(config, 5 * width, device="meta")
    shapes = {key: list(tensor.shape) for key, tensor in network.state_dict().items()}
    queries, shared_, d = (
        settings["num_attention_heads"] * settings["head_dim"],
        settings["num_key_value_heads"] * settings["head_dim"],
        settings["head_dim"],
    )
    inner = settings["intermediate_size"]
    expected = {"fc.weight": [width, 5 * width], "hidden_norm.weight": [width], "norm.weight": [width]}
    for i in range(5):
        for key, shape in {
            "input_layernorm": [width], "post_attention_layernorm": [width], "self_attn.q_proj": [queries, width],
            "self_attn.k_proj": [shared_, width], "self_attn.v_proj": [shared_, width],
            "self_attn.o_proj": [width, queries], "self_attn.q_norm": [d], "self_attn.k_norm": [d],
            "mlp.gate_proj": [inner, width], "mlp.up_proj": [inner, width], "mlp.down_proj": [width, inner],
        }.items():  # fmt: skip
            expected[f"layers.{i}.{key}.weight"] = shape
    assert shapes == expected
    assert config.target_layers == tuple(i + 1 for i in settings["dflash_config"]["target_layer_ids"])
    assert (config.block_size, config.drafts, config.mask_token) == (16, 15, 151669)
    assert config.decoder.rope_parameters["rope_theta"] == 1e6 and not any(config.is_causal)
    assert max(config.target_layers) <= depth


# ---- bad input ------------------------------------------------------------------------------------------------------


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "neither format": (SIZES, "is no DFlash drafter"),
    "another speculator": (speculators(speculators_model_type="eagle3"), "speculators_model_type='eagle3'"),
    "layer past the depth": (
        zlab(dflash_config={"target_layer_ids": [0, 2]}),
        r"hidden states \[1, 3\].* has 2 layers",
    ),
    "speculators' layer past the depth": (speculators(aux_hidden_state_layer_ids=[3]), r"\[3\].* has 2 layers"),
    "negative layer": (zlab(dflash_config={"target_layer_ids": [-1]}), "target_layer_ids=-1"),
    "no layers": (speculators(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids=None"),
    "another depth": (zlab(num_target_layers=36), "num_target_layers=36.* has 2 layers"),
    "vocabulary": (zlab(vocab_size=65), "vocab_size=65, .* has 64"),
    "mask token": (zlab(dflash_config={"mask_token_id": 64}), "mask_token_id=64"),
    "no mask token": (zlab(dflash_config={"mask_token_id": None}), "mask_token_id=None"),
    "hidden size": (zlab(hidden_size=32), "hidden_size=32, and the target's is 64"),
    "target's hidden size": (speculators(target_hidden_size=32), "target_hidden_size=32"),
    "block size": (zlab(block_size=1), "block_size=1"),
    "draft vocabulary": (speculators(draft_vocab_size=65), "draft_vocab_size=65 is more"),
    "unknown key": (zlab(layer_scale=0.1), "config.json has keys .*layer_scale.*0.1"),
    "unknown inner key": (zlab(dflash_config={"selector_rank": 2}), "dflash_config has keys .*selector_rank"),
    "unknown decoder key": (speculators({"logit_scale": 2}), "transformer_layer_config has keys .*logit_scale"),
    "shifted labels": (speculators(shift_label=True), "shift_label=True"),
    "projector": (speculators(projector_type="domino"), "projector_type='domino'"),
    "window without a size": (zlab(**WINDOWED | {"sliding_window": None}), "sliding_window is None"),
    "window switched off": (zlab(**WINDOWED | {"use_sliding_window": False}), "use_sliding_window=False"),
    "layer types": (zlab(layer_types=["full_attention"]), "do not fit together(.|\n)*layer_types"),
    "RoPE": (zlab(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "RoPE of type 'dynamic'"),
    "activation": (zlab(hidden_act="swoosh"), "hidden_act='swoosh'"),
    "family": (speculators({"model_type": "gemma2"}), "model_type='gemma2'"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_configs_that_do_not_fit(name: str, tiny: PreTrainedModel, tmp_path: Path) -> None:
    settings, message = BAD_CONFIGS[name]
    write_checkpoint(tmp_path, settings, {"fc.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=message) as caught:
        DFlashDrafter(tmp_path, tiny)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"), [("domino", "projector_type='domino'"), ("dspark", "projector_type='dspark'")]
)
def test_relatives_are_refused_by_name(shared: Callable[[str], Path], name: str, message: str) -> None:
    settings = json.loads(shared(f"configs/drafter/specforge_qwen3-8b-{name}.json").read_text())
    with pytest.raises(ValueError, match=message):
        DFlashConfig.parse(settings)


BAD_TENSORS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (zlab(), lambda t: t.pop("norm.weight"), r"missing \['norm.weight'\]"),
    "unexpected": (zlab(), lambda t: t.update(extra=t["norm.weight"]), r"unexpected \['extra'\]"),
    "shape": (zlab(), lambda t: t.update({"fc.weight": torch.zeros(64, 64)}), r"fc.weight has shape \[64, 64\]"),
    "NaN": (zlab(), lambda t: t["layers.1.mlp.up_proj.weight"].fill_(torch.nan), "up_proj.weight holds NaN"),
    "no head": (PRUNED, lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
    "no map": (PRUNED, lambda t: t.pop("d2t"), r"missing \['d2t'\]"),
    "map out of range": (PRUNED, lambda t: t["d2t"].add_(30), "d2t reaches token ids"),
    "map twice": (PRUNED, lambda t: t["d2t"].copy_(-torch.arange(40)), "d2t names 1 tokens and t2d 40"),
    "maps disagree": (PRUNED, lambda t: t.update(t2d=~t["t2d"]), "t2d 24, which are not the same"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_do_not_fit(name: str, tiny: PreTrainedModel, tmp_path: Path) -> None:
    settings, change, message = BAD_TENSORS[name]
    tensors = make_checkpoint(tmp_path, settings)
    change(tensors)
    write_checkpoint(tmp_path, settings, tensors)
    with pytest.raises(ValueError, match=message):
        DFlashDrafter(tmp_path, tiny)
