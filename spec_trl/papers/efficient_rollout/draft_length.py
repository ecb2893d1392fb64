"""Controls γ by the block efficiency over training (ER §3.3, Algorithm 1 lines 14-20)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...generation.planner.acceptance import acceptance_of, expected_block_efficiency


def convert_block_efficiency(block_efficiency: float, old_draft_length: int, new_draft_length: int) -> float:
    """Converts τ measured at one γ into the expected τ at another, so that the toggle can judge a new γ."""
    return expected_block_efficiency(acceptance_of(block_efficiency, old_draft_length), new_draft_length)


@dataclass(eq=False)
class DraftLengthController:
    """Raises γ when τ stays near its ceiling γ + 1, lowers it when τ stays far below.

    With τ of the last P training rollouts since the last move:

        min τ ≥ 1 + γ α_up    → next γ of Γ
        max τ ≤ 1 + γ α_down  → previous γ of Γ

    The window restarts after a move: τ of the old γ says nothing about the thresholds of the new γ. `RolloutOptions`
    checks the values.
    """

    draft_lengths: Sequence[int] = (5, 7, 9, 11)  # Γ, ascending
    initial: int | None = None  # γ₀, one of Γ; None: its first
    up: float = 0.94  # α_up, share of γ that must be accepted
    down: float = 0.85  # α_down, less than α_up
    patience: int = 2  # P, rollouts

    def __post_init__(self) -> None:
        self._lengths = tuple(self.draft_lengths)
        self.draft_length = self._lengths[0] if self.initial is None else self.initial
        self.block_efficiency = float(self.draft_length)
        """τ_prev for the toggle: of the last rollout that speculated, converted to the current γ; γ₀ before the first
        one (Algorithm 1 line 1)."""
        self._window: list[float] = []

    def observe(self, block_efficiency: float | None) -> None:
        """Updates γ by τ of a training rollout over all ranks; None: without speculation nothing changes."""
        if block_efficiency is None:
            return
        self._window = [*self._window, block_efficiency][-self.patience :]
        self.block_efficiency = block_efficiency
        place = self._lengths.index(self.draft_length)
        if len(self._window) < self.patience:
            return
        if min(self._window) >= 1 + self.draft_length * self.up and place + 1 < len(self._lengths):
            self._move_to(self._lengths[place + 1])
        elif max(self._window) <= 1 + self.draft_length * self.down and place > 0:
            self._move_to(self._lengths[place - 1])

    def _move_to(self, draft_length: int) -> None:
        self.block_efficiency = convert_block_efficiency(self.block_efficiency, self.draft_length, draft_length)
        self.draft_length = draft_length
        self._window = []

    def state_dict(self) -> dict[str, Any]:
        """State of a checkpoint; JSON."""
        state = {"draft_length": self.draft_length, "block_efficiency": self.block_efficiency}
        return state | {"window": list(self._window)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a checkpoint, at γ₀ if its γ is no longer in Γ."""
        if state["draft_length"] in self._lengths:
            self.draft_length = state["draft_length"]
            self.block_efficiency = state["block_efficiency"]
            self._window = list(state["window"])
