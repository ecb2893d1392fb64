"""The alarm goes off when a drafter loses its policy, and at nothing else."""

import warnings

import pytest

from spec_trl.scheduling.control import Tally
from spec_trl.trainers.collapse_alarm import COLLAPSE_DRAFTED, CollapseAlarm
from spec_trl.trainers.rollout_totals import RolloutTotals


def rollout(accepted: int, first: int = 8, drafted: int = 100, drafter: str = "self") -> RolloutTotals:
    """Of ten blocks, whose first draft tokens were accepted in `first`."""
    totals = RolloutTotals()
    totals.tallies[drafter] = Tally(rounds=10)
    totals.drafts.drafted, totals.drafts.accepted = drafted, accepted
    totals.drafts.blocks = totals.drafts.first_drafted = 10
    totals.drafts.first_accepted = first
    return totals


def quiet(alarm: CollapseAlarm, *rollouts: RolloutTotals) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in rollouts:
            alarm.hear(each, step=3)


def test_acceptance_that_falls_apart_is_told_once() -> None:
    alarm = CollapseAlarm(by_first_token=False)
    quiet(alarm, rollout(80), rollout(45))
    with pytest.warns(UserWarning, match=r"'self' fell from 0.45 to 0.20 between two rollouts \(step 3\)"):
        alarm.hear(rollout(20), step=3)
    quiet(alarm, rollout(20), rollout(5))  # from less than 0.3 on it says little


def test_a_longer_draft_is_no_alarm() -> None:
    """Of a longer draft a smaller share is accepted; only first tokens compare."""
    alarm = CollapseAlarm(by_first_token=True)
    quiet(alarm, rollout(80, first=8), rollout(20, first=8))
    with pytest.warns(UserWarning, match="fell from 0.80 to 0.30"):
        alarm.hear(rollout(20, first=3), step=3)


def test_few_drafts_other_drafters_and_lookups_are_no_alarm() -> None:
    alarm = CollapseAlarm(by_first_token=False)
    quiet(alarm, rollout(80), rollout(5, drafted=COLLAPSE_DRAFTED - 1))
    quiet(alarm, rollout(5, drafter="model"))
    quiet(alarm, rollout(80, drafter="history"), rollout(5, drafter="history"))
