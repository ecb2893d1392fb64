"""A rank that dies or hangs in a shared rollout ends it on all ranks, soon and with a clear error; nothing hangs."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.distributed.fault_job import ENDS, ROWS, TIMEOUT
from tests.distributed.ranks import launch
from tests.generation.calls import generate, outputs, pad_left
from tests.trainers.sharing_job import train_case


pytestmark = pytest.mark.slow
BOUND = 120 + 4 * TIMEOUT  # seconds, of which most go by before the rollout begins


def run(folder: Path, ranks: int, way: str, who: int = -1, how: int = 0) -> list[Any]:
    """What each rank left, None where it died; `who` sends itself the signal `how`."""
    launch(["tests.distributed.fault_job", str(folder / "{rank}.pt"), way, str(who), str(int(how))], ranks, BOUND, who)
    paths = [folder / f"{rank}.pt" for rank in range(ranks)]
    return [torch.load(path) if path.exists() else None for path in paths]


@pytest.mark.parametrize(("way", "ranks"), [("move", 2), ("move", 4), ("race", 2), ("race", 4), ("draft", 2)])
def test_ranks_help_each_other(tmp_path: Path, tiny: LlamaForCausalLM, ranks: int, way: str) -> None:
    """Rows move over gloo, or ranks race for them, or one drafts; the tokens are those of one rank."""
    found = run(tmp_path, ranks, way)
    prompts = pad_left([torch.tensor(row) for row in ROWS])
    assert [text for rank in found for text in rank["texts"]] == outputs(generate(tiny, prompts, **ENDS))
    assert sum(rank["helped"] for rank in found) > 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("way", "ranks", "who"), [("move", 2, 1), ("race", 2, 0), ("move", 4, 2), ("draft", 2, 0)])
def test_a_rank_fails(tmp_path: Path, way: str, ranks: int, who: int, how: signal.Signals) -> None:
    found = run(tmp_path, ranks, way, who, how)
    for rank, left in enumerate(found):
        if rank == who:
            assert left is None
        else:
            assert isinstance(left, str) and left.startswith("RuntimeError: rank"), left
            assert "died or hangs" in left and "resume from the last checkpoint" in left


@pytest.mark.parametrize("when", ["rollout", "reward", "update"])
def test_a_run_that_dies_goes_on_from_its_checkpoint(tmp_path: Path, when: str) -> None:
    """On one rank here, with the same global batch."""
    (errors,) = launch(["tests.trainers.dying_job", str(tmp_path / "died"), when], 2, BOUND, who=1)
    assert "died or hangs" in errors and "resume from the last checkpoint" in errors
    if when != "rollout":
        return
    options = {"steps": 4, "trainer": {}}
    whole = train_case(tmp_path / "whole", 1, **options)
    rest = train_case(tmp_path / "rest", 1, resume=tmp_path / "died" / "checkpoint-2", **options)
    assert rest.completions == whole.completions[2:]
