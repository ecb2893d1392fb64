"""Did it help? Sums by hand, and the line that a training run ends with."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spec_trl.generation.engine.statistics import SpeculationStatistics
from spec_trl.scheduling.control import NeverSpeculate
from spec_trl.trainers.rollout_totals import RolloutTotals
from spec_trl.trainers.run_log import LOG_FILE, RoundPoint, RunLog, read_run
from spec_trl.trainers.verdict import Verdict, verdict_of
from tests.cli.sample_run import make_header, make_rollout, make_step
from tests.trainers.harness import train


def verdict(*records: object) -> Verdict:
    found = Verdict()
    for record in records:
        found.add(record)  # type: ignore[arg-type]
    return found


def rollout(index: int, seconds: float, plain: float | None, share: float = 0.5, **changes: object):  # type: ignore[no-untyped-def]
    return make_rollout(
        index, seconds=seconds, plain_seconds=plain, sd_on_fraction=share, rounds=100, reason="why", **changes
    )


def test_a_gain() -> None:
    found = verdict(
        make_header(calibration_seconds=20.0), rollout(0, 100.0, 160.0, 0.6), make_step(1),
        rollout(0, 50.0, 1.0, mode="eval"), rollout(1, 100.0, 170.0, 0.8), make_step(2),
    )  # fmt: skip
    assert found.saved == 160 + 170 - 100 - 100 - 20
    gain = "rollouts 1.50× of plain decoding, 110 s saved (calibration and refresh subtracted)"
    assert str(found) == f"{gain}, drafting in 70% of rounds."


def test_a_loss_says_so_and_training_of_the_drafter_counts() -> None:
    step = make_step(1, phases={"rollout": 10.0, "adaptation": 4.0})
    found = verdict(make_header(calibration_seconds=3.0), rollout(0, 10.0, 12.5), step)
    assert str(found) == (
        "rollouts 0.74× of plain decoding, 4.5 s lost (calibration, adaptation and refresh subtracted), drafting in "
        "50% of rounds."
    )


def test_nothing_was_drafted() -> None:
    reason = "speculation predicted 0.66× at 64 rows × 300 tokens: decoding plainly"
    plain = [make_rollout(i, seconds=6.0, plain_seconds=6.0, sd_on_fraction=0.0, reason=reason) for i in range(2)]
    assert str(verdict(make_header(calibration_seconds=101.0), *plain)) == (
        f"nothing was drafted ({reason}): rollouts were plain decoding; calibration and refresh took 101 s."
    )
    assert str(verdict(make_header(), *plain)) == f"nothing was drafted ({reason}): rollouts were plain decoding."
    assert str(verdict(make_header())) == "no training rollout was logged."


def test_no_baseline_is_not_invented() -> None:
    unknown = "drafting in 50% of rounds; the speedup over plain decoding is not known"
    assert str(verdict(rollout(0, 10.0, None))) == f"{unknown}: no plain round was measured."
    older = make_rollout(0, plain_seconds=None, reason=None, sd_on_fraction=0.5)
    assert str(verdict(older)) == f"{unknown}: the log is older than this comparison."
    partly = str(verdict(rollout(0, 10.0, None), rollout(1, 10.0, 15.0)))
    assert partly.startswith("rollouts 1.50× of plain decoding, 5.0 s saved")
    assert partly.endswith("; known of 1 of 2 rollouts.")


def test_a_baseline_that_only_calibration_measured_is_named() -> None:
    drafted = [RoundPoint(8, 100.0, 5, 20, 0.1, 480)]
    always = rollout(0, 10.0, 15.0, points=drafted)
    said = "rollouts 1.50× of plain decoding as calibration measured it (no round of the run was plain), 5.0 s saved"
    assert str(verdict(always)).startswith(said)
    both = rollout(0, 10.0, 15.0, points=[*drafted, RoundPoint(8, 100.0, 0, 3, 0.1, 24)])
    assert str(verdict(both)).startswith("rollouts 1.50× of plain decoding, 5.0 s saved")


def test_seconds_saved_by_rollout(tmp_path: Path) -> None:
    log = RunLog(tmp_path / LOG_FILE)
    adapting = [make_step(i + 1, phases={"adaptation": 1.0}) for i in range(4)]
    for record in (
        make_header(calibration_seconds=10.0), rollout(0, 5.0, 9.0, step=0), *adapting[:2],
        rollout(1, 5.0, None, step=2), rollout(2, 5.0, 8.0, step=2), *adapting[2:],
    ):  # fmt: skip
        log.append(record)
    found, saved = verdict_of(read_run(tmp_path))
    # Two steps follow the first rollout, and two the last.
    assert saved == [-10 + 4 - 2, -8, -8 + 3 - 2] and saved[-1] == found.saved


def test_the_turns_of_a_rollout_and_its_ranks() -> None:
    """Turns add up, preparation included; of the ranks the slowest counts, and what one does not know none knows."""
    totals = RolloutTotals()
    first = SpeculationStatistics(
        "self", seconds=3.0, plain_seconds=4.0, reason="first", predicted_speedup=1.3, completion_curve=[(3.0, 8)],
        ended_in=[9] * 8, speculating=[(0, 5)], rounds=9,
    )  # fmt: skip
    later = replace(first, seconds=1.0, plain_seconds=1.5, reason="later", predicted_speedup=None)
    for statistics in (first, later):
        totals.add(statistics, NeverSpeculate(), 8, statistics.seconds + 0.25)
    assert totals.plain_seconds == 6.0 and totals.seconds == 4.5

    class TwoRanks:
        device = torch.device("cpu")

        def __init__(self, other: float) -> None:
            self.other = other

        def gather(self, packed: Tensor) -> Tensor:  # [1, n]
            other = packed.clone()
            other[0, -1] = self.other  # where the plain seconds are
            return torch.cat([packed, other])  # [2, n]

    for other, expected in ((5.0, 6.0), (7.0, 7.0), (math.nan, None)):
        record = totals.over_ranks(TwoRanks(other), []).record("train", 0, 0, "self", {})  # type: ignore[arg-type]
        assert (record.plain_seconds, record.seconds) == (expected, 4.5)
        assert (record.reason, record.predicted_speedup) == ("first", 1.3)


def last_line(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """The verdict that training printed, which must be the report's."""
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("spec_trl ")]
    assert lines[-1] == f"spec_trl verdict: {verdict_of(read_run(folder))[0]}"
    assert not any("verdict" in line for line in lines[:-1])
    return "\n".join(lines)


def test_a_run_that_drafts_ends_with_what_it_gained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], profiles: dict[str, str]
) -> None:
    train(tmp_path, sd_toggle="roofline", roofline_profile=profiles["pays"], max_completion_length=48)
    printed = last_line(capsys, tmp_path)
    first, verdict_line = printed.splitlines()
    # 8 rows of at most 17 tokens of prompt and 24 of output; by the profile 5 / (5 × 0.63 + 1).
    assert re.fullmatch(r"spec_trl rollouts: speculation predicted 1\.20× at 8 rows × \d\d tokens: speculating", first)
    pattern = r"spec_trl verdict: rollouts \d+\.\d\d× of plain decoding, .* s (saved|lost) \(calibration and refresh "
    assert re.match(pattern, verdict_line)
    log = read_run(tmp_path)
    assert 0 < log.header.calibration_seconds < 60
    for record in log.of("train"):
        assert record.plain_seconds is not None and record.plain_seconds > 0
        assert record.reason is not None and record.reason.startswith("speculation ")


def test_a_run_that_does_not_draft_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], profiles: dict[str, str]
) -> None:
    run = train(tmp_path, sd_toggle="roofline", roofline_profile=profiles["does not"])
    printed = last_line(capsys, tmp_path)
    assert "\nspec_trl verdict: nothing was drafted (speculation predicted 0.10× at " in printed
    log = read_run(tmp_path)
    assert [record.predicted_speedup for record in log.rollouts] == run.metric("rollout/predicted_speedup")
    assert all(record.predicted_speedup == pytest.approx(5 / 51, rel=0.01) for record in log.rollouts)
    for record in log.rollouts:
        assert record.plain_seconds == pytest.approx(record.seconds - record.refresh_seconds, rel=1e-6)


def test_always_knows_no_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, max_steps=1)
    printed = last_line(capsys, tmp_path)
    assert "spec_trl rollouts: sd_toggle=always\n" in printed
    assert printed.endswith("the speedup over plain decoding is not known: no plain round was measured.")


def test_without_a_drafter_nothing_is_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, sd_toggle="never", max_steps=1)
    assert last_line(capsys, tmp_path) == (
        "spec_trl verdict: nothing was drafted (sd_toggle=never): rollouts were plain decoding."
    )
