"""What controls say of a rollout: a prediction where something predicts, and always a reason."""

import pytest

from spec_trl.scheduling.control import AlwaysSpeculate, Control, NeverSpeculate
from spec_trl.scheduling.plain_decoding import PlainRounds
from spec_trl.scheduling.selection import AcceptanceHistory
from spec_trl.scheduling.toggle import PROBE_ROUNDS, WINDOW, SpeculationToggle
from tests.scheduling.machine import Machine as RacingMachine
from tests.scheduling.machine import by_method
from tests.scheduling.test_toggle import A100, candidate, faithful


def test_a_profile_predicts_also_where_nothing_is_drafted() -> None:
    machine = faithful()
    machine.run([64] * 30)
    assert not any(machine.spoke)
    account, predicted = machine.control.account(), A100.speedup(64, 512.0, 5.0, 5)
    assert account.predicted_speedup == pytest.approx(predicted) and predicted < 1
    assert account.reason == f"speculation predicted {predicted:.2f}× at 64 rows × 512 tokens: decoding plainly"
    machine = faithful(SpeculationToggle([candidate()], margin=5.0))
    machine.run([64] * 20 + [1] * 20)  # the largest prediction of the rollout is the reason
    account = machine.control.account()
    assert account.predicted_speedup == pytest.approx(A100.speedup(1, 512.0, 5.0, 5))
    assert "at 1 row × 512 tokens: decoding plainly, since sd_margin asks for 6.00×" in account.reason
    machine = faithful(SpeculationToggle([candidate(), candidate(name="ngram", block_efficiency=1.1)]))
    machine.run([64] * 10)  # several drafters are named
    assert machine.control.account().reason.startswith('speculation with "self" predicted ')


def test_a_gain_is_predicted_and_measured() -> None:
    machine = faithful()
    machine.run([8] * 40)
    account, (tally,) = machine.control.account(), machine.control.tallies
    assert account.predicted_speedup == tally.predicted_speedup
    promised = f"speculation predicted {tally.predicted_speedup:.2f}×, measured {tally.measured_speedup:.2f}×"
    assert account.reason == f"{promised} in {tally.rounds} rounds"


def test_when_it_was_switched_off() -> None:
    measured = A100.speedup(8, 512.0, 5.0, 5) / 1.5
    machine = faithful(slower=1.5)
    machine.run([8] * 60)
    assert 0.8 < measured < 1 and not machine.spoke[-1]
    expected = f"speculation measured {measured:.2f}× of plain decoding after {WINDOW} rounds: switched off"
    assert machine.control.account().reason == expected
    machine = faithful()
    machine.run([8] * 20 + [64] * 20, waiting=lambda number: 0 if number else 1)  # by a fallen prediction, with refill
    assert machine.spoke[0] and not machine.spoke[-1]
    assert machine.control.account().reason.startswith("speculation predicted 0.")
    assert machine.control.account().reason.endswith(" at 64 rows × 512 tokens: switched off")


def test_without_a_profile_there_is_no_prediction() -> None:
    machine = faithful(SpeculationToggle([candidate(roofline=None)]))
    machine.run([8] * PROBE_ROUNDS)
    assert machine.control.account().reason == "the rollout ended before a drafter was measured"
    machine = faithful(SpeculationToggle([candidate(roofline=None)]))
    machine.run([8] * (PROBE_ROUNDS + 16))
    account, (tally,) = machine.control.account(), machine.control.tallies
    assert account.predicted_speedup is None
    assert account.reason == f"no profile: 16 rounds tried, measured {tally.measured_speedup:.2f}×"
    machine.run([8] * 2)  # of another rollout, whose baseline is known; two rounds are tried
    assert machine.control.account().reason.startswith("no profile: 2 rounds tried, measured ")


@pytest.mark.parametrize("kind", [AlwaysSpeculate, lambda one: SpeculationToggle([one])])
def test_too_many_rows_and_failures(kind) -> None:  # type: ignore[no-untyped-def]
    control: Control = kind(candidate(max_rows=16))
    machine = faithful(control)
    machine.run([64] * 10)
    expected = "more rows (64) than the drafter's kernels serve (16)"
    assert control.account().reason == control.forecast(64, 512.0).reason == expected
    machine.run([8] * 10)
    assert control.account().reason != expected
    control.drop(0)
    assert control.account().reason == "the drafter failed"
    control.begin(8, [""] * 8)
    control.drop(0)  # before the first round
    control.decide(8, 512.0, 0)
    assert control.account().reason == "the drafter failed"


def test_always_and_never() -> None:
    always = faithful(AlwaysSpeculate(candidate()))
    always.run([8] * 10)
    assert always.control.account().reason == always.control.forecast(8, 512.0).reason == "sd_toggle=always"
    assert NeverSpeculate("sd_toggle=never").account().reason == "sd_toggle=never"
    assert NeverSpeculate().account().reason == "no drafter"


def test_forecast_before_any_rollout() -> None:
    toggle = SpeculationToggle([candidate()])
    for batch, decision in ((64, "decoding plainly"), (8, "speculating")):
        predicted = A100.speedup(batch, 300.0, 5.0, 5)
        forecast = toggle.forecast(batch, 300.0)
        assert forecast.predicted_speedup == pytest.approx(predicted)
        assert forecast.reason == f"speculation predicted {predicted:.2f}× at {batch} rows × 300 tokens: {decision}"
    unknown = SpeculationToggle([candidate(roofline=None)]).forecast(8, 300.0)
    assert unknown.predicted_speedup is None
    assert unknown.reason == "no profile: drafters are tried, and their rounds measured"


def test_best_of_n_goes_by_its_ladder() -> None:
    machine = RacingMachine({"self": 2.0, "ngram": 0.0}, by_method(self=0.9, ngram=0.3))
    control = machine.control(AcceptanceHistory(), race=False)
    forecast = control.forecast(4, 100.0)
    # Looking drafts up costs nothing, and of what never drafted 0.9 is expected: by hand (1 - 0.9⁹) / 0.1.
    assert forecast.predicted_speedup == pytest.approx(6.13, abs=0.01)
    assert forecast.reason == 'speculation with "ngram" predicted 6.13× at 4 rows × 100 tokens: speculating'
    machine.run(control, [120] * 4)
    account = control.account()
    assert account.predicted_speedup is not None and "predicted" in account.reason
    assert control.plain_seconds([PlainRounds(120, 4, 100.0)]) == pytest.approx(120.0)  # a second each, as measured


def test_plain_seconds_of_each_control() -> None:
    rounds = [PlainRounds(100, 8, 512.0)]
    for toggle in (SpeculationToggle([candidate()]), SpeculationToggle([candidate(roofline=None)])):
        faithful(toggle).run([8] * 40)
        assert toggle.plain_seconds(rounds) == pytest.approx(100 * A100.target_seconds(8, 512.0))
    always = AlwaysSpeculate(candidate(max_rows=8))
    machine = faithful(always)
    machine.run([8] * 10)
    assert always.plain_seconds(rounds) is None  # it never decoded plainly
    machine.run([64] * 10 + [8] * 10)
    assert always.plain_seconds(rounds) is None  # nor at such a batch
    machine.run([9] * 10 + [8] * 10)
    assert always.plain_seconds(rounds) == pytest.approx(100 * A100.target_seconds(9, 512.0))
    assert NeverSpeculate().plain_seconds(rounds) is None
