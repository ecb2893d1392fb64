"""The planner's rule, its account, and the ledger under it."""

import itertools
import json
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from spec_trl.generation.planner.acceptance import FADE, Drafts
from spec_trl.generation.planner.clock import Clock
from spec_trl.generation.planner.control import Candidate, Chain, PlainRounds
from spec_trl.generation.planner.plan import PLAIN, Plan
from spec_trl.generation.planner.planner import CARRIED_BUDGET, MAX_BUDGET, ROUND_BUDGET, SHARE, Planner


SELF = Plan(("self",), (5,))


def flat(cycle: float) -> Callable[[Mapping[str, int], int, int, float], float]:
    """Any round with drafts takes `cycle` autoregressive rounds."""
    return lambda lengths, width, batch, length: cycle if lengths else 1.0


def planner(cycle: float, names: tuple[str, ...] = ("self",), **options: Any) -> Planner:
    networks = [name != "ngram" for name in names]
    candidates = [Candidate(name, 5, 1.0, 64, own) for name, own in zip(names, networks, strict=True)]
    drafts = Drafts(names, [not own for own in networks])
    return Planner(candidates, [5], Clock(flat(cycle), 0.2), drafts, **({"now": lambda: 0.0} | options))


def as_predicted(control: Planner, rows: int, *plans: Plan) -> None:
    """A round of each plan took what is predicted."""
    for plan in plans:
        control.clock.observe(plan, rows, control.clock.predicted(plan)[rows - 1])


def may_try(control: Planner) -> None:
    """An autoregressive round was measured, and the account is full."""
    as_predicted(control, 1, PLAIN)
    control.budget = MAX_BUDGET


def drive(control: Planner, tokens: int, slower: list[float], cycle: float, rounds: int) -> list[bool]:
    """One row whose drafts give `tokens` in a round of `cycle` seconds, an autoregressive one taking 1; the first
    rounds take times `slower`. Returns in which rounds it drafted."""
    control.begin(1, ["a"])
    drafted = []
    for factor in [*slower, *[1.0] * (rounds - len(slower))]:
        plan = control.plan([0], 100.0, 0)
        length = plan[0].draft_length if plan else 0
        if length:
            control.record_rows([0], {0: [tokens - 1]}, {0: [length]})
        control.record(length, factor * (cycle if length else 1.0), tokens if length else 1)
        drafted.append(length > 0)
    control.finish()
    return drafted


# ---- defects of the controls before it ------------------------------------------------------------------------------


def test_a_burst_in_the_first_rounds_does_not_make_drafting_look_cheap() -> None:
    control = planner(4.0)
    for bursts in (True, False, False, False):  # drafting is 1.33x slower
        drafted = drive(control, 3, [3.0] * 3 if bursts else [], 4.0, 200)
        took = sum(4.0 if own else 1.0 for own in drafted) / sum(3 if own else 1 for own in drafted)
        assert took <= 1.02


def test_drafts_that_have_become_slow_end_before_long() -> None:
    """They look like a slower machine: only autoregressive rounds can tell, and those must run."""
    control = planner(2.0)
    assert drive(control, 3, [], 2.0, 150)[-1]  # 1.5x faster
    assert drive(control, 3, [], 4.0, 100)[-1]  # 1.33x slower: contention?
    drive(control, 3, [], 4.0, 300)
    assert not any(drive(control, 3, [], 4.0, 100))


def test_contention_does_not_switch_a_good_drafter_off() -> None:
    control = planner(2.0)
    assert drive(control, 4, [], 2.0, 300)[-1]  # it has seen that drafting is twice as fast
    drafted = drive(control, 4, [1.0] * 17 + [3.0] * 15, 2.0, 300)
    assert sum(drafted) >= 0.95 * len(drafted)


def test_trials_are_bounded_from_the_first_rollout_on() -> None:
    drafted = drive(planner(5.0), 1, [], 5.0, 100)
    lost = sum(5.0 if own else 1.0 for own in drafted) / len(drafted) - 1
    assert lost <= ROUND_BUDGET + 0.01


def test_copying_is_noticed_without_a_draft() -> None:
    control = planner(1.6, names=("ngram",))
    control.begin(1, ["a"])
    assert not control.plan([0], 100.0, 0)
    for _ in range(6):
        control.record(0, 1.0, 1)
        control.record_unverified(0, [0], [5], [5])
        plan = control.plan([0], 100.0, 0)
    assert plan == (Chain(0, 5),)


# ---- the rule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cycle", [1.5, 2.2, 2.7, 2.9, 4.0])
def test_with_all_known_it_is_the_papers_rule(cycle: float) -> None:
    # ER Eq. 3: speculate where tau T_p / (gamma T_q + T_V) >= 1 + eps.
    control = planner(cycle)
    control.begin(1, ["a", "others"])
    for _ in range(200):
        as_predicted(control, 1, SELF, PLAIN)
    for accepted, drafts in enumerate([300, 210, 147, 103, 72, 168]):  # each token is right with 0.7
        tried = np.array([[min(accepted + 1, 5)]])
        for _ in range(drafts):
            control.drafts.record(0, np.ones(1, int), np.array([[accepted]]), tried)
    tau = sum(0.7**k for k in range(6))
    assert bool(control.plan([0], 100.0, 0)) == (tau / cycle >= 1.05)


def test_rows_that_copy_take_the_lookup_and_others_the_network() -> None:
    control = planner(1.2, names=("self", "ngram"), race=False)
    control.begin(4, ["copies", "copies", "new", "new"])
    control.budget = 8.0
    for _ in range(50):
        control.drafts.record(1, np.arange(4), np.array([[5, 5, 0, 0]]), np.array([[5, 5, 1, 1]]))
        control.drafts.record(0, np.arange(4), np.array([[2, 2, 2, 2]]), np.array([[3, 3, 3, 3]]))
        as_predicted(control, 4, SELF, Plan(("self", "ngram"), (5, 5)), PLAIN)
    assert set(control.plan(range(4), 100.0, 0)) == {Chain(0, 5, (2, 3)), Chain(1, 5, (0, 1))}


@pytest.mark.parametrize(("budget", "races"), [(None, True), (11, True), (10, False)])
def test_races_keep_to_their_budget(budget: int | None, races: bool) -> None:
    control = planner(1.2, names=("self", "ngram"), race_budget=budget)
    control.begin(1, ["a"])
    control.budget = 8.0
    for _ in range(50):
        for which in (0, 1):
            control.drafts.record(which, np.zeros(1, int), np.array([[2]]), np.array([[3]]))
        lookup, race = Plan(("ngram",), (5,)), Plan(("self", "ngram"), (5, 5), on_all_rows=True)
        as_predicted(control, 1, SELF, lookup, race, PLAIN)
    assert (len(control.plan([0], 100.0, 0)) == 2) == races  # 11 tokens of one row; more rows are of no use here


@pytest.mark.parametrize("in_step", [False, True])
def test_in_step_rows_gain_what_all_accept(in_step: bool) -> None:
    control = planner(2.2)  # τ is 2.7 for a row, and 1.8 for what two accept
    control.in_step = in_step
    control.begin(2, ["a", "b"])
    for _ in range(200):
        as_predicted(control, 2, SELF, PLAIN)
        control.drafts.record(0, np.arange(2), np.array([[2, 2]]), np.array([[3, 3]]))
    assert bool(control.plan([0, 1], 100.0, 0)) != in_step
    if not in_step:
        return
    assert control.plan([0, -1], 100.0, 0), "a row that has ended accepts anything"
    control.record_rows([0, -1], {0: [5, -1]}, {0: [5, -1]})
    control.record(5, 2.2, 6)
    control.plan([0, -1], 100.0, 0)
    assert control.tallies[0].block_efficiency == 6


@pytest.mark.parametrize("name", ["self", "ngram"])
def test_in_step_a_rejection_is_one_rows_alone(name: str) -> None:
    """Nothing is known of the drafts after it; a lookup that found no more could have."""
    control, expected = planner(1.0, names=(name,)), Drafts([name], [name == "ngram"])
    control.in_step = True
    prompts = ["a", "b", "c"]
    control.begin(3, prompts)
    expected.begin(prompts)
    may_try(control)
    assert control.plan([2, 1, 0], 100.0, 0)
    control.record_rows([2, 1, 0], {0: [2, 1, 2]}, {0: [2, 2, 2]})
    control.record(5, 1.0, 6)
    control.plan([2, 1, 0], 100.0, 0)
    expected.record(0, np.array([2, 1, 0]), np.array([[2, 1, 2]]), np.array([[2, 2, 2]]))
    assert control.drafts.survivals(np.arange(3), 3) == pytest.approx(expected.survivals(np.arange(3), 3))


def test_the_account_carries_little_to_the_next_rollout() -> None:
    control = planner(2.0)
    drive(control, 5, [], 2.0, 150)
    assert control.budget > 150 * ROUND_BUDGET + CARRIED_BUDGET  # it gained more than its income
    control.begin(1, ["a"])
    assert control.budget == CARRIED_BUDGET


def test_rounds_of_no_kind_teach_nothing() -> None:
    control = planner(1.1)
    control.begin(1, ["a"])
    control.plan([0], 100.0, 0)
    control.record(0, 50.0, 1, is_typical=False)
    assert control.clock.rounds == 0


def test_seconds_of_plain_decoding_follow_the_level() -> None:
    control = planner(2.0)
    assert control.plain_seconds([PlainRounds(10, 1, 100.0)]) is None
    drive(control, 1, [3.0] * 50, 2.0, 50)
    assert control.plain_seconds([PlainRounds(10, 1, 100.0)]) == pytest.approx(30.0, rel=0.05)


# ---- what rounds took -----------------------------------------------------------------------------------------------


def one_row() -> Clock:
    """Rounds are predicted to take a second, and drafts nearly all of a round."""
    return Clock(lambda lengths, *_: 1e9 if lengths else 1.0, 0.2)


def observe(times: Clock, plan: Plan, *log_ratios: float) -> None:
    """Rounds by log(measured / predicted)."""
    times.observe(plan, 1, *(times.predicted(plan)[0] * math.exp(ratio) for ratio in log_ratios))


def offset(times: Clock, plan: Plan) -> tuple[float, float]:
    mean, variance = times.offsets(times.compare([plan], 1))
    return float(mean[0]), float(variance[0])


def test_what_all_rounds_share_is_the_level() -> None:
    times = one_row()
    for number in range(60):
        observe(times, (PLAIN, SELF)[number % 2], math.log(3.0) + (0.3 if number % 2 else 0.0))
    assert offset(times, SELF)[0] == pytest.approx(0.3, abs=0.03)
    before = offset(times, SELF)[0]
    for _ in range(10):  # the machine becomes twice as slow while it drafts
        observe(times, SELF, math.log(6.0) + 0.3)
    assert offset(times, SELF)[0] == pytest.approx(before, abs=0.05)
    assert times.seconds(PLAIN, 1) == pytest.approx(6.0, rel=0.1)


def test_a_ledger_goes_on_from_a_checkpoint() -> None:
    times, drafts = one_row(), Drafts(["self", "ngram"], [False, True])
    drafts.begin(["a", "b"])
    for _ in range(20):
        observe(times, SELF, 0.4)
        observe(times, PLAIN, 0.1)
        drafts.record(0, np.arange(2), np.array([[3, 1]]), np.array([[4, 2]]))
    drafts.end_rollout()
    again, others = one_row(), Drafts(["ngram", "self"], [True, False])
    again.load_state_dict(json.loads(json.dumps(times.state_dict())))
    others.load_state_dict(json.loads(json.dumps(drafts.state_dict())))
    assert offset(again, SELF) == pytest.approx(offset(times, SELF))
    drafts.begin(["a", "b"])
    others.begin(["a", "b"])
    np.testing.assert_allclose(
        drafts.survivals(np.arange(2), 3), others.survivals(np.arange(2), 3)[:, ::-1], err_msg="by name, not by place"
    )


def test_a_prompts_own_acceptance_counts_in_later_rollouts() -> None:
    drafts = Drafts(["self"], [False])
    for _ in range(3):
        drafts.begin(["easy", "hard"])
        for _ in range(30):
            drafts.record(0, np.arange(2), np.array([[5, 0]]), np.array([[5, 1]]))
        drafts.end_rollout()
    drafts.begin(["hard", "new", "easy"])
    hard, new, easy = drafts.survivals(np.arange(3), 1)[:, 0, 0]
    assert hard < new < easy
    tried = drafts.state_dict()["methods"][drafts.methods[0]][1::2]
    assert sum(tried) == pytest.approx(sum(30 * 6 * FADE**age for age in (1, 2, 3)))


def test_a_copy_that_was_accepted_whole_goes_on() -> None:
    drafts = Drafts(["ngram"], [True])
    drafts.begin(["a"])
    for accepted, attempted in [(0, 1)] * 8 + [(5, 5)] * 4 + [(2, 3)] * 2:
        drafts.record(0, np.zeros(1, int), np.array([[accepted]]), np.array([[attempted]]))
    cold = drafts.survivals(np.zeros(1, int), 1)[0, 0, 0]
    drafts.record(0, np.zeros(1, int), np.array([[5]]), np.array([[5]]))
    hot = drafts.survivals(np.zeros(1, int), 1)[0, 0, 0]
    assert cold < 0.5 < hot


def ticking(seconds: float) -> Callable[[], float]:
    """A clock on which a plan takes so long to make."""
    return map(seconds.__mul__, itertools.count()).__next__


def test_a_plan_is_kept_until_planning_is_a_small_share_of_the_time() -> None:
    control = planner(40.0, now=ticking(0.001))  # it cannot pay, were it six times as fast
    control.begin(2, ["a", "b"])
    made = []
    for _ in range(300):
        before = control.clock.rounds
        assert control.plan([0, 1], 100.0, 0) == ()
        made.append(control.clock.rounds - before)  # rounds that the ledger is told of
        control.record(0, 0.01, 2)
    plans = [rounds for rounds in made if rounds]
    assert len(plans) == pytest.approx(300 * 0.01 / (0.001 / SHARE), rel=0.2) and min(plans) > 5
    control.plan([0, 1], 100.0, 0)
    control.record(0, 0.01, 2)
    told = control.clock.rounds
    control.plan([1], 100.0, 0)  # a row has ended
    assert control.clock.rounds > told


def test_a_plan_that_loses_is_thought_over_at_once() -> None:
    control = planner(1.0, now=ticking(1.0))
    control.begin(1, ["a"])
    may_try(control)
    assert control.plan([0], 100.0, 0)
    for tokens, seconds, rounds in ((6, 3.0, 0), (6, 3.0, 0), (1, 9.0, 3)):
        control.record_rows([0], {0: [tokens - 1]}, {0: [5]})
        control.record(5, seconds, tokens)
        control.plan([0], 100.0, 0)
        assert control.clock.rounds == 1 + rounds


@pytest.mark.parametrize("in_the_round", [True, False])
def test_a_drafter_that_fails_while_its_plan_is_kept(in_the_round: bool) -> None:
    control = planner(0.5, now=ticking(1.0))
    control.begin(2, ["a", "b"])
    may_try(control)
    for rounds in range(3):
        assert control.plan([0, 1], 100.0, 0) == (Chain(0, 5),)
        if rounds < 2:
            control.record_rows([0, 1], {0: [5, 4]}, {0: [5, 5]})
            control.record(5, 0.5, 11)
    control.drop(0)
    if in_the_round:  # γ columns are verified all the same, in which nothing was drafted
        control.record_rows([0, 1], {}, {})
        control.record(5, 3.0, 2)
    assert control.plan([0, 1], 100.0, 0) == ()
    control.record(0, 1.0, 2)
    assert control.tallies[0].rounds == 2 and control.drafts.survivals(np.array([0]), 1).item() > 0.6
    control.finish()
    assert control.clock.rounds == 1 + 3


def test_a_debt_is_bounded() -> None:
    """Rounds of minutes, as where another rank packs its copy, are not paid back by thousands of rounds; a single one
    costs nothing."""
    control = planner(0.5)
    drive(control, 6, [1.0, 1000.0], 0.5, 10)
    assert control.budget > 0
    control = planner(0.5)
    drive(control, 6, [1.0, 1000.0, 1000.0], 0.5, 10)
    assert -MAX_BUDGET <= control.budget < -0.9 * MAX_BUDGET


def test_rounds_that_are_told_together_count_like_single_ones() -> None:
    single, together = one_row(), one_row()
    for _ in range(2):
        for own, values in ((PLAIN, (0.3, 0.5, 0.4, 0.45, 0.35)), (SELF, (0.1, 0.2, 0.15, 0.12, 0.18))):
            observe(together, own, *values)
            for value in values:
                observe(single, own, value)
    assert single.rounds == together.rounds == 20
    for own, true in ((PLAIN, 0.4), (SELF, 0.15)):
        assert together.seconds(own, 1) == pytest.approx(together.predicted(own)[0] * math.exp(true), rel=0.03)
    (_, variance), (_, expected) = (offset(times, SELF) for times in (together, single))
    assert variance == pytest.approx(expected, rel=0.5)


def test_noise_is_read_off_rounds_that_are_told_together() -> None:
    """Else it seems small where many rounds are averaged, and then a single one seems a jump of the machine."""
    chance, times = random.Random(0), one_row()
    for _ in range(30):
        observe(times, PLAIN, *(chance.gauss(0, 0.2) for _ in range(20)))
    before = times.seconds(PLAIN, 1)
    observe(times, PLAIN, 0.4)
    assert times.seconds(PLAIN, 1) == pytest.approx(before, rel=0.1)
