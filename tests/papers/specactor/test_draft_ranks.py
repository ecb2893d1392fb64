"""A drafter on another rank: the same tokens with two processes, whatever becomes of the second one."""

import re
from pathlib import Path

import pytest
import torch

from spec_trl.generation.drafters.history import HistoryDrafter
from spec_trl.papers.specactor.draft_ranks import DraftRanks, serve
from tests.distributed.draft_ranks_job import TIMEOUT
from tests.distributed.ranks import launch


IS_LOST = "rank 1, which drafts, is lost"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("none", ""),
        ("killed", IS_LOST),
        ("stopped", IS_LOST),
        ("raises", "the drafter of rank 1 failed: KeyError: .the drafter's trouble"),
        ("token", "tokens out of range"),
        ("number", f"{IS_LOST}.*begins no message"),
        ("sum", f"{IS_LOST}.*is damaged"),
        ("head", f"{IS_LOST}.*begins no message"),
    ],
)
def test_trouble_costs_time_and_no_token(trouble: str, message: str, tmp_path: Path) -> None:
    """The generation goes on without drafts; where the connection is lost, so do later ones, without a wait."""
    file = tmp_path / "generations.pt"
    who = 1 if trouble in ("killed", "stopped") else -1
    launch(["tests.distributed.draft_ranks_job", str(file), trouble], 2, 180, who)
    first, *later = torch.load(file)
    assert first["same"] and all(each["same"] for each in later) and len(later) >= 5
    assert first["accepted"] > 0 and first["seconds"] < TIMEOUT + 20
    assert re.search(message, first["failure"] or "") and bool(first["failure"]) == (trouble != "none")
    if IS_LOST in message:
        assert all("is lost" in each["failure"] and each["seconds"] < 20 for each in later)
    else:
        assert all(each["failure"] is None and each["accepted"] > 0 for each in later)
        assert len(later) == 6 and torch.load(f"{file}.closed") == "closed"


def test_a_drafter_that_cannot_be_served() -> None:
    with pytest.raises(ValueError, match="drafter=HistoryDrafter cannot draft ahead"):
        serve(HistoryDrafter(100), verifier=0)


def test_more_ranks_that_draft_than_ranks_that_decode() -> None:
    with pytest.raises(ValueError, match="^specactor.draft_ranks=2 with 3 processes: .* at most 1 can"):
        DraftRanks(2, 0, 3, 60.0)
