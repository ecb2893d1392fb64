"""Races within one process: chains under a budget, dropped and promoted by what they win. And SA Algorithm 3."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_trl.scheduling.acceptance import Acceptance
from spec_trl.scheduling.assignment import (
    GROWTH,
    PATIENCE,
    PROMOTION,
    RECENT,
    YARDSTICK,
    MethodView,
    Racing,
    RowView,
    greedy_assignments,
)
from spec_trl.scheduling.ladder import Ladder, Rung


# ---- races: budget and places -------------------------------------------------------------------------------------


SPEEDUPS = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 8.0}  # seconds of a round: "a" is the best at equal acceptance
LADDER = Ladder(tuple(Rung(method, 1, 4, 0.5, seconds, 1.0) for method, seconds in SPEEDUPS.items()), "")


def row(request: int = 0, acceptance: float = 0.5, method: str = "a", draft_length: int = 4) -> RowView:
    return RowView(request, method, draft_length, Acceptance.geometric(acceptance))


def view(name: str, draft_length: int = 4, acceptance: float = 0.5, max_rows: int = 64) -> MethodView:
    return MethodView(name, draft_length, Acceptance.geometric(acceptance), max_rows)


VIEWS = [view(name) for name in "dcba"]
RATES = st.integers(0, 20).map(lambda rate: rate / 20)


@st.composite
def many_rows(draw: st.DrawFn) -> list[RowView]:
    primaries = draw(st.lists(st.sampled_from(["a", "b", "none"]), min_size=1, max_size=7))
    lengths = [0 if method == "none" else draw(st.integers(1, 9)) for method in primaries]
    return [row(n, draw(RATES), method, lengths[n]) for n, method in enumerate(primaries)]


ROWS = many_rows()
METHODS = st.tuples(
    *(st.builds(view, st.just(name), st.integers(1, 16), RATES, st.integers(1, 9)) for name in "abcd")
).map(list)


@settings(deadline=None, max_examples=20, derandomize=True)
@given(ROWS, METHODS, st.integers(1, 200), st.data())
def test_budget_and_pairs_over_a_whole_rollout(
    rows: list[RowView], methods: list[MethodView], budget: int, data: st.DataObject
) -> None:
    """Rounds with random verdicts, rows that finish and join, drafters that fail: never more than the budget or the
    primaries alone need, never a method twice on a row or on more rows than it serves, never a failed one."""
    random = data.draw(st.randoms(use_true_random=False))
    racing, failed = Racing(LADDER), set[str]()
    for step in range(25):
        if rows and step and random.random() < 0.1:
            racing.remove(rows.pop(random.randrange(len(rows))).request)
        if random.random() < 0.1:
            rows.append(row(1000 + step, random.random(), random.choice("ab"), random.randint(1, 9)))
        if random.random() < 0.03:
            failed.add(name := random.choice("cd"))
            racing.drop(name)
        chains = racing.assign(rows, methods, budget)
        assert not racing.changed and set(chains) == {r.request for r in rows}
        if not rows:
            continue
        width = max(sum(length for _, length in laid_out) for laid_out in chains.values())
        alone = len(rows) * (1 + max(r.draft_length for r in rows))
        assert len(rows) * (1 + width) <= max(budget, alone)
        primaries, used = Counter(r.method for r in rows), Counter[str]()
        for r in rows:
            names = [name for name, _ in chains[r.request]]
            assert len(set(names)) == len(names) and not failed & set(names)
            assert all(1 <= length <= 16 for _, length in chains[r.request])
            used.update(names)
        assert all(used[m.name] <= max(m.max_rows, primaries[m.name]) for m in methods)
        for _ in range(random.randint(1, 12)):
            for r in rows:
                racing.record(r.request, {name: random.randint(0, n) for name, n in chains[r.request]})


@settings(deadline=None, max_examples=25, derandomize=True)
@given(ROWS, METHODS, st.booleans())
def test_monotone_in_budget(rows: list[RowView], methods: list[MethodView], serve_all: bool) -> None:
    """More budget takes no chain away and shortens none; where methods serve few rows this holds for the slowest."""
    methods = [replace(m, max_rows=9) for m in methods] if serve_all else methods
    slowest = min(rows, key=lambda row: row.acceptance.block_efficiency(YARDSTICK)).request
    before: dict[int, dict[str, int]] = {r.request: {} for r in rows}
    for budget in range(0, 40 * len(rows), max(len(rows) // 2, 1)):
        chains = {request: dict(found) for request, found in Racing(LADDER).assign(rows, methods, budget).items()}
        for request in before if serve_all else [slowest]:
            assert all(chains[request].get(name, 0) >= length for name, length in before[request].items())
        before = chains


@settings(deadline=None, max_examples=30, derandomize=True)
@given(ROWS, METHODS)
def test_places_go_to_the_lowest_acceptance(rows: list[RowView], methods: list[MethodView]) -> None:
    rows = [replace(r, method="a", draft_length=4) for r in rows]
    chains = Racing(LADDER).assign(rows, methods, 10**6)
    for m in methods[1:]:
        served = [r.acceptance for r in rows if m.name in dict(chains[r.request])]
        left = [r.acceptance for r in rows if m.name not in dict(chains[r.request])]
        assert len(served) == min(m.max_rows, len(rows))
        assert not left or max(served) <= min(left)
    counts = [len(chains[r.request]) for r in sorted(rows, key=lambda r: r.acceptance)]
    assert counts == sorted(counts, reverse=True)  # depth first


# One row: the budget is 1 + the width. A chain of 4 is cut to 3 or 2, and one of 1 is not worth laying out.
@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (0, [("a", 4)]),
        (6, [("a", 4)]),
        (7, [("a", 4), ("b", 2)]),
        (12, [("a", 4), ("b", 4), ("c", 3)]),
        (99, [("a", 4), ("b", 4), ("c", 4), ("d", 4)]),
    ],
)
def test_the_last_chain_is_cut(budget: int, expected: list[tuple[str, int]]) -> None:
    assert Racing(LADDER).assign([row()], VIEWS, budget) == {0: expected}
    many = [row(request) for request in range(5)]
    assert Racing(LADDER).assign(many, VIEWS, 5 * budget + 4) == dict.fromkeys(range(5), expected)


def order_of(*views: MethodView) -> list[str]:
    """Further methods of a row of "a"."""
    return [name for name, _ in Racing(LADDER).assign([row()], list(views), 100)[0][1:]]


def test_methods_are_ranked_by_what_the_ladder_makes_of_their_acceptance() -> None:
    assert order_of(view("d"), view("c"), view("b")) == ["b", "c", "d"]
    assert order_of(view("b", acceptance=0.1), view("c", acceptance=0.95), view("d")) == ["c", "b", "d"]
    # A round of "b" takes half as long as one of "c", whose further tokens are as good as certain: 1.67 tokens in 2 s,
    # 3.4 in 4 s; then 1.9 in 2 s.
    certain = MethodView("c", 4, Acceptance(0.6, 1.0), 64)
    assert order_of(MethodView("b", 4, Acceptance(0.6, 0.1), 64), certain) == ["c", "b"]
    assert order_of(MethodView("b", 4, Acceptance(0.9, 0.0), 64), certain) == ["b", "c"]


def test_the_slowest_row_is_that_of_the_smallest_accepted_share() -> None:
    """Not that of the smallest first rate: its drafts are right as a whole where they are."""
    rows = [RowView(0, "a", 4, Acceptance(0.5, 1.0)), RowView(1, "a", 4, Acceptance(0.7, 0.1))]
    for second in (rows[1], replace(rows[1], draft_length=1)):  # 0.7 of its 1, and slow all the same
        chains = Racing(LADDER).assign([rows[0], second], [view("b", max_rows=1)], 100)
        assert [len(chains[n]) for n in (0, 1)] == [1, 2]


# ---- races: what rounds change --------------------------------------------------------------------------------------


def raced(budget: int = 100, views: list[MethodView] = VIEWS[:3]) -> Racing:
    """A row of "a" against "b" (and "c", "d")."""
    racing = Racing(LADDER)
    racing.assign([row()], views, budget)
    return racing


def names(racing: Racing, budget: int = 100, views: list[MethodView] = VIEWS[:3]) -> list[str]:
    return [name for name, _ in racing.assign([row()], views, budget)[0]]


def play(racing: Racing, rounds: int, request: int = 0, **accepted: int) -> bool:
    """So many rounds alike; whether chains are to change now, which they were not before the last round."""
    for _ in range(rounds):
        assert not racing.changed
        racing.record(request, accepted)
    return racing.changed


def test_a_rows_own_rounds_change_its_place() -> None:
    racing, views, rows = Racing(LADDER), [view("b", max_rows=1)], [row(0, 0.7), row(1, 0.5)]
    assert [len(chains) for chains in racing.assign(rows, views, 100).values()] == [1, 2]
    play(racing, PATIENCE - 1, 0, a=0)
    play(racing, PATIENCE - 1, 1, a=4, b=0)
    chains = racing.assign(rows, views, 100)
    assert [len(chains[n]) for n in (0, 1)] == [2, 1]


def test_losers_are_dropped_after_losing_in_a_row() -> None:
    """Of equals the earliest wins."""
    racing = raced()
    assert not play(racing, PATIENCE // 2, a=2, b=2, c=1, d=2)
    assert not play(racing, 1, a=2, b=3, c=1, d=2)
    assert play(racing, PATIENCE - PATIENCE // 2 - 1, a=2, b=2, c=1, d=2) and names(racing) == ["a", "b"]
    assert play(racing, PATIENCE // 2 + 1, a=2, b=2) and names(racing) == ["a"]  # since it won
    racing = raced(views=VIEWS[1:3])  # "c" never beats the other challenger
    for n in range(2 * PROMOTION):
        racing.record(0, {"a": 4, "b": 0, "c": 0} if n % 2 and n < 2 * PROMOTION - 2 else {"a": 0, "b": 2, "c": 2})
    assert names(racing, views=VIEWS[1:3]) == ["a", "b"]


def test_dropped_chains_return_when_the_room_grows() -> None:
    racing = raced(budget=17)  # room for 16
    play(racing, PATIENCE, a=2, b=1, c=1, d=1)
    assert names(racing, 17) == names(racing, int(GROWTH * 16)) == ["a"]
    assert names(racing, int(GROWTH * 16) + 1) == ["a", "b", "c", "d"]
    assert not play(racing, PATIENCE - 1, a=2, b=1, c=1, d=1)  # they have all their patience again


@pytest.mark.parametrize(("before", "returns"), [(4, True), (1, False)])
def test_dropped_chains_return_when_the_acceptance_falls(before: int, returns: bool) -> None:
    racing = raced()
    play(racing, PATIENCE, a=before, b=0, c=0, d=0)
    assert names(racing) == ["a"]
    assert not play(racing, 5 * PATIENCE, a=before)
    rounds = 0
    while not racing.changed and rounds < 50:
        racing.record(0, {"a": 1})
        rounds += 1
    assert (1 < rounds < 50) is returns and len(names(racing)) == (4 if returns else 1)


def test_a_steady_winner_becomes_the_primary() -> None:
    racing = raced(views=VIEWS)
    assert play(racing, PROMOTION, a=1, b=0, c=2, d=0)
    assert names(racing, views=VIEWS) == ["c", "a", "b", "d"]
    for _ in range(PATIENCE):  # the old primary starts with all its patience
        assert "a" in names(racing, views=VIEWS)
        racing.record(0, {"c": 2, "a": 2, "b": 1, "d": 1})
    assert "a" not in names(racing, views=VIEWS)
    racing.remove(0)  # and a new row of this request begins anew
    assert racing.changed and names(racing, views=VIEWS)[0] == "a"
    racing = raced()
    for _ in range(20 * PROMOTION):  # the primary takes its wins back
        racing.record(0, {"a": 1, "b": 2, "c": 0, "d": 0})
        racing.record(0, {"a": 1, "b": 1, "c": 0, "d": 0})
    assert racing.assign([row()], VIEWS, 100)[0][:2] == [("a", 4), ("b", 4)]


def promoted(draft_length: int = 8, max_rows: int = 64) -> tuple[Racing, list[MethodView]]:
    """Row 0 of "a" that has "c" as its primary now."""
    views = [view("c", draft_length, max_rows=max_rows)]
    racing = raced(views=views)
    play(racing, PROMOTION, a=1, c=2)
    assert names(racing, views=views)[0] == "c"
    return racing, views


def test_a_promoted_primary_is_of_one_row_and_keeps_to_budget_and_places() -> None:
    racing, views = promoted()
    chains = racing.assign([row(0), row(1)], views, 100)
    assert [chains[n][0][0] for n in (0, 1)] == ["c", "a"]
    chains = racing.assign([row(0, method="b"), row(1, method="b")], views, 100)
    assert [chains[n][0][0] for n in (0, 1)] == ["c", "b"]
    assert racing.assign([row(method="c", draft_length=5)], views, 100)[0] == [("c", 5)]  # the control says its γ
    racing, views = promoted()
    assert racing.assign([row()], views, 8)[0] == [("c", 7)]
    assert racing.assign([row()], views, 1)[0] == [("c", 4)]  # what the control's own would take
    assert racing.assign([row(draft_length=3)], views, 1)[0] == [("a", 3)]  # 3 is less than half of 8
    chains = racing.assign([row(0), row(1)], [*views, view("a", max_rows=2)], 100)
    assert chains == {0: [("c", 8), ("a", 4)], 1: [("a", 4), ("c", 8)]}  # it freed its place at "a"
    racing, views = promoted(max_rows=1)
    others = [row(n, 0.0, "c", 4) for n in (1, 2)]  # the control has more rows on it than it serves
    assert racing.assign([row(), *others], views, 100)[0] == [("a", 4)]


def test_a_failed_drafter_leaves_every_row_with_its_acceptance() -> None:
    racing, views = promoted()
    play(racing, PATIENCE, c=8)
    rows, more = [row(0), row(1, 0.6)], [*views, view("b", max_rows=1)]
    assert "b" in dict(racing.assign(rows, more, 100)[1])
    racing.drop("c")
    assert racing.changed
    racing.record(1, {"a": 1})
    assert "b" in dict(racing.assign(rows, more, 100)[0])
    assert racing.assign([row(0), row(1), row(2)], views, 100) == {n: [("a", 4)] for n in range(3)}


def test_a_row_that_a_racer_leads_is_as_slow_as_that_one() -> None:
    """The control drafts nothing for row 0; what was promoted there is right, so row 1 is the slowest."""
    racing, own = Racing(LADDER), row(0, 0.0, "none", 0)
    assert racing.assign([own], [view("d")], 4) == {0: [("d", 3)]} and racing.assign([], VIEWS, 100) == {}
    for _ in range(2 * PROMOTION):
        racing.assign([own], [view("d")], 100)
        racing.record(0, {"d": 4})
    chains = racing.assign([own, row(1, 0.2)], [view("d"), view("b", max_rows=1)], 100)
    assert "b" in dict(chains[1]) and chains[0] == [("d", 4)]


def test_rounds_of_the_old_primary_alone_are_no_race() -> None:
    """The judge lets the control's primary draft alone: a promoted one cannot lose rounds that it is not in."""
    racing, views = promoted()
    play(racing, PROMOTION + 1, a=1)
    assert names(racing, views=views)[0] == "c"


class Asked(Ladder):
    """A ladder that keeps the acceptance that it was asked for."""

    def best_draft_length(self, method: str, expected: Any, batch: int) -> tuple[int, float]:
        vars(self)["acceptance"] = expected.__self__
        return 4, 1.0


# After many rounds 20 of them count, 1 / (1 - RECENT), and one position of each kind as was expected: at 0.5.
@pytest.mark.parametrize(
    ("rounds", "accepted", "drafted", "first", "further"),
    [
        (300, 0, 4, 0.5 / 21, 0.5),  # further ones were not judged
        (300, 1, 4, 20.5 / 21, 0.5 / 21),
        (300, 2, 4, 20.5 / 21, 20.5 / 41),
        (300, 4, 4, 20.5 / 21, 60.5 / 61),  # all of γ: none after them was judged
        (300, 2, 2, 20.5 / 21, 20.5 / 21),  # it was drafted shorter than laid out
        (
            1,
            0,
            4,
            (20 * 0.5 * RECENT + 0.5) / (20 * RECENT + 1 + 1),
            0.5,
        ),  # at first as if of 20 positions: a round or two say little
    ],
)
def test_recent_acceptance(rounds: int, accepted: int, drafted: int, first: float, further: float) -> None:
    ladder = Asked(LADDER.rungs, "")
    racing = Racing(ladder)
    racing.assign([row()], [view("b")], 100)
    for _ in range(rounds):
        racing.record(0, {"b": accepted}, {} if drafted == 4 else {"b": drafted})
    racing.assign([row()], [view("b")], 100)
    assert vars(ladder)["acceptance"] == pytest.approx((first, further), abs=1e-4)


# ---- SA Algorithm 3: which requests the workers that were freed draft for -----------------------------------------


def test_algorithm_3_by_hand() -> None:
    """Methods x and y, b_max = 2. Worker 0 has the initial method x for all of p, q, r; worker 1 was freed earlier and
    has y for r, with one place left; 2 and 3 are freed now, 2 from method y, where it had p."""
    added = greedy_assignments(
        requests={"p": 0.5, "q": 0.2, "r": 0.3},
        methods=["x", "y"],
        freed=[2, 3],
        workers_of={"x": [0], "y": [1, 2]},
        load={0: 3, 1: 1, 2: 1},
        max_batch=2,
        ladder_order=["y", "x"],
        assigned={("p", "x"): 0, ("q", "x"): 0, ("r", "x"): 0, ("r", "y"): 1, ("p", "y"): 2},
    )
    # Lines 1-3: 2 leaves y, so x and y have one worker each: the ladder gives it to y; then 3 goes to x.
    # Lines 4-10: all have x already. y: q, the slowest, takes the place at 1; r has y; p goes to 2, where it was void.
    assert added == {("q", "y"): 1, ("p", "y"): 2}


def test_algorithm_3_spreads_workers_evenly() -> None:
    requests = {n: n / 100 for n in range(50)}
    added = greedy_assignments(requests, ["x", "y", "z"], range(8), {"z": ["w"]}, {"w": 0}, 5, ["z", "y", "x"], {})
    workers = {m: {w for (_, method), w in added.items() if method == m} for m in "xyz"}
    assert {m: len(found) for m, found in workers.items()} == {"x": 3, "y": 3, "z": 3}
    assert workers["y"] == {0, 3, 6}  # y and x have fewer than z, and y is the better one


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `greedy_assignments` whose loads are those of its assignments."""
    methods = [f"m{n}" for n in range(draw(st.integers(1, 4)))]
    method_of = dict(enumerate(draw(st.lists(st.sampled_from([None, *methods]), min_size=1, max_size=8))))
    acceptances = draw(st.lists(st.sampled_from([0.1, 0.4, 0.7]) | st.floats(0, 1), max_size=10))
    requests = {f"r{n}": acceptance for n, acceptance in enumerate(acceptances)}
    max_batch, load, assigned = draw(st.integers(1, 4)), Counter[int](), dict[tuple[str, str], int]()
    for worker, method in method_of.items():
        for request in draw(st.lists(st.sampled_from(sorted(requests)), max_size=max_batch)) if requests else ():
            if method and (request, method) not in assigned:
                assigned[request, method] = worker
                load[worker] += 1
    return {
        "requests": requests,
        "methods": methods,
        "freed": [worker for worker, method in method_of.items() if method is None or draw(st.booleans())],
        "workers_of": {m: [w for w, method in method_of.items() if method == m] for m in methods},
        "load": load,
        "max_batch": max_batch,
        "ladder_order": draw(st.permutations(methods)),
        "assigned": assigned,
    }


@settings(deadline=None, max_examples=60, derandomize=True)
@given(clusters())
def test_algorithm_3_properties(cluster: dict[str, Any]) -> None:
    requests, freed, assigned = cluster["requests"], set(cluster["freed"]), cluster["assigned"]
    added = greedy_assignments(**cluster)
    standing = {pair for pair, worker in assigned.items() if worker not in freed}
    assert not standing & set(added)
    load = Counter({w: n for w, n in cluster["load"].items() if w not in freed}) + Counter(added.values())
    assert all(count <= cluster["max_batch"] for count in load.values())
    of_worker: dict[int, set[str]] = {}
    for (_, method), worker in added.items():
        of_worker.setdefault(worker, set()).add(method)
        assert worker in freed or worker in cluster["workers_of"][method]
    assert all(len(methods) == 1 for methods in of_worker.values())
    for method in cluster["methods"]:  # whoever went without is no slower than anyone who got the method
        served = [requests[r] for r, m in added if m == method]
        left = [requests[r] for r in requests if (r, method) not in added and (r, method) not in standing]
        assert not served or not left or max(served) <= min(left)
