"""What a run's log says: the verdict, whose gain is bounded, and the alarm at a drafter that got stale."""

import random
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.statistics import DraftCounts, RoundPoint
from spec_trl.trainers.run_log import LOG_FILE, PlainCall, RolloutRecord, RunLog, read_run
from spec_trl.trainers.run_verdict import MORE, CollapseAlarm, Verdict, verdict_of
from spec_trl.trainers.step_totals import RolloutSums
from tests.cli.sample_run import make_header, make_rollout, make_step
from tests.conftest import tiny_llama
from tests.generation.calls import generate


# ---- the verdict ----------------------------------------------------------------------------------------------------


def rollout(index: int, seconds: float, plain: float | None, share: float = 0.5, **changes: object) -> RolloutRecord:
    options: dict[str, object] = dict(rounds=100, reason="why") | changes
    return make_rollout(index, seconds=seconds, plain_seconds=plain, sd_on_fraction=share, **options)


REASON = "speculation predicted 0.66× at 64 rows × 300 tokens: decoding plainly"
PLAIN = [make_rollout(i, seconds=6.0, plain_seconds=6.0, sd_on_fraction=0.0, reason=REASON) for i in range(2)]
NOTHING = f"nothing was drafted ({REASON}): rollouts were plain decoding"
UNKNOWN = "rounds; the speedup over plain decoding is not known: "
SAVED = "5.0 s saved (refresh subtracted), drafting in 50% of"
EVALUATION = rollout(0, 50.0, 1.0, mode="eval")
OLDER = make_rollout(0, plain_seconds=None, reason=None, sd_on_fraction=0.5)
DRAFTED, NOT_DRAFTED = (RoundPoint(8, 100.0, gamma, None, 20, 2.0, 480) for gamma in (5, 0))
BEAMS, LOOKUP = PlainCall("num_beams=4"), PlainCall("custom_generate is given")


@pytest.mark.parametrize(
    ("sentence", "records"),
    [
        (
            "rollouts 1.65× of plain decoding, 130 s saved (refresh subtracted), drafting in 70% of 200 rounds; once, "
            "beside this: a probe 20.0 s.",
            [make_header(calibration_seconds=20.0), rollout(0, 100.0, 160.0, 0.6), make_step(1), EVALUATION]
            + [rollout(1, 100.0, 170.0, 0.8), make_step(2)],
        ),
        (  # what comes once divides nothing
            "rollouts 1.50× of plain decoding, 5.0 s saved (refresh subtracted), drafting in 50% of 100 rounds; once, "
            "beside this: calibration 101 s, drafters and the trial of exactness 3.0 s.",
            [make_header(calibration_seconds=101.0, profile="p.json"), rollout(0, 13.0, 15.0, setup_seconds=3.0)],
        ),
        (
            "rollouts 0.89× of plain decoding, 1.5 s lost (adaptation and refresh subtracted), drafting in 50% of 100 "
            "rounds.",
            [make_header(), rollout(0, 10.0, 12.5), make_step(1, phases={"adaptation": 4.0})],
        ),
        (
            f"{NOTHING}; once, beside this: a probe 101 s. {MORE}",
            [make_header(calibration_seconds=101.0), *PLAIN],
        ),
        (f"{NOTHING}; refresh took 1.0 s. {MORE}", [make_header(), *PLAIN, replace(PLAIN[0], seconds=7.0)]),
        (f"{NOTHING}. {MORE}", [make_header(), *PLAIN]),
        ("no training rollout was logged.", [make_header()]),
        (
            "no training rollout was logged: 3 calls of generate did not speculate (num_beams=4, and 1 more reasons).",
            [make_header(), BEAMS, LOOKUP, BEAMS],
        ),
        (
            f"rollouts 1.50× of plain decoding, {SAVED} 100 rounds; 1 call of generate did not speculate "
            "(num_beams=4).",
            [rollout(0, 10.0, 15.0), BEAMS],
        ),
        # No baseline is invented, and no gain is told from a few rounds.
        (f"drafting in 50% of 100 {UNKNOWN}no plain round was measured.", [rollout(0, 10.0, None)]),
        (f"drafting in 50% of 96 {UNKNOWN}the log is older than this comparison.", [OLDER]),
        (
            "drafting in 2% of 63 rounds; 1 round with drafts is too few to show a gain (10).",
            [rollout(0, 10.0, 12.6, 1 / 63, rounds=63)],
        ),
        (
            "rollouts 1.50× of plain decoding, 50.0 s saved (refresh subtracted), drafting in 2% of 490 rounds.",
            [rollout(i, 10.0, 15.0, 1 / 49, rounds=49) for i in range(10)],
        ),
        (
            f"rollouts 1.50× of plain decoding, {SAVED} 200 rounds; known of 1 of 2 rollouts.",
            [rollout(0, 10.0, None), rollout(1, 10.0, 15.0)],
        ),
        (
            f"rollouts 1.50× of plain decoding as predicted (no round of the run was plain), {SAVED} 100 rounds.",
            [rollout(0, 10.0, 15.0, points=[DRAFTED])],
        ),
        (
            "rollouts 1.50× of plain decoding, 10.0 s saved (refresh subtracted), drafting in 50% of 200 rounds "
            "(ngram in 45%, self in 10%).",
            [rollout(i, 10.0, 15.0, drafted_by={"self": 0.2 * i, "ngram": 0.45, "model": 0.0}) for i in (0, 1)],
        ),
        (
            f"rollouts 1.50× of plain decoding, {SAVED} 100 rounds.",
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
    assert saved == [-10 + 4 - 2, -8, -8 + 3 - 2] and saved[-1] == found.saved - found.once


@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1), st.floats(0, 60), st.integers(1, 90)), max_size=8)
)
def test_a_run_says_no_gain_that_no_rollout_has(rollouts: list[tuple[float, float, float, int]]) -> None:
    """Each of (seconds, plain seconds, setup, rounds that drafted of 100): the speedup told lies between those of the
    rollouts, setup left out, and is told of ten rounds or more."""
    found = Verdict()
    for index, (seconds, plain, setup, drafted) in enumerate(rollouts):
        found.add(rollout(index, seconds + setup, plain, drafted / 100, setup_seconds=setup))
    told, drafted = "× of plain" in str(found), sum(drafted for *_, drafted in rollouts)
    assert told == (drafted >= 10) or abs(drafted - 10) < 1e-6
    if told:
        speedups = [plain / seconds for seconds, plain, *_ in rollouts]
        assert min(speedups) - 0.01 <= float(str(found).split()[1].rstrip("×")) <= max(speedups) + 0.01
        assert found.saved == pytest.approx(sum(plain - seconds for seconds, plain, *_ in rollouts), abs=1e-6)


# ---- the alarm ------------------------------------------------------------------------------------------------------


def drafting(rate: float, first: float = 0.8, blocks: int = 100, drafter: str = "self") -> RolloutRecord:
    return make_rollout(
        3, acceptance_rate=rate, first_token_acceptance=first, drafter=drafter,
        per_depth={0: DraftCounts(5 * (blocks - 2), blocks=blocks - 2), 64: DraftCounts(10, blocks=2)},
    )  # fmt: skip


def quiet(alarm: CollapseAlarm, *rollouts: RolloutRecord) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in rollouts:
            alarm.add(each)


def test_acceptance_that_falls_apart_is_told_once() -> None:
    alarm = CollapseAlarm(by_first_token=False)
    quiet(alarm, drafting(0.8), drafting(0.5))
    with pytest.warns(UserWarning, match=r"'self' fell from 0.50 to 0.20 between two rollouts \(step 3\)"):
        alarm.add(drafting(0.2))
    quiet(alarm, drafting(0.2), drafting(0.05))  # from less than 0.3 on it says little


def test_a_longer_draft_is_no_alarm() -> None:
    """Of a longer draft a smaller share is accepted; only first tokens compare."""
    alarm = CollapseAlarm(by_first_token=True)
    quiet(alarm, drafting(0.8), drafting(0.2))
    with pytest.warns(UserWarning, match="fell from 0.80 to 0.30"):
        alarm.add(drafting(0.2, first=0.3))


def test_few_blocks_other_drafters_and_lookups_are_no_alarm() -> None:
    alarm = CollapseAlarm(by_first_token=False)
    quiet(alarm, drafting(0.33, blocks=25), drafting(0.15, blocks=25))  # the noise of an untrained adapter
    quiet(alarm, drafting(0.8), drafting(0.0, blocks=3), drafting(0.0, blocks=3))
    with pytest.warns(UserWarning, match="fell from 0.80 to 0.00"):  # the rollout with many blocks is still compared
        alarm.add(drafting(0.0, blocks=8))
    quiet(alarm, drafting(0.8, drafter="model"), drafting(0.05, drafter="self"))
    quiet(alarm, drafting(0.8, drafter="history"), drafting(0.05, drafter="history"))


@pytest.mark.parametrize("by_first_token", [False, True])
def test_noise_is_no_alarm_and_a_collapse_is(by_first_token: bool) -> None:
    """1,500 rollouts of 4 to 50 blocks of 5 drafts, with rows of different difficulty, and then a stale drafter."""
    chance, base = random.Random(0), make_rollout(0)

    def sampled(mean: float) -> RolloutRecord:
        counts = DraftCounts()
        for _ in range(rows := chance.randint(4, 10)):
            p = min(max(chance.gauss(mean, 0.1), 0.01), 0.99)  # of the next token
            for _ in range(chance.randint(1, 5)):
                accepted = next((n for n in range(5) if chance.random() > p), 5)
                counts += DraftCounts(5, accepted, 1, 1, min(accepted, 1), accepted + 1)
        assert counts.blocks >= rows
        return replace(
            base, acceptance_rate=counts.acceptance_rate, first_token_acceptance=counts.first_token_acceptance,
            per_depth={0: counts},
        )  # fmt: skip

    alarm, rollouts = CollapseAlarm(by_first_token), [sampled(0.55 if by_first_token else 0.75) for _ in range(1500)]
    quiet(alarm, *rollouts)
    rates = [one.first_token_acceptance if by_first_token else one.acceptance_rate for one in rollouts]
    falls = sum(now < 0.5 * before for before, now in zip(rates, rates[1:], strict=False))  # type: ignore[operator]
    assert falls > 10, "without the error of the difference it would be told"
    with pytest.warns(UserWarning, match="the acceptance rate of the drafter 'self' fell"):
        for _ in range(3):
            alarm.add(sampled(0.05))


def test_a_stale_drafter_is_found() -> None:
    """The copy of a policy that was trained along while the copy saw no write."""
    policy = tiny_llama()
    drafter, alarm = SelfDrafter(policy), CollapseAlarm(by_first_token=True)

    def record() -> RolloutRecord:
        totals, options = RolloutSums(), dict(max_new_tokens=24, do_sample=False)
        prompts = {"input_ids": torch.arange(1, 33).view(8, 4)}
        statistics = generate(policy, prompts, "self", drafter=drafter, **options).statistics
        assert statistics.total.blocks > 20
        totals.add(statistics, 8, statistics.seconds)
        return totals.record("train", 0, 0, "self", {"self": 5})

    quiet(alarm, record(), record())
    drafter.refresh_before_drafting = drafter.refresh = lambda *_: None  # type: ignore[method-assign, assignment]
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(parameter.flip(0))
    with pytest.warns(UserWarning, match="the acceptance rate of the drafter 'self' fell"):
        alarm.add(record())
