"""A drafter on a rank of its own: the same tokens with two processes, whatever becomes of the second one."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spec_trl.distributed.decoupled import serve
from spec_trl.generation.drafters.history import HistoryDrafter
from tests.distributed.decoupled_job import TIMEOUT


ROOT = Path(__file__).parents[2]


def run(trouble: str) -> tuple[list[dict[str, Any]], str]:
    """The generations of rank 0, and what rank 1 printed at its end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.decoupled_job", str(rank), port, trouble],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        printed, errors = ranks[0].communicate(timeout=120)
        assert ranks[0].returncode == 0, errors[-3000:]
        if trouble == "stopped":
            ranks[1].send_signal(signal.SIGKILL)
        ended, _ = ranks[1].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
    return json.loads(printed.splitlines()[-1])["generations"], ended


@pytest.mark.slow
def test_two_ranks() -> None:
    generations, ended = run("none")
    assert len(generations) == 7
    for each in generations:
        assert each["same"] and each["failure"] is None and each["accepted"] > 0, each
    assert ended.splitlines()[-1] == "closed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "message", "is_lost"),
    [
        ("killed", "rank 1, which drafts, is lost", True),
        ("stopped", "rank 1, which drafts, is lost", True),
        ("raises", "the drafter of rank 1 failed: KeyError: .the drafter's own trouble", False),
        ("token", "tokens out of range|lengths or tokens", False),
        ("number", "begins no message", True),
        ("sum", "is damaged", True),
        ("head", "begins no message", True),
    ],
)
def test_trouble_costs_time_and_no_token(trouble: str, message: str, is_lost: bool) -> None:
    """The generation goes on without drafts; where the connection is lost, so do later ones, without a wait."""
    generations, _ = run(trouble)
    assert all(each["same"] for each in generations), generations
    first, *later = generations
    assert first["accepted"] > 0
    assert_matches(message, first["failure"])
    assert first["seconds"] < TIMEOUT + 20
    if is_lost:
        assert all("is lost" in each["failure"] and each["seconds"] < 20 for each in later)
    else:
        assert all(each["failure"] is None and each["accepted"] > 0 for each in later)


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)


def test_a_drafter_that_cannot_be_served() -> None:
    with pytest.raises(ValueError, match="drafter=HistoryDrafter cannot draft ahead"):
        serve(HistoryDrafter(100), verifier=0)
