"""Acceptance over rollouts, and the method that it selects."""

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_trl.scheduling.acceptance import Acceptance, AcceptanceCounts
from spec_trl.scheduling.ladder import Choice, Ladder, Rung
from spec_trl.scheduling.selection import (
    OPTIMISTIC,
    PROMPT_PRIOR,
    AcceptanceHistory,
    Selection,
    counts_last_row,
    expectation,
)
from tests.scheduling.machine import at, history_of


# Seconds of a round at γ = 4, plain 1: a free lookup, a cheap copy, and a network that is hopeless at large batches.
SECONDS = {"ngram": {1: 1.1, 16: 1.5}, "self": {1: 2.0, 16: 2.5}, "model": {1: 1.8, 16: 9.0}}
LADDER = Ladder(
    tuple(
        Rung(method, batch, 4, 0.5, seconds, 1.0)
        for method, cells in SECONDS.items()
        for batch, seconds in cells.items()
    ),
    "",
)
METHODS = tuple(SECONDS)
GAMMAS = (0, 1, 4, 10)


def average(accepted: float, attempted: float) -> float:
    """Of either rate, by a method's counts."""
    return (accepted + 0.9) / (attempted + 1)


def efficiency(history: AcceptanceHistory, method: str, *prompt_keys: str, draft_length: int = 4) -> float:
    """τ that is expected of a method that has drafted."""
    expected = history.expected(method, prompt_keys)
    assert expected is not None
    return expected(draft_length)


def test_never_drafted() -> None:
    history = history_of(ngram=0.5)
    assert history.expected("self", ["a"]) is None and history.expected("self", []) is None
    assert history.rates("self") == history.rates("self", "a") == OPTIMISTIC == Acceptance(0.9, 0.9)
    history.record("self", "a", AcceptanceCounts.of_round(0, 0))
    assert history.expected("self", ["a"]) is None
    history.record("self", "a", AcceptanceCounts.of_round(0, 1))
    assert history.expected("self", ["a"]) is not None
    assert history.rates("self", "a") != OPTIMISTIC


def test_own_rates_where_there_are_some_and_else_the_average() -> None:
    history = AcceptanceHistory()
    history.record("self", "a", AcceptanceCounts(900, 1000, 400, 500))
    history.record("self", "b", AcceptanceCounts(100, 1000, 60, 100))
    history.record("ngram", "c", AcceptanceCounts(0, 500, 0, 0))
    mean = Acceptance(average(1000, 2000), average(460, 600))
    for key, first, further, judged in (("a", 900, 400, 500), ("b", 100, 60, 100)):
        own = (first + PROMPT_PRIOR * mean.first) / (1000 + PROMPT_PRIOR)
        assert history.rates("self", key).first == pytest.approx(own)
        own = (further + PROMPT_PRIOR * mean.further) / (judged + PROMPT_PRIOR)
        assert history.rates("self", key).further == pytest.approx(own)
    assert history.rates("self", "c") == history.rates("self", "new") == history.rates("self") == pytest.approx(mean)
    a, b, others = (history.rates("self", key).block_efficiency(4) for key in ("a", "b", "new"))
    harmonic = 4 / (1 / a + 1 / a + 1 / b + 1 / others)
    for keys, expected in (("", others), ("cn", others), ("a", a), ("aabn", harmonic)):
        assert efficiency(history, "self", *keys) == pytest.approx(expected)


ROUNDS = st.lists(
    st.integers(1, 9).flatmap(lambda gamma: st.tuples(st.integers(0, gamma), st.just(gamma))), max_size=12
).map(lambda rounds: [AcceptanceCounts.of_round(a, min(a + 1, n)) for a, n in rounds])


@settings(deadline=None, max_examples=20, derandomize=True)
@given(ROUNDS)
def test_completions_of_one_prompt_weigh_by_their_positions(records: list[AcceptanceCounts]) -> None:
    """G copies in one rollout are as one record of their sums, in any order."""
    whole, parts, total = AcceptanceHistory(), AcceptanceHistory(), AcceptanceCounts()
    for counts in records:
        total.add(counts)
    whole.record("self", "a", total)
    for counts in sorted(records, key=lambda counts: counts.further):
        parts.record("self", "a", counts)
    for key in ("a", "b"):
        assert parts.rates("self", key) == pytest.approx(whole.rates("self", key))


def test_records_are_not_the_callers_any_more() -> None:
    """A control goes on counting in the object that it has recorded."""
    history, counts = AcceptanceHistory(), at(0.5, 100)
    history.record("self", "a", counts)
    before = history.rates("self"), history.rates("self", "a")
    counts.add(at(1.0, 10**4))
    assert (history.rates("self"), history.rates("self", "a")) == before
    history.record("self", "b", counts)
    assert counts.first == 10_100


def test_averages_fade_with_every_rollout_and_a_prompt_with_those_that_have_it() -> None:
    history, prior = AcceptanceHistory(decay=0.5), PROMPT_PRIOR
    for key in ("a", "b"):
        history.record("self", key, AcceptanceCounts(800, 1000, 60, 100))
    for _ in range(3):
        history.end_rollout()
    for _ in range(2):  # the same rollout: the old counts fade once
        history.record("self", "a", AcceptanceCounts(0, 100, 0, 10))
    mean = history.rates("self")
    assert mean == pytest.approx((average(200, 450), average(15, 45)))
    for key, first, further, count in (("a", 400, 30, 700), ("b", 800, 60, 1000)):  # a tenth as many further ones
        own = (first + prior * mean.first) / (count + prior), (further + prior * mean.further) / (count / 10 + prior)
        assert history.rates("self", key) == pytest.approx(own)


def test_oldest_prompts_are_forgotten() -> None:
    history = AcceptanceHistory(prompts=2)
    for key in ("a", "b", "a", "c"):  # a is newer than b
        history.record("self", key, at(0.0 if key == "b" else 1.0, 100))
    mean = history.rates("self")
    assert history.rates("self", "b") == mean
    assert history.rates("self", "a") != mean != history.rates("self", "c")


def random_history(random: Random, prompts: int = 4096) -> AcceptanceHistory:
    history = AcceptanceHistory(prompts=prompts)
    for _ in range(random.randint(0, 100)):
        length = random.randint(1, 9)
        accepted = random.randint(0, length)
        counts = AcceptanceCounts.of_round(accepted, min(accepted + 1, length))
        history.record(random.choice(METHODS), f"p{random.randint(0, 20)}", counts)
        if random.random() < 0.1:
            history.end_rollout()
            measured, expected = random.uniform(0.5, 2), random.uniform(1, 3)
            history.record_delivery(random.choice(METHODS), 16, random.random() < 0.8, measured, expected)
    return history


@settings(deadline=None, max_examples=15, derandomize=True)
@given(st.integers(0, 10**6))
def test_any_history(seed: int) -> None:
    """Rates are probabilities, the state goes through JSON, and fewer prompts are kept where fewer fit."""
    first, second = random_history(Random(seed)), AcceptanceHistory()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for history in (first, second):  # and they go on alike
        history.record("self", "p3", at(0.3, 20))
        history.end_rollout()
        history.record("self", "p3", at(0.3, 20))
    assert second.state_dict() == first.state_dict()
    keys = [f"p{n}" for n in range(25)]
    for method in METHODS:
        assert second.delivered(method, 16, True) == first.delivered(method, 16, True)
        rates = [first.rates(method, key) for key in keys]
        assert [second.rates(method, key) for key in keys] == rates
        assert all(0 <= rate <= 1 for both in rates for rate in both)
        for gamma in GAMMAS if first.expected(method, keys) else ():
            tau = efficiency(first, method, *keys, draft_length=gamma)
            assert tau == efficiency(second, method, *keys, draft_length=gamma) and 1 <= tau <= gamma + 1
    small, fewer = random_history(Random(seed), prompts=5), AcceptanceHistory(prompts=5)
    fewer.load_state_dict(random_history(Random(seed)).state_dict())
    assert [key for key, _ in fewer.state_dict()["prompts"]] == [key for key, _ in small.state_dict()["prompts"]]


@pytest.mark.parametrize(
    ("rates", "batch", "expected"),
    [
        ({"ngram": 0.3, "self": 0.9, "model": 0.9}, 1, "model"),  # as good drafts, cheaper
        ({"ngram": 0.3, "self": 0.9, "model": 0.9}, 16, "self"),
        ({"ngram": 0.8, "self": 0.9, "model": 0.9}, 1, "ngram"),
        ({"ngram": 0.1, "self": 0.2, "model": 0.2}, 16, "none"),
    ],
)
def test_select_by_history_and_ladder(rates: dict[str, float], batch: int, expected: str) -> None:
    choice = Selection(LADDER, history_of(**rates), ["new"], batch, METHODS).common
    assert choice.method == expected
    taus = {method: Acceptance.geometric(rate).block_efficiency(4) for method, rate in rates.items()}
    best = max([1.0, *(LADDER.speedup(method, tau, batch, 4) for method, tau in taus.items())])
    assert choice.speedup == pytest.approx(best, rel=1e-4)


@settings(deadline=None, max_examples=10, derandomize=True)
@given(st.tuples(*(st.floats(0, 1) for _ in METHODS)), st.sampled_from([1, 16]))
def test_each_method_has_at_most_one_trial_and_then_the_best_one_wins(rates: tuple[float, ...], batch: int) -> None:
    truth, history, chosen = dict(zip(METHODS, rates, strict=True)), AcceptanceHistory(), []
    for _ in range(12):
        choice = Selection(LADDER, history, ["a", "b"], batch, METHODS).common
        chosen.append(choice.method)
        if choice.method != "none":
            history.record(choice.method, "a", at(truth[choice.method], 10**4))
        history.end_rollout()
    speedups = LADDER.rank({m: Acceptance.geometric(p).block_efficiency for m, p in truth.items()}, batch)
    best = {choice.method for choice in speedups if choice.speedup > 0.99 * speedups[0].speedup}
    assert set(chosen[len(METHODS) :]) <= best
    assert all(chosen.count(method) <= 1 for method in METHODS if method not in best)


def test_trials_go_in_the_ladders_order_and_only_where_they_could_win() -> None:
    optimistic = LADDER.rank(dict.fromkeys(METHODS, OPTIMISTIC.block_efficiency), 16)
    assert optimistic[0] == Selection(LADDER, AcceptanceHistory(), ["a"], 16, METHODS).common
    history = history_of(ngram=0.02, self=0.02)
    assert LADDER.speedup("model", OPTIMISTIC.block_efficiency(4), 16, 4) < 1
    assert Selection(LADDER, history, ["a"], 16, METHODS).common.method == "none"  # "model" has no trial here
    assert Selection(LADDER, history, ["a"], 1, METHODS).common.method == "model"
    assert Selection(LADDER, history, ["a"], 1, ("ngram", "self")).common.method == "none"


def test_a_method_that_is_never_chosen_is_tried_again_some_day() -> None:
    history = AcceptanceHistory()
    history.record("ngram", "a", at(0.0, 10**4))
    history.record("self", "a", at(0.9, 10**6))
    waited = 0
    while Selection(LADDER, history, ["new"], 1, ("ngram", "self")).common.method == "self":
        history.end_rollout()
        history.record("self", "a", at(0.9, 10**5))
        waited += 1
        assert waited < 200
    assert waited > 50


def methods_of(history: AcceptanceHistory, keys: list[str], batch: int = 1, margin: float = 0.05) -> list[str]:
    """Those of the prompts, by names."""
    return [choice.method for choice in Selection(LADDER, history, keys, batch, METHODS).per_prompt(margin)]


def test_a_method_of_a_prompts_own() -> None:
    """Only above the margin, of those that drafted for it, and not during a trial."""
    history = history_of(ngram=0.05, self=0.85)
    history.record("ngram", "copy", at(0.95, 10**4))
    for key, rate in (("fine", 0.8), ("odd", 0.0)):
        history.record("self", key, at(rate, 10**4))
    keys = ["story", "copy", "story", "copy", "new", *["story"] * 5]
    trial = Selection(LADDER, history, keys, 1, METHODS).common
    assert trial.method == "model" and methods_of(history, keys) == ["model"] * 10
    history.record("model", "old model", at(0.05, 10**6))
    assert methods_of(history, keys) == ["self", "ngram", "self", "ngram", *["self"] * 6]
    common, own, *_ = Selection(LADDER, history, keys, 1, METHODS).per_prompt()
    assert own == Choice("ngram", 4, LADDER.speedup("ngram", efficiency(history, "ngram", "copy"), 1, 4))
    gain = own.speedup / common.speedup
    assert [methods_of(history, keys, 1, gain - 1 + x)[1] for x in (-0.01, 0.01)] == ["ngram", "self"]
    choices = Selection(LADDER, history, ["fine", "fine", "odd"], 1, METHODS).per_prompt()
    assert [choice.method for choice in choices] == ["self", "self", "none"] and choices[2] == Choice("none", 0, 1.0)
    keys = [*["odd"] * 9, "new"]  # a prompt that is new to a method has it only with the batch
    assert methods_of(history, keys) == ["none"] * 10
    history.record("self", "new", at(0.9, 100))
    assert methods_of(history, keys)[9] == "self"


def test_a_checkpoint_of_another_version_is_left_aside() -> None:
    history = AcceptanceHistory()
    with pytest.warns(UserWarning, match="version=None where this release reads 2"):
        history.load_state_dict({"rollout": 5, "methods": {"self": [589.7, 737.1, 0]}, "prompts": []})
    assert history.expected("self", []) is None and history.state_dict() == AcceptanceHistory().state_dict()


# ---- rows that are not alike ----------------------------------------------------------------------------------


@pytest.mark.parametrize("alike", [True, False])
def test_a_rows_few_rounds_say_as_much_as_rows_have_differed(alike: bool) -> None:
    """Chance makes rates of eight positions differ by 0.16; prompts that are copied or not differ in kind."""
    random, history = Random(0), AcceptanceHistory()
    for number in range(40):
        rate = 0.7 if alike else number % 2
        right = sum(random.random() < rate for _ in range(8))
        history.record("ngram", f"{number}", AcceptanceCounts(right, 8, right, 8))
    history.record("ngram", "bad", AcceptanceCounts(0, 4, 0, 4))
    (bad,) = history.rates_of_rows("ngram", ["bad"])
    # Of 24 positions, as prompts weigh elsewhere, it would be 0.58 in the first case.
    assert (bad.first > 0.6) if alike else (bad.first < 0.15)


def copied_or_not(copied: int, others: int) -> AcceptanceHistory:
    """N-gram copies some prompts and knows nothing of the others; the copy is right in two cases of three."""
    history = history_of(self=0.66)
    for number in range(copied + others):
        history.record("ngram", f"{number}", at(0.98 if number < copied else 0.0, 200))
    return history


def expected_of_ngram(history: AcceptanceHistory, prompts: list[str], batch: int, races: bool = False) -> Any:
    until_last_row = counts_last_row(history, METHODS, prompts, batch, races)
    return expectation(LADDER, history, "ngram", prompts, until_last_row)


def test_new_prompts_differ_as_recent_ones_did() -> None:
    history = copied_or_not(12, 4)
    rows = sorted(rates.first for rates in history.rates_of_rows("ngram", ["x", "y", "z", "w"]))
    assert rows == pytest.approx([0.0, 0.98, 0.98, 0.98], abs=0.02)
    assert history.rates_of_rows("ngram", ["x"]) == [history.rates("ngram")]
    assert history.rates_of_rows("ngram", ["15", "x", "0"])[0].first < 0.02
    assert history.rates_of_rows("model", ["x", "y"]) == [OPTIMISTIC] * 2


def test_the_last_row_is_expected_where_all_are_in_flight() -> None:
    """Of four rows three are copied, and then rounds of the fourth go on at 1.1 s where they all took 1.5 s."""
    history, prompts = copied_or_not(12, 4), ["x", "y", "z", "w"]
    in_flight, in_turns = (expected_of_ngram(history, prompts, batch) for batch in (4, 1))
    copied = history.rates("ngram", "0").block_efficiency(4)
    assert in_flight(4) == pytest.approx(1.5 / (1.5 / copied + 1.1 * (1 - 1 / copied)), rel=0.02)
    assert in_turns(4) == history.expected("ngram", prompts)(4) > 2.5
    assert Selection(LADDER, history, prompts, 4, ("ngram", "self")).common.method == "self"
    assert Selection(LADDER, history, prompts, 1, ("ngram", "self")).common.method == "ngram"
    assert Selection(LADDER, copied_or_not(16, 0), prompts, 4, ("ngram", "self")).common.method == "ngram"
    assert expectation(LADDER, history, "model", prompts, until_last_row=True) is None


def test_rows_that_others_may_help_need_not_be_the_last() -> None:
    """Known to one method, the story is the last row; in a race it may have others, and if others know it."""
    history, prompts = copied_or_not(12, 4), ["0", "1", "15"]
    assert expected_of_ngram(history, prompts, 4)(4) < 1.4
    assert expected_of_ngram(history, prompts, 4, races=True)(4) == history.expected("ngram", prompts)(4) > 1.9
    assert counts_last_row(history, ["ngram"], prompts, 4, races=True)  # nobody else is there
    history.record("self", "15", at(0.66, 50))
    assert expected_of_ngram(history, prompts, 4)(4) == history.expected("ngram", prompts)(4) > 1.9
