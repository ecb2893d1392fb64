"""DFlash against an implementation without cache, batch or vectors, and the checkpoints that are refused."""

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
from spec_trl.scheduling.control import Chain
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.drafters.dflash.reference import (
    PRUNED,
    SIZES,
    VARIANTS,
    WINDOWED,
    make_checkpoint,
    speculators,
    straight_line,
    zlab,
)
from tests.generation.drafters.watching import watch
from tests.generation.races import Plans


EOS = dict(eos_token_id=[7, 11, 12])


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_drafts_are_those_of_the_straight_line(name: str, tiny: PreTrainedModel, tmp_path: Path) -> None:
    """Ragged rows that share prompts, come in late and move, rounds with rejections and rounds that draft nothing: a
    stale, missing or shifted column of context would show."""
    settings = VARIANTS[name]
    weights = make_checkpoint(tmp_path, settings)
    drafter = DFlashDrafter(tmp_path, tiny)
    seen = watch(drafter)
    rows = random_rows([5, 9, 1, 3, 12, 4])
    prompts = pad_left([rows[1], rows[0], rows[1], *rows[2:], rows[5]])  # two share a prompt, at once and later
    options, control = dict(max_new_tokens=12, **EOS), Plans(1, [[Chain(0, 4)], [Chain(0, 4)], []])
    result = generate(tiny, prompts, config={"max_batch_size": 3}, drafter=drafter, control=control, **options)
    assert outputs(result) == outputs(generate(tiny, prompts, **options))
    assert result.statistics.drafter_failure is None
    assert len(seen) > 20 and len({len(committed) for committed, *_ in seen}) > 8
    for committed, drafts, logits in seen[:: max(1, len(seen) // 4)]:
        expected = straight_line(tiny, weights, settings, torch.tensor(committed))[: len(drafts)]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("draft_length, name", [(1, "z-lab"), (11, "z-lab"), (11, "speculators, from the anchor")])
@torch.no_grad()
def test_greedy_drafts(draft_length: int, name: str, tiny: PreTrainedModel, tmp_path: Path) -> None:
    """The largest logits of the slots, as many as there are slots: no more than γ, and no more than a block drafts."""
    settings = VARIANTS[name]
    weights = make_checkpoint(tmp_path, settings)
    prompts, options = pad_left(random_rows([5, 9, 1])), dict(do_sample=False, max_new_tokens=14, **EOS)
    drafter = DFlashDrafter(tmp_path, tiny)
    seen = watch(drafter)
    generate(tiny, prompts, config={"draft_length": draft_length}, drafter=drafter, **options)
    assert len(seen) > 8 and max(len(drafts) for _, drafts, _ in seen) == min(draft_length, drafter.config.drafts)
    for committed, drafts, _ in seen[::6]:
        expected = straight_line(tiny, weights, settings, torch.tensor(committed)).argmax(-1)
        assert drafts == expected[: len(drafts)].tolist()


# ---- formats --------------------------------------------------------------------------------------------------------


def test_default_layers() -> None:
    for depth, expected in (
        (36, (1, 9, 17, 25, 33)),  # z-lab/Qwen3-8B-DFlash-b16
        (24, (1, 6, 11, 16, 21)),
        (36, (18,)),
        (29, (1, 14, 26)),  # 13.5 rounds to even
    ):
        settings = zlab(num_target_layers=depth, num_hidden_layers=len(expected))
        del settings["dflash_config"]["target_layer_ids"]
        assert DFlashConfig.parse(settings).feature_layers == tuple(index + 1 for index in expected)


@pytest.mark.parametrize("name, width", [("qwen2.5-0.5b", 896), ("qwen3-4b", 2560), ("qwen3-8b", 4096)])
def test_shapes_of_real_checkpoints(shared: Callable[[str], Path], name: str, width: int) -> None:
    settings = json.loads(shared(f"configs/drafter/specforge_{name}-dflash.json").read_text())
    config = DFlashConfig.parse(settings)
    with torch.device("meta"):
        found = {key: list(tensor.shape) for key, tensor in DFlashNetwork(config, 5 * width).state_dict().items()}
    d, inner = settings["head_dim"], settings["intermediate_size"]
    queries, shared_ = settings["num_attention_heads"] * d, settings["num_key_value_heads"] * d
    expected = {"fc": [width, 5 * width], "hidden_norm": [width], "norm": [width]}
    for i in range(5):
        expected |= {f"layers.{i}.{key}": shape for key, shape in {
            "input_layernorm": [width], "post_attention_layernorm": [width], "self_attn.q_proj": [queries, width],
            "self_attn.k_proj": [shared_, width], "self_attn.v_proj": [shared_, width],
            "self_attn.o_proj": [width, queries], "self_attn.q_norm": [d], "self_attn.k_norm": [d],
            "mlp.gate_proj": [inner, width], "mlp.up_proj": [inner, width], "mlp.down_proj": [width, inner],
        }.items()}  # fmt: skip
    assert found == {f"{key}.weight": shape for key, shape in expected.items()}
    assert config.feature_layers == tuple(i + 1 for i in settings["dflash_config"]["target_layer_ids"])
    assert (config.block_size, config.drafts, config.mask_token) == (16, 15, 151669)
    assert config.decoder.rope_parameters["rope_theta"] == 1e6 and not any(config.is_causal)


@pytest.mark.parametrize("name", ["domino", "dspark"])
def test_relatives_are_refused_by_name(shared: Callable[[str], Path], name: str) -> None:
    settings = json.loads(shared(f"configs/drafter/specforge_qwen3-8b-{name}.json").read_text())
    with pytest.raises(ValueError, match=f"projector_type='{name}'"):
        DFlashConfig.parse(settings)


Change = Callable[[dict[str, Tensor]], Any]
BAD: dict[str, tuple[dict[str, Any], str, Change | None]] = {
    "neither format": (SIZES, "is no DFlash drafter", None),
    "another speculator": (speculators(speculators_model_type="eagle3"), "speculators_model_type='eagle3'", None),
    "layer": (zlab(dflash_config={"target_layer_ids": [0, 2]}), r"states \[1, 3\].* 2 layers and so no \[3\]", None),
    "speculators' layer": (speculators(aux_hidden_state_layer_ids=[3]), r"\[3\].* has 2 layers", None),
    "negative layer": (zlab(dflash_config={"target_layer_ids": [-1]}), "target_layer_ids=-1", None),
    "no layers": (speculators(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids=None", None),
    "another depth": (zlab(num_target_layers=36), "num_target_layers=36.* has 2 layers", None),
    "no depth": (zlab(dflash_config={"target_layer_ids": None}), "target_layer_ids is missing.=2", None),
    "vocabulary": (zlab(vocab_size=65), "vocab_size=65, .* has 64", None),
    "mask token": (zlab(dflash_config={"mask_token_id": 64}), "mask_token_id=64", None),
    "no mask token": (zlab(dflash_config={"mask_token_id": None}), "mask_token_id=None", None),
    "block size": (zlab(block_size=1), "block_size=1", None),
    "unknown key": (zlab(layer_scale=0.1), "config.json has keys .*layer_scale.*0.1", None),
    "unknown inner key": (zlab(dflash_config={"rank": 2}), "dflash_config has keys .*rank", None),
    "unknown decoder key": (speculators({"logit_scale": 2}), "transformer_layer_config has keys .*logit_scale", None),
    "bias": (zlab(mlp_bias=True), "mlp_bias=True", None),
    "shifted labels": (speculators(shift_label=True), "shift_label=True", None),
    "projector": (speculators(projector_type="domino"), "projector_type='domino'", None),
    "no window": (zlab(**WINDOWED | {"sliding_window": None}), "sliding_window is None", None),
    "window off": (zlab(**WINDOWED | {"use_sliding_window": False}), "use_sliding_window=False", None),
    "layer types": (zlab(layer_types=["full_attention"]), "do not fit together(.|\n)*layer_types", None),
    "chunks": (zlab(layer_types=["full_attention", "chunked_attention"]), "layer_types=.*layers are full", None),
    "RoPE": (zlab(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "RoPE of type 'dynamic'", None),
    "missing": (zlab(), r"missing \['norm.weight'\]", lambda t: t.pop("norm.weight")),
    "no head": (PRUNED, "needs a head of its own", lambda t: t.pop("lm_head.weight")),
}


@pytest.mark.parametrize("settings, message, change", BAD.values(), ids=BAD)
def test_bad_checkpoints(
    settings: dict[str, Any], message: str, change: Change | None, tiny: PreTrainedModel, tmp_path: Path
) -> None:
    tensors = {"fc.weight": torch.zeros(1)}
    if change is not None:
        tensors = make_checkpoint(tmp_path, settings)
        change(tensors)
    write_checkpoint(tmp_path, settings, tensors)
    with pytest.raises(ValueError, match=message) as caught:
        DFlashDrafter(tmp_path, tiny)
    assert str(tmp_path) in str(caught.value)
