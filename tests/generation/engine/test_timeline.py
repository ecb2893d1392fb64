"""Who drafted for whom, recorded by hand. What the engine records `test_token_identity.py` compares with plans."""

from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from spec_trl.generation.engine.record import TimelineLog
from spec_trl.generation.engine.statistics import MOST_CHANGES, RequestTimeline, slowest
from spec_trl.scheduling.control import Chain


NAMES = ["self", "ngram", "history"]


def test_a_round_like_the_last_one_is_only_compared() -> None:
    """Of a plan that is the same, no row is looked at."""

    class Rows(tuple[int, ...]):
        def __iter__(self) -> Any:
            looks.append(1)
            return super().__iter__()

    looks: list[int] = []
    log, rows = TimelineLog(8, NAMES), Rows(range(8))
    for round_ in range(10):
        log.record(float(round_), round_, [Chain(0, 1 + round_ % 3, rows)], list(range(8)))
    assert len(looks) == 1


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=20, max_size=120))
def test_the_number_of_changes_is_bounded(spells: list[tuple[int, int]]) -> None:
    """Who drafts now is right at any time, spells do not repeat, and one longer than all others together stays."""
    longest = 1 + sum(rounds for _, rounds in spells)
    spells = [*spells[:10], (2, longest), *((which % 2, rounds) for which, rounds in spells[10:])]
    log = TimelineLog(1, NAMES)
    changes, drafted = log.timelines[0].changes, [which for which, rounds in spells for _ in range(rounds)]
    for round_, which in enumerate(drafted):
        log.record(float(round_), round_, [Chain(which, 1)], [0])
        assert len(changes) <= MOST_CHANGES and changes[-1][2] == [NAMES[which]]
    assert changes[0][:2] == (0.0, 0) and all(second == round_ for second, round_, _ in changes)
    begins = [round_ for _, round_, _ in changes] + [len(drafted)]
    assert begins == sorted(set(begins))
    assert all(one[2] != other[2] for one, other in pairwise(changes))
    shown: list[list[str]] = []
    for (_, begin, names), end in zip(changes, begins[1:], strict=True):
        shown += [names] * (end - begin)
    start = sum(rounds for _, rounds in spells[:10])
    assert shown[start : start + longest] == [["history"]] * longest
    exact = 1 + sum(one != other for one, other in pairwise(drafted))
    assert len(changes) == exact if exact <= MOST_CHANGES else len(changes) > MOST_CHANGES // 2


def test_slowest_come_in_the_order_of_their_ends() -> None:
    timelines = [RequestTimeline(i, ended=ended) for i, ended in enumerate([3.0, 9.0, 1.0, 7.0])]
    assert [timeline.request for timeline in slowest(timelines, 3)] == [0, 3, 1]
    assert [timeline.request for timeline in slowest(timelines, 9)] == [2, 0, 3, 1]
