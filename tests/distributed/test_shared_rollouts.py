"""What ranks keep and agree on from turn to turn and from rollout to rollout."""

from array import array
from typing import Any, TypeVar

import pytest

from spec_trl.distributed import shared_rollouts
from spec_trl.distributed.shared_rollouts import Sampled, SharedRollouts
from spec_trl.distributed.shared_work import ExpectedLengths


T = TypeVar("T")


class Alike(SharedRollouts):
    """All of three ranks bring the same."""

    def _gather(self, value: T) -> list[T]:
        return [value] * 3


def test_a_rank_that_drafts_decodes_nothing() -> None:
    for rank in range(3):
        sharing = Alike(True, rank, 3, 60.0, decoding=2)
        turn = sharing.gather([[1], [2]])
        assert turn.decoded == (range(6) if rank < 2 else range(0))
        assert turn.own == range(2 * rank, 2 * rank + 2)
        assert sharing.rows_in_flight(turn, None) == 3


def test_prompts_with_images_stay_on_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    sharing = SharedRollouts(True, 0, 2, timeout=1)
    for other_has_images, decoded in ((False, range(3)), (True, range(2))):
        sharing.begin()
        other = [], [[9]], other_has_images
        monkeypatch.setattr(shared_rollouts, "gather_object", lambda own, other=other: [*own, other])
        turn = sharing.gather([[1], [2]])
        assert turn.decoded == decoded and turn.shares != other_has_images
        assert sharing.rows_in_flight(turn, None) == 2
    own = {0: Sampled([5], []), 1: Sampled([6], [])}
    assert sharing.exchange(turn, own) == own


def test_lengths_are_kept_of_prompts_that_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the later turns of a tool loop prompts hold what was sampled: of a long run they would fill the memory."""
    kept: list[list[list[int]]] = []
    monkeypatch.setattr(ExpectedLengths, "record", lambda _, lengths: kept.append(sorted(lengths.values())))
    other: Any = None
    monkeypatch.setattr(shared_rollouts, "gather_object", lambda own: [*own, other])
    sharing = SharedRollouts(True, 0, 2, timeout=1)
    for _ in range(2):
        sharing.begin()
        other = [], [[9]], False
        turn = sharing.gather([[1], [2], [2]])
        other = {3: (array("i", [5]), array("f", [-0.5]))}, None
        own = {place: Sampled(tokens, [-1.0] * len(tokens)) for place, tokens in enumerate(([3], [3, 4], [7]))}
        assert sharing.exchange(turn, own) == own | {3: Sampled([5], [-0.5])}
        other = [], [], False
        turn = sharing.gather([[1, 3, 5]])
        other = {}, None
        assert sharing.exchange(turn, {0: Sampled([6], [])}) == {0: Sampled([6], [])}
    assert kept == [[[1], [1], [2, 1]]] * 2
