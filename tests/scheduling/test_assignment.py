"""SA Algorithm 3, and its form within one process: chains under a budget, dropped and promoted by what they win."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from spec_trl.scheduling.assignment import (
    FALL,
    GROWTH,
    PATIENCE,
    PROMOTION,
    MethodView,
    Racing,
    RowView,
    greedy_assignments,
)
from spec_trl.scheduling.ladder import Ladder, Rung


SPEEDUPS = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 8.0}  # seconds of a round: "a" is the best at equal acceptance
LADDER = Ladder(tuple(Rung(method, 1, 4, 0.5, seconds, 1.0) for method, seconds in SPEEDUPS.items()), "")


# Methods x and y, b_max = 2. Worker 0 has the initial method x for all of p, q, r; worker 1 was freed earlier and has
# y for r, with one place left; 2 and 3 are freed now, 2 from method y, where it had p.
def test_algorithm_3_by_hand() -> None:
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


def test_algorithm_3_gives_all_methods_to_the_slowest_first() -> None:
    acceptance = {"p": 0.9, "q": 0.1, "r": 0.5, "s": 0.1}
    added = greedy_assignments(acceptance, ["x", "y"], [1, 2, 3], {}, {}, 1, ["x", "y"], {})
    # 1 → x, 2 → y, 3 → x: two places at x, one at y; q stands before s.
    assert added == {("q", "x"): 1, ("s", "x"): 3, ("q", "y"): 2}


def random_cluster(seed: int) -> dict[str, Any]:
    """Arguments of `greedy_assignments` whose loads are those of its assignments."""
    rng = random.Random(seed)
    methods = [f"m{n}" for n in range(rng.randint(1, 4))]
    workers = list(range(rng.randint(1, 9)))
    requests = {f"r{n}": rng.choice([0.1, 0.4, 0.7, rng.random()]) for n in range(rng.randint(0, 12))}
    max_batch = rng.randint(1, 4)
    method_of = {worker: rng.choice([None, *methods]) for worker in workers}
    load, assigned = Counter[int](), {}
    for worker, method in method_of.items():
        for request in requests:
            if method and rng.random() < 0.3 and (request, method) not in assigned and load[worker] < max_batch:
                assigned[request, method] = worker
                load[worker] += 1
    order = list(methods)
    rng.shuffle(order)
    return {
        "requests": requests,
        "methods": methods,
        "freed": [worker for worker in workers if method_of[worker] is None or rng.random() < 0.2],
        "workers_of": {m: [w for w in workers if method_of[w] == m] for m in methods},
        "load": load,
        "max_batch": max_batch,
        "ladder_order": order,
        "assigned": assigned,
    }


@pytest.mark.parametrize("seed", range(60))
def test_algorithm_3_properties(seed: int) -> None:
    cluster = random_cluster(seed)
    requests, freed, assigned = cluster["requests"], set(cluster["freed"]), cluster["assigned"]
    added = greedy_assignments(**cluster)
    assert added == greedy_assignments(**cluster)
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


def test_algorithm_3_spreads_workers_evenly() -> None:
    requests = {n: n / 100 for n in range(50)}
    added = greedy_assignments(requests, ["x", "y", "z"], range(8), {"z": ["w"]}, {"w": 0}, 5, ["z", "y", "x"], {})
    workers = {m: {w for (_, method), w in added.items() if method == m} for m in "xyz"}
    assert {m: len(found) for m, found in workers.items()} == {"x": 3, "y": 3, "z": 3}
    assert workers["y"] == {0, 3, 6}  # y and x have fewer than z, and y is the better one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": []}, "methods is empty"),
        ({"ladder_order": ["x"]}, r"ladder_order=\['x'\] lacks \['y'\]"),
        ({"max_batch": 0}, "max_batch=0 is out of range"),
    ],
)
def test_algorithm_3_bad_arguments(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = dict(
        requests={}, methods=["x", "y"], freed=[], workers_of={}, load={}, max_batch=1, ladder_order=["x", "y"],
        assigned={},
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        greedy_assignments(**(arguments | change))


def row(request: int = 0, acceptance: float = 0.5, method: str = "a", draft_length: int = 4) -> RowView:
    return RowView(request, method, draft_length, acceptance)


def view(name: str, draft_length: int = 4, acceptance: float = 0.5, max_rows: int = 64) -> MethodView:
    return MethodView(name, draft_length, acceptance, max_rows)


VIEWS = [view(name) for name in "dcba"]


def width(chains: dict[int, list[tuple[str, int]]]) -> int:
    return max(sum(length for _, length in row) for row in chains.values())


def random_race(seed: int, max_rows: int | None = None) -> tuple[list[RowView], list[MethodView]]:
    rng = random.Random(seed)
    rows = [
        row(request, rng.choice([0.2, 0.6, rng.random()]), method, rng.randint(1, 9) if method != "none" else 0)
        for request, method in enumerate(rng.choices(["a", "b", "none"], k=rng.randint(1, 9)))
    ]
    methods = [view(name, rng.randint(1, 16), rng.random(), max_rows or rng.randint(1, 9)) for name in "abcd"]
    return rows, methods


@pytest.mark.parametrize("seed", range(40))
def test_budget_and_pairs_over_a_whole_rollout(seed: int) -> None:
    """Rounds with random verdicts, rows that finish and join, drafters that fail: never more than the budget or the
    primaries alone need, never a method twice on a row or on more rows than it serves, never a failed one."""
    rng = random.Random(seed)
    rows, methods = random_race(seed)
    racing, failed, budget = Racing(LADDER), set[str](), rng.randint(1, 200)
    for step in range(60):
        if rows and rng.random() < 0.1:
            racing.remove(rows.pop(rng.randrange(len(rows))).request) if step else rows.pop()
        if rng.random() < 0.1:
            rows.append(row(1000 + step, rng.random(), rng.choice("ab"), rng.randint(1, 9)))
        if rng.random() < 0.02:
            failed.add(name := rng.choice("cd"))
            racing.drop(name)
        chains = racing.assign(rows, methods, budget)
        assert not racing.changed
        assert set(chains) == {r.request for r in rows}
        if not rows:
            continue
        alone = len(rows) * (1 + max(r.draft_length for r in rows))
        assert len(rows) * (1 + width(chains)) <= max(budget, alone)
        given, used = Counter[str](), Counter[str]()  # primaries by the control, all others
        for r in rows:
            names = [name for name, _ in chains[r.request]]
            assert len(set(names)) == len(names) and not failed & set(names)
            assert all(1 <= length <= 16 for _, length in chains[r.request])
            primary = racing.primary_of(r.request)
            assert primary == "none" or primary == names[0]
            given.update([r.method] if primary == r.method else [])
            used.update(names if primary != r.method else names[bool(r.draft_length) :])
        assert all(not used[m.name] or used[m.name] + given[m.name] <= m.max_rows for m in methods)
        for _ in range(rng.randint(1, 12)):
            for r in rows:
                racing.record(r.request, {name: rng.randint(0, n) for name, n in chains[r.request]})


@pytest.mark.parametrize("seed", range(40))
def test_monotone_in_budget(seed: int) -> None:
    """More budget takes no chain away and shortens none; where methods serve few rows this holds for the slowest."""
    for max_rows in (9, None):
        rows, methods = random_race(seed, max_rows)
        slowest = min(rows, key=lambda r: r.acceptance).request
        before: dict[int, dict[str, int]] = {r.request: {} for r in rows}
        for budget in range(0, 40 * len(rows), max(len(rows) // 2, 1)):
            chains = {request: dict(row) for request, row in Racing(LADDER).assign(rows, methods, budget).items()}
            for request in before if max_rows else [slowest]:
                for name, length in before[request].items():
                    assert chains[request].get(name, 0) >= length
            before = chains


@pytest.mark.parametrize("seed", range(40))
def test_places_go_to_the_lowest_acceptance(seed: int) -> None:
    rows, methods = random_race(seed)
    rows = [replace(r, method="a", draft_length=4) for r in rows]
    chains = Racing(LADDER).assign(rows, methods, 10**6)
    for m in methods[1:]:
        served = [r.acceptance for r in rows if m.name in dict(chains[r.request])]
        left = [r.acceptance for r in rows if m.name not in dict(chains[r.request])]
        assert len(served) == min(m.max_rows, len(rows))
        assert not left or max(served) <= min(left)
    counts = [len(chains[r.request]) for r in sorted(rows, key=lambda r: r.acceptance)]
    assert counts == sorted(counts, reverse=True)  # depth first


def test_depth_first_by_hand() -> None:
    rows = [row(0, 0.9), row(1, 0.1), row(2, 0.5)]
    chains = Racing(LADDER).assign(rows, [view("d", max_rows=2), view("c", max_rows=1), view("b", max_rows=1)], 10**6)
    assert chains == {
        0: [("a", 4)],
        1: [("a", 4), ("b", 4), ("c", 4), ("d", 4)],
        2: [("a", 4), ("d", 4)],
    }


# One row: the budget is 1 + the width. A chain of 4 is cut to 3 or 2, and one of 1 is not worth laying out.
@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (0, [("a", 4)]),
        (6, [("a", 4)]),
        (7, [("a", 4), ("b", 2)]),
        (9, [("a", 4), ("b", 4)]),
        (12, [("a", 4), ("b", 4), ("c", 3)]),
        (99, [("a", 4), ("b", 4), ("c", 4), ("d", 4)]),
    ],
)
def test_the_last_chain_is_cut(budget: int, expected: list[tuple[str, int]]) -> None:
    assert Racing(LADDER).assign([row()], VIEWS, budget) == {0: expected}
    many = [row(request) for request in range(5)]
    assert Racing(LADDER).assign(many, VIEWS, 5 * budget + 4) == dict.fromkeys(range(5), expected)


def test_a_row_without_a_primary() -> None:
    racing = Racing(LADDER)
    assert racing.assign([row(method="none", draft_length=0)], VIEWS[:1], 4) == {0: [("d", 3)]}
    assert racing.primary_of(0) == "none"
    assert racing.record(0, {"d": 0}) == "none"
    assert racing.record(0, {"d": 1}) == "d"
    assert Racing(LADDER).assign([], VIEWS, 100) == {}


def test_methods_stand_in_the_ladders_order_at_their_expected_acceptance() -> None:
    def order(**acceptances: float) -> list[str]:
        views = [view(name, acceptance=p) for name, p in acceptances.items()]
        return [name for name, _ in Racing(LADDER).assign([row()], views, 100)[0][1:]]

    assert order(d=0.5, c=0.5, b=0.5) == ["b", "c", "d"]
    assert order(b=0.1, c=0.95, d=0.5) == ["c", "b", "d"]


def test_a_rows_own_rounds_change_its_order() -> None:
    racing = Racing(LADDER)
    rows = [row(0), row(1)]
    racing.assign(rows, VIEWS, 100)
    for _ in range(PATIENCE - 1):
        racing.record(0, {"a": 4, "b": 0, "c": 4, "d": 0})
        racing.record(1, {"a": 4, "b": 4, "c": 4, "d": 0})
    chains = racing.assign(rows, VIEWS, 100)
    assert [name for name, _ in chains[0]] == ["a", "c", "b", "d"]
    assert [name for name, _ in chains[1]] == ["a", "b", "c", "d"]


def test_winner() -> None:
    racing = Racing(LADDER)
    racing.assign([row()], VIEWS, 100)
    assert racing.record(0, {"a": 2, "b": 2, "c": 1, "d": 2}) == "a"
    assert racing.record(0, {"a": 1, "b": 2, "c": 3, "d": 3}) == "c"
    assert racing.record(0, {"a": 0, "d": 1}) == "d"  # the others were not laid out
    standings = racing.remove(0)
    assert {name: (s.rounds, s.wins) for name, s in standings.items()} == {
        "a": (3, 1), "b": (2, 0), "c": (2, 1), "d": (3, 1),
    }  # fmt: skip


def test_rounds_without_a_rival_are_no_race() -> None:
    racing = Racing(LADDER)
    racing.assign([row()], VIEWS, 5)
    assert racing.record(0, {"a": 3}) == "a"
    assert racing.remove(0)["a"].rounds == 0


def raced(budget: int = 100, views: list[MethodView] = VIEWS[:3]) -> Racing:
    """A row of "a" against "b" (and "c", "d")."""
    racing = Racing(LADDER)
    racing.assign([row()], views, budget)
    return racing


def names(racing: Racing, budget: int = 100, views: list[MethodView] = VIEWS[:3]) -> list[str]:
    return [name for name, _ in racing.assign([row()], views, budget)[0]]


def test_losers_are_dropped_after_so_many_rounds_in_a_row() -> None:
    racing = raced()
    for n in range(PATIENCE):
        assert not racing.changed
        racing.record(0, {"a": 2, "b": 3 if n == PATIENCE // 2 else 2, "c": 1, "d": 2})
    assert racing.changed
    assert names(racing) == ["a", "b"]
    for n in range(PATIENCE // 2 + 1):  # since it won
        assert not racing.changed, n
        racing.record(0, {"a": 2, "b": 2})
    assert names(racing) == ["a"]


def test_a_chain_that_never_beats_the_other_challenger_is_dropped() -> None:
    racing = raced(views=VIEWS[1:3])
    for _ in range(PROMOTION - 1):
        racing.record(0, {"a": 0, "b": 2, "c": 2})
        racing.record(0, {"a": 4, "b": 0, "c": 0})
    for _ in range(2):
        racing.record(0, {"a": 0, "b": 2, "c": 2})
    assert names(racing, views=VIEWS[1:3]) == ["a", "b"]


def test_dropped_chains_return_when_the_room_grows() -> None:
    racing = raced(budget=17)  # room for 16
    for _ in range(PATIENCE):
        racing.record(0, {"a": 2, "b": 1, "c": 1, "d": 1})
    assert names(racing, 17) == ["a"]
    assert names(racing, int(GROWTH * 16)) == ["a"]
    assert names(racing, int(GROWTH * 16) + 1) == ["a", "b", "c", "d"]
    for _ in range(PATIENCE - 1):
        racing.record(0, {"a": 2, "b": 1, "c": 1, "d": 1})
    assert not racing.changed  # they have all their patience again


def test_dropped_chains_return_when_the_acceptance_falls() -> None:
    racing = raced()
    for _ in range(PATIENCE):
        racing.record(0, {"a": 4, "b": 0, "c": 0, "d": 0})
    assert names(racing) == ["a"]
    for _ in range(5 * PATIENCE):
        racing.record(0, {"a": 4})
    assert not racing.changed
    rounds = 0
    while not racing.changed:
        racing.record(0, {"a": 1})
        rounds += 1
        assert rounds < 50
    assert rounds > 1
    assert len(names(racing)) == 4
    level = raced()
    for _ in range(PATIENCE):
        level.record(0, {"a": 1, "b": 0, "c": 0, "d": 0})
    assert len(names(level)) == 1
    for _ in range(40):  # as low as it was
        level.record(0, {"a": 1})
    assert not level.changed
    assert 0 < FALL < 0.5


def test_a_steady_winner_becomes_the_primary() -> None:
    racing = raced(views=VIEWS)
    for n in range(PROMOTION):
        assert not racing.changed, n
        racing.record(0, {"a": 1, "b": 0, "c": 2, "d": 0})
    assert racing.changed and racing.primary_of(0) == "a"
    assert names(racing, views=VIEWS) == ["c", "a", "b", "d"]
    assert racing.primary_of(0) == "c"
    assert racing.record(0, {"c": 1, "a": 1, "b": 1, "d": 1}) == "c"
    for n in range(PATIENCE - 1):  # the old primary starts with all its patience
        assert "a" in names(racing, views=VIEWS), n
        racing.record(0, {"c": 2, "a": 1, "b": 1, "d": 1})
    assert "a" not in names(racing, views=VIEWS)


def test_the_primary_takes_wins_back() -> None:
    racing = raced()
    for _ in range(20 * PROMOTION):
        racing.record(0, {"a": 1, "b": 2, "c": 0, "d": 0})
        racing.record(0, {"a": 1, "b": 1, "c": 0, "d": 0})
    assert racing.assign([row()], VIEWS, 100)[0][:2] == [("a", 4), ("b", 4)]


def promoted(draft_length: int = 8, max_rows: int = 64) -> tuple[Racing, list[MethodView]]:
    """Row 0 of "a" that has "c" as its primary now."""
    views = [view("c", draft_length, max_rows=max_rows)]
    racing = raced(views=views)
    for _ in range(PROMOTION):
        racing.record(0, {"a": 1, "c": 2})
    assert names(racing, views=views) == ["c", "a"] if draft_length == 4 else ["c"]
    return racing, views


def test_rows_of_one_batch_have_primaries_of_their_own() -> None:
    racing, views = promoted()
    chains = racing.assign([row(0), row(1)], views, 100)
    assert [chains[n][0][0] for n in (0, 1)] == ["c", "a"]
    assert racing.assign([row(0, method="b"), row(1, method="b")], views, 100)[1][0][0] == "b"
    assert [racing.primary_of(n) for n in (0, 1)] == ["c", "b"]


def test_a_promotion_frees_the_place_at_the_old_method() -> None:
    racing, views = promoted()
    chains = racing.assign([row(0), row(1)], [*views, view("a", max_rows=2)], 100)
    assert chains == {0: [("c", 8), ("a", 4)], 1: [("a", 4), ("c", 8)]}


def test_a_promoted_primary_keeps_to_budget_and_places() -> None:
    racing, views = promoted()
    assert racing.assign([row()], views, 8)[0] == [("c", 7)]
    assert racing.assign([row()], views, 1)[0] == [("c", 4)]  # what the control's own would take
    assert racing.assign([row(draft_length=3)], views, 1)[0] == [("a", 3)]  # 3 is less than half of 8
    assert racing.primary_of(0) == "a"
    assert racing.assign([row()], views, 100)[0][0] == ("c", 8)
    racing, views = promoted(max_rows=1)
    others = [row(n, 0.0, "c", 4) for n in (1, 2)]  # the control has more rows on it than it serves
    assert racing.assign([row(), *others], views, 100)[0] == [("a", 4)]


def test_a_failed_drafter_leaves_every_row() -> None:
    racing, views = promoted()
    racing.assign([row(0), row(1)], views, 100)
    racing.drop("c")
    assert racing.changed
    racing.record(1, {"a": 1})
    assert racing.assign([row(0), row(1), row(2)], views, 100) == {n: [("a", 4)] for n in range(3)}


def test_a_failed_drafters_acceptance_is_no_rows_any_more() -> None:
    racing, views = promoted()
    for _ in range(PATIENCE):
        racing.record(0, {"c": 8})
    rows, views = [row(0), row(1, 0.6)], [*views, view("b", max_rows=1)]
    assert "b" in dict(racing.assign(rows, views, 100)[1])
    racing.drop("c")
    assert "b" in dict(racing.assign(rows, views, 100)[0])


def test_a_control_that_comes_to_the_promoted_method_says_its_draft_length() -> None:
    racing, views = promoted()
    assert racing.assign([row(0, method="c", draft_length=5)], views, 100)[0] == [("c", 5)]


@pytest.mark.parametrize(("accepted", "expected"), [(0, 0.0), (2, 2 / 3), (4, 1.0)])
def test_recent_acceptance(accepted: int, expected: float) -> None:
    """p of a geometric model: positions behind the first rejection do not count."""
    racing = raced()
    for _ in range(300):
        racing.record(0, {"a": accepted})
    assert racing.remove(0)["a"].acceptance == pytest.approx(expected, abs=1e-4)


def test_a_finished_row_is_forgotten() -> None:
    racing, views = promoted()
    standings = racing.remove(0)
    assert racing.changed and standings["c"].wins == PROMOTION
    assert racing.assign([row()], views, 100)[0][0] == ("a", 4)


def test_a_rows_rounds_decide_its_place() -> None:
    """Row 0 was expected to be the better one, and is not."""
    racing, views = Racing(LADDER), [view("b", max_rows=1)]
    rows = [row(0, 0.7), row(1, 0.5)]
    assert [len(chains) for chains in racing.assign(rows, views, 100).values()] == [1, 2]
    for _ in range(PATIENCE - 1):
        racing.record(0, {"a": 0})
        racing.record(1, {"a": 4, "b": 0})
    chains = racing.assign(rows, views, 100)
    assert [len(chains[n]) for n in (0, 1)] == [2, 1]


def test_a_method_the_ladder_lacks() -> None:
    with pytest.raises(ValueError, match="method='eagle3' is not in the ladder"):
        Racing(LADDER).assign([row()], [view("eagle3")], 100)
