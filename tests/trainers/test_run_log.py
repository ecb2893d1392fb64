"""The log of a run: it is read back also from killed, resumed and edited runs. The verdict and the alarm on it."""

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from spec_trl.generation.engine.statistics import DraftCounts, PlanChange, RoundPoint
from spec_trl.trainers.run_log import (
    COLLAPSE_DRAFTED,
    LOG_FILE,
    MORE,
    CollapseAlarm,
    RolloutRecord,
    RunLog,
    StepRecord,
    Verdict,
    read_run,
    verdict_of,
)
from tests.cli.sample_run import make_header, make_rollout, make_step, write_run


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write_run(tmp_path, rollouts=3)
    run = read_run(tmp_path)
    assert run == read_run(path)
    assert run.headers == [make_header()] and run.header == make_header()
    assert run.of("train") == [make_rollout(i) for i in range(3)]
    assert run.of("eval") == [make_rollout(0, mode="eval")]
    assert run.steps == [make_step(i) for i in (1, 2, 3)]
    header, rollout, step = (json.loads(line) for line in path.read_text().splitlines()[:3])
    assert header == {"kind": "header", **asdict(make_header())}
    assert set(rollout) == {"kind", *asdict(make_rollout(0))}
    assert rollout["per_depth"]["512"]["blocks"] == 50 and rollout["speculating"][3] == [36, 5, 8, "self"]
    assert step == {"kind": "step", **asdict(make_step(1))}


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    log = RunLog(tmp_path / LOG_FILE)
    log.append(make_header(settings={"limit": math.inf}))
    run = read_run(tmp_path)  # of a run that was killed before its first rollout
    assert run.header.settings == {"limit": None} and run.rollouts == [] and run.steps == []
    log.append(make_rollout(0, block_efficiency=math.nan, sd_on_fraction=math.nan))
    (record,) = read_run(tmp_path).rollouts
    assert record.block_efficiency is record.sd_on_fraction is None
    assert "NaN" not in log.path.read_text() and "Infinity" not in log.path.read_text()


@pytest.mark.parametrize("version", [{}, {"version": 1}])
def test_an_older_log_is_read(version: dict[str, int], tmp_path: Path) -> None:
    """What the first release wrote: seconds of points are means. A resumed run goes on in the newest version."""
    header = dict(
        kind="header", started="2026-11-01", hardware="CPU", model="m", dtype="float32", strategy="self",
        settings={"seed": 1}, profile=None, **version,
    )  # fmt: skip
    rollout = dict(
        kind="rollout", mode="train", rollout=0, step=0, strategy="self", drafter="self", seconds=2, tokens=60,
        refresh_seconds=0.5, requests=4, phase_seconds={"draft": 1.0}, block_efficiency=3.0, acceptance_rate=0.4,
        first_token_acceptance=0.6, target_entropy=1.2, draft_length=5, mean_draft_length=5.0, sd_on_fraction=1.0,
        predicted_speedup=None, measured_speedup=None, rounds=7, speculating=[[0, 5]], completion_curve=[[1.5, 4]],
        per_depth={"64": {"blocks": 20, "committed": 60, "drafted": 100, "accepted": 40}},
        points=[{"batch": 4, "length": 9.0, "draft_length": 5, "rounds": 7, "seconds": 0.2, "tokens": 60}],
    )  # fmt: skip
    step = dict(kind="step", step=1, seconds=3.0, phases={"rollout": 2.0}, reward=None)
    (tmp_path / LOG_FILE).write_text("".join(json.dumps(each) + "\n" for each in (header, rollout, step)))
    run = read_run(tmp_path)
    assert (run.header.calibration_seconds, run.header.settings) == (0.0, {"seed": 1})
    (record,) = run.rollouts
    assert record.per_depth == {64: DraftCounts(100, 40, 20, committed=60)}
    assert record.points == [RoundPoint(4, 9.0, 5, None, 7, 7 * 0.2, 60)] and record.completion_curve == [(1.5, 4)]
    assert record.speculating == [PlanChange(0, 5, None, None)]
    assert record.timeline == [] and record.reason is record.plain_seconds is None
    assert run.steps == [StepRecord(1, 3.0, {"rollout": 2.0}, None)] and run.header.version == 1
    log = RunLog(tmp_path / LOG_FILE)
    for written in (make_header(), make_rollout(1)):
        log.append(written)
    assert read_run(tmp_path).rollouts == [record, make_rollout(1)] and read_run(tmp_path).header.version == 2


def test_a_resumed_run_goes_on_after_an_unfinished_line(tmp_path: Path) -> None:
    path = write_run(tmp_path, rollouts=3)
    whole, text = read_run(path), path.read_text()
    path.write_text(text[:-30])  # of the evaluation
    with pytest.warns(UserWarning, match=f"line {len(text.splitlines())} is incomplete"):
        cut = read_run(path)
    assert (cut.of("eval"), cut.of("train"), cut.steps) == ([], whole.of("train"), whole.steps)
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    log = RunLog(link)
    log.append(make_header(started="later"))
    log.append(make_rollout(3))
    run = read_run(path)  # a warning would be an unfinished line in its middle
    assert [header.started for header in run.headers] == [make_header().started, "later"]
    assert run.rollouts == [*whole.of("train"), make_rollout(3)]
    path.write_text(path.read_text().rstrip("\n"))  # a whole line is kept
    RunLog(path).append(make_step(4))
    assert read_run(path).rollouts == run.rollouts and read_run(path).steps == [*whole.steps, make_step(4)]


def test_a_resumed_run_replaces_what_lies_beyond_its_checkpoint(tmp_path: Path) -> None:
    path = write_run(tmp_path, rollouts=6)  # and one evaluation
    log = RunLog(path)
    log.append(make_header(started="later"))
    for seed in (1, 2):  # of two lines of the same rollout the second wins
        log.append(make_rollout(3, seed=seed))
    log.append(make_step(4, reward=0.9))
    run = read_run(path)
    # Rollouts 4 and 5 are void: they led nowhere.
    assert run.of("train") == [*(make_rollout(i) for i in range(3)), make_rollout(3, seed=2)]
    assert run.steps == [*(make_step(i) for i in (1, 2, 3)), make_step(4, reward=0.9)]
    assert run.of("eval") == [make_rollout(0, mode="eval")] and run.header.started == "later"


def change(number: int, without: str = "", **fields: Any) -> Callable[[Path], None]:
    """Has the JSON object in line `number` (from 1) changed."""

    def edit(path: Path) -> None:
        lines = path.read_text().splitlines()
        data = json.loads(lines[number - 1]) | fields
        data.pop(without, None)
        lines[number - 1] = json.dumps(data)
        path.write_text("\n".join(lines) + "\n")

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change(2, without="tokens"), "line 2: rollout.tokens: Field required"),
        (change(2, colour=1), "line 2: rollout.colour: Unexpected"),
        (change(2, seconds="fast"), r"line 2: rollout.seconds: .* valid number \(found 'fast'\)"),
        (change(2, mode="test"), r"line 2: rollout.mode: Input should be 'train' or 'eval' \(found 'test'\)"),
        (change(2, points=[{"batch": 1}]), r"line 2: rollout.points\[0\].length: Field required"),
        (change(2, timeline=[{"request": 0, "changes": [[0, []]]}]), r"line 2: rollout.timeline\[0\].changes\[0\]"),
        (change(2, kind="rolout"), "line 2: .*'rolout'.* 'header', 'rollout', 'step'"),
        (change(3, phases=[]), "line 3: step.phases: "),
        (change(1, version=3, colour=1), r"line 1: header.version: .* \(found 3\)"),
        (lambda path: path.write_text(path.read_text().replace('"phases"', '"phas', 1)), "line 3: Invalid JSON"),
        (lambda path: path.write_text(path.read_text().partition("\n")[2]), "line 1 comes before any header"),
        (lambda path: path.write_text(""), "holds no record"),
        (lambda path: path.unlink(), f"{LOG_FILE} does not exist. Name the output_dir"),
    ],
)
def test_a_damaged_log_is_refused(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    path = write_run(tmp_path, rollouts=2)
    damage(path)
    with pytest.raises(ValueError, match=message) as error:
        read_run(tmp_path)
    assert str(path) in str(error.value)


# ---- the verdict ----------------------------------------------------------------------------------------------------


def rollout(index: int, seconds: float, plain: float | None, share: float = 0.5, **changes: object) -> RolloutRecord:
    return make_rollout(
        index, seconds=seconds, plain_seconds=plain, sd_on_fraction=share, rounds=100, reason="why", **changes
    )


REASON = "speculation predicted 0.66× at 64 rows × 300 tokens: decoding plainly"
PLAIN = [make_rollout(i, seconds=6.0, plain_seconds=6.0, sd_on_fraction=0.0, reason=REASON) for i in range(2)]
NOTHING = f"nothing was drafted ({REASON}): rollouts were plain decoding"
UNKNOWN = "drafting in 50% of rounds; the speedup over plain decoding is not known: "
SAVED = "5.0 s saved (calibration and refresh subtracted), drafting in 50% of rounds"
ADAPTED = "4.5 s lost (calibration, adaptation and refresh subtracted), drafting in 50% of rounds."
EVALUATION = rollout(0, 50.0, 1.0, mode="eval")
OLDER = make_rollout(0, plain_seconds=None, reason=None, sd_on_fraction=0.5)
DRAFTED, NOT_DRAFTED = (RoundPoint(8, 100.0, gamma, None, 20, 2.0, 480) for gamma in (5, 0))


@pytest.mark.parametrize(
    ("sentence", "records"),
    [
        (
            "rollouts 1.50× of plain decoding, 110 s saved (calibration and refresh subtracted), drafting in 70% of "
            "rounds.",
            [make_header(calibration_seconds=20.0), rollout(0, 100.0, 160.0, 0.6), make_step(1), EVALUATION]
            + [rollout(1, 100.0, 170.0, 0.8), make_step(2)],
        ),
        (
            f"rollouts 0.74× of plain decoding, {ADAPTED}",
            [make_header(calibration_seconds=3.0), rollout(0, 10.0, 12.5), make_step(1, phases={"adaptation": 4.0})],
        ),
        (f"{NOTHING}; calibration and refresh took 101 s. {MORE}", [make_header(calibration_seconds=101.0), *PLAIN]),
        (f"{NOTHING}. {MORE}", [make_header(), *PLAIN]),
        ("no training rollout was logged.", [make_header()]),
        # No baseline is invented.
        (f"{UNKNOWN}no plain round was measured.", [rollout(0, 10.0, None)]),
        (f"{UNKNOWN}the log is older than this comparison.", [OLDER]),
        (
            f"rollouts 1.50× of plain decoding, {SAVED}; known of 1 of 2 rollouts.",
            [rollout(0, 10.0, None), rollout(1, 10.0, 15.0)],
        ),
        (
            f"rollouts 1.50× of plain decoding as predicted (no round of the run was plain), {SAVED}.",
            [rollout(0, 10.0, 15.0, points=[DRAFTED])],
        ),
        (
            "rollouts 1.50× of plain decoding, 10.0 s saved (calibration and refresh subtracted), drafting in 50% of "
            "rounds (ngram in 45%, self in 10%).",
            [rollout(i, 10.0, 15.0, drafted_by={"self": 0.2 * i, "ngram": 0.45, "model": 0.0}) for i in (0, 1)],
        ),
        (
            f"rollouts 1.50× of plain decoding, {SAVED}.",
            [rollout(0, 10.0, 15.0, points=[DRAFTED, NOT_DRAFTED])],
        ),
    ],
)
def test_the_sentence(sentence: str, records: list[object]) -> None:
    found = Verdict()
    for record in records:
        found.add(record)  # type: ignore[arg-type]
    assert str(found) == sentence


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


# ---- the alarm ------------------------------------------------------------------------------------------------------


def drafting(rate: float, first: float = 0.8, drafted: int = 100, drafter: str = "self") -> RolloutRecord:
    return make_rollout(
        3, acceptance_rate=rate, first_token_acceptance=first, drafter=drafter,
        per_depth={0: DraftCounts(drafted - 40), 64: DraftCounts(40)},
    )  # fmt: skip


def quiet(alarm: CollapseAlarm, *rollouts: RolloutRecord) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in rollouts:
            alarm.add(each)


def test_acceptance_that_falls_apart_is_told_once() -> None:
    alarm = CollapseAlarm(by_first_token=False)
    quiet(alarm, drafting(0.8), drafting(0.45))
    with pytest.warns(UserWarning, match=r"'self' fell from 0.45 to 0.20 between two rollouts \(step 3\)"):
        alarm.add(drafting(0.2))
    quiet(alarm, drafting(0.2), drafting(0.05))  # from less than 0.3 on it says little


def test_a_longer_draft_is_no_alarm() -> None:
    """Of a longer draft a smaller share is accepted; only first tokens compare."""
    alarm = CollapseAlarm(by_first_token=True)
    quiet(alarm, drafting(0.8), drafting(0.2))
    with pytest.warns(UserWarning, match="fell from 0.80 to 0.30"):
        alarm.add(drafting(0.2, first=0.3))


def test_few_drafts_other_drafters_and_lookups_are_no_alarm() -> None:
    alarm = CollapseAlarm(by_first_token=False)
    quiet(alarm, drafting(0.8), drafting(0.05, drafted=COLLAPSE_DRAFTED - 1))
    quiet(alarm, drafting(0.05, drafter="model"))
    quiet(alarm, drafting(0.8, drafter="history"), drafting(0.05, drafter="history"))
