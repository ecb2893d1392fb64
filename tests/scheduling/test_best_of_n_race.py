"""Best-of-N over simulated machines: who races, and when that stops."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from spec_trl.scheduling.control import Chain
from spec_trl.scheduling.race_judge import Field, RaceJudge
from spec_trl.scheduling.roofline import Coefficients, ModelConstants, Roofline
from spec_trl.scheduling.selection import AcceptanceHistory
from spec_trl.scheduling.toggle import HOPELESS, PROBE_ROUNDS, WINDOW
from tests.scheduling.machine import GAMMAS, Machine, at, by_method


def complementary(name: str, request: int) -> float:
    """Each request is easy for one method, by turns; for others hardly."""
    return 0.9 if name == ("ngram", "history")[request % 2] else 0.3


def known(machine: Machine, average: float = 0.6) -> AcceptanceHistory:
    """A history in which all methods were tried."""
    history = AcceptanceHistory()
    for name in machine.drafting:
        history.record(name, "elsewhere", at(average, 100))
    return history


LOOKUPS = {"ngram": 0.0, "history": 0.0}
TAIL = [60] * 12 + [600] * 4


def test_racing_ends_the_tail_in_fewer_rounds() -> None:
    machine = Machine(LOOKUPS, complementary)
    alone = machine.run(machine.control(known(machine), race=False), TAIL).rounds
    raced = machine.run(machine.control(known(machine)), TAIL)
    assert max(most for _, _, most in raced.widths()) == 2
    assert raced.rounds < alone / 1.5


@pytest.mark.parametrize(("tried", "rounds"), [(True, min(HOPELESS)), (False, 2 * WINDOW)])
def test_the_primary_is_measured_alone_first(tried: bool, rounds: int) -> None:
    """For a few rounds, or each for a window where they are on trial."""
    machine = Machine(LOOKUPS, complementary)
    control = machine.control(known(machine) if tried else None, budget=1000)
    machine.run(control, [600] * 4)
    chains = [most for _, _, most in machine.widths()]
    first = chains.index(2)
    assert sum(chains[:first]) == rounds
    alone = sum(len(plan) == 1 and plan[0].rows is None for _, _, plan in machine.plans)
    assert sum(tally.rounds for tally in control.tallies) <= alone < len(chains)


def test_columns_for_all_chains() -> None:
    machine = Machine(LOOKUPS, complementary)
    assert machine.control().most_drafted == 2 * max(GAMMAS)
    assert machine.control(race=False).most_drafted == max(GAMMAS)


def test_races_stay_within_what_was_verified_at_first() -> None:
    machine = Machine(LOOKUPS, complementary)
    machine.run(machine.control(known(machine)), TAIL)
    first = next(rows * (1 + width) for rows, width, _ in machine.widths() if width)
    races = [(rows, width) for rows, width, most in machine.widths() if most > 1]
    assert races and all(rows * (1 + width) <= first for rows, width in races)


@pytest.mark.parametrize("budget", [1, 40, 80])
def test_races_stay_within_the_given_budget(budget: int) -> None:
    machine = Machine(LOOKUPS, complementary)
    machine.run(machine.control(known(machine), budget=budget), TAIL)
    races = [rows * (1 + width) for rows, width, most in machine.widths() if most > 1]
    assert all(verified <= budget for verified in races)
    assert bool(races) is (budget > 1)


ROOFLINE = Roofline(  # free up to 64 tokens, then in proportion to them
    ModelConstants("64", 64.0, 0.0, 1.0, 0.0, 0.0),
    Coefficients(F_eff=1.0, BW_eff=1.0, rho_kappa=0.0, eta_D=0.0, c_T=0.0, c_D=0.0, c_V=0.0),
)


@pytest.mark.parametrize("tolerance", [0.0, 0.05, 0.5])
def test_free_tokens_are_those_of_the_roofline(tolerance: float) -> None:
    machine = Machine(LOOKUPS, complementary, lambda tokens: max(64.0, tokens))
    control = machine.control(known(machine), roofline=ROOFLINE, tolerance=tolerance)
    for batch, gamma in ((1, 8), (4, 4), (8, 4), (16, 8)):
        free, own = control.free_tokens(batch, 100.0, gamma), batch * (1 + gamma)
        assert ROOFLINE.verify_seconds(batch, 100.0, free // batch - 1) <= (1 + tolerance) * max(64, own)
        beyond = ROOFLINE.verify_seconds(batch, 100.0, free // batch)
        assert free // batch == 1 + control.most_drafted or beyond > (1 + tolerance) * max(64, own)
    machine.run(control, TAIL)
    races = [rows * (1 + width) for rows, width, most in machine.widths() if most > 1]
    assert races and max(races) <= (1 + tolerance) * 64 + 4


def test_nobody_races_while_requests_wait() -> None:
    machine = Machine(LOOKUPS, complementary)
    machine.run(machine.control(known(machine), budget=1000), [100] * 8, capacity=2)
    for (_, waiting, _), (_, _, most) in zip(machine.plans, machine.widths(), strict=True):
        assert most < 2 or not waiting
    assert any(most > 1 for _, _, most in machine.widths())


def test_a_race_that_does_not_pay_is_off_until_the_batch_has_halved() -> None:
    """The profile says that tokens are free, and they are not: 8 rows race for a while, then not; then 4 do."""
    machine = Machine(LOOKUPS, by_method(ngram=0.8, history=0.05), lambda tokens: 1 + tokens / 32)
    control = machine.control(known(machine), ladder=machine.ladder(verifying=lambda tokens: 1.0), budget=10_000)
    machine.run(control, [400] * 4 + [800] * 4)
    races = {rows: [most > 1 for batch, _, most in machine.widths() if batch == rows] for rows in (8, 4)}
    for raced in races.values():
        assert min(HOPELESS) <= sum(raced) <= WINDOW + PROBE_ROUNDS and not any(raced[-10:])


def test_a_network_that_cannot_pay_does_not_race() -> None:
    """Its drafts take as long as they could ever gain."""
    for drafting, races in ((0.02, True), (3.0, False)):
        machine = Machine({"ngram": 0.0, "self": drafting}, by_method(ngram=0.6, self=0.6))
        machine.run(machine.control(known(machine), budget=1000), [400] * 4)
        assert any(most > 1 for _, _, most in machine.widths()) is races


def test_failed_drafters_have_no_chains() -> None:
    machine = Machine({"ngram": 0.0, "history": 0.0, "self": 0.01}, by_method(ngram=0.8, history=0.5, self=0.5))
    control = machine.control(known(machine), budget=1000)
    plan, count = control.plan, itertools.count()

    def fail_later(*args: Any) -> Sequence[Chain]:
        if next(count) == 60:
            control.drop(0)
        return plan(*args)

    control.plan = fail_later  # type: ignore[method-assign]
    machine.run(control, [800] * 4)
    assert any(0 in drafters for drafters in machine.drafters()[:60])
    assert not any(0 in drafters for drafters in machine.drafters()[60:])
    assert any(len(drafters) == 2 for drafters in machine.drafters()[60:])


def test_one_candidate_races_nobody() -> None:
    machine = Machine({"ngram": 0.0}, by_method(ngram=0.8))
    machine.run(machine.control(), [200] * 4)
    assert {most for _, _, most in machine.widths()} <= {0, 1} and {0} in machine.drafters()


@pytest.mark.parametrize("race", [False, True])
def test_a_losing_network_of_a_prompts_own_stops(race: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slower than profiled: after the verdict no row drafts with it any more."""
    verdicts: list[Field] = []
    field = RaceJudge.field

    def watch(judge: RaceJudge, batch: int) -> Field:
        verdicts.append(field(judge, batch))
        return verdicts[-1]

    monkeypatch.setattr(RaceJudge, "field", watch)
    machine = Machine(
        {"ngram": 0.0, "self": 0.1}, lambda name, request: 0.9 if (name == "self") == (request % 4 == 0) else 0.2
    )
    history = AcceptanceHistory()
    for request in range(8):
        for name in ("ngram", "self"):
            history.record(name, f"prompt {request}", at(machine.acceptance(name, request), 200))
    control = machine.control(history, race=race, ladder=machine.ladder())
    machine.drafting = {"ngram": 0.0, "self": 2.0}
    machine.run(control, [600] * 8)
    assert Field.EVERYBODY in verdicts and (race or Field.LOOKUPS not in verdicts)
    networks = sum(any(c.which == 1 and c.rows is not None for c in plan) for _, _, plan in machine.plans)
    assert 0 < networks <= verdicts.count(Field.EVERYBODY)
