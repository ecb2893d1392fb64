"""The training script as a user runs it: trains, measures, resumes, and refuses what does not fit before any work."""

import re
from pathlib import Path

import pytest

from examples import train_drafter
from examples.demo.task import build_tokenizer
from tests.conftest import STORY_MODEL
from tests.examples.test_examples import CHAT_TEMPLATE
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


@pytest.mark.parametrize("drafter", ["eagle3", "dflash", "model"])
def test_trains_and_measures(
    drafter: str, target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "drafter"
    options = ["--target", str(target), "--drafter", drafter, "--prompts", str(prompts), "--output", str(output)]
    options += SMALL
    train_drafter.main(options)
    printed = capsys.readouterr().out
    assert re.search(r"\d+ parameters learn from 6 windows of up to 16 tokens", printed)
    assert re.search(r"temperature 0: [\d.]+ untrained, [\d.]+ trained\n +temperature 1: ", printed)
    weights = (output / "model.safetensors").read_bytes()
    train_drafter.main([*options, "--resume"])  # nothing is left to do
    assert (output / "model.safetensors").read_bytes() == weights
    with pytest.raises(ValueError, match="holds a model already"):
        train_drafter.main(options)


@pytest.mark.slow
def test_stories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the BOS token, in windows."""
    options = ["--target", str(STORY_MODEL), "--drafter", "eagle3", "--output", str(tmp_path), *SMALL]
    train_drafter.main([*options, "--window", "8"])
    printed = capsys.readouterr().out
    assert "12 windows of up to 8 tokens" in printed
    assert "2 held-out prompts" in printed


def test_prompts_are_cut_within_their_template() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.decode(train_drafter.tokenize(["abcdef"], tokenizer, 3)[0]) == "<bos>ab"
    tokenizer.chat_template = CHAT_TEMPLATE
    assert tokenizer.decode(train_drafter.tokenize(["abcdef"], tokenizer, 3)[0]) == "abc="


@pytest.mark.parametrize("options, problem", [
    (["--steps", "0"], "steps=0"),
    (["--learning-rate", "-1"], "learning_rate=-1.0"),
    (["--batch-size", "0"], "batch_size=0"),
    (["--held-out", "4"], "--held-out 4: of 4 prompts"),
    (["--format", "onnx"], "format='onnx'"),
    (["--layer-ids", "9"], "and so no [9]"),
    (["--drafter", "dflash", "--block-size", "1"], "block_size=1"),
    (["--drafter", "dflash", "--mask-token", "9999"], "mask_token=9999"),
    (["--drafter", "model", "--hidden-size", "17"], "--hidden-size 17"),
    (["--window", "1"], "window=1"),
    (["--resume"], "has no training_state.pt to go on from"),
])  # fmt: skip
def test_bad_input_is_refused_before_any_sampling(
    options: list[str], problem: str, target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_drafter, "sample_sequences", lambda *_, **__: pytest.fail("work was begun"))
    output = tmp_path / "none"
    with pytest.raises(ValueError, match=re.escape(problem)):
        train_drafter.main(
            ["--target", str(target), "--prompts", str(prompts), "--output", str(output), *SMALL, *options]
        )
    assert not output.exists()
