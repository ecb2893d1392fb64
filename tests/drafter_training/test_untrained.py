"""Untrained checkpoints: of the public formats, loadable, the same for the same seed, refused where they cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM, PreTrainedModel

from spec_trl.drafter_training.untrained import DFLASH_FORMATS, EAGLE3_FORMATS, LayerSizes, write_dflash, write_eagle3
from spec_trl.generation.drafters.dflash.drafter import DFlashDrafter
from spec_trl.generation.drafters.eagle3.drafter import Eagle3Drafter
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows


PROMPTS = pad_left(random_rows([5, 9, 1]))


def check_drafting(kind: str, folder: Path, target: PreTrainedModel) -> None:
    result = generate(target, PROMPTS, kind, assistant_model=str(folder), max_new_tokens=8)
    assert result.statistics.drafter_failure is None and result.statistics.total.drafted > 0
    assert outputs(result) == outputs(generate(target, PROMPTS, max_new_tokens=8))


@pytest.mark.parametrize("depth, layers", [(1, (1,)), (2, (1, 2)), (5, (1, 3, 5)), (8, (2, 4, 5)), (12, (2, 6, 9))])
def test_eagle3_drafts(depth: int, layers: tuple[int, ...], tmp_path: Path) -> None:
    target = tiny_llama(num_hidden_layers=depth)
    for format in EAGLE3_FORMATS:
        write_eagle3(tmp_path / format, target, format=format)
        drafter = Eagle3Drafter(tmp_path / format, target)
        assert drafter.feature_layers == layers
        assert torch.equal(drafter.network.lm_head.weight, target.lm_head.weight.float())  # float32 while it is made
    if depth < 8:
        check_drafting("eagle3", tmp_path / EAGLE3_FORMATS[depth % 2], target)


@pytest.mark.parametrize("depth, layers, expected", [
    (1, 1, (1,)), (2, 1, (2,)), (5, 2, (2, 3)), (5, 5, (1, 2, 3, 4, 5)), (8, 2, (2, 6)),
    (36, 5, (2, 10, 18, 26, 34)),  # z-lab's own for Qwen3-8B, counted from 1
])  # fmt: skip
def test_dflash_drafts(depth: int, layers: int, expected: tuple[int, ...], tmp_path: Path) -> None:
    target = tiny_llama(num_hidden_layers=depth)
    for format in DFLASH_FORMATS:
        write_dflash(tmp_path / format, target, format=format, layers=layers, block_size=4)
        drafter = DFlashDrafter(tmp_path / format, target)
        assert drafter.feature_layers == expected
        assert len(drafter.network.layers) == layers and drafter.config.mask_token == 0
    if depth < 8:
        check_drafting("dflash", tmp_path / DFLASH_FORMATS[layers % 2], target)


def test_tensors_have_the_names_of_the_formats(tiny: PreTrainedModel, tmp_path: Path) -> None:
    layer = ["input_layernorm", "post_attention_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]
    layer += [f"self_attn.{name}_proj" for name in "qkvo"]

    def names(write: Any, **options: Any) -> set[str]:
        write(tmp_path, tiny, **options)
        return {name.removesuffix(".weight") for name in load_file(tmp_path / "model.safetensors")}

    own = ["fc", "norm", "lm_head"]
    assert names(write_eagle3) == {*own, "midlayer.hidden_norm", *(f"midlayer.{name}" for name in layer)}
    pruned = dict(format="speculators", draft_vocab_size=8, token_counts=torch.ones(64))
    at = {f"layers.0.{name}" for name in layer}
    assert names(write_eagle3, **pruned) == {*own, "d2t", "t2d", "layers.0.hidden_norm", *at}
    at |= {"layers.0.self_attn.q_norm", "layers.0.self_attn.k_norm"}
    assert names(write_dflash, layers=1) == {"fc", "norm", "hidden_norm", *at}
    assert names(write_dflash, layers=1, format="speculators") == {*own, "hidden_norm", "embed_tokens", *at}


def test_pruned_vocabulary_holds_the_most_frequent_tokens(tiny: PreTrainedModel, tmp_path: Path) -> None:
    counts = torch.zeros(64, dtype=torch.int64)
    counts[torch.tensor([60, 7, 31])] = torch.tensor([5, 9, 5])
    write_eagle3(tmp_path, tiny, draft_vocab_size=5, token_counts=counts)
    drafter = Eagle3Drafter(tmp_path, tiny)
    assert drafter.target_ids.tolist() == [0, 1, 7, 31, 60]  # of tokens that never occur, the lowest
    assert torch.equal(drafter.network.lm_head.weight, tiny.lm_head.weight.float()[[0, 1, 7, 31, 60]])
    write_eagle3(tmp_path, tiny, draft_vocab_size=64, token_counts=counts)
    assert Eagle3Drafter(tmp_path, tiny).target_ids is None


@pytest.mark.parametrize("write", [write_eagle3, write_dflash])
def test_seed_dtype_sizes_and_norm(write: Any, fresh: LlamaForCausalLM, tmp_path: Path) -> None:
    fresh.bfloat16()
    with torch.no_grad():
        fresh.model.norm.weight *= 7

    def config(name: str) -> list[Any]:
        keys = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta")
        found = json.loads((tmp_path / name / "config.json").read_text())
        return [found[key] for key in (*keys, "rms_norm_eps")]

    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write(tmp_path / name, fresh, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    write(tmp_path / "given", fresh, sizes=LayerSizes(96, 8, 4, 6))
    assert config("a") == [64, 4, 2, 16, 10000.0, 1e-6] and config("given") == [96, 8, 4, 6, 10000.0, 1e-6]
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    assert tensors["fc.weight"].dtype == torch.bfloat16
    norm = tensors["norm.weight"].float()  # of the size of the target's
    torch.testing.assert_close(norm, torch.full_like(norm, 7.0), rtol=0.01, atol=0)


def test_a_target_that_caps_its_logits(tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, pad_token_id=0, final_logit_softcapping=3.0,
    )  # fmt: skip
    target = Gemma2ForCausalLM(config).eval()
    write_dflash(tmp_path, target, layers=1)
    assert DFlashDrafter(tmp_path, target).config.softcap == 3.0
    with pytest.raises(ValueError, match='caps its logits at 3.0.*choose format="z-lab"'):
        write_dflash(tmp_path, target, layers=1, format="speculators")


BOTH, EAGLE3, DFLASH = (write_eagle3, write_dflash), (write_eagle3,), (write_dflash,)


@pytest.mark.parametrize("writers, options, problem", [
    (BOTH, dict(format="onnx"), "format='onnx' is not one of"),
    (BOTH, dict(sizes=LayerSizes(num_attention_heads=3)), "sizes give 3 query heads"),
    (BOTH, dict(sizes=LayerSizes(head_dim=5)), "sizes give 4 query heads of 5 dim"),
    (BOTH, dict(sizes=LayerSizes(head_dim=-2)), "sizes.head_dim=-2"),
    (EAGLE3, dict(layer_ids=[0, 3]), r"no \[3\]"),
    (EAGLE3, dict(draft_vocab_size=8), "belong together"),
    (EAGLE3, dict(draft_vocab_size=65, token_counts=torch.ones(64)), "draft_vocab_size=65"),
    (DFLASH, dict(layer_ids=[0]), r"layer_ids=\[0\]: z-lab drafters read hidden states from 1 to 2"),
    (DFLASH, dict(layer_ids=[3], format="speculators"), r"layer_ids=\[3\]"),
    (DFLASH, dict(layers=0), "layers=0"),
    (DFLASH, dict(block_size=1), "block_size=1"),
    (DFLASH, dict(mask_token=64), "mask_token=64; the target's tokens are 0 to 63"),
])  # fmt: skip
def test_bad_input(writers: Any, options: dict[str, Any], problem: str, tiny: PreTrainedModel, tmp_path: Path) -> None:
    for write in writers:
        with pytest.raises(ValueError, match=problem):
            write(tmp_path / "none", tiny, **options)
        assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("pad", [None, 7])
def test_a_pad_token_that_cannot_be_the_mask(pad: int | None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no pad token of its own .* give mask_token"):
        write_dflash(tmp_path, tiny_llama(pad_token_id=pad, eos_token_id=7))
