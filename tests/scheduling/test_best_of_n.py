"""Best-of-N over simulated machines: who drafts first, and when that stops."""

import itertools
from collections import Counter
from typing import Any

import pytest

from spec_trl.scheduling.best_of_n import BestOfN
from spec_trl.scheduling.control import Candidate
from spec_trl.scheduling.selection import AcceptanceHistory, Selection
from spec_trl.scheduling.toggle import PROBE_ROUNDS, WINDOW
from tests.scheduling.machine import Machine, at, by_method, history_of
from tests.scheduling.test_ladder import GROWING


# ---- the primary ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("drafting", "first"), [(0.3, ("self", 4)), (1.0, ("model", 4))])
def test_first_choice_is_that_of_history_and_ladder(drafting: float, first: tuple[str, int]) -> None:
    rates, keys = {"self": 0.9, "ngram": 0.2, "model": 0.6}, ["a", "b", "c", "d"]
    history = history_of(1000, **rates)
    control = Machine({"self": drafting, "ngram": 0.0, "model": 0.1}, by_method(**rates)).control(history)
    control.begin(4, keys)
    choice = Selection(control.ladder, history, keys, 4, list(rates)).common
    (chain,) = control.plan(range(4), 100.0, 0)
    # By hand: "self" makes 4.10 tokens of γ = 4 in 1 + 4 x 0.3 s, "model" 2.31 of γ = 4 in 1.4 s.
    assert (control.candidates[chain.which].name, chain.draft_length) == (choice.method, choice.draft_length) == first


def test_draft_length_and_tokens_are_those_of_the_batchs_prompts() -> None:
    """γ + 1 where "copy" is drafted for right, else 1. Of prompts in turns τ is the harmonic mean, of those
    in flight together the smallest, for rounds of one row are as dear as those of four."""
    history = AcceptanceHistory()
    history.record("self", "copy", at(1.0, 10**6))
    history.record("self", "story", at(0.0, 10**6))
    control = Machine({"self": 0.2}, by_method(self=0.5)).control(history)
    pair, four = ["copy", "story"], ["copy"] * 3 + ["story"]
    for rows, prompts, tau in (
        (4, ["copy"], 9.0), (4, ["story"], 1.0), (4, pair, 1.0), (4, four, 1.0), (1, pair, 1.5), (1, four, 2.0),
    ):  # fmt: skip
        control.begin(rows, prompts)
        (candidate,) = control.candidates
        assert candidate.draft_length == (8 if tau == 9 else 2)
        assert candidate.block_efficiency == pytest.approx(tau, abs=0.01)


def test_a_drafter_of_some_rows_alone_stops() -> None:
    """Half of the rows leave the others behind by drafts that slow every round down: the last row ends no sooner."""
    machine = Machine(
        {"ngram": 0.1}, lambda name, request: 0.9 if request % 2 else 0.0, lambda tokens: 1 + tokens / 50
    )
    control = machine.control(race=False)
    assert 4 <= machine.run(control, [200] * 16).drafting_rounds() <= WINDOW
    assert machine.seconds < 1.1 * 200 * (1 + 16 / 50)
    assert machine.run(control, [200] * 16).drafting_rounds() <= WINDOW
    assert machine.run(control, [200] * 16, capacity=1).drafting_rounds()  # in turns: each has its share


@pytest.mark.parametrize("race", [False, True])
def test_a_drafter_of_all_rows_alike_takes_over(race: bool) -> None:
    """In a round "model" gains most; "self" brings the last row to its end soonest."""
    machine = Machine(
        {"self": 0.05, "model": 0.05}, lambda name, request: 0.7 if name == "self" else 0.95 * (request % 2)
    )
    control = machine.control(race=race)
    machine.run(control, [1200] * 8)
    primaries = [plan[0].which for _, _, plan in machine.plans if plan]
    if not race:  # rows that a racer leads have none of the primary
        assert sum(a != b for a, b in itertools.pairwise(primaries)) <= 2  # both had their trial
    machine.run(control, [300] * 8)
    primaries = [plan[0].which for _, _, plan in machine.plans if plan]
    assert primaries.count(0) > 0.7 * len(primaries) and machine.seconds < 200


@pytest.mark.parametrize("failing", [None, (0, 1)])
def test_help_that_failed_is_none(failing: tuple[int, int] | None) -> None:
    """N-gram serves half of the rows, history the others: with nobody left to draft for those, n-gram stops."""
    machine = Machine(
        {"ngram": 0.1, "history": 0.1},
        lambda name, request: 0.9 * (request % 2 if name == "ngram" else 1 - request % 2),
        lambda tokens: 1 + tokens / 50,
    )
    control = machine.control(race=False)
    machine.run(control, [200] * 16)  # prompts have methods of their own by now
    machine.run(control, [200] * 16, failing=failing)
    drafted = sum(0 in drafters for drafters in machine.drafters())
    assert drafted <= WINDOW if failing else drafted > 2 * WINDOW


def test_the_ladders_times_stand_next_to_those_of_the_roofline() -> None:
    """An autoregressive round takes the same for a candidate that brings a roofline and one that has none."""
    machine = Machine({"self": 0.5, "ngram": 0.0}, by_method())
    candidates = [Candidate("self", 5, 5.0, 1000), Candidate("ngram", 5, 5.0, 1000, GROWING, False)]
    control = BestOfN(candidates, machine.ladder(), AcceptanceHistory(), roofline=GROWING)
    for _ in range(2):  # rollouts
        control.begin(4, ["a", "b", "c", "d"])
        own, lookup = (candidate.roofline for candidate in control.candidates)
        assert own is not None and lookup is GROWING
        gamma = candidates[0].draft_length
        for batch, length in ((1, 10.0), (4, 100.0), (100, 1e4)):
            plain = own.target_seconds(batch, length)
            assert plain == lookup.target_seconds(batch, length)
            assert own.cycle_seconds(batch, length, gamma) == pytest.approx((1 + 0.5 * gamma) * plain)


def test_measuring_has_the_last_word() -> None:
    """History praises one method, and rounds find that another one is the better."""
    machine = Machine({"self": 0.1, "ngram": 0.0}, by_method(self=0.9, ngram=0.1))
    machine.run(machine.control(history_of(1000, ngram=0.95, self=0.8), race=False), [400])
    assert machine.drafters()[0] == {1} and machine.drafters()[-1] == {0}


@pytest.mark.parametrize("best", ["self", "ngram", "model"])
def test_best_method_is_found_and_known_from_then_on(best: str) -> None:
    rates = {name: 0.9 if name == best else 0.3 for name in ("self", "ngram", "model")}
    machine = Machine({"self": 0.1, "ngram": 0.02, "model": 0.1}, by_method(**rates))
    history, index = AcceptanceHistory(), list(rates).index(best)
    machine.run(machine.control(history, race=False), [500] * 4)
    assert machine.drafters()[-1] == {index}
    machine.run(machine.control(history, race=False), [100] * 4)
    assert all(drafters == {index} for drafters in machine.drafters())


@pytest.mark.parametrize(("tokens", "race"), [([200] * 4, True), ([20, 20, 20, 60, 60, 100], False)])
def test_rounds_that_capture_forwards_decide_nothing(tokens: list[int], race: bool) -> None:
    """Each shape's first rounds take much longer, the baseline's and the drafters'. At first a drafter that copies
    nothing is on, which the baseline would flatter; later on deliveries count."""
    drafters: list[list[Counter[int]]] = []
    for capturing in (0.0, 10.0, 100.0):
        machine = Machine({"self": 0.1, "ngram": 0.02}, by_method(self=0.9, ngram=0.0), capturing=capturing)
        control = machine.control(race=race)
        rollouts = [machine.run(control, tokens).drafters() for _ in range(3)]
        drafters.append([Counter(itertools.chain.from_iterable(rollout)) for rollout in rollouts])
        for rollout, usual in zip(drafters[-1], drafters[0], strict=True):
            assert rollout[0] > 8 and rollout[1] <= usual[1] + WINDOW


@pytest.mark.parametrize(("name", "b"), [("self", (2, 3)), ("ngram", (2, 3)), ("model", (1, 1)), ("history", (1, 2))])
def test_history_has_each_verdict(name: str, b: tuple[int, int]) -> None:
    """A round of γ with a accepted is a + 1 positions, at most γ. What a lookup did not find counts as a wrong token;
    what a network had no room for does not, nor does what lies after a row's end."""
    history = AcceptanceHistory(decay=1.0)
    control = Machine({name: 0.0}, by_method()).control(history)
    control.begin(4, ["a", "b", "c", "d"])
    (chain,) = control.plan([0, 1, 2, 3], 10.0, 0)
    gamma, accepted = chain.draft_length, 1 + b[0]
    assert gamma == 8
    drafted = 8 if accepted == 3 else 2
    control.record_rows([0, 1, 2, 3], {0: [gamma, accepted, 3, 0]}, {0: [gamma, drafted, 3, 2]})
    control.record(gamma, 1.0, 17)
    control.plan([0, 1, 3], 10.0, 0)  # the third has ended
    control.finish()
    found = {key: own[name][1:] for key, own in history.state_dict()["prompts"]}
    # Accepted and judged: of first tokens, of further ones.
    assert found == {"a": [1, 1, 7, 7], "b": [1, 1, *b], "c": [1, 1, 2, 2], "d": [0, 1, 0, 0]}


# ---- what rollouts delivered ----------------------------------------------------------------------------------------


def test_what_rollouts_did_not_deliver_is_not_tried_again_soon() -> None:
    """Fourteen rows accept everything and leave two behind, which nobody can help. By all rounds the copy looks faster
    than plain decoding each time; only the end of the last row tells."""
    machine = Machine({"self": 0.1, "ngram": 0.0}, lambda name, request: (name == "self") * (request % 8 > 0) * 0.98)
    machine.verifying = lambda tokens: 1 + 0.01 * tokens
    history = AcceptanceHistory()
    control = machine.control(history)
    runs = [machine.run(control, [60] * 16, prompts=f"rollout {rollout}").seconds for rollout in range(12)]
    speedups = [60 * machine.verifying(16) / seconds for seconds in runs]
    assert speedups[0] < 0.8 and history.delivered("self", 16, False) < 0.5
    assert [speedup > 0.99 for speedup in speedups].count(False) == 2  # and once again, when it had faded


def deliveries(machine: Machine, tokens: list[int], history: AcceptanceHistory | None = None, **options: Any) -> Any:
    """What a rollout records: method, batch, until the last row, measured, expected."""
    history, recorded = history or AcceptanceHistory(), list[Any]()
    history.record_delivery = lambda *told: recorded.append(told)  # type: ignore[method-assign]
    machine.run(machine.control(history, race=options.pop("race", True)), tokens, **options)
    return recorded


def test_deliveries_are_of_batches_of_which_none_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({"self": 0.02}, by_method(self=0.9))
    recorded = deliveries(machine, [30] * 8 + [60, 60, 60, 240], capacity=4)
    assert [batch for _, batch, *_ in recorded] == [4, 1]
    assert all(measured == pytest.approx(expected, rel=0.15) for *_, measured, expected in recorded)
    assert not deliveries(machine, [200] * 4, failing=(5, 0))  # a drafter that failed is not judged by the rest
    monkeypatch.setattr(AcceptanceHistory, "delivered", lambda *asked: 0.1)
    control, plans = machine.control(), []
    for waiting in (1, 0):
        control.begin(4, ["a"] * (4 + waiting))
        plans.append(control.plan(range(4), 100.0, waiting))
    assert plans[0] and not plans[1]


@pytest.mark.parametrize("alone", [True, False])
def test_expected_is_what_the_choice_went_by(alone: bool) -> None:
    """Of two rows one is left behind, which the last row's account knows and the mean does not."""
    machine = Machine({"self": 0.02, "ngram": 0.0}, lambda name, request: 0.9 * request)
    name, batch, until_last_row, measured, expected = deliveries(machine, [200] * 2, race=not alone)[0]
    assert until_last_row == alone
    assert measured == pytest.approx(expected, rel=0.2) if alone else measured < 0.8 * expected


def test_nothing_is_blamed_for_the_trial_of_another() -> None:
    """The copy drafts, less well than it used to; n-gram, which nobody knows, has its trial in between and is of no
    use. What the copy delivers counts from when it drafts again."""
    machine = Machine({"self": 0.05, "ngram": 0.0}, by_method(self=0.8, ngram=0.0), lambda tokens: 1 + tokens / 32)
    recorded = deliveries(machine, [300] * 4, history_of(1000, self=0.95), race=False)
    drafters = [next(iter(names)) for names in machine.drafters() if names]
    assert [name for name, _ in itertools.groupby(drafters)] == [0, 1, 0]
    assert [name for name, *_ in recorded] == ["ngram", "self"]


@pytest.mark.parametrize(("share", "drafter"), [(1.0, 1), (0.3, 0)])
def test_a_rival_is_preferred_only_for_what_it_delivered(
    share: float, drafter: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has drafted for a window, and n-gram promises more."""
    monkeypatch.setattr(AcceptanceHistory, "delivered", lambda self, method, *_: share if method == "ngram" else 1.0)
    machine = Machine({"self": 0.02, "ngram": 0.0}, by_method(self=0.5, ngram=0.8))
    machine.run(machine.control(history_of(1000, self=0.95, ngram=0.8), race=False), [400])
    assert machine.drafters()[PROBE_ROUNDS + 2 * WINDOW] == {drafter}


# ---- rows with methods of their own -----------------------------------------------------------------------------


def mostly_self(name: str, request: int) -> float:
    """All requests are easier for "self" but the first, which is so for "ngram", by a speedup of 1.6."""
    return {"self": 0.7, "ngram": 0.8}[name] if request == 0 else {"self": 0.95, "ngram": 0.1}[name]


def test_prompts_that_favour_another_method_get_it() -> None:
    machine, history = Machine({"self": 0.02, "ngram": 0.0}, mostly_self), AcceptanceHistory(decay=1.0)
    for request, name in itertools.product(range(6), machine.drafting):
        history.record(name, f"prompt {request}", at(mostly_self(name, request), 10_000))
    machine.run(machine.control(history, race=False), [200] * 6)
    several = [plan for rows, _, plan in machine.plans if len(rows) == 6 and len(plan) > 1]
    assert several and not machine.verified_in_races()
    assert all({chain.which: chain.rows for chain in plan} == {0: (1, 2, 3, 4, 5), 1: (0,)} for plan in several)
    machine.run(machine.control(history, race=False, margin=1.0), [200] * 6)
    assert all(len(plan) <= 1 for _, _, plan in machine.plans) and {0} in machine.drafters()
    machine.run(machine.control(history, race=False), [200] * 6, failing=(0, 1))
    assert set().union(*machine.drafters()) == {0}  # one that failed is nobody's own
    machine.run(machine.control(history, budget=1000), [200] * 6, capacity=3)  # while others wait
    rounds = zip(machine.plans, machine.widths(), strict=True)
    waiting = [(len(plan), most) for (_, waiting, plan), (_, _, most) in rounds if waiting]
    assert {most for _, most in waiting} <= {0, 1} and max(count for count, _ in waiting) == 2
