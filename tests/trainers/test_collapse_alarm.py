"""The alarm goes off when a drafter loses its policy, and at nothing else."""

import warnings

import pytest

from spec_trl.generation.engine.statistics import DraftCounts
from spec_trl.trainers.collapse_alarm import COLLAPSE_DRAFTED, CollapseAlarm
from spec_trl.trainers.run_log import RolloutRecord
from tests.cli.sample_run import make_rollout


def rollout(rate: float, first: float = 0.8, drafted: int = 100, drafter: str = "self") -> RolloutRecord:
    return make_rollout(
        3, acceptance_rate=rate, first_token_acceptance=first, drafter=drafter,
        per_depth={0: DraftCounts(drafted - 40), 64: DraftCounts(40)},
    )  # fmt: skip


def quiet(alarm: CollapseAlarm, *rollouts: RolloutRecord) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in rollouts:
            alarm.hear(each)


def test_acceptance_that_falls_apart_is_told_once() -> None:
    alarm = CollapseAlarm(by_first_token=False)
    quiet(alarm, rollout(0.8), rollout(0.45))
    with pytest.warns(UserWarning, match=r"'self' fell from 0.45 to 0.20 between two rollouts \(step 3\)"):
        alarm.hear(rollout(0.2))
    quiet(alarm, rollout(0.2), rollout(0.05))  # from less than 0.3 on it says little


def test_a_longer_draft_is_no_alarm() -> None:
    """Of a longer draft a smaller share is accepted; only first tokens compare."""
    alarm = CollapseAlarm(by_first_token=True)
    quiet(alarm, rollout(0.8), rollout(0.2))
    with pytest.warns(UserWarning, match="fell from 0.80 to 0.30"):
        alarm.hear(rollout(0.2, first=0.3))


def test_few_drafts_other_drafters_and_lookups_are_no_alarm() -> None:
    alarm = CollapseAlarm(by_first_token=False)
    quiet(alarm, rollout(0.8), rollout(0.05, drafted=COLLAPSE_DRAFTED - 1))
    quiet(alarm, rollout(0.05, drafter="model"))
    quiet(alarm, rollout(0.8, drafter="history"), rollout(0.05, drafter="history"))
