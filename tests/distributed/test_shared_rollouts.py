"""What a rank keeps from turn to turn and from rollout to rollout."""

from array import array
from typing import Any

import pytest

from spec_trl.distributed import shared_rollouts
from spec_trl.distributed.shared_rollouts import SharedRollouts
from spec_trl.scheduling.shared_order import ExpectedLengths


def test_lengths_are_kept_of_prompts_that_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the later turns of a tool loop prompts hold what was sampled: of a long run they would fill the memory."""
    kept: list[list[list[int]]] = []
    monkeypatch.setattr(ExpectedLengths, "record", lambda _, lengths: kept.append(sorted(lengths.values())))
    other: Any = None
    monkeypatch.setattr(shared_rollouts, "gather_object", lambda own: [*own, other])
    sharing = SharedRollouts(True, 0, 2, timeout=1)
    for _ in range(2):
        sharing.begin()
        other = [], [[9]]
        turn = sharing.gather([[1], [2], [2]])
        other = {3: array("i", [5])}, None
        sharing.exchange(turn, {0: [3], 1: [3, 4], 2: [7]})
        other = [], []
        turn = sharing.gather([[1, 3, 5]])
        other = {}, None
        assert sharing.exchange(turn, {0: [6]}) == {0: [6]}
    assert kept == [[[1], [1], [2, 1]]] * 2
