"""What each rank of the tests of shared rollouts runs: ``torchrun -m tests.trainers.sharing_job FOLDER``.

The global batch is the same for any number of ranks.
"""

import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.trainers.harness import OTHERS, Run, hybrid_policy, tiny_dataset, train
from tests.trainers.tool_task import add, conversations, make_chat_tokenizer


BATCH = 16  # rows of a rollout, all ranks together
CASES: dict[str, dict[str, Any]] = {
    "own": {"rollout_sharing": "own"},
    "pool": {},
    "two rows in flight": {"max_batch_size": 2},
    "decoupled": {"specactor": {"decoupled_execution": "always"}, "max_batch_size": 4},
    "one drafts": {"specactor": {"draft_ranks": 1}, "max_batch_size": 4, "sd_toggle": "always"},
    "history": {"strategy": "history", "max_batch_size": 1},
    "padding seen": {"strategy": "ngram", "generation_kwargs": {"repetition_penalty": 1.3}},
    "padding seen, own": {
        "strategy": "ngram", "generation_kwargs": {"repetition_penalty": 1.3}, "rollout_sharing": "own",
    },
}  # fmt: skip
"""Options by case; each but those with the penalty samples the same completions."""
TOOLS: dict[str, dict[str, Any]] = {
    "tools": {}, "tools, own": {"rollout_sharing": "own"}, "tools, one drafts": {"specactor": {"draft_ranks": 1}},
}  # fmt: skip


def train_case(
    folder: Path, ranks: int, strategy: str = "self", steps: int = 3, resume: Path | None = None, **options: Any
) -> Run:
    """Trains and evaluates with the global batch; the policy follows plain gradient descent, since Adam turns the
    rounding of a vanishing gradient into a full step."""
    given = dict(
        max_steps=steps, per_device_train_batch_size=BATCH // 2 // ranks, gradient_accumulation_steps=2, optim="sgd",
        learning_rate=0.1, draft_kernel="reference", draft_length=[3],
    ) | options  # fmt: skip
    if ranks == 1 and "draft_ranks" in given.get("specactor", {}):
        del given["specactor"]
    if "trainer" not in given:
        given |= {
            "per_device_eval_batch_size": 8 // ranks, "eval_strategy": "steps", "eval_steps": 2,
            "trainer": {"eval_dataset": tiny_dataset(2)},
        }  # fmt: skip
    return train(folder, strategy, resume, **given)


def train_with_tools(folder: Path, ranks: int, **options: Any) -> Run:
    """The same in conversations whose loops have different numbers of turns on different ranks."""
    trainer = {"tools": [add], "train_dataset": conversations(*["a3+b8", "c5", "k", "z9"] * 8)}
    return train_case(
        folder, ranks, tokenizer=make_chat_tokenizer(), max_completion_length=48, max_tool_calling_iterations=3,
        trainer=trainer, **options,
    )  # fmt: skip


STATES: dict[str, dict[str, Any]] = {
    "states": {"max_batch_size": 4},
    "states, none": {"strategy": "none"},
    "states, own": {"rollout_sharing": "own"},
}
"""Of a policy whose layers keep states: all sample the same."""


def train_others(folder: Path, ranks: int) -> dict[str, Run]:
    """Each other trainer, and distillation with tools, whose evaluation has no groups that fill the ranks."""
    done = {
        name: train_case(folder / name, ranks, **options, **({"trainer": {}} if name == "distillation" else {}))
        for name, options in OTHERS.items()
    }
    return done | {"distillation, tools": train_with_tools(folder / "tools", ranks, **OTHERS["distillation"])}


def kept(run: Run) -> dict[str, Any]:
    """What the tests look at."""
    return {
        "rewarded": run.rewarded, "losses": run.losses, "logs": run.logs, "weights": run.weights,
        "ids": [call.request_ids for call in run.calls],
    }  # fmt: skip


def all_cases(folder: Path, ranks: int) -> dict[str, dict[str, Any]]:
    """What each case left."""
    done = {name: kept(train_case(folder / name, ranks, **options)) for name, options in CASES.items()}
    done |= {name: kept(train_with_tools(folder / name, ranks, **options)) for name, options in TOOLS.items()}
    done |= {
        name: kept(train_case(folder / name, ranks, policy=hybrid_policy(), **options))
        for name, options in STATES.items()
    }
    done |= {name: kept(run) for name, run in train_others(folder, ranks).items()}
    twenty = train_case(folder / "twenty", ranks, steps=20, trainer={}, max_batch_size=4)
    return done | {"twenty steps": kept(twenty)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # see tests/conftest.py
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.save(all_cases(folder / f"rank{rank}", int(os.environ["WORLD_SIZE"])), folder / f"rank{rank}.pt")
