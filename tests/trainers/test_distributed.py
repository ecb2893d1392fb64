"""Two processes sample what one would, their own rows of the same global batch; and what their drafters learn."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_trl.json_files import read_json
from spec_trl.papers.specactor.ladder import Ladder
from spec_trl.trainers.certificate import CERTIFICATE_FILE, Content
from tests.generation.drafters.watching import make_checkpoint
from tests.trainers.ddp_job import look, same_batch, train_on_each_rank
from tests.trainers.harness import Run, train


pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
VOCABULARY = 48  # of the tiny policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ddp")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """What each of two gloo ranks left of all that the job trains."""
    for kind in ("eagle3", "dflash"):
        make_checkpoint(folder / kind, kind, VOCABULARY)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.trainers.ddp_job", str(folder)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.fixture(scope="module")
def ranks(found: list[dict[str, Any]]) -> list[Run]:
    """Trained plainly; `logs` are filled on both, though only the first one's are reported."""
    return [Run(**rank["plainly"]) for rank in found]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_on_each_rank(tmp_path_factory.mktemp("alone"), rows_per_rank=8)


def test_ranks_sample_their_rows_of_the_same_batch(ranks: list[Run], alone: Run) -> None:
    assert len(alone.rewarded) > 3
    for one, (mode, rows), (_, other) in zip(ranks[0].rewarded, alone.rewarded, ranks[1].rewarded, strict=True):
        assert one[0] == mode
        assert one[1] != other
        assert one[1] + other == rows


def test_ranks_read_the_images_of_their_rows(found: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = look(tmp_path, rows_per_rank=8)
    one, other = (rank["images"] for rank in found)
    assert alone == [mine + theirs for mine, theirs in zip(one, other, strict=True)] and len(alone) == 2


def test_losses_have_the_bits_of_samplers(found: list[dict[str, Any]]) -> None:
    distances, accepted, equal = found[0]["exact"].values()
    assert distances == [[0.0] * 50] * 2 and min(accepted) > 0.2 and all(equal)


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


def test_one_certificate_of_all_ranks(folder: Path, ranks: list[Run], alone: Run) -> None:
    ours, theirs = (
        read_json(place / CERTIFICATE_FILE, Content, "certificate", "") for place in (folder / "rank0", alone.folder)
    )
    assert not (folder / "rank1" / CERTIFICATE_FILE).exists()
    assert (ours.compared, ours.steps[0].drafted) == (theirs.compared, theirs.steps[0].drafted) and ours.accepted
    largest = ranks[1].metric("sampling/sampling_logp_difference/max")  # of two micro-batches: TRL logs their mean
    assert len(ours.steps) == len(largest) == 3
    for step, mean in zip(ours.steps, largest, strict=True):
        assert step.distance is not None and mean <= step.distance <= 2 * mean


def test_ranks_agree_on_the_draft_length(ranks: list[Run], alone: Run) -> None:
    lengths = [[math.ceil(length) for length in run.metric("rollout/draft_length")] for run in (*ranks, alone)]
    assert lengths == [[2, 3, 4]] * 3


def test_ranks_end_with_the_same_weights(ranks: list[Run], alone: Run) -> None:
    for name, weight in alone.weights.items():
        assert torch.equal(ranks[0].weights[name], ranks[1].weights[name])
        torch.testing.assert_close(ranks[0].weights[name], weight, rtol=1e-5, atol=1e-7)


def test_ranks_share_the_ladder_and_learn_apart(folder: Path, found: list[dict[str, Any]], tmp_path: Path) -> None:
    """Each chooses by how drafters fared on its own rows, and saves that."""
    ranks = [rank["auto"] for rank in found]
    alone = train(tmp_path, "none", **same_batch(rows_per_rank=8))
    pairs = zip(*(rank["completions"] for rank in ranks), strict=True)
    assert [one + other for one, other in pairs] == alone.completions
    assert [rank["profiled"] for rank in ranks] == [1, 0]
    assert Ladder.load(folder / "auto" / "roofline_profile.ladder.json").methods == ("self", "history")
    assert ranks[0]["drafted_by"] == ranks[1]["drafted_by"] and len(ranks[0]["drafted_by"][0]) == 2
    for rank, result in enumerate(ranks):
        saved = json.loads((folder / "auto" / "checkpoint-2" / f"rollout_acceptance_{rank}.json").read_text())
        assert saved == result["ledger"] and saved["times"]["rounds"] > 0
    assert ranks[0]["ledger"] != ranks[1]["ledger"]


# ---- drafters that learn --------------------------------------------------------------------------------------------


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_drafters_that_learn_while_drafting_learn_apart(
    folder: Path, found: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Ranks sample the same batch all the same, and each saves its own state."""
    ranks = [rank["tts"] for rank in found]
    alone = train(tmp_path, "none", **same_batch(rows_per_rank=8) | {"max_steps": 3})
    pairs = zip(*(rank["completions"] for rank in ranks), strict=True)
    assert [one + other for one, other in pairs] == alone.completions
    assert not equal(ranks[0]["tensors"], ranks[1]["tensors"])
    assert [rank["warned"] for rank in ranks] == [[], []]
    for rank, result in enumerate(ranks):
        saved = torch.load(folder / "tts" / "checkpoint-2" / f"rollout_tts_{rank}.pt", weights_only=True)
        assert equal(saved["tensors"], result["tensors"])
        assert saved["moments"][0]["step"] == result["steps"][0] < result["steps"][1]
    # What is logged counts the updates of both.
    totals = [sum(rank["steps"][i] for rank in ranks) for i in (0, 1)]
    assert [sum(counts) for counts in ranks[0]["updates"]] == [totals[0], totals[1] - totals[0]]


def test_adapted_drafters_agree(found: list[dict[str, Any]]) -> None:
    """Each learns from its own rows; the step is that of the mean gradient."""
    one, other = (rank["plain"] for rank in found)
    assert len(one["local"]) == len(one["stepped"]) == 6  # three steps of two micro-batches
    for mine, theirs, step, same in zip(one["local"], other["local"], one["stepped"], other["stepped"], strict=True):
        assert any(not torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        for a, b, mean, again in zip(mine, theirs, step, same, strict=True):
            assert torch.equal(mean, again)
            torch.testing.assert_close(mean, (a + b) / 2)
    assert equal(one["drafter"], other["drafter"])
    assert one["warned"] == other["warned"] == []
    assert one["metrics"] == other["metrics"] and len(one["metrics"]) == 3


@pytest.mark.parametrize("case", ["loss fails on one", "step fails on one"])
def test_adaptation_stops_everywhere_when_one_fails(case: str, found: list[dict[str, Any]]) -> None:
    one, other = (rank[case] for rank in found)
    assert one["steps"] == other["steps"] == 3  # the training goes on
    assert len(one["warned"]) == len(other["warned"]) == 1
    assert "it failed on another rank" in one["warned"][0] and "out of luck" in other["warned"][0]


def test_a_rank_with_nothing_to_learn_from_takes_part(found: list[dict[str, Any]]) -> None:
    one, other = (rank["nothing on one"] for rank in found)
    assert equal(one["drafter"], other["drafter"])
    assert one["warned"] == other["warned"] == []
    for mine, theirs, step in zip(one["local"], other["local"], one["stepped"], strict=True):
        assert not any(gradient.any() for gradient in theirs)
        for a, alone in zip(mine, step, strict=True):
            assert torch.equal(a, alone)


@pytest.mark.parametrize("name", ["rloo", "gkd"])
def test_other_trainers_draft_on_each_rank(name: str, found: list[dict[str, Any]]) -> None:
    """Each its own rows, as without drafts; the first writes the log."""
    (first, losses, efficiency), (second, _, log) = (rank[f"{name} self"] for rank in found)
    assert first != second and log is None
    assert efficiency and min(efficiency) > 2
    for rank in found:
        assert rank[f"{name} self"][:2] == rank[f"{name} none"][:2]
