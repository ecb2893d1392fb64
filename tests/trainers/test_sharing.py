"""Two and four ranks sample what one does, each way to share a rollout, and train alike."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainers.harness import OTHERS
from tests.trainers.sharing_job import CASES, STATES, TOOLS, all_cases


pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
Found = dict[str, dict[str, Any]]
TRAINERS = [*OTHERS, "distillation, tools"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return all_cases(tmp_path_factory.mktemp("alone"), ranks=1)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each of some gloo ranks left."""
    folder = tmp_path_factory.mktemp("ranks")
    launch = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(request.param)]
    done = subprocess.run(
        [sys.executable, "-m", *launch, "-m", "tests.trainers.sharing_job", str(folder)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(request.param)]


def together(ranks: list[Found], name: str) -> list[tuple[str, list[list[int]]]]:
    """The completions of all ranks, rollout by rollout."""
    rollouts = zip(*(rank[name]["rewarded"] for rank in ranks), strict=True)
    return [(each[0][0], [row for _, rows in each for row in rows]) for each in rollouts]


@pytest.mark.parametrize("name", [*CASES, *TOOLS, *STATES, *TRAINERS, "twenty steps"])
def test_ranks_sample_what_one_does(ranks: list[Found], alone: Found, name: str) -> None:
    assert together(ranks, name) == alone[name]["rewarded"]
    assert len(alone[name]["rewarded"]) >= 3


@pytest.mark.parametrize("name", ["pool", "tools", "states", *TRAINERS, "twenty steps"])
def test_ranks_train_alike(ranks: list[Found], alone: Found, name: str) -> None:
    """Losses and weights differ by the rounding of the gradients' mean alone."""
    rounding = 5e-8 if name in ("rloo", "gmpo") else 1e-9  # those losses are sums in float32 that cancel
    assert ranks[0][name]["losses"] == pytest.approx(alone[name]["losses"], rel=1e-5, abs=rounding)
    for weight, reference in alone[name]["weights"].items():
        assert torch.equal(ranks[0][name]["weights"][weight], ranks[-1][name]["weights"][weight])
        atol = 2e-6 if name == "states" else 1e-7  # scans compute in float32
        torch.testing.assert_close(ranks[0][name]["weights"][weight], reference, rtol=1e-5, atol=atol)


def test_both_ways_of_sharing_sample_the_same(ranks: list[Found]) -> None:
    assert together(ranks, "pool") == together(ranks, "own")
    assert together(ranks, "states") == together(ranks, "states, own") == together(ranks, "states, none")
    assert together(ranks, "padding seen") == together(ranks, "padding seen, own") != together(ranks, "pool")


@pytest.mark.parametrize("name", ["own", "pool", "tools", "one drafts", "twenty steps"])
def test_log_probabilities_come_home_with_their_tokens(ranks: list[Found], alone: Found, name: str) -> None:
    """Each rank logs that they did, as one alone does."""
    for run in (*(rank[name] for rank in ranks), alone[name]):
        logged = [entry for entry in run["logs"] if "loss" in entry]
        apart = [entry["sampling/sampling_logp_difference/max"] for entry in logged]
        assert len(apart) >= 3 and max(apart) < 2e-5


@pytest.mark.parametrize("name", ["one drafts", "tools, one drafts"])
def test_the_last_rank_only_drafts(ranks: list[Found], name: str) -> None:
    assert ranks[-1][name]["ids"] == [] != ranks[0][name]["ids"]
    logged = [entry["rollout/acceptance_rate"] for entry in ranks[0][name]["logs"] if "rollout/seconds" in entry]
    assert len(logged) == 3 and min(logged) > 0.3  # with other noise: 0.05


def test_ranks_log_how_long_they_had_nothing_to_do(ranks: list[Found]) -> None:
    for name in ("own", "pool"):
        shares = [entry["rollout/idle_share"] for entry in ranks[0][name]["logs"] if "rollout/idle_share" in entry]
        assert len(shares) == 3 and all(0 <= share < 1 for share in shares)
    assert all("rollout/moved_rows" in entry for entry in ranks[0]["pool"]["logs"] if "rollout/idle_share" in entry)
