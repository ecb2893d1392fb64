"""One of two ranks that train and save each step, of which one dies in its third rollout, in the reward of that or in
the update after it: ``python -m tests.trainers.dying_job FOLDER WHEN``."""

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from spec_trl import SpecGRPOTrainer
from spec_trl.distributed import shared_rollouts
from spec_trl.distributed.pool import SharedPool
from tests.trainers.sharing_job import train_case


SAVING = {"save_strategy": "steps", "save_steps": 1, "trainer": {}}
WHEN = {
    "rollout": (SharedPool, "after_round"), "reward": (SpecGRPOTrainer, "_calculate_rewards"),
    "update": (SpecGRPOTrainer, "compute_loss"),
}  # fmt: skip


def die(when: str) -> None:
    """Has rank 1 killed then."""
    kind, name = WHEN[when]
    made, go_on = 0, getattr(kind, name)

    class Counted(SharedPool):
        def __init__(self, *given: object) -> None:
            nonlocal made
            made += 1
            super().__init__(*given)  # type: ignore[arg-type]

    def killed(*given: Any, **named: Any) -> Any:
        if made == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return go_on(*given, **named)

    shared_rollouts.SharedPool = Counted  # type: ignore[misc]
    setattr(kind, name, killed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    die(sys.argv[2])
    try:
        train_case(Path(sys.argv[1]), 2, steps=4, ddp_timeout=6, **SAVING)
    except Exception:
        traceback.print_exc()
    os._exit(1)  # gloo's threads wait for the rank that is gone
