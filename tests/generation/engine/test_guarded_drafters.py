"""Lookups that draft beside a round: what their drafts would have become is told, and nothing else happens."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from spec_trl.generation.engine import guarded_drafters
from spec_trl.generation.engine.guarded_drafters import GuardedDrafters, LookupEvaluation
from spec_trl.generation.engine.sampling.accept import Proposal
from spec_trl.generation.planner.planner import SHARE


class Listener:
    compared_lookups, compared_length = [1], 3

    def __init__(self) -> None:
        self.told: list[tuple[int, int, int]] = []

    def record_unverified(self, drafter: int, requests: Any, accepted: Any, attempted: Any) -> None:
        assert drafter == 1
        self.told += zip(requests, accepted, attempted, strict=True)


@pytest.fixture
def lookup() -> Any:
    drafted = torch.tensor([[1, 2, 3], [1, 2, 0]])
    asked: list[int] = []

    def propose(draft_length: int, noise: None) -> Proposal:
        asked.append(draft_length)
        return Proposal(drafted, torch.tensor([3, 2]))

    return SimpleNamespace(strategy="ngram", propose=propose, asked=asked)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands still but for what the test adds."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(guarded_drafters, "time", clock)
    return clock


def heard(lookup: Any) -> tuple[Listener, LookupEvaluation]:
    listener: Any = Listener()
    network: Any = SimpleNamespace(strategy="self")
    return listener, LookupEvaluation(listener, GuardedDrafters([network, lookup], lambda index: None), 9)


def commit(each: LookupEvaluation, *texts: list[int]) -> None:
    width = max(map(len, texts))
    tokens = np.array([[*text, *[0] * (width - len(text))] for text in texts])
    each.after_round([4, 7], tokens, np.array([len(text) for text in texts]))


def test_a_draft_is_compared_with_the_text_that_follows(lookup: Any) -> None:
    listener, each = heard(lookup)
    each.before_round({}, [4, 7])
    commit(each, [1], [1, 2])
    assert not listener.told
    each.before_round({}, [4, 7])  # drafts are pending: no new ones
    commit(each, [2], [5])  # of request 7 the lookup knew two tokens, and no third one
    assert listener.told == [(7, 2, 3)]
    each.before_round({0: [3, 3]}, [4, 7])
    commit(each, [3, 9], [9])  # accepted whole
    assert listener.told == [(7, 2, 3), (4, 3, 3)] and lookup.asked == [3]
    each.before_round({}, [4, 7])  # it rests for as many rounds as a draft has tokens
    assert lookup.asked == [3]
    each.before_round({}, [4, 7])
    commit(each, [8], [8])
    assert listener.told[2:] == [(4, 0, 1), (7, 0, 1)] and lookup.asked == [3, 3]


def test_rows_that_have_ended_are_not_compared(lookup: Any) -> None:
    listener, each = heard(lookup)
    each.before_round({}, [4, 7])
    commit(each, [5], [1])  # request 4 is told, and 7 ends
    for _ in range(4):
        each.before_round({}, [4, -1])
    assert lookup.asked == [3, 3]
    each.after_round([4, -1], np.array([[6], [0]]), np.array([1, 0]))
    assert listener.told == [(4, 0, 1)] * 2


def test_lookups_take_a_small_share_of_the_time(lookup: Any, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup takes a second and a half, the rounds a second each."""
    listener, each = heard(lookup)
    propose, tell = lookup.propose, listener.record_unverified

    def take(seconds: float, action: Any) -> Any:
        def slow(*arguments: Any) -> Any:
            clock.now += seconds
            return action(*arguments)

        return slow

    lookup.propose, listener.record_unverified = take(1.0, propose), take(0.5, tell)  # type: ignore[method-assign]
    rounds = []
    for number in range(1000):
        each.before_round({}, [4, 7])
        if len(lookup.asked) > len(rounds):
            rounds.append(number)
        clock.now += 1.0
        commit(each, [8], [8])
    assert 1.5 * len(rounds) == pytest.approx(SHARE * clock.now, rel=0.2)
    assert min(np.diff(rounds)) >= 1.4 / SHARE


def test_a_lookup_that_drafts_is_told_by_its_round(lookup: Any) -> None:
    listener, each = heard(lookup)
    each.before_round({}, [4, 7])
    each.before_round({1: [3, 3]}, [4, 7])
    commit(each, [5], [5])
    assert not listener.told and lookup.asked == [3]


def test_a_lookup_that_fails_is_dropped(lookup: Any) -> None:
    listener, each = heard(lookup)
    lookup.propose = lambda *_: 1 / 0
    with pytest.warns(UserWarning, match="failed and is not used"):
        each.before_round({}, [4, 7])
    commit(each, [5], [5])
    assert not listener.told
