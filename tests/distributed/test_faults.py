"""A rank that dies or hangs in a shared rollout ends it on all ranks, soon and with a clear error; nothing hangs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.fault_job import ENDS, ROWS, TIMEOUT
from tests.generation.calls import generate, outputs, pad_left


pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
BOUND = 120 + 4 * TIMEOUT  # seconds, of which most go by before the rollout begins


def run(folder: Path, ranks: int, who: int = -1, how: int = 0) -> list[object]:
    """What each rank left, None where it died; `who` sends itself the signal `how`."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as a launcher has it
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.fault_job", str(folder / f"{rank}.pt"), str(who), str(int(how))],
            cwd=ROOT, stderr=subprocess.DEVNULL,
            env={
                **os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            },
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        for rank, process in enumerate(processes):
            if rank != who:
                process.wait(timeout=BOUND)
    finally:
        for process in processes:
            process.kill()
    paths = [folder / f"{rank}.pt" for rank in range(ranks)]
    return [torch.load(path) if path.exists() else None for path in paths]


def test_nothing_fails(tmp_path: Path, tiny) -> None:
    found = run(tmp_path, 2)
    prompts = pad_left([torch.tensor(row) for row in ROWS])
    assert [text for rank in found for text in rank] == outputs(generate(tiny, prompts, **ENDS))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("ranks", "who"), [(2, 1), (2, 0), (3, 2)])
def test_a_rank_fails(tmp_path: Path, ranks: int, who: int, how: signal.Signals) -> None:
    found = run(tmp_path, ranks, who, how)
    for rank, left in enumerate(found):
        if rank == who:
            assert left is None
        else:
            assert isinstance(left, str) and left.startswith("RuntimeError: rank"), left
            assert "died or hang" in left and "resume from the last checkpoint" in left
