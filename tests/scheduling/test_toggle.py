"""When to speculate: decisions of the toggle over simulated machines."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from spec_trl.scheduling.control import AlwaysSpeculate, Candidate, Control, NeverSpeculate
from spec_trl.scheduling.roofline import Coefficients, ModelConstants, Roofline
from spec_trl.scheduling.toggle import CONFIDENT, DWELL, PROBE_ROUNDS, RETRY_AFTER, WINDOW, SpeculationToggle


# Qwen2.5-7B on an A100, as published (facts of ER): speculation pays at small batches only.
A100 = Roofline(
    ModelConstants("7b", 15.231e9, 5.443e9, 14.14e9, 401408, 57344),
    Coefficients(F_eff=233.5e12, BW_eff=1.617e12, rho_kappa=0.457, eta_D=1.334, c_T=39e-6, c_D=69e-6, c_V=152e-6),
)


@dataclass
class Machine:
    """Decodes with a control, and answers with times: `target` and `cycle` seconds by (batch, length, γ).

    The first three rounds of a shape take `capture_seconds` more, and say that they are not typical.
    """

    control: Control
    target: Callable[[int, float], float]
    cycle: Callable[[int, int, float, int], float]  # (candidate, batch, length, γ)
    tokens_per_row: Callable[[int], float] = lambda index: 5.0
    seconds: float = 0.0
    decisions: list[tuple[int, int]] = field(default_factory=list)  # (batch, γ)
    chosen: list[int | None] = field(default_factory=list)
    capture_seconds: float = 0.0
    asked: Counter[tuple[int, int]] = field(default_factory=Counter)

    def run(self, batches: list[int], waiting: Callable[[int], int] = lambda number: 0, length: float = 512.0) -> None:
        """One rollout, a round per entry."""
        self.decisions, self.chosen = [], []
        self.control.begin(max(batches), [""] * (max(batches) + waiting(0)))
        for number, batch in enumerate(batches):
            index, gamma = self.control.decide(batch, length, waiting(number))
            self.decisions.append((batch, gamma))
            self.chosen.append(index if gamma else None)
            seconds = self.cycle(index, batch, length, gamma) if gamma else self.target(batch, length)
            tokens = round(self.tokens_per_row(index) * batch) if gamma else batch
            self.asked[batch, gamma] += 1
            is_typical = not self.capture_seconds or self.asked[batch, gamma] > 3
            seconds += 0.0 if is_typical else self.capture_seconds
            self.seconds += seconds
            self.control.record(gamma, seconds, tokens, is_typical)

    @property
    def spoke(self) -> list[bool]:
        return [gamma > 0 for _, gamma in self.decisions]


def candidate(**changes: Any) -> Candidate:
    return replace(Candidate("self", 5, 5.0, 10_000, A100), **changes)


def faithful(control: Control, tau: float = 5.0, slower: float = 1.0) -> Machine:
    """A machine that the published roofline describes, but for `slower` speculative rounds."""
    return Machine(
        control,
        A100.target_seconds,
        lambda index, batch, length, gamma: slower * A100.cycle_seconds(batch, length, gamma),
        lambda index: tau,
    )


SHRINKING = [64] * 40 + [48] * 30 + [32] * 30 + [16] * 30 + [8] * 30 + [4] * 60 + [1] * 60


def test_turns_on_where_the_roofline_says_so_and_stays_on() -> None:
    machine = faithful(SpeculationToggle([candidate()], margin=0.05))
    machine.run(SHRINKING)
    pays = [A100.speedup(batch, 512.0, 5.0, 5) >= 1.05 for batch, _ in machine.decisions]
    assert not pays[0] and pays[-1]  # the case has both sides
    first = pays.index(True)
    assert machine.spoke.index(True) == first
    # Monotone, but for the rounds that measure the baseline anew where the gain is in doubt.
    off = [number for number in range(first, len(pays)) if not machine.spoke[number]]
    assert off == list(range(off[0], off[0] + PROBE_ROUNDS)) and machine.decisions[off[0]][0] > 8


def test_stays_on_even_where_the_prediction_falls() -> None:
    # Monotone without refill (App. E.4): a batch that the roofline would refuse does not turn it off again.
    machine = faithful(SpeculationToggle([candidate()]))
    machine.run([8] * 10 + [64] * 3)
    assert machine.spoke == [True] * 13
    assert A100.speedup(64, 512.0, 5.0, 5) < 1


@pytest.mark.parametrize(("margin", "on"), [(0.0, True), (0.05, True), (5.0, False)])
def test_margin(margin: float, on: bool) -> None:
    machine = faithful(SpeculationToggle([candidate()], margin=margin))
    machine.run([8] * 20)
    assert machine.spoke[-1] is on


def test_block_efficiency_of_the_last_rollout_decides() -> None:
    for tau, on in ((1.5, False), (5.5, True)):
        machine = faithful(SpeculationToggle([candidate(block_efficiency=tau)]))
        machine.run([8] * 20)
        assert machine.spoke[-1] is on


def test_waiting_requests_count_as_batch() -> None:
    # Ramp: 8 rows of 64 are in flight while 56 wait. That is no tail.
    machine = faithful(SpeculationToggle([candidate()]))
    machine.control.begin(64, [""] * 64)
    decisions = []
    for waiting in (56, 56, 56, 56, 56, 0, 0):
        decisions.append(machine.control.decide(8, 512.0, waiting)[1] > 0)
        machine.control.record(0, A100.target_seconds(8, 512.0), 8)
    assert decisions == [False] * 5 + [True] * 2


def test_small_batches_speculate_from_the_start() -> None:
    # The authors' released guard never speculates with 32 requests or fewer.
    machine = faithful(SpeculationToggle([candidate()]))
    machine.run([4] * 30)
    # One look at the baseline, which nobody has seen yet.
    assert machine.spoke == [True] * WINDOW + [False] * PROBE_ROUNDS + [True] * (30 - WINDOW - PROBE_ROUNDS)


def test_a_close_call_waits_for_the_baseline() -> None:
    for tau in (3.9, 5.0):
        promised = A100.speedup(8, 512.0, tau, 5)
        assert 1.05 < promised and (promised < CONFIDENT) is (tau == 3.9)  # the case has both sides
        machine = faithful(SpeculationToggle([candidate(block_efficiency=tau)]), tau=tau)
        machine.run([8] * 12)
        assert machine.spoke == [tau == 5.0] * PROBE_ROUNDS + [True] * (12 - PROBE_ROUNDS)
        machine.run([8] * 12)  # the baseline is known by now, or still not needed
        assert machine.spoke == [True] * 12


def test_hysteresis_with_refill() -> None:
    machine = faithful(SpeculationToggle([candidate()]))
    threshold = next(b for b in range(64, 0, -1) if A100.speedup(b, 512.0, 5.0, 5) >= 1.05)
    above = next(b for b in range(64, 0, -1) if A100.speedup(b, 512.0, 5.0, 5) >= 1.0)
    assert threshold < above  # between them it keeps what it has
    back_and_forth = [threshold, above] * 30
    machine.run([64, *back_and_forth], waiting=lambda number: 1 if number == 0 else 0)
    assert machine.spoke == sorted(machine.spoke)
    machine.run([64] + [threshold] * 20 + [64] * 20, waiting=lambda number: 1 if number == 0 else 0)
    turns = [i for i in range(1, 41) if machine.spoke[i] != machine.spoke[i - 1]]
    assert len(turns) == 2 and machine.spoke[-1] is False  # on, and off again at 64
    assert turns[1] - turns[0] >= DWELL


def test_slower_than_predicted_goes_off_for_the_rollout() -> None:
    machine = faithful(SpeculationToggle([candidate()]), slower=4.0)
    machine.run([8] * 200)
    first = machine.spoke.index(True)
    assert sum(machine.spoke) <= 2 * WINDOW
    assert not any(machine.spoke[first + 3 * WINDOW :])
    # The next rollout knows: the profile's overhead terms have been corrected.
    machine.run([8] * 50)
    assert not any(machine.spoke)


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_a_machine_that_is_off_by_a_factor_decides_the_same(factor: float) -> None:
    machine = Machine(
        SpeculationToggle([candidate()]),
        lambda batch, length: factor * A100.target_seconds(batch, length),
        lambda index, batch, length, gamma: factor * A100.cycle_seconds(batch, length, gamma),
    )
    machine.run([64] * 20 + [8] * 100)
    assert not any(machine.spoke[:20]) and machine.spoke[20]
    assert sum(machine.spoke[20:]) >= 100 - PROBE_ROUNDS  # at most one look back at the baseline


def test_low_acceptance_goes_off() -> None:
    machine = faithful(SpeculationToggle([candidate()]), tau=1.2)
    machine.run([8] * 100)
    assert any(machine.spoke) and not any(machine.spoke[-50:])


def test_one_slow_round_changes_nothing() -> None:
    machine = faithful(SpeculationToggle([candidate()]))
    cycle = machine.cycle
    machine.cycle = lambda *shape: cycle(*shape) * (100.0 if len(machine.decisions) == 20 else 1.0)
    machine.run([8] * 80)
    off = [number for number, speculated in enumerate(machine.spoke) if not speculated]
    assert off == list(range(WINDOW, WINDOW + PROBE_ROUNDS))  # that measured the baseline


@pytest.mark.parametrize(("tau", "capture_seconds"), [(2.5, 0.15), (5.0, 0.15), (5.0, 0.5)])
def test_rounds_that_capture_forwards_decide_nothing(tau: float, capture_seconds: float) -> None:
    """Each shape's first rounds are slow: the baseline's, which would flatter any drafter, and a drafter's own."""
    clean, machine = (faithful(SpeculationToggle([candidate()]), tau) for _ in range(2))
    machine.capture_seconds = capture_seconds
    for _ in range(2):
        clean.run(SHRINKING)
        machine.run(SHRINKING)
    assert sum(clean.spoke) > 100 if tau > 3 else sum(clean.spoke) < 20
    assert abs(sum(machine.spoke) - sum(clean.spoke)) <= 3 * WINDOW


def test_a_baseline_is_measured_in_typical_rounds() -> None:
    machine = faithful(SpeculationToggle([candidate(roofline=None)]))
    machine.capture_seconds = 1.0
    machine.run([8] * 20)
    assert machine.spoke == [False] * (3 + PROBE_ROUNDS) + [True] * (20 - 3 - PROBE_ROUNDS)


def test_a_drafter_whose_rounds_all_captured_has_drafted() -> None:
    """Old evidence is put aside for one that did not draft for long, and τ = γ + 1 is then hoped for."""
    toggle = SpeculationToggle([candidate()])
    machine = faithful(toggle)
    machine.capture_seconds = 1.0
    for _ in range(RETRY_AFTER + 1):
        machine.asked.clear()
        machine.run([8] * 3)
        assert all(machine.spoke) and not toggle.tallies[0].rounds
    toggle.begin(8, [""] * 8)
    assert toggle.predicted_speedup(0, 8, 512.0) == toggle.speedup_at(5.0, 0, 8, 512.0)


def test_never_much_slower_than_autoregressive() -> None:
    for slower in (0.5, 1.0, 2.0, 5.0):
        for batches in (SHRINKING, [1] * 300, [8] * 300, [64] * 300):
            machine = faithful(SpeculationToggle([candidate()]), slower=slower)
            tokens = 0.0
            machine.run(batches)
            plain = 0.0
            for batch, gamma in machine.decisions:
                tokens += batch * (5 if gamma else 1)
                plain += A100.target_seconds(batch, 512.0) * (5 if gamma else 1)
            assert machine.seconds <= 1.3 * plain  # what trying costs in 300 rounds


def test_gives_up_to_kernels_that_cannot_serve_the_batch() -> None:
    machine = faithful(SpeculationToggle([candidate(max_rows=4)]))
    machine.run([8] * 20 + [4] * 20)
    assert machine.spoke == [False] * 20 + [True] * 20


def test_forgets_old_evidence_after_many_rollouts_without() -> None:
    toggle = SpeculationToggle([candidate()])
    bad = faithful(toggle, slower=4.0)
    bad.run([8] * 100)
    good = faithful(toggle)
    spoke = []
    for _ in range(RETRY_AFTER + 2):
        good.run([8] * 40)
        spoke.append(any(good.spoke))
    assert spoke[:RETRY_AFTER] == [False] * RETRY_AFTER
    assert spoke[-1]


def test_what_rounds_of_long_drafts_took_says_nothing_of_short_ones() -> None:
    """Drafts of 10 take a fifth of what the profile says; so many seconds less, rounds of γ = 2 would take none."""
    toggle = SpeculationToggle([candidate(draft_length=10, block_efficiency=8.0)])
    machine = faithful(toggle, tau=8.0, slower=0.2)
    machine.run([4] * 40)
    assert sum(machine.spoke) > 30
    toggle.candidates[0].draft_length, toggle.candidates[0].block_efficiency = 2, 2.5
    toggle.begin(4, [""] * 4)
    assert toggle.predicted_speedup(0, 4, 512.0) == pytest.approx(A100.speedup(4, 512.0, 2.5, 2), rel=0.05)
    toggle.candidates[0].draft_length = 10
    assert toggle.predicted_speedup(0, 4, 512.0) == pytest.approx(5 * A100.speedup(4, 512.0, 2.5, 10), rel=0.05)


def test_candidates_without_a_profile_are_tried_and_judged() -> None:
    for cost, kept in ((2.0, True), (6.0, False)):
        machine = Machine(
            SpeculationToggle([candidate(roofline=None)]),
            lambda batch, length: 1.0,
            lambda index, batch, length, gamma, cost=cost: cost,
        )
        machine.run([8] * 60)
        assert any(machine.spoke) and machine.spoke[-1] is kept
    # A later rollout goes by what was measured, and tries again with fewer rows.
    machine.run([8] * 60 + [4] * 40)
    assert not any(machine.spoke[:60]) and any(machine.spoke[60:])
    machine.run([8] * 60 + [4] * 40)
    assert not any(machine.spoke)


def test_rounds_of_short_rollouts_add_up() -> None:
    """A drafter is not on trial for ever where each call ends before its first judgement."""
    toggle = SpeculationToggle([candidate(roofline=None)])
    machine = Machine(toggle, lambda batch, length: 1.0, lambda index, *shape: 6.0)
    spoke = []
    for _ in range(6):
        machine.run([1] * 3)
        toggle.finish()
        spoke += machine.spoke
    assert spoke[:PROBE_ROUNDS] == [False] * PROBE_ROUNDS and not any(spoke[PROBE_ROUNDS + 6 :])
    assert sum(spoke) == 6  # two rollouts of three rounds: the second began before four rounds were known


def test_what_rounds_took_makes_a_ladder() -> None:
    toggle = SpeculationToggle([candidate(name=name, roofline=None) for name in ("self", "history")])
    machine = Machine(
        toggle, lambda batch, length: 0.1 * batch, lambda index, batch, length, gamma: (0.3 + index) * batch
    )
    assert toggle.rungs() == ()
    machine.run([8] * 100)
    toggle.finish()
    assert toggle.candidates[0].block_efficiency == 5.0
    rungs = {(rung.method, rung.batch): rung for rung in toggle.rungs()}
    assert set(rungs) == {("self", 8), ("history", 8)}
    assert rungs["self", 8].seconds == pytest.approx(2.4) and rungs["history", 8].seconds == pytest.approx(10.4)
    assert all(rung.plain_seconds == pytest.approx(0.8) and rung.draft_length == 5 for rung in rungs.values())
    assert rungs["self", 8].block_efficiency == pytest.approx(5.0)
    toggle.drop(1)
    assert len(toggle.rungs()) == 2  # what was measured stays true


def test_a_profile_serves_the_ladder_of_measured_rounds() -> None:
    machine = faithful(SpeculationToggle([candidate()]))
    machine.run([4] * 60)
    (rung,) = machine.control.rungs()
    assert rung.seconds == pytest.approx(A100.cycle_seconds(4, 512.0, 5)) and rung.batch == 4
    assert rung.plain_seconds == pytest.approx(A100.target_seconds(4, 512.0))


@pytest.mark.parametrize("best", [0, 1, 2])
@pytest.mark.parametrize("profiled", [True, False])
def test_auto_ends_with_the_fastest_candidate(best: int, profiled: bool) -> None:
    roofline = A100 if profiled else None
    names = ("self", "history", "model")
    toggle = SpeculationToggle([candidate(name=name, roofline=roofline) for name in names])
    machine = Machine(
        toggle,
        A100.target_seconds,
        lambda index, batch, length, gamma: A100.cycle_seconds(batch, length, gamma) * (1.0 if index == best else 1.6),
    )
    machine.run([4] * 300)
    assert set(machine.chosen[-100:]) == {best}


def test_two_that_became_slower_do_not_take_turns() -> None:
    """Of both most was accepted at first, and hardly anything later: by its mean over the rollout each looks better
    than the other one measures."""
    toggle = SpeculationToggle([candidate(name="history"), candidate(name="ngram")])
    machine = Machine(toggle, A100.target_seconds, lambda index, *shape: A100.cycle_seconds(*shape))
    good = 40
    taus = {0: iter([6.0] * good + [1.5] * 1000), 1: iter([5.0] * good + [1.5] * 1000)}
    machine.tokens_per_row = lambda index: next(taus[index])
    machine.run([8] * 300)
    assert sum(machine.spoke) - 2 * good <= 3 * WINDOW and not any(machine.spoke[-WINDOW:])


def test_a_slightly_bad_start_is_given_a_whole_window() -> None:
    """0.7 after four or five rounds is no reason to give up yet: acceptance varies."""
    machine = faithful(SpeculationToggle([candidate()]))
    taus = iter([2.6] * 6 + [6.0] * 1000)
    machine.tokens_per_row = lambda index: next(taus)
    machine.run([8] * 120)
    assert machine.spoke[-50:] == [True] * 50


def test_without_a_profile_the_baseline_is_of_like_batches() -> None:
    """Rounds cost what their rows cost, speculative ones 1.3 times that per token: after many plain rounds at 64 rows
    that must still show at 8."""
    machine = Machine(
        SpeculationToggle([candidate(roofline=None, max_rows=8)]),
        lambda batch, length: batch * 1e-3,
        lambda index, batch, length, gamma: 1.3 * 5 * batch * 1e-3,
    )
    machine.run([64] * 40 + [8] * 100)
    assert any(machine.spoke) and not any(machine.spoke[-40:])


def test_each_candidate_gets_its_second_chance() -> None:
    toggle = SpeculationToggle([candidate(name="self"), candidate(name="history")])
    better = [0]
    machine = Machine(
        toggle,
        A100.target_seconds,
        lambda index, *shape: A100.cycle_seconds(*shape) * (1 if index == better[0] else 3),
    )
    for _ in range(3):
        machine.run([4] * 100)
    better[0] = 1  # the second epoch: now the history knows the texts
    toggle.candidates[0].block_efficiency = 2.0
    for _ in range(RETRY_AFTER + 2):
        machine.run([4] * 100)
    assert set(machine.chosen[-50:]) == {1}


def test_dropped_before_the_first_round() -> None:
    for control in (SpeculationToggle([candidate()]), AlwaysSpeculate(candidate())):
        control.begin(4, [""] * 4)
        control.drop(0)
        assert control.decide(4, 512.0, 0)[1] == 0


def test_auto_ends_without_any_where_none_pays() -> None:
    toggle = SpeculationToggle([candidate(name=name) for name in ("self", "history")])
    machine = faithful(toggle, slower=4.0)
    machine.run([4] * 200)
    assert not any(machine.spoke[-100:])


def test_dropped_candidates_are_not_chosen_again() -> None:
    toggle = SpeculationToggle([candidate()])
    machine = faithful(toggle)
    machine.run([4] * 10)
    toggle.begin(4, [""] * 4)
    assert toggle.decide(4, 512.0, 0)[1] == 5
    toggle.drop(0)
    assert toggle.decide(4, 512.0, 0)[1] == 0
    toggle.begin(4, [""] * 4)  # a new rollout, perhaps a new drafter
    assert toggle.decide(4, 512.0, 0)[1] == 5


def test_lookup_drafters_cost_no_draft_forwards() -> None:
    lookup, network = candidate(is_network=False), candidate()
    assert lookup.cycle_seconds(A100, 8, 512.0) == A100.verify_seconds(8, 512.0, 5)
    assert network.cycle_seconds(A100, 8, 512.0) == A100.cycle_seconds(8, 512.0, 5)


def test_tallies_count_what_was_speculated() -> None:
    machine = faithful(SpeculationToggle([candidate()]), tau=4.0)
    machine.run([8] * 23)
    (tally,) = machine.control.tallies
    assert (tally.rounds, tally.blocks, tally.tokens) == (20, 160, 640)
    assert tally.block_efficiency == 4.0
    expected = 4.0 * A100.target_seconds(8, 512.0) / A100.cycle_seconds(8, 512.0, 5)
    assert tally.measured_speedup == pytest.approx(expected)
    assert tally.predicted_speedup == pytest.approx((16 * expected * 5 / 4 + 4 * expected) / 20, rel=0.05)


def test_always_and_never() -> None:
    always = faithful(AlwaysSpeculate(candidate(max_rows=16)))
    always.run(SHRINKING)
    always.control.record(2, 1.0, 2)  # cut short where no row has room for more: says nothing about τ
    assert always.spoke == [batch <= 16 for batch, _ in always.decisions]
    assert always.control.tallies[0].block_efficiency == 5.0
    never = faithful(NeverSpeculate())
    never.run(SHRINKING)
    assert not any(never.spoke) and never.control.tallies == []
