"""Best-of-N over simulated machines: who races, and when that stops."""

import pytest

from spec_trl.scheduling.race_judge import Field, RacedRound, RaceJudge
from spec_trl.scheduling.roofline import Coefficients, ModelConstants, Roofline
from spec_trl.scheduling.selection import AcceptanceHistory
from spec_trl.scheduling.toggle import HOPELESS, PROBE_ROUNDS, WINDOW
from tests.scheduling.machine import GAMMAS, Machine, at, by_method, history_of


def complementary(verifying=lambda tokens: 1.0) -> Machine:  # type: ignore[no-untyped-def]
    """Two lookups; each request is easy for one of them, by turns, and hardly for the other."""
    return Machine(
        {"ngram": 0.0, "history": 0.0},
        lambda name, request: 0.9 if name == ("ngram", "history")[request % 2] else 0.3,
        verifying,
    )


def known(machine: Machine) -> AcceptanceHistory:
    """A history in which all methods were tried."""
    return history_of(100, **dict.fromkeys(machine.drafting, 0.6))


TAIL = [60] * 12 + [600] * 4


def test_racing_ends_the_tail_in_fewer_rounds() -> None:
    """Within what was verified at first."""
    machine = complementary()
    assert machine.control().most_drafted == 2 * max(GAMMAS)
    assert machine.control(race=False).most_drafted == max(GAMMAS)
    alone = machine.run(machine.control(known(machine), race=False), TAIL).rounds
    raced = machine.run(machine.control(known(machine)), TAIL)
    assert max(most for _, _, most in raced.widths()) == 2
    assert raced.rounds < alone / 1.5
    first = next(rows * (1 + width) for rows, width, _ in raced.widths() if width)
    assert max(raced.verified_in_races()) <= first
    for budget in (1, 40, 80):
        races = machine.run(machine.control(known(machine), budget=budget), TAIL).verified_in_races()
        assert all(verified <= budget for verified in races) and bool(races) is (budget > 1)


@pytest.mark.parametrize(("tried", "rounds"), [(True, min(HOPELESS)), (False, 2 * WINDOW)])
def test_the_primary_is_measured_alone_first(tried: bool, rounds: int) -> None:
    """For a few rounds, or each for a window where they are on trial."""
    machine = complementary()
    control = machine.control(known(machine) if tried else None, budget=1000)
    machine.run(control, [600] * 4)
    chains = [most for _, _, most in machine.widths()]
    assert sum(chains[: chains.index(2)]) == rounds
    alone = sum(len(plan) == 1 and plan[0].rows is None for _, _, plan in machine.plans)
    assert sum(tally.rounds for tally in control.tallies) <= alone < len(chains)


ROOFLINE = Roofline(  # free up to 64 tokens, then in proportion to them
    ModelConstants("64", 64.0, 0.0, 1.0, 0.0, 0.0),
    Coefficients(F_eff=1.0, BW_eff=1.0, rho_kappa=0.0, eta_D=0.0, c_T=0.0, c_D=0.0, c_V=0.0),
)


@pytest.mark.parametrize("tolerance", [0.0, 0.05, 0.5])
def test_free_tokens_are_those_of_the_roofline(tolerance: float) -> None:
    machine = complementary(lambda tokens: max(64.0, tokens))
    control = machine.control(known(machine), roofline=ROOFLINE, tolerance=tolerance)
    for batch, gamma in ((1, 8), (4, 4), (8, 4), (16, 8)):
        free, own = control.free_tokens(batch, 100.0, gamma), batch * (1 + gamma)
        assert ROOFLINE.verify_seconds(batch, 100.0, free // batch - 1) <= (1 + tolerance) * max(64, own)
        beyond = ROOFLINE.verify_seconds(batch, 100.0, free // batch)
        assert free // batch == 1 + control.most_drafted or beyond > (1 + tolerance) * max(64, own)
    assert 0 < max(machine.run(control, TAIL).verified_in_races()) <= (1 + tolerance) * 64 + 4


def test_nobody_races_while_requests_wait() -> None:
    machine = complementary()
    machine.run(machine.control(known(machine), budget=1000), [100] * 8, capacity=2)
    for (_, waiting, _), (_, _, most) in zip(machine.plans, machine.widths(), strict=True):
        assert most < 2 or not waiting
    assert machine.verified_in_races()


def test_a_race_that_does_not_pay_is_off_until_the_batch_has_halved() -> None:
    """The profile says that tokens are free, and they are not: 8 rows race for a while, then not; then 4 do."""
    machine = Machine(
        {"ngram": 0.0, "history": 0.0}, by_method(ngram=0.8, history=0.05), lambda tokens: 1 + tokens / 32
    )
    control = machine.control(known(machine), ladder=machine.ladder(verifying=lambda tokens: 1.0), budget=10_000)
    machine.run(control, [400] * 4 + [800] * 4)
    for rows in (8, 4):
        raced = [most > 1 for batch, _, most in machine.widths() if batch == rows]
        assert min(HOPELESS) <= sum(raced) <= WINDOW + PROBE_ROUNDS and not any(raced[-10:])


@pytest.mark.parametrize(
    ("drafting", "races"),
    # The drafts of a slow network take as long as they could ever gain; and one candidate has nobody to race.
    [({"ngram": 0.0, "self": 0.02}, True), ({"ngram": 0.0, "self": 3.0}, False), ({"ngram": 0.0}, False)],
)
def test_who_cannot_pay_does_not_race(drafting: dict[str, float], races: bool) -> None:
    machine = Machine(drafting, by_method(ngram=0.6, self=0.6))
    machine.run(machine.control(known(machine), budget=1000), [400] * 4)
    assert bool(machine.verified_in_races()) is races and {0} in machine.drafters()


def test_failed_drafters_have_no_chains() -> None:
    machine = Machine({"ngram": 0.0, "history": 0.0, "self": 0.01}, by_method(ngram=0.8, history=0.5, self=0.5))
    machine.run(machine.control(known(machine), budget=1000), [800] * 4, failing=(60, 0))
    before, after = machine.drafters()[:60], machine.drafters()[60:]
    assert 0 in set().union(*before) and 0 not in set().union(*after)
    assert any(len(drafters) == 2 for drafters in after)


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


# ---- the judge ------------------------------------------------------------------------------------------------------


def judging(batch: int) -> RaceJudge:
    """After rounds without a race, at a cost of 1."""
    judge = RaceJudge()
    for _ in range(PROBE_ROUNDS):
        judge.record_unraced(batch, 1.0)
    return judge


@pytest.mark.parametrize(
    ("cost", "tokens", "plain_cost", "field"),
    [
        (1.0, 17, 1.0, Field.EVERYBODY),
        (1.4, 24, 1.0, Field.EVERYBODY),
        (1.6, 24, 1.0, Field.NOBODY),
        # Two tokens per row in 1.9 or 2.1 times an autoregressive round: to beat the primary alone is not enough.
        (1.0, 20, 1.9, Field.EVERYBODY),
        (1.0, 20, 2.1, Field.NOBODY),
    ],
)
def test_a_race_is_judged_by_tokens_gained_and_time_lost(
    cost: float, tokens: int, plain_cost: float, field: Field
) -> None:
    """Rounds of 8 rows in which the primary alone brings 16 tokens at a cost of 1."""
    judge = judging(8)
    for _ in range(WINDOW):
        assert judge.field(8) is Field.EVERYBODY
        judge.record_raced(RacedRound(cost, tokens, 16.0, plain_cost > 1, 2.0, plain_cost))
    assert judge.field(8) is field and judge.field(4) is Field.EVERYBODY


def test_hopeless_races_end_early_and_networks_leave_first() -> None:
    judge = judging(8)
    for networks, field in ((True, Field.LOOKUPS), (False, Field.NOBODY)):
        judge.field(8)
        for _ in range(min(HOPELESS)):
            judge.record_raced(RacedRound(2.0, 16, 16.0, networks, 2.0, 1.0))
        assert judge.field(8) is field
    assert judge.field(5) is Field.NOBODY


def test_a_verdict_waits_for_rounds_to_compare_with() -> None:
    judge = judging(64)  # too many rows to say anything of 8
    for _ in range(WINDOW):
        judge.record_raced(RacedRound(2.0, 16, 16.0, False, 2.0, 1.0))
    for _ in range(PROBE_ROUNDS):
        assert judge.field(8) is Field.NOBODY
        judge.record_unraced(8, 3.0)
    assert judge.field(8) is Field.EVERYBODY
