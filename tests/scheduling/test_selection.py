"""Acceptance over rollouts, and the method that it selects."""

import json
import random

import pytest

from spec_trl.scheduling.ladder import Choice, Ladder, Rung
from spec_trl.scheduling.selection import (
    OPTIMISTIC,
    PROMPT_PRIOR,
    AcceptanceHistory,
    select_method,
    select_per_prompt,
)


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


def history_of(**rates: float) -> AcceptanceHistory:
    """A long one: each method drafted for prompts of its own at this rate."""
    history = AcceptanceHistory()
    for method, rate in rates.items():
        history.record(method, f"old {method}", round(rate * 10**6), 10**6)
    return history


def average(accepted: float, attempted: float) -> float:
    return (accepted + OPTIMISTIC) / (attempted + 1)


def test_never_drafted() -> None:
    history = history_of(ngram=0.5)
    assert history.expected("self", ["a"]) is None
    history.record("self", "a", 0, 0)
    assert history.expected("self", ["a"]) is None
    history.record("self", "a", 0, 1)
    assert history.expected("self", ["a"]) is not None


def test_own_rate_where_there_is_one_and_else_the_average() -> None:
    history = AcceptanceHistory()
    history.record("self", "a", 900, 1000)
    history.record("self", "b", 100, 1000)
    history.record("ngram", "c", 0, 500)
    mean = average(1000, 2000)
    a, b = ((n + PROMPT_PRIOR * mean) / (1000 + PROMPT_PRIOR) for n in (900, 100))
    assert history.expected("self", ["a"]) == pytest.approx(a)
    assert history.expected("self", ["c"]) == history.expected("self", ["new"]) == pytest.approx(mean)
    assert history.expected("self", []) == pytest.approx(mean)
    assert history.expected("self", ["a", "a", "b", "new"]) == pytest.approx((a + a + b + mean) / 4)


def test_a_prompt_leaves_the_average_as_its_evidence_grows() -> None:
    rates = []
    for positions in (1, 10, 100, 1000):
        history = history_of(self=0.3)
        history.record("self", "a", positions, positions)
        rates.append(history.expected("self", ["a"]))
    assert rates == sorted(rates)
    assert 0.3 < rates[0] < 0.35 and rates[-1] > 0.97


def test_completions_of_one_prompt_weigh_by_their_positions() -> None:
    """G copies in one rollout are as one record of their sums, in any order."""
    rng = random.Random(0)
    records = [(rng.randint(0, n), n) for n in (rng.randint(1, 300) for _ in range(16))]
    whole = AcceptanceHistory()
    whole.record("self", "a", sum(a for a, _ in records), sum(n for _, n in records))
    parts = AcceptanceHistory()
    for accepted, attempted in sorted(records):
        parts.record("self", "a", accepted, attempted)
    assert parts.expected("self", ["a"]) == pytest.approx(whole.expected("self", ["a"]))
    assert parts.expected("self", ["b"]) == pytest.approx(whole.expected("self", ["b"]))


def test_averages_fade_with_every_rollout() -> None:
    history = AcceptanceHistory(decay=0.5)
    history.record("self", "a", 1000, 1000)
    history.end_rollout()
    history.end_rollout()
    history.record("self", "b", 0, 1000)
    assert history.expected("self", ["new"]) == pytest.approx(average(250, 1250))


def test_a_prompt_fades_only_with_rollouts_that_have_it() -> None:
    history = AcceptanceHistory(decay=0.5)
    history.record("self", "a", 800, 1000)
    history.record("self", "b", 800, 1000)
    for _ in range(3):
        history.end_rollout()
    history.record("self", "a", 0, 100)
    history.record("self", "a", 0, 100)  # the same rollout: the old counts fade once
    mean = history.expected("self", [])
    assert mean is not None
    assert history.expected("self", ["a"]) == pytest.approx((400 + PROMPT_PRIOR * mean) / (700 + PROMPT_PRIOR))
    assert history.expected("self", ["b"]) == pytest.approx((800 + PROMPT_PRIOR * mean) / (1000 + PROMPT_PRIOR))


def test_oldest_prompts_are_forgotten() -> None:
    history = AcceptanceHistory(prompts=2)
    for key in ("a", "b", "a", "c"):  # a is newer than b
        history.record("self", key, 0 if key == "b" else 100, 100)
    mean = history.expected("self", [])
    assert history.expected("self", ["b"]) == mean
    assert history.expected("self", ["a"]) != mean != history.expected("self", ["c"])


def random_history(seed: int, prompts: int = 4096) -> AcceptanceHistory:
    rng = random.Random(seed)
    history = AcceptanceHistory(prompts=prompts)
    for _ in range(200):
        attempted = rng.randint(0, 40)
        history.record(rng.choice(METHODS), f"p{rng.randint(0, 30)}", rng.randint(0, attempted), attempted)
        if rng.random() < 0.1:
            history.end_rollout()
    return history


@pytest.mark.parametrize("seed", range(3))
def test_state_goes_through_json(seed: int) -> None:
    first, second = random_history(seed), AcceptanceHistory()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for history in (first, second):  # and they go on alike
        history.record("self", "p3", 3, 20)
        history.end_rollout()
        history.record("self", "p3", 3, 20)
    assert second.state_dict() == first.state_dict()
    keys = [f"p{n}" for n in range(31)]
    for method in METHODS:
        assert second.expected(method, keys) == first.expected(method, keys)


def test_state_loads_into_fewer_prompts() -> None:
    whole, small = random_history(0), random_history(0, prompts=5)
    fewer = AcceptanceHistory(prompts=5)
    fewer.load_state_dict(whole.state_dict())
    assert [key for key, _ in fewer.state_dict()["prompts"]] == [key for key, _ in small.state_dict()["prompts"]]


@pytest.mark.parametrize("seed", range(5))
def test_rates_stay_probabilities(seed: int) -> None:
    history = random_history(seed)
    for key in range(40):
        for method in METHODS:
            rate = history.expected(method, [f"p{key}"])
            assert rate is not None and 0 <= rate <= 1


@pytest.mark.parametrize(("accepted", "attempted"), [(-1, 3), (4, 3), (0, -1)])
def test_bad_counts(accepted: int, attempted: int) -> None:
    history = AcceptanceHistory()
    with pytest.raises(ValueError, match=f"accepted={accepted} of attempted={attempted} is out of range"):
        history.record("self", "a", accepted, attempted)


@pytest.mark.parametrize(("name", "value"), [("decay", 0.0), ("decay", 1.1), ("prompts", 0)])
def test_bad_arguments(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value} is out of range"):
        AcceptanceHistory(**{name: value})  # type: ignore[arg-type]


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
    choice = select_method(LADDER, history_of(**rates), ["new"], batch, METHODS)
    assert choice.method == expected
    best = max([1.0, *(LADDER.speedup(m, p, batch, 4) for m, p in rates.items())])
    assert choice.speedup == pytest.approx(best, rel=1e-4)


def test_select_asks_for_the_prompts_of_the_batch() -> None:
    history = history_of(ngram=0.2, self=0.7, model=0.2)
    history.record("ngram", "copy", 9000, 9500)
    assert select_method(LADDER, history, ["story"] * 4, 1, METHODS).method == "self"
    assert select_method(LADDER, history, ["copy"] * 3 + ["story"], 1, METHODS).method == "ngram"


@pytest.mark.parametrize("seed", range(10))
def test_each_method_has_at_most_one_trial_and_then_the_best_one_wins(seed: int) -> None:
    rng = random.Random(seed)
    truth = {method: rng.random() for method in METHODS}
    history, batch, chosen = AcceptanceHistory(), rng.choice([1, 16]), []
    for _ in range(12):
        choice = select_method(LADDER, history, ["a", "b"], batch, METHODS)
        chosen.append(choice.method)
        if choice.method != "none":
            history.record(choice.method, "a", round(truth[choice.method] * 10**4), 10**4)
        history.end_rollout()
    final = LADDER.rank(truth, batch)[0].method
    assert set(chosen[len(METHODS) :]) == {final}
    assert all(chosen.count(method) <= 1 for method in METHODS if method != final)


def test_trials_go_in_the_ladders_order_and_only_where_they_could_win() -> None:
    optimistic = LADDER.rank(dict.fromkeys(METHODS, OPTIMISTIC), 16)
    assert optimistic[0] == select_method(LADDER, AcceptanceHistory(), ["a"], 16, METHODS)
    history = history_of(ngram=0.02, self=0.02)
    assert LADDER.speedup("model", OPTIMISTIC, 16, 4) < 1
    assert select_method(LADDER, history, ["a"], 16, METHODS).method == "none"  # "model" has no trial here
    assert select_method(LADDER, history, ["a"], 1, METHODS).method == "model"
    assert select_method(LADDER, history, ["a"], 1, ("ngram", "self")).method == "none"


def test_a_method_that_is_never_chosen_is_tried_again_some_day() -> None:
    history = AcceptanceHistory()
    history.record("ngram", "a", 0, 10**4)
    history.record("self", "a", 9 * 10**5, 10**6)
    waited = 0
    while select_method(LADDER, history, ["new"], 1, ("ngram", "self")).method == "self":
        history.end_rollout()
        history.record("self", "a", 9 * 10**4, 10**5)
        waited += 1
        assert waited < 200
    assert waited > 50


def test_per_prompt_only_above_the_margin() -> None:
    history = history_of(ngram=0.2, self=0.85, model=0.1)
    history.record("ngram", "copy", 9500, 10000)
    keys = ["story", "copy", "story", "copy", "new", "story"]
    common = select_method(LADDER, history, keys, 1, METHODS)
    assert common.method == "self"
    choices = select_per_prompt(LADDER, history, keys, 1, METHODS)
    assert [choice.method for choice in choices] == ["self", "ngram", "self", "ngram", "self", "self"]
    own = history.expected("ngram", ["copy"])
    assert own is not None
    gain = LADDER.speedup("ngram", own, 1, 4) / choices[0].speedup
    assert choices[1] == Choice("ngram", 4, LADDER.speedup("ngram", own, 1, 4))
    for margin, method in ((gain - 1.01, "ngram"), (gain - 0.99, "self")):
        assert select_per_prompt(LADDER, history, keys, 1, METHODS, margin)[1].method == method


def test_per_prompt_none() -> None:
    history = history_of(ngram=0.05, self=0.8, model=0.05)
    history.record("self", "odd", 0, 10**4)
    choices = select_per_prompt(LADDER, history, ["new", "new", "odd"], 1, METHODS)
    assert [choice.method for choice in choices] == ["self", "self", "none"]
    assert choices[2] == Choice("none", 0, 1.0)


def test_per_prompt_during_a_trial() -> None:
    history = history_of(ngram=0.2, self=0.6)
    history.record("ngram", "copy", 9500, 10000)
    trial = select_method(LADDER, history, ["copy", "new"], 1, METHODS)
    assert trial.method == "model"
    assert select_per_prompt(LADDER, history, ["copy", "new"], 1, METHODS) == [trial, trial]
