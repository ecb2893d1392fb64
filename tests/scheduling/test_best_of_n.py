"""Best-of-N over simulated machines: who drafts first, and when that stops."""

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from spec_trl.scheduling.acceptance import AcceptanceCounts
from spec_trl.scheduling.best_of_n import BestOfN
from spec_trl.scheduling.control import Candidate, Chain
from spec_trl.scheduling.roofline import Coefficients, ModelConstants, Roofline
from spec_trl.scheduling.selection import AcceptanceHistory, select_method
from spec_trl.scheduling.toggle import PROBE_ROUNDS, WINDOW
from tests.scheduling.machine import Machine, at, by_method


# ---- the primary ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("drafting", "first"), [(0.3, ("self", 4)), (1.0, ("model", 4))])
def test_first_choice_is_that_of_history_and_ladder(drafting: float, first: tuple[str, int]) -> None:
    machine = Machine({"self": drafting, "ngram": 0.0, "model": 0.1}, by_method(self=0.9, ngram=0.2, model=0.6))
    history = AcceptanceHistory()
    for name, rate in (("self", 0.9), ("ngram", 0.2), ("model", 0.6)):
        history.record(name, "elsewhere", at(rate, 1000))
    control = machine.control(history)
    control.begin(4, ["a", "b", "c", "d"])
    choice = select_method(control.ladder, history, ["a", "b", "c", "d"], 4, ["self", "ngram", "model"])
    (chain,) = control.plan(range(4), 100.0, 0)
    # By hand: "self" makes 4.10 tokens of γ = 4 in 1 + 4 x 0.3 s, "model" 2.31 of γ = 4 in 1.4 s.
    assert (control.candidates[chain.which].name, chain.draft_length) == (choice.method, choice.draft_length) == first


def test_lookups_that_are_right_all_or_none_are_not_overrated() -> None:
    """8 of 8 in every second round are τ = 5. 8 of 9 judged positions would say 5.9, more than "self" at 6.1 in 1.16 s
    has to offer."""
    machine = Machine({"self": 0.02, "ngram": 0.0}, by_method(self=0.9, ngram=0.5))
    history = AcceptanceHistory()
    history.record("self", "elsewhere", at(0.9, 10_000))
    for accepted in (8, 0) * 5000:
        history.record("ngram", "elsewhere", AcceptanceCounts.of_round(accepted, min(accepted + 1, 8)))
    control = machine.control(history)
    control.begin(4, ["a", "b", "c", "d"])
    found = [(candidate.draft_length, candidate.block_efficiency) for candidate in control.candidates]
    assert found == [(8, pytest.approx(6.13, abs=0.01)), (8, pytest.approx(5.0, abs=0.01))]
    (chain,) = control.plan(range(4), 100.0, 0)
    assert chain.which == 0


def test_draft_length_and_tokens_are_those_of_the_batchs_prompts() -> None:
    """γ + 1 where "copy" is drafted for right, else 1. Of prompts in turns τ is the harmonic mean, of those
    in flight together the smallest, for rounds of one row are as dear as those of four."""
    machine = Machine({"self": 0.2}, by_method(self=0.5))
    history = AcceptanceHistory()
    history.record("self", "copy", at(1.0, 10**6))
    history.record("self", "story", at(0.0, 10**6))
    control = machine.control(history)
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
    history = AcceptanceHistory()
    control = machine.control(history, race=False)
    machine.run(control, [200] * 16)
    speculating = sum(map(bool, machine.drafters()))
    assert 4 <= speculating <= WINDOW and machine.seconds < 1.1 * 200 * (1 + 16 / 50)
    machine.run(control, [200] * 16)
    assert sum(map(bool, machine.drafters())) <= WINDOW
    machine.run(control, [200] * 16, capacity=1)  # one row after the other: each has its share
    assert any(machine.drafters())


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


@pytest.mark.parametrize("helped", [True, False])
def test_help_that_failed_is_none(helped: bool) -> None:
    """N-gram serves half of the rows, history the others: with nobody left to draft for those, n-gram stops."""
    machine = Machine(
        {"ngram": 0.1, "history": 0.1},
        lambda name, request: 0.9 * (request % 2 if name == "ngram" else 1 - request % 2),
        lambda tokens: 1 + tokens / 50,
    )
    control = machine.control(race=False)
    machine.run(control, [200] * 16)  # prompts have methods of their own by now
    plan = control.plan

    def fail_at_once(*args: Any) -> Sequence[Chain]:
        if not helped and not machine.plans:
            control.drop(1)
        return plan(*args)

    control.plan = fail_at_once  # type: ignore[method-assign]
    machine.run(control, [200] * 16)
    drafted = sum(0 in drafters for drafters in machine.drafters())
    assert drafted > 2 * WINDOW if helped else drafted <= WINDOW


GROWING = Roofline(  # a second, and one per 100 cached tokens
    ModelConstants("growing", 1.0, 0.0, 1.0, 0.0, 0.01),
    Coefficients(F_eff=1e9, BW_eff=1.0, rho_kappa=1.0, eta_D=0.0, c_T=0.0, c_D=0.0, c_V=0.0),
)


def test_the_ladders_times_stand_beside_those_of_the_roofline() -> None:
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
    history = AcceptanceHistory()
    history.record("ngram", "elsewhere", at(0.95, 1000))
    history.record("self", "elsewhere", at(0.8, 1000))
    machine.run(machine.control(history, race=False), [400])
    assert machine.drafters()[0] == {1} and machine.drafters()[-1] == {0}


def test_what_rollouts_did_not_deliver_is_not_tried_again_soon() -> None:
    """Fourteen rows accept everything and leave two behind, which nobody can help. By all rounds the copy looks faster
    than plain decoding each time; only the end of the last row tells."""
    machine = Machine({"self": 0.1, "ngram": 0.0}, lambda name, request: (name == "self") * (request % 8 > 0) * 0.98)
    machine.verifying = lambda tokens: 1 + 0.01 * tokens
    history, plain_seconds, speedups = AcceptanceHistory(), 60 * machine.verifying(16), []
    control = machine.control(history)
    for rollout in range(12):
        machine.run(control, [60] * 16, prompts=f"rollout {rollout}")
        speedups.append(plain_seconds / machine.seconds)
    assert speedups[0] < 0.8 and history.delivered("self", 16, False) < 0.5
    assert [speedup > 0.99 for speedup in speedups].count(False) == 2  # and once again, when it had faded
    without, worst = machine.control(known := AcceptanceHistory()), []
    known.record_delivery = lambda *told: None  # type: ignore[method-assign]
    for rollout in range(12):
        worst.append(plain_seconds / machine.run(without, [60] * 16, prompts=f"rollout {rollout}").seconds)
    assert max(worst) < 0.8


def deliveries_of(history: AcceptanceHistory) -> list[tuple[str, int, bool, float, float]]:
    """Fills up as they are recorded."""
    recorded: list[tuple[str, int, bool, float, float]] = []
    history.record_delivery = lambda *told: recorded.append(told)  # type: ignore[method-assign]
    return recorded


def test_deliveries_are_of_batches_of_which_none_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, history = Machine({"self": 0.02}, by_method(self=0.9)), AcceptanceHistory()
    recorded, control = deliveries_of(history), machine.control(history)
    machine.run(control, [30] * 8 + [60, 60, 60, 240], capacity=4)
    assert [batch for _, batch, *_ in recorded] == [4, 1]
    assert all(measured == pytest.approx(expected, rel=0.15) for *_, measured, expected in recorded)
    monkeypatch.setattr(AcceptanceHistory, "delivered", lambda *asked: 0.1)
    plans = []
    for waiting in (1, 0):
        control.begin(4, ["a"] * (4 + waiting))
        plans.append(control.plan(range(4), 100.0, waiting))
    assert plans[0] and not plans[1]


@pytest.mark.parametrize("alone", [True, False])
def test_expected_is_what_the_choice_went_by(alone: bool) -> None:
    """Of two rows one is left behind, which the last row's account knows and the mean does not."""
    machine, history = Machine({"self": 0.02, "ngram": 0.0}, lambda name, request: 0.9 * request), AcceptanceHistory()
    recorded = deliveries_of(history)
    machine.run(machine.control(history, race=not alone), [200] * 2)
    name, batch, until_last_row, measured, expected = recorded[0]
    assert until_last_row == alone
    assert measured == pytest.approx(expected, rel=0.2) if alone else measured < 0.8 * expected


def test_a_drafter_that_failed_is_not_judged_by_the_rest() -> None:
    machine, history = Machine({"self": 0.02}, by_method(self=0.9)), AcceptanceHistory()
    recorded, control = deliveries_of(history), machine.control(history)
    plan = control.plan

    def fail_later(*args: Any) -> Sequence[Chain]:
        if len(machine.plans) == 5:
            control.drop(0)
        return plan(*args)

    control.plan = fail_later  # type: ignore[method-assign]
    machine.run(control, [200] * 4)
    assert not recorded


def test_nothing_is_blamed_for_the_trial_of_another() -> None:
    """The copy drafts, less well than it used to; n-gram, which nobody knows, has its trial in between and is of no
    use. What the copy delivers counts from when it drafts again."""
    machine, history = Machine({"self": 0.05, "ngram": 0.0}, by_method(self=0.8, ngram=0.0)), AcceptanceHistory()
    machine.verifying = lambda tokens: 1 + tokens / 32
    history.record("self", "elsewhere", at(0.95, 1000))
    recorded = deliveries_of(history)
    machine.run(machine.control(history, race=False), [300] * 4)
    drafters = [next(iter(names)) for names in machine.drafters() if names]
    assert [name for name, _ in itertools.groupby(drafters)] == [0, 1, 0]
    assert [name for name, *_ in recorded] == ["ngram", "self"]


def test_a_rival_is_preferred_only_for_what_it_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy has drafted for a window, and n-gram promises more."""
    shares = {"self": 1.0, "ngram": 1.0}
    monkeypatch.setattr(AcceptanceHistory, "delivered", lambda self, method, *asked: shares[method])
    drafters = []
    for shares["ngram"] in (1.0, 0.3):
        machine, history = Machine({"self": 0.02, "ngram": 0.0}, by_method(self=0.5, ngram=0.8)), AcceptanceHistory()
        history.record("self", "elsewhere", at(0.95, 1000))
        history.record("ngram", "elsewhere", at(0.8, 1000))
        machine.run(machine.control(history, race=False), [400])
        drafters.append(machine.drafters()[PROBE_ROUNDS + 2 * WINDOW])
    assert drafters == [{1}, {0}]


@pytest.mark.parametrize("best", ["self", "ngram", "model"])
def test_best_method_is_found_and_known_from_then_on(best: str) -> None:
    rates = {name: 0.9 if name == best else 0.3 for name in ("self", "ngram", "model")}
    machine = Machine({"self": 0.1, "ngram": 0.02, "model": 0.1}, by_method(**rates))
    history, index = AcceptanceHistory(), list(rates).index(best)
    machine.run(machine.control(history, race=False), [500] * 4)
    assert machine.drafters()[-1] == {index}
    machine.run(machine.control(history, race=False), [100] * 4)
    assert all(drafters == {index} for drafters in machine.drafters())


@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize("tokens", [[200] * 4, [20, 20, 20, 60, 60, 100]], ids=["long", "short"])
def test_rounds_that_capture_forwards_decide_nothing(tokens: list[int], race: bool) -> None:
    """Each shape's first rounds take much longer, the baseline's and the drafters'. At first a drafter that copies
    nothing is on, which the baseline would flatter; later on deliveries count."""
    rates, drafters = by_method(self=0.9, ngram=0.0), []
    for capturing in (0.0, 10.0, 100.0):
        machine = Machine({"self": 0.1, "ngram": 0.02}, rates, capturing=capturing)
        control = machine.control(race=race)
        drafters.append([])
        for _ in range(3):
            machine.run(control, tokens)
            drafters[-1].append(Counter(index for each in machine.drafters() for index in each))
    clean = drafters[0]
    assert all(each[0] > 8 for each in clean)
    for found in drafters[1:]:
        for rollout, usual in zip(found, clean, strict=True):
            assert rollout[0] > 8 and rollout[1] <= usual[1] + WINDOW


def test_nothing_drafts_where_nothing_pays() -> None:
    machine = Machine({"self": 1.0, "ngram": 0.3}, by_method(self=0.9, ngram=0.0))
    control = machine.control()
    machine.run(control, [300] * 4)
    machine.run(control, [300] * 4)
    assert sum(map(bool, machine.drafters())) <= WINDOW


@pytest.mark.parametrize(("name", "b"), [("self", (2, 3)), ("ngram", (2, 3)), ("model", (1, 1)), ("history", (1, 2))])
def test_history_has_each_verdict(name: str, b: tuple[int, int]) -> None:
    """A round of γ with a accepted is a + 1 positions, at most γ. What a lookup did not find counts as a wrong token;
    what a network had no room for does not, nor does what lies behind a row's end."""
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


def test_same_history_same_choice_after_a_checkpoint() -> None:
    machine = Machine({"self": 0.1, "ngram": 0.02, "model": 0.05}, by_method(self=0.8, ngram=0.5, model=0.7))
    history = AcceptanceHistory()
    machine.run(machine.control(history), [200] * 8)
    restored = AcceptanceHistory()
    restored.load_state_dict(json.loads(json.dumps(history.state_dict())))
    first = machine.run(machine.control(history), [200] * 8).plans
    assert machine.run(machine.control(restored), [200] * 8).plans == first
    assert history.state_dict() == restored.state_dict() and history.state_dict()["rollout"] == 2


# ---- rows with methods of their own -----------------------------------------------------------------------------


def mostly_self(name: str, request: int) -> float:
    """All requests are easier for "self" but the first, which is so for "ngram", by a speedup of 1.6."""
    return {"self": 0.7, "ngram": 0.8}[name] if request == 0 else {"self": 0.95, "ngram": 0.1}[name]


@pytest.fixture
def mixed() -> tuple[Machine, AcceptanceHistory]:
    machine, history = Machine({"self": 0.02, "ngram": 0.0}, mostly_self), AcceptanceHistory(decay=1.0)
    for request, name in itertools.product(range(6), machine.drafting):
        history.record(name, f"prompt {request}", at(mostly_self(name, request), 10_000))
    return machine, history


Mixed = tuple[Machine, AcceptanceHistory]


def test_prompts_that_favour_another_method_get_it(mixed: Mixed) -> None:
    machine, history = mixed
    machine.run(machine.control(history, race=False), [200] * 6)
    several = [plan for rows, _, plan in machine.plans if len(rows) == 6 and len(plan) > 1]
    assert several and all(most <= 1 for _, _, most in machine.widths())
    assert all({chain.which: chain.rows for chain in plan} == {0: (1, 2, 3, 4, 5), 1: (0,)} for plan in several)


def test_margin_of_a_method_of_ones_own(mixed: Mixed) -> None:
    machine, history = mixed
    machine.run(machine.control(history, race=False, margin=1.0), [200] * 6)
    assert all(len(plan) <= 1 for _, _, plan in machine.plans) and {0} in machine.drafters()


def test_a_method_that_failed_is_nobodys_own(mixed: Mixed) -> None:
    machine, history = mixed
    control = machine.control(history, race=False)
    begin = control.begin

    def begin_and_fail(capacity: int, prompts: Sequence[str]) -> None:
        begin(capacity, prompts)
        control.drop(1)

    control.begin = begin_and_fail  # type: ignore[method-assign]
    machine.run(control, [200] * 6)
    assert set().union(*machine.drafters()) == {0}


def test_rows_have_methods_of_their_own_while_others_wait(mixed: Mixed) -> None:
    machine, history = mixed
    machine.run(machine.control(history, budget=1000), [200] * 6, capacity=3)
    waiting = [
        (len(plan), most)
        for (_, waiting, plan), (_, _, most) in zip(machine.plans, machine.widths(), strict=True)
        if waiting
    ]
    assert {most for _, most in waiting} <= {0, 1} and max(count for count, _ in waiting) == 2
