"""The clock: predictions that rounds correct."""

import math

import pytest

from spec_trl.generation.planner.clock import OUTLIER_ROUNDS, Clock
from spec_trl.generation.planner.plan import PLAIN, Plan


DRAFTED = Plan(("history",), (2,))


def clock(share: float = 1 - 1e-9) -> Clock:
    """Of two rows, whose autoregressive rounds are predicted to take a second; drafts take `share` of a round."""
    made = Clock(lambda lengths, *_: 1 / (1 - share) if lengths else 1.0, 0.3)
    made.begin(2)
    return made


def observe(times: Clock, plan: Plan, *log_ratios: float) -> list[bool]:
    """Rounds by log(measured / predicted); returns which count."""
    return times.observe(plan, 2, *(times.predicted(plan)[1] * math.exp(ratio) for ratio in log_ratios)).tolist()


def offset(times: Clock) -> tuple[float, float]:
    """How much longer drafted rounds are believed to take than predicted, beside plain ones; and the sd of that."""
    mean, variance = times.offsets(times.compare([DRAFTED], 2))
    return float(mean[0]), math.sqrt(variance[0])


def usual(times: Clock, plan: Plan, rounds: int) -> None:
    """Rounds that take what is predicted, within 1 %."""
    for number in range(rounds):
        observe(times, plan, 0.01 * (-1) ** number)


def test_rounds_of_a_kind_that_was_never_seen_take_what_is_predicted() -> None:
    """As a rollout's last autoregressive rounds, of fewer rows than any so far."""
    assert Clock(lambda *_: 2.0, 0.3).seconds(PLAIN, 1, 9.0) == 2.0


@pytest.mark.parametrize("times_as_long", [2, 20, 200, 1000])  # with rounds of 5 ms: 10 ms to 5 s
@pytest.mark.parametrize("before", [0, 1, 50])
@pytest.mark.parametrize("shocks", [1, 2, 3])
def test_plain_rounds_that_compile_say_nothing_of_drafts(times_as_long: float, before: int, shocks: int) -> None:
    """The first rounds of a fresh machine, or later ones: what drafts take stays as well known as it was."""
    times = clock()
    known = offset(times)
    usual(times, PLAIN, before)
    for _ in range(shocks):
        observe(times, PLAIN, math.log(times_as_long))
    usual(times, PLAIN, 5)
    assert offset(times) == pytest.approx(known, abs=0.02)
    assert times.seconds(PLAIN, 2) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("times_as_long", [4, 20, 200, 1000])
@pytest.mark.parametrize("together", [False, True])
def test_a_drafted_round_that_compiles_is_no_news(times_as_long: float, together: bool) -> None:
    """The first of its kind, told alone or with others of its plan."""
    times = clock()
    usual(times, PLAIN, 50)
    known = offset(times)
    ratios = [math.log(times_as_long), *([0.0, 0.01, -0.01] if together else [])]
    assert observe(times, DRAFTED, *ratios) == [False, *([True] * 3 if together else [])]
    if not together:
        assert offset(times) == pytest.approx(known, abs=0.01)
        usual(times, DRAFTED, 3)
    usual(times, PLAIN, 3)
    mean, deviation = offset(times)
    assert abs(mean) < 0.02 and deviation < 0.1


def test_what_is_slow_again_and_again_counts() -> None:
    """One round in `OUTLIER_ROUNDS` is set aside. Plain rounds then tell that drafts are slow, not the machine."""
    times = clock()
    usual(times, PLAIN, 50)
    counted = [observe(times, DRAFTED, math.log(6.0))[0] for _ in range(OUTLIER_ROUNDS)]
    assert counted == [False, *[True] * (OUTLIER_ROUNDS - 1)]
    usual(times, PLAIN, 5)
    mean, deviation = offset(times)
    assert mean == pytest.approx(math.log(6.0), abs=0.1) and deviation < 0.1


def test_a_machine_that_got_slower_is_followed() -> None:
    times = clock()
    usual(times, PLAIN, 50)
    known = offset(times)
    for _ in range(4):
        observe(times, PLAIN, math.log(3.0))
    assert times.seconds(PLAIN, 2) == pytest.approx(3.0, rel=0.1)
    assert offset(times) == pytest.approx(known, abs=0.02)


def test_the_state_of_an_earlier_release_is_left_out() -> None:
    """There a first round that compiled could rule drafts out for good, in later processes too."""
    times, poisoned = clock(), clock()
    usual(times, PLAIN, 5)
    poisoned.load_state_dict({name: value for name, value in times.state_dict().items() if name != "version"})
    assert poisoned.rounds == 0 and poisoned.seconds(PLAIN, 2) == 1.0
    poisoned.load_state_dict(times.state_dict())
    assert poisoned.rounds == 5


def test_a_load_that_ends_while_drafts_run_leaves_terms_finite() -> None:
    """Drafted rounds are then shorter than plain rounds seemed to be alone: no time of a draft explains that."""
    for share in (0.3, 0.6, 0.9):
        for load in (1.5, 3.0, 6.0, 20.0):
            times = clock(share)
            for plan, rounds, seconds in ((PLAIN, 20, load), (DRAFTED, 5, 1.0), (PLAIN, 30, 1.0), (DRAFTED, 30, 1.0)):
                for _ in range(rounds):
                    observe(times, plan, math.log(seconds))
            mean, deviation = offset(times)
            assert abs(mean) < 3 and deviation**2 < 3
