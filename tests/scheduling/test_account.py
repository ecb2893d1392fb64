"""What controls say of a rollout: a prediction where something predicts, and always a reason."""

import pytest

from spec_trl.scheduling.control import AlwaysSpeculate, Control, NeverSpeculate
from spec_trl.scheduling.plain_decoding import PlainRounds
from spec_trl.scheduling.toggle import PROBE_ROUNDS, WINDOW
from tests.scheduling.machine import Machine as RacingMachine
from tests.scheduling.machine import by_method
from tests.scheduling.test_toggle import A100, Machine, candidate, faithful, toggled


def predicted(batch: int, length: float = 512.0) -> float:
    return A100.speedup(batch, length, 5.0, 5)


@pytest.mark.parametrize(
    ("machine", "batches", "prediction", "reason"),
    [
        # Predicted also where nothing is drafted; the largest prediction of the rollout is the reason.
        (
            faithful(), [64] * 30, predicted(64),
            f"speculation predicted {predicted(64):.2f}× at 64 rows × 512 tokens: decoding plainly",
        ),
        (
            faithful(toggled(margin=5.0)), [64] * 20 + [1] * 20, predicted(1),
            f"speculation predicted {predicted(1):.2f}× at 1 row × 512 tokens: decoding plainly, since sd_margin asks "
            "for 6.00×",
        ),
        (
            faithful(toggled("self", "ngram")), [64] * 10, predicted(64),  # several drafters are named
            f'speculation with "self" predicted {predicted(64):.2f}× at 64 rows × 512 tokens: decoding plainly',
        ),
        (
            faithful(slower=1.5), [8] * 60, None,
            f"speculation measured {predicted(8) / 1.5:.2f}× of plain decoding after {WINDOW} rounds: switched off",
        ),
        (
            faithful(toggled(roofline=None)), [8] * PROBE_ROUNDS, None,
            "the rollout ended before a drafter was measured",
        ),
        (faithful(AlwaysSpeculate(candidate())), [8] * 10, None, "sd_toggle=always"),
        (faithful(NeverSpeculate("sd_toggle=never")), [8] * 10, None, "sd_toggle=never"),
        (faithful(NeverSpeculate()), [8] * 10, None, "no drafter"),
    ],
)  # fmt: skip
def test_reasons(machine: Machine, batches: list[int], prediction: float | None, reason: str) -> None:
    machine.run(batches)
    account = machine.control.account()
    assert account.reason == reason
    assert prediction is None or account.predicted_speedup == pytest.approx(prediction)


def test_a_gain_is_predicted_and_measured() -> None:
    machine = faithful()
    machine.run([8] * 40)
    account, (tally,) = machine.control.account(), machine.control.tallies
    assert account.predicted_speedup == tally.predicted_speedup
    promised = f"speculation predicted {tally.predicted_speedup:.2f}×, measured {tally.measured_speedup:.2f}×"
    assert account.reason == f"{promised} in {tally.rounds} rounds"
    machine.run([8] * 20 + [64] * 20, waiting=lambda number: 0 if number else 1)  # by a fallen prediction, with refill
    assert machine.spoke[0] and not machine.spoke[-1]
    assert machine.control.account().reason.startswith("speculation predicted 0.")
    assert machine.control.account().reason.endswith(" at 64 rows × 512 tokens: switched off")
    machine = faithful(toggled(roofline=None))
    machine.run([8] * (PROBE_ROUNDS + 16))
    account, (tally,) = machine.control.account(), machine.control.tallies
    assert account.predicted_speedup is None
    assert account.reason == f"no profile: 16 rounds tried, measured {tally.measured_speedup:.2f}×"
    machine.run([8] * 2)  # of another rollout, whose baseline is known; two rounds are tried
    assert machine.control.account().reason.startswith("no profile: 2 rounds tried, measured ")


@pytest.mark.parametrize("control", [AlwaysSpeculate(candidate(max_rows=16)), toggled(max_rows=16)])
def test_too_many_rows_and_failures(control: Control) -> None:
    machine = faithful(control)
    machine.run([64] * 10)
    expected = "more rows (64) than the drafter's kernels serve (16)"
    assert control.account().reason == control.forecast(64, 512.0).reason == expected
    machine.run([8] * 10)
    assert control.account().reason != expected
    control.drop(0)
    assert control.account().reason == "the drafter failed" and not control.plan(range(8), 512.0, 0)
    control.begin(8, [""] * 8)  # a new rollout, perhaps a new drafter
    assert control.plan(range(8), 512.0, 0)[0].draft_length == 5
    control.begin(8, [""] * 8)
    control.drop(0)  # before the first round
    assert not control.plan(range(8), 512.0, 0)
    assert control.account().reason == "the drafter failed"


def test_forecast_before_any_rollout() -> None:
    toggle = toggled()
    for batch, decision in ((64, "decoding plainly"), (8, "speculating")):
        forecast, speedup = toggle.forecast(batch, 300.0), predicted(batch, 300.0)
        assert forecast.predicted_speedup == pytest.approx(speedup)
        assert forecast.reason == f"speculation predicted {speedup:.2f}× at {batch} rows × 300 tokens: {decision}"
    unknown = toggled(roofline=None).forecast(8, 300.0)
    assert unknown.predicted_speedup is None
    assert unknown.reason == "no profile: drafters are tried, and their rounds measured"
    assert AlwaysSpeculate(candidate()).forecast(8, 512.0).reason == "sd_toggle=always"


def test_best_of_n_goes_by_its_ladder() -> None:
    machine = RacingMachine({"self": 2.0, "ngram": 0.0}, by_method(self=0.9, ngram=0.3))
    control = machine.control(race=False)
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
    for toggle in (toggled(), toggled(roofline=None)):
        faithful(toggle).run([8] * 40)
        assert toggle.plain_seconds(rounds) == pytest.approx(100 * A100.target_seconds(8, 512.0))
    always = AlwaysSpeculate(candidate(max_rows=8))
    for batches in ([8] * 10, [64] * 10 + [8] * 10):
        faithful(always).run(batches)
        assert always.plain_seconds(rounds) is None  # it never decoded plainly, nor at such a batch
    faithful(always).run([9] * 10 + [8] * 10)
    assert always.plain_seconds(rounds) == pytest.approx(100 * A100.target_seconds(9, 512.0))
    assert NeverSpeculate().plain_seconds(rounds) is None
