"""The demo: its task, and a small run of it from end to end, with what its tables and its last two sentences say."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo import drafts, run, task
from examples.demo.pretrain import POLICY, accuracy
from examples.demo.task import MAX_COMPLETION_LENGTH, build_tokenizer, draw_terms, exact_match, write_working
from examples.demo.turns import Turns
from spec_trl.generation.engine.statistics import DraftCounts
from spec_trl.trainers.run_log import LOG_FILE, read_run
from tests.conftest import STORY_MODEL


def test_the_task(tmp_path: Path) -> None:
    rng = random.Random(0)
    assert task.write_prompt([3, 8, 5, 9]) == "a3+b8+c5+d9="
    assert write_working([3, 8, 5, 9], rng) == "a3+b8=11;11+c5=16;16+d9=25"
    assert write_working([3, 8, 5, 9], rng, guess=1.0).startswith("=")
    for completion, reward in (("11+c5=16", 1), ("16", 1), ("11+c5=17", 0), ("11+c5=16;", 0), ("=160", 0), ("", 0)):
        assert exact_match([completion], answer=["16"], prompts=["a3+b8+c5="]) == [reward]
    lengths = []
    for _ in range(500):
        terms = draw_terms(rng)
        lengths.append(len(write_working(terms, rng, guess=0.5)) + 1)
        assert exact_match([write_working(terms, rng)], [str(sum(terms))]) == [1.0]
        assert exact_match([write_working(terms[:2], rng, slip=1.0)], [str(sum(terms[:2]))]) == [0.0]
    assert max(lengths) > 5 * sorted(lengths)[len(lengths) // 2]  # a long tail, which fits
    assert len(write_working([9] * task.MAX_TERMS, rng)) + 1 <= MAX_COMPLETION_LENGTH
    first, again, other = (task.build_dataset(64, seed).to_dict() for seed in (1, 1, 2))
    assert first == again != other
    sums = [sum(int(term[1:]) for term in prompt.removesuffix("=").split("+")) for prompt in first["prompt"]]
    assert list(map(str, sums)) == first["answer"]

    build_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["a3+b8+c5+d9=", "a1+b2="]
    batch = tokenizer(texts, padding=True)
    assert tokenizer.batch_decode(batch.input_ids, skip_special_tokens=True) == texts
    assert [sum(mask) for mask in batch.attention_mask] == [13, 7]  # BOS and one token per character
    assert batch.input_ids[1][0] == tokenizer.pad_token_id  # padded on the left


@pytest.mark.slow
def test_the_shipped_policy_is_small_and_solves_some() -> None:
    assert sum(file.stat().st_size for file in POLICY.iterdir()) <= 4 * 2**20
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    policy = AutoModelForCausalLM.from_pretrained(POLICY, dtype="float32")
    assert policy.num_parameters() <= 2_000_000
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()
    assert 0.25 < accuracy(policy, tokenizer, seed=5) < 0.7  # GRPO needs both outcomes


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_training_that_fails_ends_all(failing: int) -> None:
    class Fake:
        def __init__(self, number: int) -> None:
            self.number, self.steps = number, 0

        def add_callback(self, callback: Turns) -> None:
            self.callback = callback

        def train(self) -> None:
            for _ in range(10):
                self.callback.on_step_begin()
                if self.number == failing and self.steps == 2:
                    raise ValueError("no more")
                self.steps += 1

    turns, trainers = Turns(), [Fake(number) for number in range(3)]
    for trainer in trainers:
        turns.add(str(trainer.number), trainer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no more"):
        turns.train()
    assert turns.order[:7] == [*"012012", "0"] and max(trainer.steps for trainer in trainers) <= 3


def test_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    for name, value in dict(OUTPUT=output, STEPS=2, WINDOW=1, ROWS=8, MAX_COMPLETION_LENGTH=16).items():
        monkeypatch.setattr(run, name, value)
    for name, value in dict(WIDENED_BY=2, ROWS=(1, 2), CALLS=2, NEW_TOKENS=24).items():
        monkeypatch.setattr(drafts, name, value)
    output.mkdir()
    (output / LOG_FILE).write_text("no JSON\n")  # of an earlier demo, which is gone
    run.main([])
    printed = capsys.readouterr().out
    assert printed.endswith((output / "table.txt").read_text())
    result = json.loads((output / "result.json").read_text())
    assert printed.splitlines()[-3:] == ["", run.conclude(result["comparison"]), drafts.conclude(result["drafts"])]
    rows = result["comparison"]
    assert {row["method"]: row["same_steps"] for row in rows} == {run.TRL: None, "none": 2, "history": 2, "auto": 2}
    speeds = [row["over_trl"] for row in rows]
    assert speeds == sorted(speeds, reverse=True) and 1.0 in speeds
    assert {row["method"]: row["drafting"] is not None for row in rows}["history"]
    assert result["turns"] == [*run.METHODS] * 2
    log = read_run(output)
    assert log.header.strategy == "auto" and len(log.of("train")) == 2
    assert "Verdict" not in printed and "Verdict" in (output / "report/report.html").read_text()
    for file in ("training.png", "drafts.png", "report/report.html"):
        assert (output / file).stat().st_size > 100

    rows = result["drafts"]["rows"]
    assert [(row["at_a_time"], row["method"]) for row in rows] == [(n, m) for n in (1, 2) for m in drafts.METHODS]
    for row in rows:
        assert row["texts"] == 2 * row["at_a_time"]
        assert row["same"] == (None if row["method"] == "generate" else row["texts"])
        assert 0 <= row["accepted"] <= row["drafted"]
        if row["method"] == "self":  # 24 tokens in rounds of 3 drafts
            assert 1 < row["tokens_per_block"] <= 4 and row["accepted"] > 4 * row["at_a_time"]
        elif row["method"] != "auto":
            assert row["drafted"] == 0 and row["tokens_per_block"] is None


def test_the_sentence_claims_what_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step `changed` of "auto" differs."""

    def made_up(completions: list[list[list[int]]], seconds: float, rewards: list[float]) -> run.Training:
        return run.Training(completions, [9.0] + [seconds] * 2, 9.0, [{"reward": reward} for reward in rewards])

    monkeypatch.setattr(run, "STEPS", 3)
    monkeypatch.setattr(run, "WINDOW", 1)
    for changed, same in ((None, "in all steps"), (2, "in the first 2 of 3 steps"), (0, "in the first 0 of 3 steps")):
        drafted = [[[1, 2], [3, 5 if step == changed else 4]] for step in range(3)]
        trainings = {
            run.TRL: made_up([[[7] * 4]] * 3, 2.0, [0.5, 0.0, 0.75]),
            "none": made_up([[[1, 2], [3, 4]]] * 3, 1.0, [0.25, 0.0, 1.0]),
            "auto": made_up(drafted, 0.5, [0.25, 0.0, 1.0]),
        }
        rows = run.summarize(trainings)
        assert [(row["method"], row["over_trl"]) for row in rows] == [("auto", 4.0), ("none", 2.0), (run.TRL, 1.0)]
        table, sentence = run.format_table(rows), run.conclude(rows)
        assert [line.split("  ")[0] for line in table.splitlines()[1:4]] == ['"auto"', '"none"', run.TRL]
        assert "4.00 times as fast as TRL's GRPOTrainer" in sentence and same in sentence
        assert "from 0.25 to 1.00, and from 0.50 to 0.75 with TRL, whose sampler draws other texts" in sentence


def test_a_model_that_is_named_drafts_in_place_of_the_wide_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, prompts, _ = drafts.load(str(STORY_MODEL))
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts) == 3 * (1 + 4)  # as many as a whole demo takes
    assert model.generation_config.eos_token_id is None and model.dtype == torch.float32
    with pytest.raises(SystemExit):
        run.main(["--model", str(tmp_path / "nowhere")])
    assert "nowhere: there is no config.json in it; name the folder of a checkpoint" in capsys.readouterr().err


def test_the_second_sentence_claims_what_was_measured() -> None:
    """Of 10 tokens a text; first calls take 100 s and count in no figure but their own."""

    counts = {"self": DraftCounts(drafted=12, accepted=8, blocks=3, committed=10)}

    def made_up(seconds: dict[str, float], same: int = 3) -> dict[str, Any]:
        """Only the first `same` texts of "auto" are those of "none"."""
        calls = {
            method: [
                drafts.Call(took, [[same <= i if method == "auto" else 0] * 10], counts.get(method, DraftCounts()))
                for i, took in enumerate((100.0, seconds[method], seconds[method]))
            ]
            for method in drafts.METHODS
        }
        return {"model": "m", "widened": True, "rows": drafts.summarize(calls)}

    result = made_up({"generate": 4.0, "none": 2.0, "auto": 2.5, "self": 1.0})
    assert [row["over_generate"] for row in result["rows"]] == [1.0, 2.0, 1.6, 4.0]
    assert {row["first_call"] for row in result["rows"]} == {0.1}
    chosen = result["rows"][-1]
    assert (chosen["drafted"], chosen["accepted"], chosen["tokens_per_block"]) == (24, 16, pytest.approx(10 / 3))
    assert drafts.conclude(result) == (
        'On one stream drafts of "self" wrote 4.00 times as many tokens per second as generate and 2.00 times as many '
        'as "none"; with drafts all 6 texts were those of "none", token for token.'
    )
    table = drafts.format_table(result)
    assert "24        16  3.33  3 of 3" in table and "trained at this size" in table
    lost = drafts.conclude(made_up({"generate": 4.0, "none": 2.0, "auto": 2.5, "self": 3.0}, same=1))
    assert 'drafts did not pay here: "none" was the fastest and wrote 2.00 times' in lost and "4 of 6 texts" in lost
    slow = drafts.conclude(made_up({"generate": 4.0, "none": 8.0, "auto": 5.0, "self": 8.0}))
    assert 'nothing was faster than generate here: "auto" was the fastest of ours and wrote 0.80 times' in slow
