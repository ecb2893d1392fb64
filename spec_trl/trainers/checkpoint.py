"""Writes and reads the state of the rollouts in a checkpoint. A file is written whole or not at all, even if the run
dies."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..generation.drafters.history import HistoryDrafter, damage_of
from ..generation.planner.acceptance import Drafts
from ..generation.planner.clock import Clock
from ..generation.registry import drafter_names
from ..json_files import read_json, replacing, write_json


STATE_FILE = "rollout_state.json"
_LEDGER_FILE = "rollout_acceptance_{}.json"
_MEMORY_FILE = "rollout_{}_{}.pt"  # of a drafter by its strategy


def find_checkpoint(wanted: str | bool | None, output_dir: str) -> str | bool | None:
    """Returns `resume_from_checkpoint` for transformers. True names the newest complete folder, with a warning about
    incomplete ones; transformers would take the newest one.

    Raises:
        ValueError: `wanted` names an incomplete checkpoint, or no checkpoint is complete.
    """
    if not wanted:
        return wanted
    siblings = Path(output_dir) if wanted is True else Path(wanted).parent
    steps = {folder: folder.name.rpartition("-")[2] for folder in siblings.glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
    folders = sorted((path for path, step in steps.items() if step.isdecimal()), key=lambda path: int(steps[path]))
    asked = Path(wanted) if wanted is not True else folders[-1] if folders else siblings / "none"
    if not asked.is_dir():
        return wanted  # transformers says what is wrong with a path
    if _is_whole(asked):
        return str(asked)
    whole = [folder for folder in folders if _is_whole(folder)]
    reason = f"{asked} has no readable {TRAINER_STATE_NAME}, which is written last: a run died while it saved it"
    if wanted is not True or not whole:
        remedy = f"Resume from {whole[-1]}, the newest one that is whole" if whole else "Train from the start"
        raise ValueError(f"{reason}. {remedy}.")
    warnings.warn(f"{reason}. The run goes on from {whole[-1]}, the newest one that is whole.", stacklevel=3)
    return str(whole[-1])


def _is_whole(folder: Path) -> bool:
    try:
        return isinstance(json.loads((folder / TRAINER_STATE_NAME).read_bytes()), dict)
    except (OSError, ValueError):
        return False


@contextmanager
def only_for_speed(path: Path) -> Iterator[None]:
    """Turns any error while `path` is read into a warning, because the file only makes rollouts faster."""
    try:
        yield
    except Exception as error:
        said = " ".join(str(error).split())
        warnings.warn(
            f"{path} is damaged ({type(error).__name__}: {said:.200}); the run goes on without it, and drafters begin "
            "anew. Completions are not affected.",
            stacklevel=3,
        )


@dataclass(frozen=True)
class DraftLengthState:
    """State of one drafter's :class:`~.DraftLengthController`."""

    draft_length: int
    block_efficiency: float
    window: list[float]


@dataclass(frozen=True)
class RolloutState:
    """State that is the same on all ranks.

    Args:
        rollouts: number of rollouts so far, by mode, "train" or "eval".
        draft_lengths: controller state by strategy; the oldest checkpoints lack it.
    """

    rollouts: dict[str, int]
    draft_lengths: dict[str, DraftLengthState] = field(default_factory=dict)

    def save(self, folder: str | Path) -> None:
        write_json(Path(folder) / STATE_FILE, self)

    @classmethod
    def load(cls, folder: str | Path) -> "RolloutState | None":
        """Reads `folder`; None, with a warning, if another trainer saved the checkpoint or the file is lost.

        Raises:
            ValueError: the file is damaged.
        """
        path = Path(folder) / STATE_FILE
        if path.exists():
            return read_json(path, cls, "state of rollouts", "resume from another checkpoint")
        warnings.warn(
            f"{path} does not exist: another trainer or save_only_model=True wrote this checkpoint, or the file is "
            "lost. Rollouts are counted from 0 again, so completions differ from those of an uninterrupted run.",
            stacklevel=2,
        )
        return None


@dataclass(frozen=True)
class RankState:
    """State of one rank.

    Args:
        memories: by strategy: texts of the history drafter, learned weights of a `"tts"` drafter.
        ledger: the planner's measurements of rounds and drafts; None: another control decides. Older checkpoints hold
            only acceptance.
    """

    memories: dict[str, dict[str, Any]]
    ledger: dict[str, Any] | None

    def save(self, folder: str | Path, rank: int) -> None:
        if self.ledger is not None:
            write_json(Path(folder) / _LEDGER_FILE.format(rank), self.ledger)
        for strategy, memory in self.memories.items():
            with replacing(Path(folder) / _MEMORY_FILE.format(strategy, rank)) as file:
                torch.save(memory, file)

    @classmethod
    def load(cls, folder: str | Path, rank: int) -> "RankState":
        """Reads this rank's files in `folder`, if any; warns once per damaged file."""
        memories: dict[str, dict[str, Any]] = {}
        for strategy in drafter_names():
            path = Path(folder) / _MEMORY_FILE.format(strategy, rank)
            with only_for_speed(path):
                if path.exists():
                    memory = torch.load(path, map_location="cpu", weights_only=True)
                    if strategy == HistoryDrafter.strategy and (damage := damage_of(memory)):
                        raise ValueError(damage)
                    if not isinstance(memory, dict):
                        raise TypeError(f"it holds a {type(memory).__name__}")
                    memories[strategy] = memory
        path, ledger = Path(folder) / _LEDGER_FILE.format(rank), None
        with only_for_speed(path):
            if path.exists():
                saved = json.loads(path.read_text())
                Drafts([*saved["methods"]], [False] * len(saved["methods"])).load_state_dict(saved)
                if "times" in saved:  # older releases did not write it
                    Clock(lambda *_: 0.0).load_state_dict(saved["times"])
                ledger = saved
        return cls(memories, ledger)
