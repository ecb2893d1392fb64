"""The training script as a user runs it: a drafter gets better, training goes on bit for bit, and what does not fit is
refused before any work."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM

from examples import train_drafter
from examples.demo.task import build_tokenizer
from examples.train_drafter import cut, write_dflash, write_eagle3
from spec_trl.generation.drafters.dflash.dflash_drafter import DFlashDrafter
from spec_trl.generation.drafters.eagle3.eagle3_drafter import Eagle3Drafter
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.trainers.harness import tiny_policy


SMALL = [
    "--samples", "6", "--sample-tokens", "16", "--steps", "3", "--batch-size", "2", "--layers", "1",
    "--hidden-size", "16", "--block-size", "4", "--held-out", "2", "--measure-tokens", "8", "--device", "cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_policy().save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("a1\nb22\n\nc3\nd4\n")
    return path


class Stopped(Exception):
    pass


@pytest.mark.parametrize("drafter", ["eagle3", "dflash", "model"])
def test_trains_measures_and_goes_on(
    drafter: str, target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A run that was killed in its third step ends in the bits of one that was not."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    options = ["--target", str(target), "--drafter", drafter, "--prompts", str(prompts), *SMALL, "--save-every", "2"]
    train_drafter.main([*options, "--output", str(once)])
    printed = capsys.readouterr().out
    assert re.search(r"\d+ parameters learn from 6 windows of up to 16 tokens", printed)
    assert re.search(r"on 2 held-out prompts, 8 tokens:\n +untrained: [\d.]+ at .*\n +trained: [\d.]+ at", printed)
    with pytest.raises(ValueError, match="holds a model already"):
        train_drafter.main([*options, "--output", str(once)])

    view = train_drafter._view

    def stop(*given: Any) -> Any:
        if given[-1] == 2:
            raise Stopped
        return view(*given)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(train_drafter, "_view", stop)
        train_drafter.main([*options, "--output", str(twice)])
    train_drafter.main([*options, "--output", str(twice), "--resume"])
    assert (once / "model.safetensors").read_bytes() == (twice / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="--resume: .* was trained with .*give the same options"):
        train_drafter.main([*options, "--output", str(twice), "--resume", "--steps", "4"])


def test_goes_on_after_a_kill_while_it_saves(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of a "model" drafter never holds half of its weights."""
    folder = tmp_path / "drafter"
    options = ["--target", str(target), "--drafter", "model", "--prompts", str(prompts), *SMALL, "--save-every", "2"]
    options += ["--measure-tokens", "0", "--output", str(folder)]
    save, saves, weights = LlamaForCausalLM.save_pretrained, [], folder / "model.safetensors"

    def half(model: LlamaForCausalLM, place: str | Path) -> None:
        save(model, place)
        saves.append(place)
        if len(saves) == 4:  # after two untrained drafters and the save before the first step
            written = Path(place) / "model.safetensors"
            written.write_bytes(written.read_bytes()[:1000])
            raise Stopped

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(LlamaForCausalLM, "save_pretrained", half)
        train_drafter.main(options)
    untrained = weights.read_bytes()
    train_drafter.main([*options, "--resume"])
    assert untrained != weights.read_bytes()
    files = {file.name for file in folder.iterdir() if not file.name.startswith("training_")}
    assert files == {"config.json", "generation_config.json", "model.safetensors"}


def test_prompts_are_cut_with_their_special_tokens(target: Path, tmp_path: Path) -> None:
    """BOS counts, and no text is made of a cut prompt: a token may be half of a character."""
    path = tmp_path / "prompts.txt"
    path.write_text("a1+22\nb2\n")
    options = ["--target", str(target), "--output", str(tmp_path), "--prompts", str(path), "--held-out", "1"]
    arguments = train_drafter.parse_arguments([*options, "--prompt-tokens", "4"])
    prompts = train_drafter.choose_prompts(arguments, tiny_policy(), 16)
    assert prompts == build_tokenizer()(["a1+", "b2"]).input_ids and list(map(len, prompts)) == [4, 3]


@pytest.mark.parametrize("drafter", ["eagle3", pytest.param("dflash", marks=pytest.mark.slow)])
def test_training_helps(drafter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More drafts of held-out prompts are accepted, and windows come once in each pass."""
    model = tiny_llama()
    model.generation_config.bos_token_id = 1
    model.save_pretrained(tmp_path / "target")
    options = ["--target", str(tmp_path / "target"), "--drafter", drafter, "--output", str(tmp_path / "drafter")]
    options += ["--samples", "40", "--sample-tokens", "24", "--window", "12", "--steps", "80", "--batch-size", "12"]
    options += ["--learning-rate", "1e-2", "--depth", "3", "--layers", "1", "--block-size", "4", "--device", "cpu"]
    train_drafter.main([*options, "--held-out", "8", "--measure-tokens", "40"])
    untrained, trained = re.findall(r"trained: [\d.]+ at temperature 0, ([\d.]+)", capsys.readouterr().out)
    assert float(trained) > float(untrained) + 0.1


def test_samples_are_what_the_engine_samples() -> None:
    """Each under its own noise, in whatever batch it is drawn, ended by EOS."""
    model, prompts = tiny_llama(), [row.tolist() for row in random_rows([3, 4, 9])]
    model.generation_config.eos_token_id = 7
    sampled = train_drafter.sample(model, prompts, 6, 24, seed=0)
    for row, width in ((0, 4), (2, 9), (4, 4)):  # prompts of 3 and 4 tokens go together
        prompt = prompts[row % 3]
        alone = generate(
            model, pad_left([torch.tensor(prompt)]), request_ids=[row], max_new_tokens=24 - width, eos_token_id=7
        )
        assert sampled[row] == prompt + outputs(alone)[0]
    assert len({tuple(row) for row in sampled}) == 6


def test_cut() -> None:
    sequences = [list(range(1, 12)), list(range(12, 17))]  # of the second nothing was sampled
    windows = cut(sequences, [2, 5], 4)
    assert windows.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 0]]
    assert windows.lengths.tolist() == [4, 4, 3] and windows.first.tolist() == [2, 1, 1]
    assert cut(sequences, [2, 5], 100).tokens.tolist() == [list(range(1, 12))]
    with pytest.raises(ValueError, match="no window of 4 tokens holds a sampled token"):
        cut(sequences, [11, 5], 4)


# ---- untrained checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth, of_eagle3, of_dflash", [
    (1, (1,), (1,)), (5, (1, 3, 5), (2, 3)), (8, (2, 4, 5), (2, 6)),
])  # fmt: skip
def test_untrained_drafters_draft(
    depth: int, of_eagle3: tuple[int, ...], of_dflash: tuple[int, ...], tmp_path: Path
) -> None:
    model, prompts = tiny_llama(num_hidden_layers=depth), pad_left(random_rows([5, 9, 1]))
    write_eagle3(tmp_path / "eagle3", model)
    write_dflash(tmp_path / "dflash", model, layers=min(depth, 2), block_size=4)
    drafter = Eagle3Drafter(tmp_path / "eagle3", model)
    assert drafter.feature_layers == of_eagle3
    assert torch.equal(drafter.network.lm_head.weight, model.lm_head.weight.float())  # float32 while it is made
    assert DFlashDrafter(tmp_path / "dflash", model).feature_layers == of_dflash
    expected = outputs(generate(model, prompts, max_new_tokens=8))
    for kind in ("eagle3", "dflash"):
        result = generate(model, prompts, kind, assistant_model=str(tmp_path / kind), max_new_tokens=8)
        assert result.statistics.drafter_failure is None and result.statistics.total.drafted > 0
        assert outputs(result) == expected


def test_tensors_have_the_names_of_the_formats(tmp_path: Path) -> None:
    layer = ["input_layernorm", "post_attention_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]
    layer += [f"self_attn.{name}_proj" for name in "qkvo"]

    def names(write: Any) -> set[str]:
        write(tmp_path, tiny_llama())
        return {name.removesuffix(".weight") for name in load_file(tmp_path / "model.safetensors")}

    expected = {"fc", "norm", "lm_head", "midlayer.hidden_norm", *(f"midlayer.{name}" for name in layer)}
    assert names(write_eagle3) == expected
    layer += ["self_attn.q_norm", "self_attn.k_norm"]
    expected = {"fc", "norm", "hidden_norm", *(f"layers.{index}.{name}" for index in range(2) for name in layer)}
    assert names(lambda folder, model: write_dflash(folder, model, layers=2)) == expected


@pytest.mark.parametrize("write", [write_eagle3, write_dflash])
def test_seed_dtype_and_norm(write: Any, tmp_path: Path) -> None:
    model = tiny_llama().bfloat16()
    with torch.no_grad():
        model.model.norm.weight *= 7
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write(tmp_path / name, model, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    tensors, config = load_file(tmp_path / "a/model.safetensors"), json.loads((tmp_path / "a/config.json").read_text())
    assert tensors["fc.weight"].dtype == torch.bfloat16 and config["rope_theta"] == 10000.0
    norm = tensors["norm.weight"].float()  # of the size of the target's
    torch.testing.assert_close(norm, torch.full_like(norm, 7.0), rtol=0.01, atol=0)


def test_masks_and_caps_of_a_target(tmp_path: Path) -> None:
    """A pad token that ends texts, or none at all, is no mask; DFlash takes over the cap of its target's logits."""
    for pad in (None, 7):
        with pytest.raises(ValueError, match="the pad token of LlamaForCausalLM is none. Give --mask-token"):
            write_dflash(tmp_path, tiny_llama(pad_token_id=pad, eos_token_id=7))
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    more = dict(num_key_value_heads=2, head_dim=16, pad_token_id=0, final_logit_softcapping=3.0)
    model = Gemma2ForCausalLM(Gemma2Config(**sizes, **more)).eval()
    write_dflash(tmp_path, model, layers=1)
    assert DFlashDrafter(tmp_path, model).config.softcap == 3.0


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, problem", [
    (["--steps", "0"], "--steps 0"),
    (["--learning-rate", "-1"], "--learning-rate -1.0"),
    (["--held-out", "4"], "--held-out 4: of 4 prompts"),
    (["--sample-tokens", "2", "--prompt-tokens", "2"], "--sample-tokens 2 leaves no room"),
    (["--held-out", "-1"], "--held-out -1: it must be at least 0"),
    (["--held-out", "0"], "--held-out 0 needs --measure-tokens 0, not 8"),
    (["--drafter", "dflash", "--block-size", "1"], "block_size=1"),
    (["--drafter", "dflash", "--mask-token", "9999"], "mask_token=9999"),
    (["--drafter", "model", "--hidden-size", "17"], "--hidden-size 17"),
    (["--window", "1"], "--window 1"),
    (["--resume"], "has no training_state.pt to go on from"),
])  # fmt: skip
def test_bad_input_is_refused_before_any_sampling(
    options: list[str], problem: str, target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_drafter, "sample", lambda *_: pytest.fail("work was begun"))
    given = ["--target", str(target), "--prompts", str(prompts), "--output", str(tmp_path / "none"), *SMALL, *options]
    with pytest.raises(ValueError, match=re.escape(problem)):
        train_drafter.main(given)
    assert not (tmp_path / "none").exists()


def test_what_is_refused_later(target: Path, prompts: Path, tmp_path: Path) -> None:
    options = ["--target", str(target), "--prompts", str(prompts), "--output", str(tmp_path / "drafter"), *SMALL]
    options += ["--held-out", "0", "--measure-tokens", "0"]
    with pytest.raises(FloatingPointError, match="the loss is nan at step 2: lower --learning-rate 1e"):
        train_drafter.main([*options, "--learning-rate", "1e30"])
    (tmp_path / "training_state.pt").touch()
    with pytest.raises(ValueError, match="--resume: an older version wrote .*; resume with it, or train in another"):
        train_drafter.main(["--target", "nowhere", "--output", str(tmp_path), "--resume"])
