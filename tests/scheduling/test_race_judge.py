"""Whether races pay, by measured rounds."""

import pytest

from spec_trl.scheduling.race_judge import Field, RacedRound, RaceJudge
from spec_trl.scheduling.toggle import HOPELESS, PROBE_ROUNDS, WINDOW


def judged(cost: float, tokens: int, networks: bool = False, rounds: int = WINDOW) -> tuple[RaceJudge, list[Field]]:
    """A judge after raced rounds of 8 rows in which the primary alone brings 16 tokens at a cost of 1."""
    judge, fields = RaceJudge(), []
    for _ in range(PROBE_ROUNDS):
        judge.record_unraced(8, 1.0)
    for _ in range(rounds):
        fields.append(judge.field(8))
        judge.record_raced(RacedRound(cost, tokens, 16.0, networks, 2.0, 1.0))
    return judge, fields


@pytest.mark.parametrize(("cost", "tokens", "pays"), [(1.0, 17, True), (1.4, 24, True), (1.6, 24, False)])
def test_a_race_is_judged_by_tokens_gained_and_time_lost(cost: float, tokens: int, pays: bool) -> None:
    judge, fields = judged(cost, tokens)
    assert fields == [Field.EVERYBODY] * WINDOW
    assert judge.field(8) is (Field.EVERYBODY if pays else Field.NOBODY)
    assert judge.field(4) is Field.EVERYBODY


def test_hopeless_races_end_early_and_networks_leave_first() -> None:
    judge, fields = judged(2.0, 16, networks=True, rounds=min(HOPELESS))
    assert judge.field(8) is Field.LOOKUPS
    for _ in range(min(HOPELESS)):
        judge.record_raced(RacedRound(2.0, 16, 16.0, False, 2.0, 1.0))
    assert judge.field(8) is Field.NOBODY and judge.field(5) is Field.NOBODY


def test_a_verdict_waits_for_rounds_to_compare_with() -> None:
    judge = RaceJudge()
    for _ in range(PROBE_ROUNDS):
        judge.record_unraced(64, 1.0)  # too many rows to say anything of 8
    for _ in range(WINDOW):
        judge.record_raced(RacedRound(2.0, 16, 16.0, False, 2.0, 1.0))
    for _ in range(PROBE_ROUNDS):
        assert judge.field(8) is Field.NOBODY
        judge.record_unraced(8, 3.0)
    assert judge.field(8) is Field.EVERYBODY


@pytest.mark.parametrize(("plain_cost", "field"), [(1.9, Field.EVERYBODY), (2.1, Field.NOBODY)])
def test_a_race_that_is_slower_than_no_drafts_ends(plain_cost: float, field: Field) -> None:
    """Even one that is faster than its primary alone, and with networks in it."""
    judge = RaceJudge()
    for _ in range(PROBE_ROUNDS):
        judge.record_unraced(8, 1.0)
    for _ in range(WINDOW):
        judge.field(8)
        judge.record_raced(RacedRound(1.0, 20, 16.0, True, 2.0, plain_cost))
    assert judge.field(8) is field
