"""Untrained checkpoints: of the public formats, loadable, the same for the same seed, refused where they cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from spec_trl.drafter_training.untrained import DFLASH_FORMATS, EAGLE3_FORMATS, LayerSizes, write_dflash, write_eagle3
from spec_trl.generation.drafters.dflash.drafter import DFlashDrafter
from spec_trl.generation.drafters.eagle3.drafter import Eagle3Drafter
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows


PROMPTS = pad_left(random_rows([5, 9, 1]))


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("depth", [1, 2, 5, 8, 12])
@pytest.mark.parametrize("format", EAGLE3_FORMATS)
def test_eagle3_drafts(format: str, depth: int, tmp_path: Path) -> None:
    target = tiny_llama(num_hidden_layers=depth)
    write_eagle3(tmp_path, target, format=format)
    drafter = Eagle3Drafter(tmp_path, target)
    expected = {1: (1,), 2: (1, 2), 5: (1, 3, 5), 8: (2, 4, 5), 12: (2, 6, 9)}
    assert drafter.feature_layers == expected[depth]
    assert torch.equal(drafter.network.lm_head.weight, target.lm_head.weight.float())  # in float32 while it is made
    result = generate(target, PROMPTS, "eagle3", assistant_model=str(tmp_path))
    assert result.statistics.drafter_failure is None and result.statistics.total.drafted > 0
    assert outputs(result) == outputs(generate(target, PROMPTS))


@pytest.mark.parametrize("depth, layers", [(1, 1), (2, 1), (5, 2), (5, 5), (8, 2), (36, 5)])
@pytest.mark.parametrize("format", DFLASH_FORMATS)
def test_dflash_drafts(format: str, depth: int, layers: int, tmp_path: Path) -> None:
    target = tiny_llama(num_hidden_layers=depth)
    write_dflash(tmp_path, target, format=format, layers=layers, block_size=4)
    drafter = DFlashDrafter(tmp_path, target)
    expected = {
        (1, 1): (1,), (2, 1): (2,), (5, 2): (2, 3), (5, 5): (1, 2, 3, 4, 5), (8, 2): (2, 6),
        (36, 5): (2, 10, 18, 26, 34),  # z-lab's own for Qwen3-8B, counted from 1
    }  # fmt: skip
    assert drafter.feature_layers == expected[depth, layers]
    assert len(drafter.network.layers) == layers and drafter.config.mask_token == 0
    result = generate(target, PROMPTS, "dflash", assistant_model=str(tmp_path))
    assert result.statistics.drafter_failure is None and result.statistics.total.drafted > 0
    assert outputs(result) == outputs(generate(target, PROMPTS))


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
def test_the_seed_decides(write: Any, tiny: PreTrainedModel, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write(tmp_path / name, tiny, seed=seed, dtype=torch.bfloat16)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    assert load_file(tmp_path / "a" / "model.safetensors")["fc.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("write", [write_eagle3, write_dflash])
def test_sizes(write: Any, tiny: PreTrainedModel, tmp_path: Path) -> None:
    write(tmp_path / "own", tiny)
    own = config_of(tmp_path / "own")
    assert (own["intermediate_size"], own["num_attention_heads"], own["num_key_value_heads"]) == (64, 4, 2)
    assert (own["head_dim"], own["rope_theta"], own["rms_norm_eps"]) == (16, 10000.0, 1e-6)
    write(tmp_path / "given", tiny, sizes=LayerSizes(96, 8, 4, 6))
    given = config_of(tmp_path / "given")
    assert (given["intermediate_size"], given["num_attention_heads"], given["num_key_value_heads"]) == (96, 8, 4)
    assert given["head_dim"] == 6


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


def refuse(problem: str, write: Any, target: PreTrainedModel, folder: Path, **options: Any) -> None:
    with pytest.raises(ValueError, match=problem):
        write(folder, target, **options)
    assert not folder.exists()


def test_bad_input(tiny: PreTrainedModel, tmp_path: Path) -> None:
    folder = tmp_path / "none"
    for write in (write_eagle3, write_dflash):
        refuse("format='onnx' is none of", write, tiny, folder, format="onnx")
        refuse("sizes give 3 query heads", write, tiny, folder, sizes=LayerSizes(num_attention_heads=3))
        refuse("sizes give 4 query heads of 5 dim", write, tiny, folder, sizes=LayerSizes(head_dim=5))
        refuse("sizes.head_dim=-2", write, tiny, folder, sizes=LayerSizes(head_dim=-2))
    refuse(r"does not have \[3\]", write_eagle3, tiny, folder, layer_ids=[0, 3])
    refuse("belong together", write_eagle3, tiny, folder, draft_vocab_size=8)
    refuse("draft_vocab_size=65", write_eagle3, tiny, folder, draft_vocab_size=65, token_counts=torch.ones(64))
    refuse(
        r"layer_ids=\[0\]: z-lab drafters read hidden states from 1 to 2", write_dflash, tiny, folder, layer_ids=[0]
    )
    refuse(r"layer_ids=\[3\]", write_dflash, tiny, folder, layer_ids=[3], format="speculators")
    refuse("layers=0", write_dflash, tiny, folder, layers=0)
    refuse("block_size=1", write_dflash, tiny, folder, block_size=1)
    refuse("mask_token=64; the target's tokens are 0 to 63", write_dflash, tiny, folder, mask_token=64)
    same = tiny_llama(pad_token_id=None, eos_token_id=7)
    refuse("has no pad token of its own .* give mask_token", write_dflash, same, folder)
    same.config.pad_token_id = 7
    refuse("has no pad token of its own", write_dflash, same, folder)
