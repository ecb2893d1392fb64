"""What a checkpoint keeps of the rollouts. Each file is written whole or not at all, also where a run dies."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..generation.drafters.history import HistoryDrafter
from ..generation.drafters.tts.drafter import DistilledDrafter
from ..json_files import read_json, replacing, write_json


STATE_FILE = "rollout_state.json"
_LEDGER_FILE = "rollout_acceptance_{}.json"
_MEMORY_FILES = {HistoryDrafter.strategy: "rollout_history_{}.pt", DistilledDrafter.strategy: "rollout_tts_{}.pt"}
_REMEDY = "resume from another checkpoint"


@dataclass(frozen=True)
class DraftLengthState:
    """State of one drafter's :class:`~spec_trl.scheduling.draft_length.DraftLengthController`."""

    draft_length: int
    block_efficiency: float
    window: list[float]


@dataclass(frozen=True)
class RolloutState:
    """What is the same on all ranks.

    Args:
        rollouts: number of rollouts so far, by mode, "train" or "eval".
        draft_lengths: of each drafter by its strategy; the oldest checkpoints have none.
    """

    rollouts: dict[str, int]
    draft_lengths: dict[str, DraftLengthState] = field(default_factory=dict)

    def save(self, folder: str | Path) -> None:
        write_json(Path(folder) / STATE_FILE, self)

    @classmethod
    def load(cls, folder: str | Path) -> "RolloutState | None":
        """What `folder` holds; None: it was saved by another trainer.

        Raises:
            ValueError: the file is damaged.
        """
        path = Path(folder) / STATE_FILE
        return read_json(path, cls, "state of rollouts", _REMEDY) if path.exists() else None


@dataclass(frozen=True)
class RankState:
    """What each rank keeps for itself.

    Args:
        memories: by strategy, what the history remembers and what a drafter of `"tts"` has learned.
        ledger: what the planner knows of rounds and drafts; None: another control decides. Older checkpoints have
            acceptance alone.
    """

    memories: dict[str, dict[str, Any]]
    ledger: dict[str, Any] | None

    def save(self, folder: str | Path, rank: int) -> None:
        if self.ledger is not None:
            write_json(Path(folder) / _LEDGER_FILE.format(rank), self.ledger)
        for strategy, memory in self.memories.items():
            with replacing(Path(folder) / _MEMORY_FILES[strategy].format(rank)) as file:
                torch.save(memory, file)

    @classmethod
    def load(cls, folder: str | Path, rank: int) -> "RankState":
        """What `folder` holds of this rank, which may be nothing.

        Raises:
            ValueError: the ledger's file is damaged.
        """
        memories: dict[str, dict[str, Any]] = {}
        for strategy, name in _MEMORY_FILES.items():
            path = Path(folder) / name.format(rank)
            if path.exists():
                memories[strategy] = torch.load(path, map_location="cpu", weights_only=True)
        path = Path(folder) / _LEDGER_FILE.format(rank)
        return cls(memories, read_json(path, dict, "ledger of rounds", _REMEDY) if path.exists() else None)
