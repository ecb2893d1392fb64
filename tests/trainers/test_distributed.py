"""Two processes sample what one would: their own rows of the same global batch."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainers.ddp_job import train_on_each_rank
from tests.trainers.harness import Run


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Runs the job on two gloo ranks; `logs` are filled on both, though only the first one's are reported."""
    folder = tmp_path_factory.mktemp("ddp")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.trainers.ddp_job", str(folder)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    runs = []
    for rank in (0, 1):
        saved = json.loads((folder / f"rank{rank}.json").read_text())
        weights = torch.load(folder / f"rank{rank}.pt")
        runs.append(Run([tuple(entry) for entry in saved["rewarded"]], saved["logs"], weights))
    return runs


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_on_each_rank(tmp_path_factory.mktemp("alone"), rows_per_rank=8)


def test_ranks_sample_their_rows_of_the_same_batch(ranks: list[Run], alone: Run) -> None:
    assert len(alone.rewarded) > 3
    for one, (mode, rows), (_, other) in zip(ranks[0].rewarded, alone.rewarded, ranks[1].rewarded, strict=True):
        assert one[0] == mode
        assert one[1] != other
        assert one[1] + other == rows


def test_metrics_are_summed_over_ranks(ranks: list[Run], alone: Run) -> None:
    for name in ("block_efficiency", "acceptance_rate", "first_token_acceptance", "target_entropy"):
        values, evaluated = alone.metric(f"rollout/{name}"), alone.metric(f"eval_rollout/{name}")
        assert len(values) == 3 and evaluated
        for rank in ranks:
            # From the second step on weights differ in the last bits, and so do a few of the drafter's 4-bit codes.
            assert rank.metric(f"rollout/{name}")[0] == pytest.approx(values[0], rel=1e-6)
            assert rank.metric(f"rollout/{name}") == pytest.approx(values, rel=0.05)
            assert rank.metric(f"eval_rollout/{name}") == pytest.approx(evaluated, rel=0.05)
    tokens = sum(len(ids) for ids in alone.completions[0])
    seconds, rate = (ranks[0].metric(f"rollout/{name}")[0] for name in ("seconds", "tokens_per_second"))
    assert seconds * rate == pytest.approx(tokens)


def test_ranks_agree_on_the_draft_length(ranks: list[Run], alone: Run) -> None:
    lengths = [[math.ceil(length) for length in run.metric("rollout/draft_length")] for run in (*ranks, alone)]
    assert lengths == [[2, 3, 4]] * 3


def test_ranks_end_with_the_same_weights(ranks: list[Run], alone: Run) -> None:
    for name, weight in alone.weights.items():
        assert torch.equal(ranks[0].weights[name], ranks[1].weights[name])
        torch.testing.assert_close(ranks[0].weights[name], weight, rtol=1e-5, atol=1e-7)
