"""What each rank of the two-process test of Test-Time Speculation runs: ``torchrun ... ddp_tts_job FOLDER``."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.trainers.harness import make_trainer


def same_batch(rows_per_rank: int) -> dict[str, Any]:
    """A global batch of 8 rows; any number of ranks must sample the same."""
    return dict(
        max_steps=2, per_device_train_batch_size=rows_per_rank, gradient_accumulation_steps=2,
        optim="sgd", learning_rate=0.1,  # Adam turns the rounding of a vanishing gradient into a full step
    )  # fmt: skip


def run(folder: Path) -> dict[str, Any]:
    """Trains, saves, and goes on in another trainer."""
    given = same_batch(rows_per_rank=4) | dict(
        tts_drafter="eagle3", assistant_model=str(folder / "drafter"), tts_learning_rate=1e-3, draft_lengths=[3],
    )  # fmt: skip
    first, log = make_trainer(folder / "out", "tts", **given, save_strategy="steps", save_steps=2)
    first.train()
    rest, more = make_trainer(folder / "out", "tts", **given | {"max_steps": 3})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rest.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2"))
    states = [trainer._drafters[0].state_dict() for trainer in (first, rest)]
    return {
        "completions": log.completions + more.completions,
        "steps": [int(state["moments"][0]["step"]) for state in states],
        "updates": [run.metric("rollout/drafter_updates") for run in (log, more)],
        "tensors": states[0]["tensors"],
        "warned": [str(warning.message) for warning in caught if "Test-Time" in str(warning.message)],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    torch.save(run(folder), folder / f"rank{rank}.pt")
