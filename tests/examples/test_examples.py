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
import torch
from transformers import AutoModelForCausalLM

import spec_trl
from examples import generate, grpo_gsm8k, online_dpo, own_loop, rloo
from examples.demo.task import build_tokenizer
from spec_trl import SpeculativeConfig, SpeculativeOutput
from spec_trl.cli.loading import pad_left, token_ids
from spec_trl.generation.registry import taking_assistant
from spec_trl.trainers.run_log import read_run
from tests.conftest import DATA, STORY_MODEL
from tests.trainers.harness import tiny_policy


ROOT = Path(__file__).parents[2]
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
README, HOW_TO = (
    re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    for page in ("README.md", "docs/how_to.md")
)
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}={% endfor %}"


@pytest.mark.parametrize("script", README + HOW_TO, ids=["train", "generate", "qlora"])
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
        assert small != script
        assert (tmp_path / "out" / "rollout_log.jsonl").exists()
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
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("drafting in ")
    assert script is not own_loop or [line.partition(":")[0] for line in printed[:-1]] == ["step 0", "step 1"]


# ---- GSM8K ----------------------------------------------------------------------------------------------------------


def test_gsm8k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tiny_policy().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"question": f"a{n}+b{n}", "answer": f"so #### {2 * n}"} for n in range(1, 9)]
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


def test_gsm8k_prompts_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "questions.jsonl", build_tokenizer()
    path.write_text("\n".join(json.dumps({"question": "a" * n, "answer": "#### 1"}) for n in (5, 50, 500)))
    plain = grpo_gsm8k.build_dataset(str(path), tokenizer, longest_prompt=200)
    assert [prompt.count("a" * 5) for prompt in plain["prompt"]] == [1, 10]
    assert plain["prompt"][0].startswith("Question: aaaaa\n")
    tokenizer.chat_template = CHAT_TEMPLATE
    chat = grpo_gsm8k.build_dataset(str(path), tokenizer, longest_prompt=200)
    assert [messages[0]["role"] for messages in chat["prompt"]] == ["user", "user"]
    with pytest.raises(ValueError, match="no question .* fits into 20 tokens"):
        grpo_gsm8k.build_dataset(str(path), tokenizer, longest_prompt=20)


def test_gsm8k_answers_and_rewards() -> None:
    for text, number in (
        ("Natalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72", "72"),
        ("#### $1,234.50 for all 3", "1234.5"),
        ("#### 5\nNo, wait.\n#### -6", "-6"),
        (r"so 3 of 4, that is \boxed{\$12}.", "12"),
        ("It takes 3 hours and 20 minutes.", "20"),
        ("#### unknown, perhaps 7", "7"),
        ("It is 72.0.", "72"),
        ("no idea", None),
    ):
        assert grpo_gsm8k.find_answer(text) == (None if number is None else Decimal(number))
    chat = [[{"role": "assistant", "content": "#### 72"}], [{"role": "assistant", "content": "#### 7"}]]
    assert grpo_gsm8k.answer_reward(chat, answer=["... #### 72"] * 2) == [1.0, 0.0]
    assert grpo_gsm8k.answer_reward(["it is 1,000", "no idea"], answer=["#### 1000"] * 2) == [1.0, 0.0]


# ---- generate.py ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_generate_on_a_small_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--model", str(STORY_MODEL), "--prompts", str(DATA / "stories.json"), "--max_prompt_tokens", "24",
        "--max_new_tokens", "40", "--limit", "6", "--dtype", "float64", "--show", "2", "--compare",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
    monkeypatch.setattr(generate, "SpeculativeConfig", partial(SpeculativeConfig, sd_toggle="always"))
    generate.main()
    printed = capsys.readouterr().out
    assert printed.count("--- ") == 2 and printed.count("tokens/s") == 2
    assert re.search(r"tokens per verified block: [2-6]\.\d\d; drafts accepted: 0\.\d{3}", printed)
    assert 'rows identical to "none": 6 of 6' in printed


def test_generate_options_act(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whether the default toggle drafts depends on how long rounds take.
    monkeypatch.setattr(generate, "SpeculativeConfig", partial(SpeculativeConfig, sd_toggle="always"))
    policy = tiny_policy().eval()
    inputs = pad_left(token_ids(["a3+b8=", "c5="], build_tokenizer(), longest=16), policy.device)

    def sample(strategy: str, *options: str) -> SpeculativeOutput:
        monkeypatch.setattr(sys, "argv", ["generate.py", *options])
        return generate.sample(policy, inputs, strategy, generate.parse_arguments(), new_tokens=16)

    reference = generate.completions_of(sample("none"))
    for options in ([], ["--draft_length", "2"], ["--batch_size", "1"]):
        assert generate.completions_of(sample("self", *options)) == reference
    for options in (["--seed", "1"], ["--temperature", "2"], ["--top_p", "0.1"], ["--verification", "rejection"]):
        assert generate.completions_of(sample("self", *options)) != reference
    greedy = sample("self", "--temperature", "0")
    assert torch.equal(greedy.sequences, policy.generate(**inputs, do_sample=False, max_new_tokens=16))
    assert "tokens per verified block" in generate.describe(greedy)


def test_generate_hands_its_assistant_to_every_strategy_that_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        def generate(self, **options: Any) -> dict[str, Any]:
            return options

    options = ["--assistant_model", "small", "--tts_drafter", "model", "--best_of_n_drafters", "self", "model"]
    monkeypatch.setattr(sys, "argv", ["generate.py", *options])
    for strategy in ("none", *taking_assistant()):
        given: Any = generate.sample(Model(), {}, strategy, generate.parse_arguments(), new_tokens=1)
        assert given["assistant_strategy"] == strategy
        assert given["assistant_model"] == (None if strategy == "none" else "small")
        config = given["speculative_config"]
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
