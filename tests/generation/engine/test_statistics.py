"""Statistics agree with the output they describe."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine import record
from spec_trl.generation.engine.kv import memory
from spec_trl.generation.engine.record import (
    LENGTH_BIN,
    Completion,
    DraftedChains,
    PhaseTimer,
    Record,
    Round,
    count_drafts,
    points_and_plans,
    timelines,
)
from spec_trl.generation.engine.rows import Request
from spec_trl.generation.engine.statistics import (
    DEPTH_EDGES,
    MOST_CHANGES,
    MOST_PLANS,
    BestOfNStatistics,
    DraftCounts,
    PlanChange,
    RequestTimeline,
    RoundPoint,
    SpeculationStatistics,
    Tail,
    added,
    slowest,
)
from spec_trl.generation.planner.control import AlwaysSpeculate, Candidate, Chain, PlainRounds, Tally
from spec_trl.papers.specactor.racing_rollout import RacedChains
from tests.generation.calls import generate, pad_left, random_rows


SEVEN = pad_left(random_rows([5, 3, 8, 2, 9, 4, 4]))
REQUESTS, NAMES = 4, ["self", "ngram", "self"]


@st.composite
def rounds(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rounds of some of the requests, with one to three lanes; of equal chains the first wins."""

    def one(batch: int, lanes: int) -> dict[str, Any]:
        drafters = [[draw(st.integers(-1, 2)) for _ in range(batch)] for _ in range(lanes)]
        drafted = [[draw(st.integers(0, 3)) if which >= 0 else 0 for which in lane] for lane in drafters]
        accepted = [[draw(st.integers(0, most)) for most in lane] for lane in drafted]
        winner = [max(range(lanes), key=lambda lane, row=row: (accepted[lane][row], -lane)) for row in range(batch)]
        kept = [accepted[winner[row]][row] + 1 for row in range(batch)]
        for row in range(batch):
            if draw(st.booleans()):  # the row ends early: what comes after its end does not count
                kept[row] = draw(st.integers(1, kept[row]))
                for lane in range(lanes):
                    drafted[lane][row] = min(drafted[lane][row], kept[row])
                    accepted[lane][row] = min(accepted[lane][row], kept[row])
        requests = draw(st.permutations(range(REQUESTS)))[:batch]
        depths = [draw(st.sampled_from([0, 63, 64, 700, 40_000])) for _ in range(batch)]
        return dict(
            requests=requests, depths=depths, drafters=drafters, drafted=drafted, accepted=accepted, kept=kept,
            winner=winner,
        )  # fmt: skip

    return [one(draw(st.integers(1, REQUESTS)), draw(st.integers(1, 3))) for _ in range(draw(st.integers(1, 3)))]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(rounds())
def test_drafts_are_counted_by_request_depth_and_drafter(rounds: list[dict[str, Any]]) -> None:
    recorded = [Round(0.0, [0], 9.0, ())]
    per_request = [DraftCounts() for _ in range(REQUESTS)]
    per_depth: dict[int, DraftCounts] = {}
    per_drafter = {name: DraftCounts() for name in NAMES}
    nobody = dict.fromkeys(NAMES, 0)
    racing = BestOfNStatistics(0, dict(nobody), dict(nobody), dict(nobody), [dict(nobody) for _ in range(REQUESTS)])
    for each in rounds:
        depths, *arrays = (np.array(each[name]) for name in ("depths", "drafted", "accepted", "kept", "winner"))
        owners, winner = np.array(each["drafters"]), arrays.pop()
        if len(owners) == 1:
            chains = DraftedChains.of(depths, owners[0], *(array[0] for array in arrays[:2]), arrays[2])
        else:
            chains = RacedChains.of_lanes(DraftedChains.of(depths, owners, *arrays), winner)
        recorded.append(Round(0.0, each["requests"], 9.0, (), chains=chains))
        racing.rounds += len(each["drafters"]) > 1
        for row, request in enumerate(each["requests"]):
            edge = DEPTH_EDGES[bisect_right(DEPTH_EDGES, each["depths"][row]) - 1]
            chains = [lane for lane, drafters in enumerate(each["drafters"]) if drafters[row] >= 0]
            for lane in {*chains, each["winner"][row]}:
                drafted, accepted = each["drafted"][lane][row], each["accepted"][lane][row]
                own = DraftCounts(drafted, accepted, 1, min(drafted, 1), min(accepted, 1), 0)
                own.committed = min(accepted + 1, each["kept"][row])
                won = lane == each["winner"][row]
                if won:
                    per_request[request] += own
                    per_depth[edge] = per_depth.get(edge, DraftCounts()) + own
                if lane in chains:
                    name = NAMES[each["drafters"][lane][row]]
                    per_drafter[name] += own
                    if len(chains) > 1:
                        (racing.wins if won else racing.losses)[name] += 1
                        racing.wasted[name] += drafted - accepted * won
                        racing.winners[request][name] += won
                        racing.winners_by_depth.setdefault(edge, dict(nobody))[name] += won
    racing.winners_by_depth = {edge: won for edge, won in racing.winners_by_depth.items() if any(won.values())}
    found = SpeculationStatistics("best_of_n")
    with patch.object(record, "ROUNDS_AT_ONCE", 2):
        count_drafts(found, recorded, REQUESTS, NAMES)
    assert found.per_request == per_request and found.total == sum(per_request, DraftCounts())
    assert found.per_depth == per_depth and list(found.per_depth) == sorted(per_depth)
    assert found.per_drafter == per_drafter
    assert found.best_of_n == (racing if racing.rounds else None)


def test_sums_of_records_and_their_ratios() -> None:
    total = DraftCounts(10, 6, 3, 3, 2, 9) + DraftCounts(2, 1, 2, 2, 1, 3)
    assert (total.block_efficiency, total.acceptance_rate, total.first_token_acceptance) == (12 / 5, 7 / 12, 3 / 5)
    one, other = {0: DraftCounts(1), 64: DraftCounts(2)}, {64: DraftCounts(3, 1), 512: DraftCounts(4)}
    assert added(one, other) == {0: DraftCounts(1), 64: DraftCounts(5, 1), 512: DraftCounts(4)}


def round_of(
    batch: int, gamma: int, length: float = 10.0, seconds: float = 1.0, tokens: int = 0, which: int = 0
) -> Round:
    plan = [Chain(which, gamma)] if gamma else []
    return Round(0.0, [0] * batch, length, plan, gamma, seconds, tokens)


def test_like_rounds_are_one_point() -> None:
    drafted, far = (4, 3, 20.0), (4, 0, LENGTH_BIN)
    shapes = [(4, 0, 10.0), (4, 0, 30.0), drafted, far, (2, 0, 5.0), drafted]
    points, plans = points_and_plans([round_of(*each, i, 10 * i) for i, each in enumerate(shapes, 1)], NAMES)
    assert points == [
        RoundPoint(4, 20.0, 0, None, 2, 3.0, 30), RoundPoint(4, 20.0, 3, "self", 2, 9.0, 90),
        RoundPoint(4, LENGTH_BIN, 0, None, 1, 4.0, 40), RoundPoint(2, 5.0, 0, None, 1, 5.0, 50),
    ]  # fmt: skip
    assert plans == [
        PlanChange(0, 0, 4), PlanChange(2, 3, 4, "self"), PlanChange(3, 0, 4), PlanChange(4, 0, 2),
        PlanChange(5, 3, 4, "self"),
    ]  # fmt: skip
    race = Round(0.0, [0], 9.0, [Chain(1, 4), Chain(0, 2), Chain(2, 2), Chain(1, 1)], 8)
    assert points_and_plans([race], NAMES)[0][0].drafter == "ngram+self"


def test_of_many_plans_the_short_spells_are_left_out() -> None:
    """Spells of 50 rounds stay; of those of 3 rounds and of 1 the longer ones do, and take the others' rounds."""
    rounds = [round_of(4, 0)] * 5
    for spell in range(400):
        length, gamma = (50, 5) if spell % 10 == 0 else (3, 2) if spell % 2 else (1, 1)
        rounds += [round_of(2, gamma)] * length
    _, plans = points_and_plans(rounds, NAMES)
    assert MOST_PLANS / 2 < len(plans) <= MOST_PLANS
    shown = {plan[1:]: 0 for plan in plans}
    for plan, until in zip(plans, [*(plan.round for plan in plans[1:]), len(rounds)], strict=True):
        shown[plan[1:]] += until - plan.round
    assert shown[5, 2, "self"] == 50 * 40 and shown.get((1, 2, "self"), 0) < 40 and plans[0].round == 0


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 40)), min_size=20, max_size=120))
def test_the_changes_of_a_timeline_are_bounded(spells: list[tuple[int, int]]) -> None:
    """Who drafts last is right, spells do not repeat, and one longer than all others together stays."""
    names, longest = ["self", "ngram", "history"], 1 + sum(rounds for _, rounds in spells)
    drafted = [which for which, rounds in [*spells[:10], (2, longest), *spells[10:]] for _ in range(rounds)]
    rounds = [Round(float(at), [3], 9.0, [Chain(which, 1)]) for at, which in enumerate(drafted)]
    (found,) = timelines(rounds, names, {3: (1e6, len(rounds)), 5: (2e6, 9)}, [3])
    assert (found.request, found.ended) == (3, 1e6)
    assert found.changes[0][:2] == (0.0, 0) and all(second == number for second, number, _ in found.changes)
    begins = [number for _, number, _ in found.changes] + [len(drafted)]
    assert begins == sorted(set(begins)) and found.changes[-1][2] == [names[drafted[-1]]]
    assert all(one[2] != other[2] for one, other in pairwise(found.changes))
    shown: list[list[str]] = []
    for (_, begin, drafters), end in zip(found.changes, begins[1:], strict=True):
        shown += [drafters] * (end - begin)
    start = sum(count for _, count in spells[:10])
    assert shown[start : start + longest] == [["history"]] * longest
    exact = 1 + sum(one != other for one, other in pairwise(drafted))
    most = MOST_CHANGES
    assert len(found.changes) == exact if exact <= most else most // 2 < len(found.changes) <= most


def test_timelines_of_races_and_of_requests_without_a_round() -> None:
    """Of a plan that is the same, no row is looked at."""

    class Rows(tuple[int, ...]):
        def __iter__(self) -> Any:
            looks.append(1)
            return super().__iter__()

    looks: list[int] = []
    requests, rows = [4, 1], Rows((1,))
    plans = [[Chain(0, 1 + at % 3, None), Chain(1, 2, rows), Chain(2, 3)] for at in range(9)]
    rounds = [Round(float(at), requests, 9.0, plan) for at, plan in enumerate(plans)]
    found = timelines(rounds, NAMES, {4: (9.0, 9), 2: (0.5, 0), 0: (3.0, 2)}, [4, 2])
    assert found == [
        RequestTimeline(1, [(0.0, 0, ["self", "ngram"])]), RequestTimeline(2, [(0.5, 0, [])], 0.5),
        RequestTimeline(4, [(0.0, 0, ["self"])], 9.0),
    ]  # fmt: skip
    assert len(looks) == 1
    assert [timeline.request for timeline in slowest(found, 2)] == [2, 4]


def test_tail_by_hand() -> None:
    curve = [(1.0, 1), (2.5, 4), (4.0, 5), (9.0, 7)]
    statistics = SpeculationStatistics("self", ended_in=[5, 9, 20, 5, 5, 2, 20], completion_curve=curve)
    tails = {share: statistics.tail(share) for share in (0.0, 0.1, 1 / 7, 0.5, 4 / 7, 0.6, 0.9, 1.0)}
    assert tails == {
        0.0: Tail(9.0, 20), 0.1: Tail(8.0, 18), 1 / 7: Tail(8.0, 18), 0.5: Tail(6.5, 15), 4 / 7: Tail(6.5, 15),
        0.6: Tail(5.0, 11), 0.9: Tail(0.0, 0), 1.0: Tail(0.0, 0),
    }  # fmt: skip
    assert statistics.tail() == tails[0.5]
    hundred = list(range(1, 101))
    statistics = SpeculationStatistics("self", ended_in=hundred, completion_curve=[(n, n) for n in hundred])
    assert statistics.tail(0.07) == Tail(93, 93)  # 0.07 * 100 > 7
    for share in (-0.1, 1.1):
        with pytest.raises(ValueError, match=f"share={share} is out of range; it must be 0 to 1"):
            statistics.tail(share)


def test_fields_agree_with_the_output(tiny) -> None:
    """Those that `test_token_identity.py` does not look at."""
    config = {"max_batch_size": 3, "draft_length": 4, "verification": "rejection"}
    result = generate(tiny, SEVEN, "self", config, eos_token_id=7, max_new_tokens=90)
    found, width = result.statistics, SEVEN["input_ids"].shape[1]
    for row, length in enumerate(result.lengths.tolist()):
        assert not result.sequences[row, width + length :].any() and (result.logprobs[row, :length] < 0).all()
    # Every token comes out of a round; rounds that drafted nothing for a row do not count as blocks of it.
    assert found.total.committed > 0.9 * found.tokens and found.per_drafter == {"self": found.total}
    assert {0, 64} <= set(found.per_depth) <= set(DEPTH_EDGES)
    assert 0 < found.acceptance_rate < 1 < found.block_efficiency <= 5 and 0 < found.first_token_acceptance <= 1
    seconds = [second for second, _ in found.completion_curve]
    assert seconds == sorted(seconds) and found.tail(0) == Tail(seconds[-1], found.rounds)
    assert set(found.phase_seconds) == {"prefill", "noise", "draft", "verify", "accept", "compact", "control"}
    assert 0 < sum(found.phase_seconds.values()) <= found.seconds
    assert found.tokens_per_second == found.tokens / found.seconds
    assert found.target_forwards > found.rounds > 0 < found.draft_forwards
    assert found.speculating[0] == PlanChange(0, 4, 3, "self") and found.speculating == sorted(set(found.speculating))
    assert (found.strategy, found.drafter_failure, found.reason) == ("self", None, "sd_toggle=always")


def test_what_plain_decoding_would_have_taken(tiny) -> None:
    """A stand-in of a second per plain round, two with more than three rows: the rows and the rounds are those of the
    call without drafts."""

    class Seconds(AlwaysSpeculate):
        rounds = 0

        def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
            self.rounds += 1
            return () if self.rounds <= 5 else super().plan(requests, length, waiting)

        def plain_seconds(self, rounds: Sequence[PlainRounds]) -> float | None:
            self.asked = getattr(self, "asked", None) or list(rounds)  # first the plain rounds, then the bounds
            return 1e6 * sum(each.rounds * (2 if each.batch > 3 else 1) for each in rounds)

    config, options = {"max_batch_size": 5}, dict(eos_token_id=7, max_new_tokens=60)
    plain = generate(tiny, SEVEN, config=config, **options).statistics
    control = Seconds(Candidate("self", 4, 4.0, 100))
    found = generate(tiny, SEVEN, "self", config, drafter=SelfDrafter(tiny), control=control, **options).statistics
    batches = [each.batch for each in control.asked for _ in range(each.rounds)]
    assert len(batches) == plain.rounds - 5 and max(batches) == 5
    alive = [sum(point.rounds for point in plain.points if point.batch == batch) for batch in range(1, 5)]
    assert [batches.count(batch) for batch in range(1, 5)] == alive
    whole = 1e6 * sum(2 if batch > 3 else 1 for batch in batches)
    assert whole < found.plain_seconds < whole + found.seconds
    # Without a draft the call is what plain decoding took; where no round can tell, nothing is said.
    assert plain.plain_seconds == plain.seconds
    assert generate(tiny, SEVEN, "self", **options).statistics.plain_seconds is None


SECONDS = st.floats(1e-4, 10.0)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 4), SECONDS, st.integers(0, 32)), min_size=1, max_size=12),
    SECONDS, st.floats(0, 1e3),
)  # fmt: skip
def test_no_gain_beyond_what_rounds_with_drafts_can_have_saved(
    drawn: list[tuple[int, int, float, int]], plain: float, noise: float
) -> None:
    """Rounds of (rows, γ, seconds, accepted tokens); the estimate of all plain rounds is off by any factor."""
    requests = [Request(index, torch.tensor([1, 2]), 40, index) for index in range(8)]
    made = Record("self", requests, ["self"], torch.device("cpu"))
    for rows, gamma, seconds, accepted in drawn:
        one = made.begin_round([Chain(0, gamma)] if gamma else [], list(range(rows)), 9.0)
        one.draft_length, one.seconds, one.tokens = gamma, seconds, rows + min(accepted, gamma * rows)
    found = SpeculationStatistics("self", rounds=len(drawn), phase_seconds={"prefill": 0.5})
    found.points, _ = points_and_plans(made.rounds, ["self"])
    found.seconds = 0.5 + sum(seconds for _, _, seconds, _ in drawn) + 0.25

    class Wrong(AlwaysSpeculate):
        asked = 0

        def plain_seconds(self, rounds: Sequence[PlainRounds]) -> float | None:
            self.asked += 1
            return plain * sum(each.rounds for each in rounds) * (noise if self.asked == 1 else 1.0)

    drafted = [each for each in made.rounds if each.draft_length]
    if drafted:
        tallied = Tally()
        for one in drafted:
            tallied.add_round(len(one.requests), one.tokens, one.seconds)
            tallied.baseline_seconds += plain * one.tokens / len(one.requests)
        found.measured_speedup = tallied.measured_speedup
    completed = {index: Completion(torch.zeros(20, dtype=torch.int64), None) for index in range(8)}
    estimate = made.plain_seconds(found, completed, 8, Wrong(Candidate("self", 4, 4.0, 100)))
    assert estimate is not None
    most = sum(plain * one.tokens / len(one.requests) - one.seconds for one in drafted)
    saved = estimate - found.seconds
    least = sum(plain - one.seconds for one in drafted) - 0.25  # the last is what else drafting took
    assert (saved == 0) if not drafted else (least - 1e-6 <= saved <= most + 1e-6)
    if drafted and found.measured_speedup is not None and found.measured_speedup < 1:
        assert saved < 0


def test_the_summary_is_short_and_says_why() -> None:
    drafted, plain = RoundPoint(4, 9.0, 5, "self", 12), RoundPoint(4, 9.0, 0, None, 18)
    known = SpeculationStatistics(
        "self", tokens=300, seconds=2.0, rounds=30, points=[drafted, plain], reason="why", predicted_speedup=1.3,
        measured_speedup=1.25, plain_seconds=2.2, total=DraftCounts(10, 6, 3, 3, 2, 9),
    )  # fmt: skip
    assert str(known).splitlines() == [
        "self: 300 tokens in 2.00 s, 150.0 tokens/s",
        "drafting in 40% of 30 rounds: why",
        "block efficiency 3.00, acceptance rate 0.60",
        "speedup over plain decoding: predicted 1.30×, measured 1.25×, whole call 1.10×",
    ]
    few = replace(known, rounds=19, points=[replace(drafted, rounds=1), plain], setup_seconds=3.5)
    assert str(few).splitlines() == [
        "self: 300 tokens in 2.00 s, 150.0 tokens/s, after 3.50 s of setup",
        "drafting in 5% of 19 rounds: why",
        "block efficiency 3.00, acceptance rate 0.60",
        "speedup over plain decoding: predicted 1.30×",
        "1 round with drafts is too few to show a gain (10)",
    ]
    assert str(SpeculationStatistics("none", reason="no drafter")).endswith("\ndrafting in 0% of 0 rounds: no drafter")


def test_nothing_drafted_is_nan_not_zero(tiny) -> None:
    found = generate(tiny, pad_left(random_rows([3]))).statistics
    assert all(map(math.isnan, (found.acceptance_rate, found.block_efficiency, found.first_token_acceptance)))
    assert found.rounds == found.target_forwards - 1 == 23
    assert (found.speculating, found.per_depth, found.reason) == ([(0, 0, 1, None)], {}, "no drafter")
    assert generate(tiny, SEVEN, "self", {"sd_toggle": "never"}).statistics.total == DraftCounts()


def test_cache_bytes_and_tokens_alone(tiny, tiny_assistant, monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V of 2 layers x 2 heads x 16 in float64 for 7 rows of 9 + 24 + γ columns, where memory is not taken page
    by page; a small model adds its own."""
    monkeypatch.setattr(memory, "takes_memory_late", lambda device: False)

    def cache_bytes(strategy: str, **options: object) -> int:
        return generate(tiny, SEVEN, strategy, {"draft_length": 5}, **options).statistics.cache_bytes

    row_bytes = 2 * 2 * 2 * 16 * 8 * (9 + 24 + 5)
    assert cache_bytes("none") == cache_bytes("ngram") == cache_bytes("self") == 7 * row_bytes
    assert cache_bytes("model", assistant_model=tiny_assistant) == 14 * row_bytes
    sequences = generate(tiny, SEVEN, "self", return_dict_in_generate=False)
    assert isinstance(sequences, torch.Tensor) and sequences.shape == (7, 9 + 24)


class LateEvent:
    """A CUDA event that is over when the host waits for the device."""

    now = waited = alive = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        LateEvent.alive += 1

    def __del__(self) -> None:
        LateEvent.alive -= 1

    def record(self) -> None:
        LateEvent.now += 1
        self.at = LateEvent.now

    def query(self) -> bool:
        return self.at <= LateEvent.waited

    def elapsed_time(self, end: "LateEvent") -> float:
        assert end.query()
        return 1e3 * (end.at - self.at)

    @classmethod
    def wait(cls) -> None:
        cls.waited = cls.now


def test_a_long_rollout_keeps_few_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", LateEvent.wait)
    timer, most = PhaseTimer(torch.device("cuda")), 0
    for _ in range(50):
        for name in ("draft", "verify", "draft"):
            with timer.phase(name):
                pass
            most = max(most, LateEvent.alive)
        LateEvent.wait()  # for the round's tokens
    assert timer.seconds() == {"draft": 100, "verify": 50} and most <= 10
