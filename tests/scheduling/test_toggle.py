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
    capture_seconds: float = 0.0
    seconds: float = 0.0
    decisions: list[tuple[int, int]] = field(default_factory=list)  # (batch, γ)
    chosen: list[int | None] = field(default_factory=list)
    asked: Counter[tuple[int, int]] = field(default_factory=Counter)

    def run(self, batches: list[int], waiting: Callable[[int], int] = lambda number: 0) -> list[bool]:
        """One rollout, a round per entry, at a mean length of 512; returns which rounds speculated."""
        self.decisions, self.chosen = [], []
        self.control.begin(max(batches), [""] * (max(batches) + waiting(0)))
        for number, batch in enumerate(batches):
            index, gamma = self.control.decide(batch, 512.0, waiting(number))
            self.decisions.append((batch, gamma))
            self.chosen.append(index if gamma else None)
            seconds = self.cycle(index, batch, 512.0, gamma) if gamma else self.target(batch, 512.0)
            tokens = round(self.tokens_per_row(index) * batch) if gamma else batch
            self.asked[batch, gamma] += 1
            is_typical = not self.capture_seconds or self.asked[batch, gamma] > 3
            seconds += 0.0 if is_typical else self.capture_seconds
            self.seconds += seconds
            self.control.record(gamma, seconds, tokens, is_typical)
        return self.spoke

    @property
    def spoke(self) -> list[bool]:
        return [gamma > 0 for _, gamma in self.decisions]


def candidate(**changes: Any) -> Candidate:
    return replace(Candidate("self", 5, 5.0, 10_000, A100), **changes)


def toggled(*names: str, margin: float = 0.05, **changes: Any) -> SpeculationToggle:
    """A toggle of the candidates of these names, at first of one copy."""
    return SpeculationToggle([candidate(name=name, **changes) for name in names or ("self",)], margin)


def faithful(
    control: Control | None = None, tau: float = 5.0, slower: float = 1.0, factor: float = 1.0, capturing: float = 0.0
) -> Machine:
    """A machine that the published roofline describes, but for `slower` speculative rounds and a common `factor`."""
    return Machine(
        control or toggled(),
        lambda batch, length: factor * A100.target_seconds(batch, length),
        lambda index, batch, length, gamma: factor * slower * A100.cycle_seconds(batch, length, gamma),
        lambda index: tau,
        capturing,
    )


def timed(target: Callable[[int], float], cycle: Callable[[int, int], float], *names: str, **changes: Any) -> Machine:
    """A machine with seconds by batch, and by candidate and batch; nothing is predicted."""
    control = toggled(*names, roofline=None, **changes)
    return Machine(control, lambda batch, _: target(batch), lambda index, batch, *_: cycle(index, batch))


def one_slow_round() -> Machine:
    machine = faithful()
    cycle = machine.cycle
    machine.cycle = lambda *shape: cycle(*shape) * (100.0 if len(machine.decisions) == 20 else 1.0)
    return machine


def bad_start() -> Machine:
    machine, taus = faithful(), iter([2.6] * 6 + [6.0] * 1000)
    machine.tokens_per_row = lambda index: next(taus)
    return machine


def tried(spoke: list[bool]) -> bool:
    """It drafted, and not for long."""
    return 0 < sum(spoke) <= 3 * WINDOW and not any(spoke[-40:])


def ends_on(spoke: list[bool]) -> bool:
    return all(spoke[-20:])


def from_20(spoke: list[bool]) -> bool:
    """With at most one look back at the baseline."""
    return spoke.index(True) == 20 and sum(spoke[20:]) >= 80 - PROBE_ROUNDS


PROBES = [False] * PROBE_ROUNDS  # rounds that measure the baseline
LOOKED_BACK = [True] * WINDOW + PROBES + [True] * 61  # the gain is in doubt
STORIES: dict[str, tuple[Machine, list[int], list[bool] | Callable[[list[bool]], bool]]] = {
    "less than the margin": (faithful(toggled(margin=5.0)), [8] * 20, [False] * 20),
    "low block efficiency": (faithful(toggled(block_efficiency=1.5)), [8] * 20, [False] * 20),
    # Though 64 rows alone would be refused.
    "stays on without refill, App. E.4": (faithful(), [8] * 10 + [64] * 3, [True] * 13),
    # The authors' guard never speculates with 32 requests or fewer.
    "small batches speculate from the start": (faithful(), [4] * 30, LOOKED_BACK[:30]),
    "kernels serve four rows": (faithful(toggled(max_rows=4)), [8] * 20 + [4] * 20, [False] * 20 + [True] * 20),
    "a fast machine": (faithful(factor=0.3), [64] * 20 + [8] * 80, from_20),
    "a slow machine": (faithful(factor=3.0), [64] * 20 + [8] * 80, from_20),
    "one slow round": (one_slow_round(), [8] * 80, LOOKED_BACK),
    # 0.7 after four or five rounds is no reason to give up yet: acceptance varies.
    "a slightly bad start is given a whole window": (bad_start(), [8] * 120, ends_on),
    "low acceptance": (faithful(tau=1.2), [8] * 100, tried),
    "slow rounds": (faithful(slower=4.0), [8] * 200, tried),
    "neither of two pays": (faithful(toggled("self", "history"), slower=4.0), [4] * 200, tried),
    "a baseline of typical rounds": (
        faithful(toggled(roofline=None), capturing=1.0),
        [8] * 20,
        [False] * 3 + PROBES + [True] * (17 - PROBE_ROUNDS),
    ),
    "no profile, and it pays": (timed(lambda batch: 1.0, lambda index, batch: 2.0), [8] * 60, ends_on),
    # Rounds cost what their rows cost, speculative ones 1.3 times that per token; 64 rows say nothing of 8.
    "the baseline is of like batches": (
        timed(lambda batch: batch / 1000, lambda index, batch: 6.5 * batch / 1000, max_rows=8),
        [64] * 40 + [8] * 100,
        tried,
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_one_rollout(story: str) -> None:
    machine, batches, expected = STORIES[story]
    spoke = machine.run(batches)
    assert expected(spoke) if callable(expected) else spoke == expected


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
    assert A100.speedup(64, 512.0, 5.0, 5) < 1


def test_waiting_requests_count_as_batch() -> None:
    """At first 8 rows of 64 are in flight while 56 wait, which is no tail."""
    machine = faithful()
    machine.control.begin(64, [""] * 64)
    decisions = []
    for waiting in (56, 56, 56, 56, 56, 0, 0):
        decisions.append(machine.control.decide(8, 512.0, waiting)[1] > 0)
        machine.control.record(0, A100.target_seconds(8, 512.0), 8)
    assert decisions == [False] * 5 + [True] * 2


@pytest.mark.parametrize("tau", [3.9, 5.0])
def test_a_close_call_waits_for_the_baseline(tau: float) -> None:
    promised = A100.speedup(8, 512.0, tau, 5)
    assert 1.05 < promised and (promised < CONFIDENT) is (tau == 3.9)  # the case has both sides
    machine = faithful(toggled(block_efficiency=tau), tau=tau)
    assert machine.run([8] * 12) == [tau == 5.0] * PROBE_ROUNDS + [True] * (12 - PROBE_ROUNDS)
    assert machine.run([8] * 12) == [True] * 12  # the baseline is known by now, or still not needed


def test_hysteresis_with_refill() -> None:
    machine = faithful()
    threshold = next(b for b in range(64, 0, -1) if A100.speedup(b, 512.0, 5.0, 5) >= 1.05)
    above = next(b for b in range(64, 0, -1) if A100.speedup(b, 512.0, 5.0, 5) >= 1.0)
    assert threshold < above  # between them it keeps what it has
    machine.run([64, *[threshold, above] * 30], waiting=lambda number: number == 0)
    assert machine.spoke == sorted(machine.spoke)
    machine.run([64] + [threshold] * 20 + [64] * 20, waiting=lambda number: number == 0)
    turns = [i for i in range(1, 41) if machine.spoke[i] != machine.spoke[i - 1]]
    assert len(turns) == 2 and machine.spoke[-1] is False  # on, and off again at 64
    assert turns[1] - turns[0] >= DWELL


@settings(deadline=None, max_examples=12, derandomize=True)
@given(slower=st.floats(0.5, 5.0), batches=st.sampled_from([SHRINKING, [1] * 300, [8] * 300, [64] * 300]))
def test_never_much_slower_than_autoregressive(slower: float, batches: list[int]) -> None:
    machine = faithful(slower=slower)
    machine.run(batches)
    plain = sum(A100.target_seconds(batch, 512.0) * (5 if gamma else 1) for batch, gamma in machine.decisions)
    assert machine.seconds <= 1.3 * plain  # what trying costs in 300 rounds


# ---- over rollouts --------------------------------------------------------------------------------------------------


def test_old_evidence_counts_until_many_rollouts_went_without_drafting() -> None:
    toggle = toggled()
    slow, good = faithful(toggle, slower=4.0), faithful(toggle)
    slow.run([8] * 100)
    assert not any(slow.run([8] * 50))  # the profile's overhead terms have been corrected
    spoke = [any(good.run([8] * 40)) for _ in range(RETRY_AFTER + 1)]
    assert spoke[: RETRY_AFTER - 1] == [False] * (RETRY_AFTER - 1) and spoke[-1]


def test_a_drafter_whose_rounds_all_captured_has_drafted() -> None:
    """Else old measurements would be ignored, and τ = γ + 1 hoped for."""
    toggle = toggled()
    machine = faithful(toggle, capturing=1.0)
    for _ in range(RETRY_AFTER + 1):
        machine.asked.clear()
        assert all(machine.run([8] * 3)) and not toggle.tallies[0].rounds
    toggle.begin(8, [""] * 8)
    assert toggle.predicted_speedup(0, 8, 512.0) == toggle.speedup_at(5.0, 0, 8, 512.0)


def test_what_rounds_of_long_drafts_took_says_nothing_of_short_ones() -> None:
    """Drafts of 10 take a fifth of what the profile says; by as many seconds less, rounds of γ = 2 would take none."""
    toggle = toggled(draft_length=10, block_efficiency=8.0)
    assert sum(faithful(toggle, tau=8.0, slower=0.2).run([4] * 40)) > 30
    toggle.candidates[0].draft_length, toggle.candidates[0].block_efficiency = 2, 2.5
    toggle.begin(4, [""] * 4)
    assert toggle.predicted_speedup(0, 4, 512.0) == pytest.approx(A100.speedup(4, 512.0, 2.5, 2), rel=0.05)
    toggle.candidates[0].draft_length = 10
    assert toggle.predicted_speedup(0, 4, 512.0) == pytest.approx(5 * A100.speedup(4, 512.0, 2.5, 10), rel=0.05)


def test_candidates_without_a_profile_are_tried_and_judged() -> None:
    machine = timed(lambda batch: 1.0, lambda index, batch: 6.0)
    spoke = machine.run([8] * 60)
    assert any(spoke) and not spoke[-1]
    spoke = machine.run([8] * 60 + [4] * 40)  # goes by what was measured, and tries again with fewer rows
    assert not any(spoke[:60]) and any(spoke[60:])
    assert not any(machine.run([8] * 60 + [4] * 40))


def test_rounds_of_short_rollouts_add_up() -> None:
    """A drafter is not on trial for ever where each call ends before its first judgement."""
    machine, spoke = timed(lambda batch: 1.0, lambda index, batch: 6.0), []
    for _ in range(6):
        spoke += machine.run([1] * 3)
        machine.control.finish()
    # Two rollouts of three rounds draft: the second began before four rounds were known.
    assert spoke[:PROBE_ROUNDS] == [False] * PROBE_ROUNDS and sum(spoke) == 6 and not any(spoke[PROBE_ROUNDS + 6 :])


# ---- several candidates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("best", "profiled"), [(0, True), (1, False), (2, True), (2, False)])
def test_auto_ends_with_the_fastest_candidate(best: int, profiled: bool) -> None:
    machine = faithful(toggled("self", "history", "model", roofline=A100 if profiled else None))
    cycle = machine.cycle
    machine.cycle = lambda index, *shape: cycle(index, *shape) * (1.0 if index == best else 1.6)
    machine.run([4] * 300)
    assert set(machine.chosen[-100:]) == {best}


def test_two_that_became_slower_do_not_take_turns() -> None:
    """Of both most was accepted at first, and hardly anything later: by its mean over the rollout each looks better
    than the other one measures."""
    machine, good = faithful(toggled("history", "ngram")), 40
    taus = {0: iter([6.0] * good + [1.5] * 1000), 1: iter([5.0] * good + [1.5] * 1000)}
    machine.tokens_per_row = lambda index: next(taus[index])
    spoke = machine.run([8] * 300)
    assert sum(spoke) - 2 * good <= 3 * WINDOW and not any(spoke[-WINDOW:])


def test_each_candidate_gets_its_second_chance() -> None:
    toggle = toggled("self", "history")
    machine, better = faithful(toggle), [0]
    cycle = machine.cycle
    machine.cycle = lambda index, *shape: cycle(index, *shape) * (1 if index == better[0] else 3)
    for rollout in range(RETRY_AFTER + 5):
        if rollout == 3:  # the second epoch: now the history knows the texts
            better[0], toggle.candidates[0].block_efficiency = 1, 2.0
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
    assert (tally.rounds, tally.blocks, tally.tokens, tally.block_efficiency) == (20, 160, 640, 4.0)
    expected = 4.0 * A100.target_seconds(8, 512.0) / A100.cycle_seconds(8, 512.0, 5)
    assert tally.measured_speedup == pytest.approx(expected)
    assert tally.predicted_speedup == pytest.approx((16 * expected * 5 / 4 + 4 * expected) / 20, rel=0.05)


def test_always_and_never() -> None:
    always = faithful(AlwaysSpeculate(candidate(max_rows=16)))
    assert always.run(SHRINKING) == [batch <= 16 for batch in SHRINKING]
    always.control.record(2, 1.0, 2)  # cut short where no row has room for more: says nothing about τ
    assert always.control.tallies[0].block_efficiency == 5.0
    never = faithful(NeverSpeculate())
    assert not any(never.run(SHRINKING)) and never.control.tallies == []
