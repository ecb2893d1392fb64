"""The demo: its task, and a small run of it from end to end, with what its table and its last sentence say."""

import json
import random
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo import run, task
from examples.demo.pretrain import POLICY, accuracy
from examples.demo.task import MAX_COMPLETION_LENGTH, build_tokenizer, draw_terms, exact_match, write_working
from spec_trl.trainers.run_log import LOG_FILE, read_run


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


def test_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    for name, value in dict(OUTPUT=output, STEPS=2, WINDOW=1, ROWS=8, MAX_COMPLETION_LENGTH=16).items():
        monkeypatch.setattr(run, name, value)
    output.mkdir()
    (output / LOG_FILE).write_text("no JSON\n")  # of an earlier demo, which is gone
    run.main()
    printed = capsys.readouterr().out
    assert printed.endswith((output / "table.txt").read_text())
    rows = json.loads((output / "result.json").read_text())["comparison"]
    assert {row["method"]: row["same_steps"] for row in rows} == {run.TRL: None, "none": 2, "history": 2, "auto": 2}
    speeds = [row["over_trl"] for row in rows]
    assert speeds == sorted(speeds, reverse=True) and 1.0 in speeds
    assert {row["method"]: row["drafting"] is not None for row in rows}["history"]
    log = read_run(output)
    assert log.header.strategy == "auto" and len(log.of("train")) == 2
    for file in ("demo.png", "report/report.html"):
        assert (output / file).stat().st_size > 100


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
