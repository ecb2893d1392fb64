"""The README's Python and the example scripts, run as a user runs them but for the model, which is a tiny one here."""

import json
import re
import runpy
import sys
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import spec_trl
from examples import generate, grpo_gsm8k, online_dpo, own_loop, rloo
from examples.demo.task import build_tokenizer
from spec_trl import SpeculativeConfig
from spec_trl.generation.registry import assistant_of, strategies
from spec_trl.trainers.run_log import read_run
from tests.conftest import DATA, STORY_MODEL
from tests.trainers.harness import tiny_policy


ROOT = Path(__file__).parents[2]
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SCRIPTS = [
    script for page in ("README.md", "docs/how_to.md")
    for script in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
]  # fmt: skip
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}={% endfor %}"


@pytest.mark.parametrize("script", SCRIPTS, ids=["train", "generate", "qlora"])
def test_the_scripts_of_the_docs(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The README's second one shows that drafts change nothing."""
    assert MODEL in script
    model = STORY_MODEL
    if "BitsAndBytesConfig" in script:
        pytest.importorskip("bitsandbytes")
        model = request.getfixturevalue("shared")("models/bit-stories3M")  # whose layers fit into its blocks
    small = script.replace("max_steps=4, max_completion_length=48", "max_steps=1, max_completion_length=16")
    monkeypatch.chdir(tmp_path)  # where the trainer's output goes
    names: dict[str, object] = {"__name__": "__main__"}
    exec(small.replace(MODEL, str(model)), names)
    if "trainer" in names:
        assert small != script and (tmp_path / "out" / "rollout_log.jsonl").exists()
    else:
        said = r"(\d+) of (\d+) drafts accepted; same tokens: (\w+)"
        accepted, drafted, same = re.findall(said, capsys.readouterr().out)[0]
        assert 0 < int(accepted) < int(drafted) and same == "True"


@pytest.mark.parametrize(
    ("script", "options"),
    [(own_loop, ["--model", str(STORY_MODEL), "--rows", "2", "--tokens", "24"]), (rloo, []), (online_dpo, [])],
    ids=["own_loop", "rloo", "online_dpo"],
)
def test_what_speculate_serves(
    script: Any, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    always = partial(spec_trl.speculate, strategy="self", sd_toggle="always")
    monkeypatch.setattr(spec_trl, "speculate", always)
    monkeypatch.chdir(tmp_path)
    script.main(["--steps", "2", *options])
    records = read_run(tmp_path / script.__name__.rpartition(".")[2]).rollouts
    assert [(record.mode, record.step) for record in records] == [("train", 0), ("train", 1)]
    assert all((record.acceptance_rate or 0.0) > 0.3 for record in records)
    assert capsys.readouterr().out.splitlines()[-1].startswith("drafting in ")


# ---- GSM8K ----------------------------------------------------------------------------------------------------------


def test_gsm8k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Questions whose prompts do not fit are left out."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tiny_policy().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"question": f"a{n}+b{n}", "answer": f"so #### {2 * n}"} for n in range(1, 9)]
    rows.append({"question": "a" * 500, "answer": "#### 1"})
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = [
        "--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "questions.jsonl"), "--max_steps", "1",
        "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1", "--num_generations", "2",
        "--use_cpu", "--assistant_strategy", "self", "--speculative_config", '{"sd_toggle": "always"}',
        "--max_completion_length", "32", "--output_dir", str(tmp_path / "out"),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["grpo_gsm8k.py", *arguments])
    grpo_gsm8k.main()
    printed = capsys.readouterr().out
    assert "8 questions of up to 224 tokens, completions of up to 32 tokens" in printed  # of a context of 256
    assert re.search(r"1 logged steps, reward .* assistant_strategy='self': .* of drafts accepted", printed)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.max_position_embeddings == 256
    with pytest.raises(ValueError, match="no question .* fits into 20 tokens"):
        grpo_gsm8k.build_dataset(str(tmp_path / "questions.jsonl"), build_tokenizer(), longest_prompt=20)


def test_gsm8k_answers_and_rewards() -> None:
    for text, number in (
        ("Natalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72", "72"),
        ("#### $1,234.50 for all 3", "1234.5"),
        ("#### 5\nNo, wait.\n#### -6", "-6"),
        (r"so 3 of 4, that is \boxed{\$12}.", "12"),
        ("It takes 3 hours and 20 minutes.", "20"),
        ("#### unknown, perhaps 7", "7"),
        ("no idea", None),
    ):
        assert grpo_gsm8k.find_answer(text) == (None if number is None else Decimal(number))
    chat = [[{"role": "assistant", "content": "#### 72"}], [{"role": "assistant", "content": "#### 7"}]]
    assert grpo_gsm8k.answer_reward(chat, answer=["... #### 72"] * 2) == [1.0, 0.0]
    assert grpo_gsm8k.answer_reward(["it is 1,000", "no idea"], answer=["#### 1000"] * 2) == [1.0, 0.0]


# ---- generate.py ----------------------------------------------------------------------------------------------------


def test_generate_on_a_small_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--model", str(STORY_MODEL), "--prompts", str(DATA / "stories.json"), "--max_prompt_tokens", "24",
        "--max_new_tokens", "30", "--limit", "3", "--dtype", "float64", "--show", "2", "--compare",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
    monkeypatch.setattr(generate, "SpeculativeConfig", partial(SpeculativeConfig, sd_toggle="always"))
    generate.main()
    printed = capsys.readouterr().out
    assert printed.count("--- ") == 2 and printed.count("tokens/s") == 2
    assert re.search(r"tokens per verified block: [2-6]\.\d\d; drafts accepted: 0\.\d{3}", printed)
    assert 'rows identical to "none": 3 of 3' in printed


def test_generate_hands_its_options_to_every_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        def generate(self, **options: Any) -> dict[str, Any]:
            return options

    options = ["--assistant_model", "small", "--tts_drafter", "model", "--best_of_n_drafters", "self", "model"]
    options += ["--draft_length", "2", "--batch_size", "1", "--seed", "3", "--temperature", "2", "--top_p", "0.1"]
    monkeypatch.setattr(sys, "argv", ["generate.py", *options, "--verification", "rejection"])
    for strategy in ("none", *(name for name in strategies() if assistant_of(name) != "none")):
        given: Any = generate.sample(Model(), {}, strategy, generate.parse_arguments(), new_tokens=1)
        assert (given["assistant_strategy"], given["temperature"], given["top_p"]) == (strategy, 2.0, 0.1)
        assert given["assistant_model"] == (None if strategy == "none" else "small")
        config = given["speculative_config"]
        assert (config.draft_length, config.max_batch_size, config.seed, config.verification) == (2, 1, 3, "rejection")
        assert (config.tts.drafter == "model") == (strategy == "tts")
        assert (config.specactor.drafters == ("self", "model")) == (strategy == "best_of_n")


# ---- All scripts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("generate", ["--assistant_model", "small"], "--assistant_strategy self uses no --assistant_model small"),
        ("generate", ["--assistant_strategy", "eagle3"], "eagle3 needs a drafter; give --assistant_model."),
        ("generate", ["--prompts", "no/such.txt"], "No such file or directory: 'no/such.txt'"),
        ("generate", ["--device", "nowhere"], "--device nowhere cannot be used here"),
        ("generate", ["--model", "no/such/model"], "no/such/model"),
        ("grpo_gsm8k", ["--model", "no/such/model"], "no/such/model"),
        ("train_drafter", ["--target", "no/such/model", "--output", "no/such/folder"], "no/such/model"),
        ("generate", ["--help"], "--assistant_strategy"),
        ("grpo_gsm8k", ["--help"], "--assistant_strategy"),
    ],
)
def test_bad_input_is_one_line_and_help_is_printed(
    script: str, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *options])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "examples" / f"{script}.py"), run_name="__main__")
    if options == ["--help"]:
        assert stop.value.code == 0 and message in capsys.readouterr().out
        return
    line = str(stop.value.code)
    assert line.startswith(f"{script}.py: error: ") and message in line and "\n" not in line
