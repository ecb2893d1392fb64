"""One of two ranks that train and save each step, of which one dies in its third rollout:
``python -m tests.trainers.dying_job FOLDER``."""

import os
import signal
import sys
import traceback
from pathlib import Path

import torch

from spec_trl.distributed import shared_rollouts
from spec_trl.distributed.pool import SharedPool
from spec_trl.generation.engine.rollout import Rollout
from tests.trainers.sharing_job import train_case


SAVING = {"save_strategy": "steps", "save_steps": 1, "trainer": {}}


class Dying(SharedPool):
    """Kills rank 1 in the third rollout."""

    made = 0

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        type(self).made += 1

    def after_round(self, rollout: Rollout) -> None:
        if self.made == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        super().after_round(rollout)


if __name__ == "__main__":
    torch.set_num_threads(1)
    shared_rollouts.SharedPool = Dying  # type: ignore[misc]
    try:
        train_case(Path(sys.argv[1]), 2, steps=4, ddp_timeout=6, **SAVING)
    except Exception:
        traceback.print_exc()
    os._exit(1)  # gloo's threads wait for the rank that is gone
