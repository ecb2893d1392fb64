"""SA Algorithm 3 within one process: chains under a budget, dropped and promoted by what they win."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from spec_trl.scheduling.acceptance import Acceptance
from spec_trl.scheduling.assignment import FALL, GROWTH, PATIENCE, PROMOTION, YARDSTICK, MethodView, Racing, RowView
from spec_trl.scheduling.ladder import Ladder, Rung


SPEEDUPS = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 8.0}  # seconds of a round: "a" is the best at equal acceptance
LADDER = Ladder(tuple(Rung(method, 1, 4, 0.5, seconds, 1.0) for method, seconds in SPEEDUPS.items()), "")


def row(request: int = 0, acceptance: float = 0.5, method: str = "a", draft_length: int = 4) -> RowView:
    return RowView(request, method, draft_length, Acceptance.geometric(acceptance))


def view(name: str, draft_length: int = 4, acceptance: float = 0.5, max_rows: int = 64) -> MethodView:
    return MethodView(name, draft_length, Acceptance.geometric(acceptance), max_rows)


VIEWS = [view(name) for name in "dcba"]


def accepted_share(row: RowView) -> float:
    return row.acceptance.block_efficiency(YARDSTICK)


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
        slowest = min(rows, key=accepted_share).request
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


# After many rounds 20 of them count, 1 / (1 - RECENT), and one position of each kind as was expected: at 0.5.
@pytest.mark.parametrize(
    ("accepted", "first", "further"),
    [
        (0, 0.5 / 21, 0.5),  # of further ones nothing is heard
        (1, 20.5 / 21, 0.5 / 21),
        (2, 20.5 / 21, 20.5 / 41),
        (4, 20.5 / 21, 60.5 / 61),  # all of γ: behind them nothing was judged
    ],
)
def test_recent_acceptance(accepted: int, first: float, further: float) -> None:
    """Positions behind the first rejection do not count."""
    racing = raced()
    for _ in range(300):
        racing.record(0, {"a": accepted})
    assert racing.remove(0)["a"].acceptance == pytest.approx((first, further), abs=1e-4)


def test_a_standing_begins_at_what_was_expected() -> None:
    """As if by 20 positions, and one that stays: a round or two say little."""
    racing, expected = Racing(LADDER), Acceptance(0.3, 0.8)
    racing.assign([RowView(0, "a", 4, expected)], [MethodView("b", 4, Acceptance(0.6, 0.1), 64)], 100)
    standings = racing.remove(0)
    assert standings["a"].acceptance == pytest.approx(expected)
    assert standings["b"].acceptance == pytest.approx((0.6, 0.1))
    standings["a"].add(0, 4)
    assert standings["a"].acceptance == pytest.approx(((19 * 0.3 + 0.3) / 21, 0.8))


def test_drafts_that_are_right_all_or_none() -> None:
    """Half of the rounds accept 4 of 4, the others nothing: half of the draft, not 4 of 5 positions."""
    racing = raced()
    for _ in range(300):
        racing.record(0, {"a": 4})
        racing.record(0, {"a": 0})
    acceptance = racing.remove(0)["a"].acceptance
    assert acceptance.further > 0.97
    assert acceptance.block_efficiency(4) == pytest.approx(3, abs=0.2)


def test_methods_are_ranked_by_tokens_of_their_own_draft() -> None:
    """A round of "b" takes half as long as one of "c", whose further tokens are as good as certain."""

    def order(b: Acceptance, c: Acceptance) -> list[str]:
        views = [MethodView("b", 4, b, 64), MethodView("c", 4, c, 64)]
        return [name for name, _ in Racing(LADDER).assign([row()], views, 100)[0][1:]]

    assert order(Acceptance(0.6, 0.1), Acceptance(0.6, 1.0)) == ["c", "b"]  # 1.67 tokens in 2 s, 3.4 in 4 s
    assert order(Acceptance(0.9, 0.0), Acceptance(0.6, 1.0)) == ["b", "c"]  # 1.9 in 2 s


def test_the_slowest_row_is_that_of_the_smallest_accepted_share() -> None:
    """Not that of the smallest first rate: its drafts are right as a whole where they are."""
    rows = [RowView(0, "a", 4, Acceptance(0.5, 1.0)), RowView(1, "a", 4, Acceptance(0.7, 0.1))]
    chains = Racing(LADDER).assign(rows, [view("b", max_rows=1)], 100)
    assert [len(chains[n]) for n in (0, 1)] == [1, 2]
    shorter = [rows[0], replace(rows[1], draft_length=1)]  # 0.7 of its 1, and slow all the same
    chains = Racing(LADDER).assign(shorter, [view("b", max_rows=1)], 100)
    assert [len(chains[n]) for n in (0, 1)] == [1, 2]


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


def test_a_row_that_a_racer_leads_is_as_slow_as_that_one() -> None:
    """The control drafts nothing for row 0; what was promoted there is right, so row 1 is the slowest."""
    racing, own = Racing(LADDER), row(0, 0.0, "none", 0)
    racing.assign([own], [view("d")], 100)
    for _ in range(2 * PROMOTION):
        racing.record(0, {"d": 4})
        racing.assign([own], [view("d")], 100)
    assert racing.primary_of(0) == "d"
    chains = racing.assign([own, row(1, 0.2)], [view("d"), view("b", max_rows=1)], 100)
    assert "b" in dict(chains[1]) and "b" not in dict(chains[0])


def test_a_longer_round_than_laid_out_counts_its_refusals() -> None:
    """Room for 2; alone it drafted 4, of which 2 were accepted each time: 2 of 3 positions."""
    racing = Racing(LADDER)
    racing.assign([row(0, 0.9, draft_length=2)], [], 3)
    for _ in range(60):
        racing.record(0, {"a": 2}, {"a": 4})
    assert racing.remove(0)["a"].acceptance.further == pytest.approx(0.5, abs=0.1)


def test_rounds_of_the_old_primary_alone_are_no_race() -> None:
    """The judge has the control's primary draft by itself: a promoted one cannot lose rounds that it is not in."""
    racing, views = promoted()
    racing.assign([row()], views, 100)
    assert racing.primary_of(0) == "c"
    for _ in range(PROMOTION + 1):
        racing.record(0, {"a": 1})
    racing.assign([row()], views, 100)
    assert racing.primary_of(0) == "c"
