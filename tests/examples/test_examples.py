"""The two example scripts, run as a user runs them."""

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples import generate, grpo_gsm8k
from examples.demo.task import build_tokenizer
from spec_trl import SpeculativeConfig, SpeculativeOutput
from spec_trl.cli.prompts import pad_left, token_ids
from spec_trl.generation.configuration import TAKE_ASSISTANT
from tests.conftest import DATA, STORY_MODEL
from tests.trainers.harness import tiny_policy


ROOT = Path(__file__).parents[2]
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}={% endfor %}"


def run(script: str, *arguments: str) -> str:
    """Runs examples/`script`; returns what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, f"examples/{script}", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def save_chat_model(folder: Path) -> None:
    """A tiny policy with a chat template."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tiny_policy().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.slow
def test_gsm8k_on_a_small_model(
    shared: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--model", str(shared("models/bit-stories3M")), "--dataset", str(shared("data/gsm8k/train.jsonl")),
        "--max_steps", "2", "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1",
        "--num_generations", "4", "--max_completion_length", "32", "--learning_rate", "1e-3", "--use_cpu",
        "--output_dir", str(tmp_path), "--sd_toggle", "always",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["grpo_gsm8k.py", *arguments])
    grpo_gsm8k.main()
    printed = capsys.readouterr().out
    assert "questions of up to 480 tokens, completions of up to 32 tokens" in printed
    assert re.search(r"2 logged steps, reward .* assistant_strategy='self': .* of drafts accepted", printed)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert saved.config.max_position_embeddings == 512


def test_gsm8k_with_a_chat_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_chat_model(tmp_path / "model")
    rows = [{"question": f"a{n}+b{n}", "answer": f"so #### {2 * n}"} for n in range(1, 9)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = [
        "--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "questions.jsonl"), "--max_steps", "1",
        "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1", "--num_generations", "2",
        "--use_cpu", "--assistant_strategy", "none", "--output_dir", str(tmp_path / "out"),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["grpo_gsm8k.py", *arguments])
    grpo_gsm8k.main()
    printed = capsys.readouterr().out
    assert "8 questions of up to 128 tokens, completions of up to 128 tokens" in printed  # of a context of 256
    assert "1 logged steps" in printed
    assert "drafts accepted" not in printed


def test_gsm8k_prompts_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    rows = [{"question": "a" * n, "answer": "#### 1"} for n in (5, 50, 500)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = build_tokenizer()
    plain = grpo_gsm8k.build_dataset(str(tmp_path / "questions.jsonl"), tokenizer, longest_prompt=200)
    assert [prompt.count("a" * 5) for prompt in plain["prompt"]] == [1, 10]
    assert plain["prompt"][0].startswith("Question: aaaaa\n")
    tokenizer.chat_template = CHAT_TEMPLATE
    chat = grpo_gsm8k.build_dataset(str(tmp_path / "questions.jsonl"), tokenizer, longest_prompt=200)
    assert [messages[0]["role"] for messages in chat["prompt"]] == ["user", "user"]
    with pytest.raises(ValueError, match="no question .* fits into 20 tokens"):
        grpo_gsm8k.build_dataset(str(tmp_path / "questions.jsonl"), tokenizer, longest_prompt=20)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Natalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72", "72"),
        ("#### $1,234.50 for all 3", "1234.5"),
        ("#### 5\nNo, wait.\n#### -6", "-6"),
        (r"so 3 of 4, that is \boxed{\$12}.", "12"),
        ("It takes 3 hours and 20 minutes.", "20"),
        ("#### unknown, perhaps 7", "7"),
        ("It is 72.0.", "72"),
        ("no idea", None),
    ],
)
def test_gsm8k_answer_of_a_text(text: str, number: str | None) -> None:
    assert grpo_gsm8k.find_answer(text) == (None if number is None else Decimal(number))


def test_gsm8k_reward() -> None:
    chat = [[{"role": "assistant", "content": "#### 72"}], [{"role": "assistant", "content": "#### 7"}]]
    assert grpo_gsm8k.answer_reward(chat, answer=["... #### 72"] * 2) == [1.0, 0.0]
    assert grpo_gsm8k.answer_reward(["it is 1,000", "no idea"], answer=["#### 1000"] * 2) == [1.0, 0.0]


@pytest.mark.slow
def test_generate_on_a_small_model() -> None:
    printed = run(
        "generate.py", "--model", str(STORY_MODEL),
        "--prompts", str(DATA / "stories.json"), "--max_prompt_tokens", "24",
        "--max_new_tokens", "40", "--limit", "6", "--dtype", "float64", "--show", "2", "--compare",
    )  # fmt: skip
    assert printed.count("--- ") == 2
    assert printed.count("tokens/s") == 2
    assert re.search(r"tokens per verified block: [2-6]\.\d\d; drafts accepted: 0\.\d{3}", printed)
    assert 'rows identical to "none": 6 of 6' in printed


def test_generate_options_act(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whether the default toggle drafts depends on how long rounds take.
    monkeypatch.setattr(generate, "SpeculativeConfig", partial(SpeculativeConfig, sd_toggle="always"))
    policy = tiny_policy().eval()
    inputs = pad_left(token_ids(["a3+b8=", "c5="], build_tokenizer(), longest=16), policy.device)

    def sample(strategy: str, *options: str) -> SpeculativeOutput:
        monkeypatch.setattr(sys, "argv", ["generate.py", *options])
        return generate.sample(policy, inputs, strategy, generate.parse_arguments(), new_tokens=24)

    reference = generate.completions_of(sample("none"))
    for options in ([], ["--draft_length", "2"], ["--batch_size", "1"]):
        assert generate.completions_of(sample("self", *options)) == reference
    for options in (["--seed", "1"], ["--temperature", "2"], ["--top_p", "0.1"], ["--verification", "rejection"]):
        assert generate.completions_of(sample("self", *options)) != reference
    greedy = sample("self", "--temperature", "0")
    assert torch.equal(greedy.sequences, policy.generate(**inputs, do_sample=False, max_new_tokens=24))
    assert "tokens per verified block" in generate.describe(greedy)


@pytest.mark.parametrize(
    ("strategy", "handed_over"), [("none", None), *((strategy, "small") for strategy in TAKE_ASSISTANT)]
)
def test_generate_hands_its_assistant_to_every_strategy_that_takes_one(
    strategy: str, handed_over: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model:
        def generate(self, **options: Any) -> dict[str, Any]:
            return options

    options = ["--assistant_model", "small", "--tts_drafter", "model", "--best_of_n_drafters", "self", "model"]
    monkeypatch.setattr(sys, "argv", ["generate.py", *options])
    given: Any = generate.sample(Model(), {}, strategy, generate.parse_arguments(), new_tokens=1)
    assert (given["assistant_strategy"], given["assistant_model"]) == (strategy, handed_over)
    config = given["speculative_config"]
    assert (config.tts_drafter, config.best_of_n_drafters) == ("model", ["self", "model"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--assistant_model", "small"], "--assistant_strategy self uses no --assistant_model small"),
        (["--assistant_strategy", "eagle3"], "--assistant_strategy eagle3 needs a drafter; give --assistant_model."),
        (["--prompts", "no/such.txt"], "No such file or directory: 'no/such.txt'"),
        (["--device", "nowhere"], "--device nowhere cannot be used here"),
        (["--model", "no/such/model"], "no/such/model"),
    ],
)
def test_generate_ends_in_one_line_on_bad_input(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py", *options])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "examples" / "generate.py"), run_name="__main__")
    line = str(stop.value.code)
    assert line.startswith("generate.py: error: ") and message in line and "\n" not in line


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("grpo_gsm8k.py", ["--model", "no/such/model"]),
        ("train_drafter.py", ["--target", "no/such/model", "--output", "no/such/folder"]),
    ],
)
def test_other_examples_end_in_one_line_on_bad_input(
    script: str, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [script, *options])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    line = str(stop.value.code)
    assert line.startswith(f"{script}: error: ") and "no/such/model" in line and "\n" not in line


@pytest.mark.parametrize("module", [generate, grpo_gsm8k], ids=["generate", "grpo_gsm8k"])
def test_help(module: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["example.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        module.main()
    usage = capsys.readouterr().out
    assert "--assistant_strategy" in usage and "--model" in usage
