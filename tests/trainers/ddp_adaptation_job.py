"""What each rank of the two-process adaptation tests runs: ``torchrun ... ddp_adaptation_job FOLDER CASE``."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_trl.generation.drafters.sequence_loss import TargetView
from spec_trl.trainers import drafter_adaptation
from spec_trl.trainers.drafter_adaptation import DrafterAdaptation
from tests.trainers.harness import make_trainer


def run(folder: Path, rank: int, case: str) -> dict[str, Any]:
    """Trains a drafter on this rank's rows; on rank 1 things may go wrong."""
    local: list[list[Tensor]] = []
    stepped: list[list[Tensor]] = []
    learn, step, loss = DrafterAdaptation._learn_from, DrafterAdaptation._step, drafter_adaptation.sequence_loss

    def remember_own(adaptation: DrafterAdaptation, seen: Any) -> Any:
        found = learn(adaptation, seen)
        local.append([gradient.clone() for gradient in found[3]])
        return found

    def remember_mean(adaptation: DrafterAdaptation, gradients: list[Tensor]) -> None:
        stepped.append([gradient.clone() for gradient in gradients])
        if rank == 1 and case == "step fails on one":
            raise RuntimeError("out of luck")
        step(adaptation, gradients)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if rank == 1 and case == "loss fails on one" and len(local) == 2:
            raise RuntimeError("out of luck")
        return loss(*args, **kwargs)

    view = drafter_adaptation.target_view

    def blind(*args: Any) -> TargetView:
        found = view(*args)
        if rank == 1 and case == "nothing on one":
            found.first.copy_(found.is_real.sum(dim=1))  # no token counts
        return found

    DrafterAdaptation._learn_from, DrafterAdaptation._step = remember_own, remember_mean  # type: ignore[method-assign]
    drafter_adaptation.sequence_loss, drafter_adaptation.target_view = fail, blind
    trainer, log = make_trainer(
        folder / f"rank{rank}", "dflash", assistant_model=str(folder / "drafter"), max_steps=3,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, drafter_learning_rate=1e-3,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    return {
        "local": local,
        "stepped": stepped,
        "drafter": trainer._drafters[0].network.state_dict(),
        "warned": [str(warning.message) for warning in caught if "adapted no further" in str(warning.message)],
        "metrics": log.metric("drafter/loss"),
        "steps": trainer.state.global_step,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.save(run(folder, rank, sys.argv[2]), folder / f"rank{rank}.pt")
