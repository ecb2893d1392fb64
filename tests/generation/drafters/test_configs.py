"""What config.json of EAGLE-3 and DFlash says, and the checkpoints that are refused."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, OPTConfig, PreTrainedModel

from spec_trl.generation.drafters.checkpoints import read_checkpoint, write_checkpoint
from spec_trl.generation.drafters.dflash.dflash_drafter import DFlashDrafter
from spec_trl.generation.drafters.dflash.dflash_network import DFlashConfig
from spec_trl.generation.drafters.eagle3.eagle3_drafter import Eagle3Drafter
from spec_trl.generation.drafters.eagle3.eagle3_network import Eagle3Config
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.drafters.dflash.reference import PRUNED, SIZES, WINDOWED, make_checkpoint, speculators, zlab
from tests.generation.drafters.eagle3 import reference as eagle3
from tests.generation.drafters.eagle3.reference import IDS_KEY, make_tensors, safeai


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


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen3-4b", "qwen3-8b"])
def test_real_configs_of_dflash(shared: Callable[[str], Path], name: str) -> None:
    settings = json.loads(shared(f"configs/drafter/specforge_{name}-dflash.json").read_text())
    config = DFlashConfig.parse(settings)
    assert config.feature_layers == tuple(i + 1 for i in settings["dflash_config"]["target_layer_ids"])
    assert (config.block_size, config.drafts, config.mask_token) == (16, 15, 151669)
    assert config.decoder.rope_parameters["rope_theta"] == 1e6 and not any(config.is_causal)
    for size in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        assert getattr(config.decoder, size) == settings[size]


# What stands in the configs that AngelSlim and SpecForge train with (their `configs` folders), and touches no forward.
OF_TARGETS: dict[str, dict[str, Any]] = {
    "a head that is not tied": {"tie_word_embeddings": True},
    "the target": {"target_model_type": "qwen3", "modal_type": "VLM", "image_token_id": 60, "vision_token_id": 61},
    "a target with experts": {"decoder_sparse_step": 1, "output_router_logits": False, "router_aux_loss_coef": 0.001},
    "HunYuan": {
        "attention_head_dim": 16, "cla_share_factor": 2, "class_num": 0, "dense_list": [64, 0], "norm_type": "rms",
        "pool_type": "last", "use_cla": False, "use_qk_norm": True, "use_rotary_pos_emb": True, "pretraining_tp": 1,
    },
    "the target's depth": {"num_hidden_layers": 24, "max_window_layers": 24},
    "the target's kind": {"model_type": "phi3"},
    "positions of images": {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    "interleaved": {"rope_scaling": {"type": "default", "mrope_interleaved": True, "mrope_section": [3, 3, 2]}},
    "scaled past their end": {"rope_scaling": {"type": "dynamic", "factor": 1.0, "mscale": 1.0}},
    "how it was trained": {"inference_type": "bfloat16", "truncated_vocab_size": 40, "ttt_length": 7},
    "neutral values": {"logit_scale": 1.0, "final_logit_softcapping": None, "parallel_drafting": False},
}  # fmt: skip


@pytest.mark.parametrize("more", OF_TARGETS.values(), ids=OF_TARGETS)
def test_keys_without_a_part_in_the_forward(more: dict[str, Any], tiny: PreTrainedModel, tmp_path: Path) -> None:
    """The drafts are those of the config without them."""
    prompts, found = pad_left(random_rows([5, 9])), []
    for name, config in (("plain", safeai()), ("more", safeai(**more))):
        write_checkpoint(tmp_path / name, config, make_tensors(safeai()))
        found.append(generate(tiny, prompts, "eagle3", assistant_model=str(tmp_path / name), max_new_tokens=12))
    plain, other = found
    assert other.statistics.total == plain.statistics.total and other.statistics.total.drafted > 10
    assert outputs(other) == outputs(generate(tiny, prompts, max_new_tokens=12))


def test_heads_need_not_divide_the_hidden_size() -> None:
    """SpecForge's of Qwen2.5-VL-32B: 28 heads of 128, 5120 wide."""
    config = Eagle3Config.parse(safeai(hidden_size=66, head_dim=16), 2).decoder
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (66, 4, 2)


def test_positions_that_scale_past_an_end_are_served_up_to_it() -> None:
    config = Eagle3Config.parse(safeai(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), 2)
    assert config.position_limit == 512 and Eagle3Config.parse(safeai(), 2).position_limit is None


# ---- refused --------------------------------------------------------------------------------------------------------


LONGROPE = {
    "rope_type": "longrope", "factor": 2.0, "long_factor": [1.0] * 8, "short_factor": [1.0] * 8,
    "original_max_position_embeddings": 256,
}  # fmt: skip
WHOLE = {"lm_head.weight": torch.zeros(64, 64)}
EAGLE3: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], object], str]] = {
    "layer past the depth": (lambda c, t: c.update({IDS_KEY: [0, 1, 3]}), r"hidden states \[0, 1, 3\].*no \[3\]"),
    "default layer ids": (lambda c, t: c.pop(IDS_KEY), r"\[2, 1, -1\] does not fit"),
    "layer ids": (lambda c, t: c.update({IDS_KEY: "2"}), f"{IDS_KEY}='2'"),
    "vocabulary": (lambda c, t: c.update(vocab_size=65), "vocab_size=65, .* has 64"),
    "hidden size": (lambda c, t: c.update(target_hidden_size=32), "target_hidden_size=32, .* are 64 wide"),
    "no embedding": (lambda c, t: c.update(hidden_size=32, target_hidden_size=64), "no embed_tokens.weight"),
    "scaled states": (lambda c, t: c.update(residual_multiplier=0.5), "config.json has residual_multiplier=0.5"),
    "capped logits": (lambda c, t: c.update(final_logit_softcapping=30), "config.json has final_logit_softcapping=30"),
    "parallel drafts": (lambda c, t: c.update(parallel_drafting=True), "config.json has parallel_drafting=True"),
    "another method": (lambda c, t: c.update(architectures=["PEagleDraftModel"]), "architectures=.'PEagleDraftModel'"),
    "packed weights": (lambda c, t: c.update(quantization_config={"bits": 4}), "quantization_config="),
    "unknown eagle_config": (lambda c, t: c.update(eagle_config={"use_mtp_layernorm": True}), "use_mtp_layernorm"),
    "another speculator": (lambda c, t: c.update(speculators_model_type="dflash"), "speculators_model_type='dflash'"),
    "model type": (lambda c, t: c.update(model_type="gemma2", architectures=None), "model_type='gemma2'"),
    "two layers": (lambda c, t: t.update({"layers.1.a": torch.zeros(1)}), "unexpected .'layers.1.a'"),
    "tied head": (lambda c, t: (c.update(tie_word_embeddings=True), t.pop("lm_head.weight")), "lm_head.weight"),
    "window": (lambda c, t: c.update(sliding_window=16), "sliding_window=16"),
    "layer type": (lambda c, t: c.update(layer_types=["sliding_attention"]), "layer_types=.*must be full"),
    "positions": (lambda c, t: c.update(rope_scaling=LONGROPE), "type 'longrope'"),
    "other positions": (lambda c, t: c.update(rope_scaling={"type": "dynamic", "alpha": 9.0}), "RoPE has alpha=9.0"),
    "half of them": (lambda c, t: c.update(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
    "activation": (lambda c, t: c.update(hidden_act="snake"), "hidden_act='snake'"),
    "heads": (lambda c, t: c.update(num_key_value_heads=3), "num_key_value_heads=3 must divide"),
    "flag": (lambda c, t: c.update(norm_output="yes"), "norm_output='yes'"),
    "size": (lambda c, t: c.update(draft_vocab_size=-1), "draft_vocab_size=-1"),
    "draft vocabulary": (lambda c, t: c.update(draft_vocab_size=99), "draft_vocab_size=99 is more"),
    "a type": (lambda c, t: c.update(hidden_size="64"), "do not fit together"),
    "EAGLE 1": (
        lambda c, t: (t.pop("midlayer.hidden_norm.weight"), t.update({"fc.weight": torch.zeros(64, 128)})),
        "it is a drafter of EAGLE 1 or 2",
    ),
    "another count": (
        lambda c, t: (c.clear(), c.update(eagle3.speculators({"num_hidden_layers": 2}))), "=2, .* are of 1",
    ),
    "missing": (lambda c, t: t.pop("midlayer.hidden_norm.weight"), r"missing \['layers.0.hidden_norm.weight'\]"),
    "no d2t": (lambda c, t: t.pop("d2t"), "draft_vocab_size=40 .* and d2t"),
    "t2d alone": (lambda c, t: (c.pop("draft_vocab_size"), t.pop("d2t"), t.update(WHOLE)), "t2d and no d2t"),
    "t2d of other tokens": (lambda c, t: t.update(t2d=~t["t2d"]), "t2d marks other tokens"),
    "d2t too large": (lambda c, t: t["d2t"][-1].fill_(64), "d2t must lead .* to 103"),
    "d2t negative": (lambda c, t: t["d2t"][0].fill_(-1), "different ones from -1"),
    "d2t twice": (lambda c, t: t["d2t"][1].copy_(t["d2t"][0] - 1), "to 39 different ones"),
}


@pytest.mark.parametrize("change, message", EAGLE3.values(), ids=EAGLE3)
def test_bad_eagle3_checkpoints(
    change: Callable[..., object], message: str, tiny: PreTrainedModel, tmp_path: Path
) -> None:
    config, tensors = safeai(), make_tensors(safeai())
    change(config, tensors)
    write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=f"assistant_model=(.|\n)*{message}"):
        Eagle3Drafter(tmp_path, tiny)


# Names and parts that public checkpoints vary in, and that change no draft.
VARIANTS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "prefix": lambda t: {name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name}": t[name] for name in t},
    "layer by number": lambda t: {name.replace("midlayer.", "layers.0."): t[name] for name in t},
    "both": lambda t: {
        name if "2" in name or "head" in name else "model." + name.replace("midlayer.", "layers.0."): t[name]
        for name in t
    },
    "frequencies": lambda t: t | {"model.midlayer.self_attn.rotary_emb.inv_freq": torch.zeros(8)},
    "a bias of nothing": lambda t: t | {"fc.bias": torch.zeros(64)},
}  # fmt: skip


def test_variants_of_eagle3_draft_alike(tiny: PreTrainedModel, tmp_path: Path) -> None:
    """And are saved under the names that they came with."""
    prompts, tensors = pad_left(random_rows([5, 9])), make_tensors(safeai())
    write_checkpoint(tmp_path / "plain", safeai(), tensors)
    plain = generate(tiny, prompts, "eagle3", assistant_model=str(tmp_path / "plain"), max_new_tokens=12)
    for name, vary in VARIANTS.items():
        write_checkpoint(tmp_path / name, safeai(), vary(tensors))
        drafter = Eagle3Drafter(tmp_path / name, tiny)
        found = generate(tiny, prompts, drafter=drafter, max_new_tokens=12)
        assert found.statistics.total == plain.statistics.total and found.statistics.total.drafted > 10, name
        drafter.save(tmp_path / "saved")
        assert read_checkpoint(tmp_path / "saved")[1].keys() == vary(tensors).keys()


@pytest.mark.parametrize(("size", "warns"), [(40, True), (64, False)])
def test_an_empty_map_is_the_first_tokens_and_is_told(
    size: int, warns: bool, tiny: PreTrainedModel, tmp_path: Path
) -> None:
    """As in vLLM. Where t2d says the same, or all tokens are drafted, nothing is odd."""
    config = safeai(draft_vocab_size=size)
    tensors = make_tensors(config) | {"d2t": torch.zeros(size, dtype=torch.int64)}
    marked = torch.arange(64) < size
    for name, more in (("alone", {}), ("marked", {"t2d": marked})):
        write_checkpoint(tmp_path / name, config, {**{n: t for n, t in tensors.items() if n != "t2d"}, **more})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            drafter = Eagle3Drafter(tmp_path / name, tiny)
        told = [str(one.message) for one in caught if "d2t is 0 throughout" in str(one.message)]
        assert bool(told) == (warns and name == "alone")
        assert drafter.target_ids is not None and drafter.target_ids.tolist() == list(range(size))


@pytest.mark.parametrize("strategy", ["dflash", "eagle3"])
def test_an_embedding_of_another_width_is_refused_in_words(strategy: str, tmp_path: Path) -> None:
    """OPT projects it to the width of its hidden states."""
    opt = AutoModelForCausalLM.from_config(OPTConfig(
        vocab_size=64, hidden_size=64, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
    ))  # fmt: skip
    if strategy == "eagle3":
        write_checkpoint(tmp_path, safeai(), make_tensors(safeai()))
    else:
        make_checkpoint(tmp_path, zlab())
    with pytest.raises(ValueError, match="the target's embedding is 32 wide: .*has no embed_tokens.weight"):
        {"dflash": DFlashDrafter, "eagle3": Eagle3Drafter}[strategy](tmp_path, opt)


DFLASH: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "neither format": (SIZES, "is no DFlash drafter", None),
    "another speculator": (speculators(speculators_model_type="eagle3"), "speculators_model_type='eagle3'", None),
    "speculators' layer": (speculators(aux_hidden_state_layer_ids=[3]), r"\[3\].* has 2 layers", None),
    "negative layer": (zlab(dflash_config={"target_layer_ids": [-1]}), "target_layer_ids=-1", None),
    "no layers": (speculators(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids=None", None),
    "another depth": (zlab(num_target_layers=36), "num_target_layers=36.* has 2 layers", None),
    "no depth": (zlab(dflash_config={"target_layer_ids": None}), "target_layer_ids is missing.=2", None),
    "mask token": (zlab(dflash_config={"mask_token_id": 64}), "mask_token_id=64", None),
    "no mask token": (zlab(dflash_config={"mask_token_id": None}), "mask_token_id=None", None),
    "block size": (zlab(block_size=1), "block_size=1", None),
    "scaled states": (zlab(layer_scale=0.1), "config.json has layer_scale=0.1", None),
    "scaled attention": (zlab(dflash_config={"query_pre_attn_scalar": 2}), "dflash_config has query_pre_attn", None),
    "scaled logits": (speculators({"logit_scale": 2}), "transformer_layer_config has logit_scale=2", None),
    "a factor of the other format": (speculators(output_multiplier=2), "config.json has output_multiplier=2", None),
    "bias": (zlab(mlp_bias=True), "mlp_bias=True", None),
    "shifted labels": (speculators(shift_label=True), "shift_label=True", None),
    "projector": (speculators(projector_type="domino"), "projector_type='domino'", None),
    "no window": (zlab(**WINDOWED | {"sliding_window": None}), "sliding_window is None", None),
    "window off": (zlab(**WINDOWED | {"use_sliding_window": False}), "use_sliding_window=False", None),
    "layer types": (zlab(layer_types=["full_attention"]), "do not fit together(.|\n)*layer_types", None),
    "chunks": (zlab(layer_types=["full_attention", "chunked_attention"]), "layer_types=.*layers are full", None),
    "no head": (PRUNED, "needs a head of its own", "lm_head.weight"),
}


@pytest.mark.parametrize("settings, message, lost", DFLASH.values(), ids=DFLASH)
def test_bad_dflash_checkpoints(
    settings: dict[str, Any], message: str, lost: str | None, tiny: PreTrainedModel, tmp_path: Path
) -> None:
    tensors = {"fc.weight": torch.zeros(1)}
    if lost is not None:
        tensors = make_checkpoint(tmp_path, settings)
        del tensors[lost]
    write_checkpoint(tmp_path, settings, tensors)
    with pytest.raises(ValueError, match=f"assistant_model=(.|\n)*{message}"):
        DFlashDrafter(tmp_path, tiny)
