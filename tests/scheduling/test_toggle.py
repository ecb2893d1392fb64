"""When to speculate: decisions of the toggle over simulated machines."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_trl.scheduling.control import AlwaysSpeculate, Candidate, Control, NeverSpeculate
from spec_trl.scheduling.roofline import Coefficients, ModelConstants, Roofline
from spec_trl.scheduling.toggle import CONFIDENT, DWELL, PROBE_ROUNDS, RETRY_AFTER, WINDOW, SpeculationToggle


# Qwen2.5-7B on an A100, as published: speculation pays at small batches only.
A100 = Roofline(
    ModelConstants("7b", 15.231e9, 5.443e9, 14.14e9, 401408, 57344),
    Coefficients(F_eff=233.5e12, BW_eff=1.617e12, rho_kappa=0.457, eta_D=1.334, c_T=39e-6, c_D=69e-6, c_V=152e-6),
)
SHRINKING = [64] * 40 + [48] * 30 + [32] * 30 + [16] * 30 + [8] * 30 + [4] * 60 + [1] * 60


@dataclass
class Machine:
    """Decodes with a control, and answers with times: `target` and `cycle` seconds by (batch, length, γ).

    The first three rounds of a shape take `capture_seconds` more, and are not typical.
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


def faithful(control: Control | None = None, tau: float = 5.0, slower: float = 1.0, factor: float = 1.0) -> Machine:
    """A machine that the published roofline describes, but for `slower` speculative rounds and a common `factor`."""
    return Machine(
        SpeculationToggle([candidate()]) if control is None else control,
        lambda batch, length: factor * A100.target_seconds(batch, length),
        lambda index, batch, length, gamma: factor * slower * A100.cycle_seconds(batch, length, gamma),
        lambda index: tau,
    )


# ---- with a profile -------------------------------------------------------------------------------------------------


def test_turns_on_where_the_roofline_says_so_and_stays_on() -> None:
    machine = faithful()
    machine.run(SHRINKING)
    pays = [A100.speedup(batch, 512.0, 5.0, 5) >= 1.05 for batch, _ in machine.decisions]
    assert not pays[0] and pays[-1]  # the case has both sides
    first = pays.index(True)
    assert machine.spoke.index(True) == first
    # Monotone, but for the rounds that measure the baseline anew where the gain is in doubt.
    off = [number for number in range(first, len(pays)) if not machine.spoke[number]]
    assert off == list(range(off[0], off[0] + PROBE_ROUNDS)) and machine.decisions[off[0]][0] > 8
    machine = faithful()
    machine.run([8] * 10 + [64] * 3)  # monotone without refill (App. E.4), though 64 rows alone would be refused
    assert machine.spoke == [True] * 13 and A100.speedup(64, 512.0, 5.0, 5) < 1


@pytest.mark.parametrize(
    ("margin", "tau", "on"), [(0.0, 5.0, True), (0.05, 5.0, True), (5.0, 5.0, False), (0.05, 1.5, False)]
)
def test_margin_and_block_efficiency_decide(margin: float, tau: float, on: bool) -> None:
    machine = faithful(SpeculationToggle([candidate(block_efficiency=tau)], margin))
    machine.run([8] * 20)
    assert machine.spoke[-1] is on


def test_waiting_requests_count_as_batch() -> None:
    """At first 8 rows of 64 are in flight while 56 wait, which is no tail."""
    machine = faithful()
    machine.control.begin(64, [""] * 64)
    decisions = []
    for waiting in (56, 56, 56, 56, 56, 0, 0):
        decisions.append(machine.control.decide(8, 512.0, waiting)[1] > 0)
        machine.control.record(0, A100.target_seconds(8, 512.0), 8)
    assert decisions == [False] * 5 + [True] * 2


def test_small_batches_speculate_from_the_start() -> None:
    """The authors' guard never speculates with 32 requests or fewer. One look at the baseline comes after a window."""
    machine = faithful()
    machine.run([4] * 30)
    assert machine.spoke == [True] * WINDOW + [False] * PROBE_ROUNDS + [True] * (30 - WINDOW - PROBE_ROUNDS)


@pytest.mark.parametrize("tau", [3.9, 5.0])
def test_a_close_call_waits_for_the_baseline(tau: float) -> None:
    promised = A100.speedup(8, 512.0, tau, 5)
    assert 1.05 < promised and (promised < CONFIDENT) is (tau == 3.9)  # the case has both sides
    machine = faithful(SpeculationToggle([candidate(block_efficiency=tau)]), tau=tau)
    machine.run([8] * 12)
    assert machine.spoke == [tau == 5.0] * PROBE_ROUNDS + [True] * (12 - PROBE_ROUNDS)
    machine.run([8] * 12)  # the baseline is known by now, or still not needed
    assert machine.spoke == [True] * 12


def test_hysteresis_with_refill() -> None:
    machine = faithful()
    threshold = next(b for b in range(64, 0, -1) if A100.speedup(b, 512.0, 5.0, 5) >= 1.05)
    above = next(b for b in range(64, 0, -1) if A100.speedup(b, 512.0, 5.0, 5) >= 1.0)
    assert threshold < above  # between them it keeps what it has
    machine.run([64, *[threshold, above] * 30], waiting=lambda number: 1 if number == 0 else 0)
    assert machine.spoke == sorted(machine.spoke)
    machine.run([64] + [threshold] * 20 + [64] * 20, waiting=lambda number: 1 if number == 0 else 0)
    turns = [i for i in range(1, 41) if machine.spoke[i] != machine.spoke[i - 1]]
    assert len(turns) == 2 and machine.spoke[-1] is False  # on, and off again at 64
    assert turns[1] - turns[0] >= DWELL


# ---- measured rounds have the last word ---------------------------------------------------------------------------


def test_slower_than_predicted_goes_off_for_the_rollout() -> None:
    machine = faithful(slower=4.0)
    machine.run([8] * 200)
    first = machine.spoke.index(True)
    assert sum(machine.spoke) <= 2 * WINDOW and not any(machine.spoke[first + 3 * WINDOW :])
    machine.run([8] * 50)  # the profile's overhead terms have been corrected
    assert not any(machine.spoke)


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_a_machine_that_is_off_by_a_factor_decides_the_same(factor: float) -> None:
    machine = faithful(factor=factor)
    machine.run([64] * 20 + [8] * 100)
    assert not any(machine.spoke[:20]) and machine.spoke[20]
    assert sum(machine.spoke[20:]) >= 100 - PROBE_ROUNDS  # at most one look back at the baseline


def test_low_acceptance_goes_off() -> None:
    machine = faithful(tau=1.2)
    machine.run([8] * 100)
    assert any(machine.spoke) and not any(machine.spoke[-50:])


def test_one_slow_round_changes_nothing() -> None:
    machine = faithful()
    cycle = machine.cycle
    machine.cycle = lambda *shape: cycle(*shape) * (100.0 if len(machine.decisions) == 20 else 1.0)
    machine.run([8] * 80)
    off = [number for number, speculated in enumerate(machine.spoke) if not speculated]
    assert off == list(range(WINDOW, WINDOW + PROBE_ROUNDS))  # that measured the baseline


def test_a_slightly_bad_start_is_given_a_whole_window() -> None:
    """0.7 after four or five rounds is no reason to give up yet: acceptance varies."""
    machine = faithful()
    taus = iter([2.6] * 6 + [6.0] * 1000)
    machine.tokens_per_row = lambda index: next(taus)
    machine.run([8] * 120)
    assert machine.spoke[-50:] == [True] * 50


@settings(deadline=None, max_examples=12, derandomize=True)
@given(slower=st.floats(0.5, 5.0), batches=st.sampled_from([SHRINKING, [1] * 300, [8] * 300, [64] * 300]))
def test_never_much_slower_than_autoregressive(slower: float, batches: list[int]) -> None:
    machine = faithful(slower=slower)
    machine.run(batches)
    plain = sum(A100.target_seconds(batch, 512.0) * (5 if gamma else 1) for batch, gamma in machine.decisions)
    assert machine.seconds <= 1.3 * plain  # what trying costs in 300 rounds


@pytest.mark.parametrize(("tau", "capture_seconds"), [(2.5, 0.15), (5.0, 0.15), (5.0, 0.5)])
def test_rounds_that_capture_forwards_decide_nothing(tau: float, capture_seconds: float) -> None:
    """Each shape's first rounds are slow: the baseline's, which would flatter any drafter, and a drafter's own."""
    clean, machine = (faithful(tau=tau) for _ in range(2))
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


# ---- over rollouts --------------------------------------------------------------------------------------------------


def test_old_evidence_is_forgotten_after_many_rollouts_without_drafting() -> None:
    toggle = SpeculationToggle([candidate()])
    faithful(toggle, slower=4.0).run([8] * 100)
    good, spoke = faithful(toggle), []
    for _ in range(RETRY_AFTER + 2):
        good.run([8] * 40)
        spoke.append(any(good.spoke))
    assert spoke[:RETRY_AFTER] == [False] * RETRY_AFTER and spoke[-1]


def test_a_drafter_whose_rounds_all_captured_has_drafted() -> None:
    """Else old measurements would be ignored, and τ = γ + 1 hoped for."""
    toggle = SpeculationToggle([candidate()])
    machine = faithful(toggle)
    machine.capture_seconds = 1.0
    for _ in range(RETRY_AFTER + 1):
        machine.asked.clear()
        machine.run([8] * 3)
        assert all(machine.spoke) and not toggle.tallies[0].rounds
    toggle.begin(8, [""] * 8)
    assert toggle.predicted_speedup(0, 8, 512.0) == toggle.speedup_at(5.0, 0, 8, 512.0)


def test_what_rounds_of_long_drafts_took_says_nothing_of_short_ones() -> None:
    """Drafts of 10 take a fifth of what the profile says; by as many seconds less, rounds of γ = 2 would take none."""
    toggle = SpeculationToggle([candidate(draft_length=10, block_efficiency=8.0)])
    machine = faithful(toggle, tau=8.0, slower=0.2)
    machine.run([4] * 40)
    assert sum(machine.spoke) > 30
    toggle.candidates[0].draft_length, toggle.candidates[0].block_efficiency = 2, 2.5
    toggle.begin(4, [""] * 4)
    assert toggle.predicted_speedup(0, 4, 512.0) == pytest.approx(A100.speedup(4, 512.0, 2.5, 2), rel=0.05)
    toggle.candidates[0].draft_length = 10
    assert toggle.predicted_speedup(0, 4, 512.0) == pytest.approx(5 * A100.speedup(4, 512.0, 2.5, 10), rel=0.05)


def test_kernels_that_cannot_serve_the_batch_and_dropped_candidates() -> None:
    machine = faithful(SpeculationToggle([candidate(max_rows=4)]))
    machine.run([8] * 20 + [4] * 20)
    assert machine.spoke == [False] * 20 + [True] * 20
    for control in (machine.control, AlwaysSpeculate(candidate())):
        control.begin(4, [""] * 4)
        control.drop(0)
        assert control.decide(4, 512.0, 0)[1] == 0
        control.begin(4, [""] * 4)  # a new rollout, perhaps a new drafter
        assert control.decide(4, 512.0, 0)[1] == 5
        control.drop(0)
        assert control.decide(4, 512.0, 0)[1] == 0


# ---- without a profile ----------------------------------------------------------------------------------------------


def timed(target: Callable[[int], float], cycle: Callable[[int, int], float], *names: str, **changes: Any) -> Machine:
    """A machine with seconds by batch, and by candidate and batch; nothing is predicted."""
    toggle = SpeculationToggle([candidate(name=name, roofline=None, **changes) for name in names or ("self",)])
    return Machine(toggle, lambda batch, _: target(batch), lambda index, batch, *_: cycle(index, batch))


def test_candidates_without_a_profile_are_tried_and_judged() -> None:
    machine = timed(lambda batch: 1.0, lambda index, batch: 2.0)
    machine.run([8] * 60)
    assert machine.spoke[-1]
    machine = timed(lambda batch: 1.0, lambda index, batch: 6.0)
    machine.run([8] * 60)
    assert any(machine.spoke) and not machine.spoke[-1]
    machine.run([8] * 60 + [4] * 40)  # goes by what was measured, and tries again with fewer rows
    assert not any(machine.spoke[:60]) and any(machine.spoke[60:])
    machine.run([8] * 60 + [4] * 40)
    assert not any(machine.spoke)


def test_rounds_of_short_rollouts_add_up() -> None:
    """A drafter is not on trial for ever where each call ends before its first judgement."""
    machine, spoke = timed(lambda batch: 1.0, lambda index, batch: 6.0), []
    for _ in range(6):
        machine.run([1] * 3)
        machine.control.finish()
        spoke += machine.spoke
    # Two rollouts of three rounds draft: the second began before four rounds were known.
    assert spoke[:PROBE_ROUNDS] == [False] * PROBE_ROUNDS and sum(spoke) == 6 and not any(spoke[PROBE_ROUNDS + 6 :])


def test_the_baseline_is_of_like_batches() -> None:
    """Rounds cost what their rows cost, speculative ones 1.3 times that per token: after many plain rounds at 64 rows
    that must still show at 8."""
    machine = timed(lambda batch: batch * 1e-3, lambda index, batch: 1.3 * 5 * batch * 1e-3, max_rows=8)
    machine.run([64] * 40 + [8] * 100)
    assert any(machine.spoke) and not any(machine.spoke[-40:])


def test_what_rounds_took_makes_a_ladder() -> None:
    machine = timed(lambda batch: 0.1 * batch, lambda index, batch: (0.3 + index) * batch, "self", "history")
    toggle = machine.control
    assert isinstance(toggle, SpeculationToggle) and toggle.rungs() == ()
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
    profiled = SpeculationToggle([candidate()])
    faithful(profiled).run([4] * 60)
    (rung,) = profiled.rungs()
    assert rung.seconds == pytest.approx(A100.cycle_seconds(4, 512.0, 5)) and rung.batch == 4
    assert rung.plain_seconds == pytest.approx(A100.target_seconds(4, 512.0))


# ---- several candidates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("best", "profiled"), [(0, True), (1, False), (2, True), (2, False)])
def test_auto_ends_with_the_fastest_candidate(best: int, profiled: bool) -> None:
    names, roofline = ("self", "history", "model"), A100 if profiled else None
    machine = faithful(SpeculationToggle([candidate(name=name, roofline=roofline) for name in names]))
    cycle = machine.cycle
    machine.cycle = lambda index, *shape: cycle(index, *shape) * (1.0 if index == best else 1.6)
    machine.run([4] * 300)
    assert set(machine.chosen[-100:]) == {best}


def test_two_that_became_slower_do_not_take_turns() -> None:
    """Of both most was accepted at first, and hardly anything later: by its mean over the rollout each looks better
    than the other one measures."""
    machine, good = faithful(SpeculationToggle([candidate(name="history"), candidate(name="ngram")])), 40
    taus = {0: iter([6.0] * good + [1.5] * 1000), 1: iter([5.0] * good + [1.5] * 1000)}
    machine.tokens_per_row = lambda index: next(taus[index])
    machine.run([8] * 300)
    assert sum(machine.spoke) - 2 * good <= 3 * WINDOW and not any(machine.spoke[-WINDOW:])
    machine = faithful(SpeculationToggle([candidate(name=name) for name in ("self", "history")]), slower=4.0)
    machine.run([4] * 200)  # neither pays
    assert not any(machine.spoke[-100:])


def test_each_candidate_gets_its_second_chance() -> None:
    toggle = SpeculationToggle([candidate(name="self"), candidate(name="history")])
    machine, better = faithful(toggle), [0]
    cycle = machine.cycle
    machine.cycle = lambda index, *shape: cycle(index, *shape) * (1 if index == better[0] else 3)
    for _ in range(3):
        machine.run([4] * 100)
    better[0] = 1  # the second epoch: now the history knows the texts
    toggle.candidates[0].block_efficiency = 2.0
    for _ in range(RETRY_AFTER + 2):
        machine.run([4] * 100)
    assert set(machine.chosen[-50:]) == {1}


# ---- candidates, tallies and the simple controls -------------------------------------------------------------------


def test_lookup_drafters_cost_no_draft_forwards() -> None:
    lookup, network = candidate(is_network=False), candidate()
    assert lookup.cycle_seconds(A100, 8, 512.0) == A100.verify_seconds(8, 512.0, 5)
    assert network.cycle_seconds(A100, 8, 512.0) == A100.cycle_seconds(8, 512.0, 5)


def test_tallies_count_what_was_speculated() -> None:
    machine = faithful(tau=4.0)
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
