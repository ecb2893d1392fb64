"""What each rank of the two-process test runs: ``torchrun --nproc_per_node 2 -m tests.trainers.ddp_job FOLDER``."""

import json
import os
import sys
from pathlib import Path

import torch

from tests.trainers.harness import Run, make_trainer, tiny_dataset


def train_on_each_rank(folder: Path, rows_per_rank: int) -> Run:
    """Trains and evaluates with a global batch of 8 rows; any number of ranks must sample the same."""
    trainer, run = make_trainer(
        folder, max_steps=3, per_device_train_batch_size=rows_per_rank, per_device_eval_batch_size=rows_per_rank,
        gradient_accumulation_steps=2, draft_kernel="reference", eval_strategy="steps", eval_steps=2,
        draft_lengths=[2, 3, 4], draft_length_up=0.05, draft_length_down=0.01, draft_length_patience=1,
        optim="sgd", learning_rate=0.1,  # Adam turns the rounding of a vanishing gradient into a full step
        trainer={"eval_dataset": tiny_dataset(2)},
    )  # fmt: skip
    trainer.train()
    run.weights = {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}
    return run


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    run = train_on_each_rank(folder / f"rank{rank}", rows_per_rank=4)
    (folder / f"rank{rank}.json").write_text(json.dumps({"rewarded": run.rewarded, "logs": run.logs}))
    torch.save(run.weights, folder / f"rank{rank}.pt")
