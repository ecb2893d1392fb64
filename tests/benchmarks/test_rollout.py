"""The rollout benchmark: what it counts, whom it compares. No test looks at a time."""

import copy
import json
import math
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks import rollout
from benchmarks.measure import peak_memory
from benchmarks.models import build, shape_config
from benchmarks.rollout import CONTINUOUS, GENERATE, PLAIN, Method, Run, compare, summarise
from benchmarks.workload import Workload
from spec_trl import SpeculativeConfig


ROWS, NEW = 3, 10
CONFIG = SpeculativeConfig(draft_length=4)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(shape_config("tiny"), 0.04, 0, torch.float64, "cpu")


@pytest.fixture(scope="module")
def works() -> list[Workload]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(512, (4 + i % 3,), generator=generator).tolist() for i in range(2 * ROWS)]
    return [Workload(prompts[i * ROWS : (i + 1) * ROWS], NEW, 1.0, (), 0) for i in range(2)]


def test_every_method_generates_what_it_was_asked_for(model: PreTrainedModel, works: list[Workload]) -> None:
    methods: dict[str, Method] = {
        GENERATE: rollout.transformers_generate(model),
        CONTINUOUS: rollout.transformers_continuous(model),
        PLAIN: rollout.ours(model, "none", None, CONFIG),
        "ours self": rollout.ours(model, "self", None, CONFIG),
        "ours ngram": rollout.ours(model, "ngram", None, CONFIG),
    }
    calls: list[None] = []
    summaries = {s.method: s for s in compare(methods, works, model.device, 0, lambda: calls.append(None))}
    assert len(calls) == len(methods) * (len(works) + 1)
    for summary in summaries.values():
        assert summary.tokens == ROWS * NEW
        assert summary.rows == 2 * ROWS
        assert len(summary.tokens_per_second_by_pass) == 2
        assert summary.method not in summary.ratio_to
    assert summaries[GENERATE].target_forwards_per_token == pytest.approx(1 / ROWS)
    for name in ("ours self", "ours ngram"):
        assert summaries[name].identical_rows == 2 * ROWS
        assert summaries[name].identical_tokens == summaries[name].compared_tokens == 2 * ROWS * NEW
    speculative = summaries["ours self"]
    assert speculative.block_efficiency > 1
    assert speculative.target_forwards_per_token < summaries[PLAIN].target_forwards_per_token
    assert {"draft", "verify"} <= set(speculative.phase_seconds)
    assert set(speculative.ratio_to) == {GENERATE, CONTINUOUS, PLAIN}


def test_continuous_batching_returns_rows_in_prompt_order(model: PreTrainedModel, works: list[Workload]) -> None:
    greedy = Workload(works[0].prompts, NEW, 1e-4, (), 0)  # so cold that sampling is greedy
    continuous = rollout.transformers_continuous(model)(greedy, 0).completions
    assert continuous == rollout.transformers_generate(model)(greedy, 0).completions
    assert len({tuple(row) for row in continuous}) == ROWS


def test_assisted_generation_serves_row_by_row(model: PreTrainedModel, works: list[Workload]) -> None:
    run = rollout.transformers_assisted(model, copy.deepcopy(model), 4)(works[0], 0)
    assert run.tokens == ROWS * NEW
    assert run.target_forwards < ROWS * NEW  # its own assistant: drafts are accepted
    assert run.block_efficiency == run.tokens / run.target_forwards


def test_the_seed_decides_the_text(model: PreTrainedModel, works: list[Workload]) -> None:
    for method in (rollout.transformers_generate(model), rollout.ours(model, "none", None, CONFIG)):
        assert method(works[0], 1).completions == method(works[0], 1).completions
        assert method(works[0], 1).completions != method(works[0], 2).completions


def test_ratios_are_paired_and_identity_counts_up_to_the_first_difference() -> None:
    def run(rows: list[list[int]], seconds: float) -> Run:
        return Run(rows, target_forwards=2, seconds=seconds)

    runs = {
        PLAIN: [run([[1, 2, 3, 4]], 4.0), run([[1, 2]], 1.0), run([[7, 8]], 1.0)],
        "ours self": [run([[1, 2, 9, 4]], 1.0), run([[1, 2]], 1.0), run([[7, 8]], 2.0)],
    }
    summary = summarise("ours self", runs, 0.0)
    assert summary.ratio_to == {PLAIN: 1.0}  # of 4, 1 and 0.5
    assert (summary.identical_rows, summary.rows) == (2, 3)
    assert (summary.identical_tokens, summary.compared_tokens) == (6, 8)
    assert math.isnan(summary.block_efficiency)
    assert summarise(PLAIN, runs, 0.0).identical_rows is None


def test_peak_memory_sees_a_large_allocation() -> None:
    with peak_memory(torch.device("cpu")) as peak:
        block = torch.ones(64 << 20, dtype=torch.uint8)
        time.sleep(0.2)  # the resident set is sampled
        del block  # freed before the block ends
    assert 60e6 < peak.value < 200e6


def test_the_command_writes_json_and_markdown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = tmp_path / "rollout.json"
    arguments = ["--model", "shape:tiny", "--batch", "1", "2", "--repeats", "1", "--max-new-tokens", "6"]
    arguments += ["--baselines", "generate", "--strategies", "none", "self", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["rollout", *arguments])
    rollout.main()
    result = json.loads(output.read_text())
    assert list(result["batches"]) == ["1", "2"]
    assert result["target"]["agreement"]["overlap_packed_head"] > 0.8
    assert str(tmp_path) not in output.read_text()
    text = output.with_suffix(".md").read_text()
    assert "## Batch 2" in text and "ours self" in text and "overlap with the 4-bit copy" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "model"], "strategy model needs --assistant"),
        (["--strategies", "ngram", "--verification", "rejection"], "ngram has no draft probabilities"),
    ],
)
def test_contradicting_options_are_named(arguments, message, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["rollout", *arguments])
    with pytest.raises(SystemExit):
        rollout.main()
    assert message in capsys.readouterr().err
