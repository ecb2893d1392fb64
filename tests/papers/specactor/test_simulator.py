"""The cluster simulator against times that can be worked out by hand, and against what no scheduler may do."""

from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_trl.papers.specactor.cluster import Cluster, DrafterModel, Lengths, TargetModel
from spec_trl.papers.specactor.simulator import Method, Outcome, simulate
from spec_trl.papers.specactor.token_speed import committed_tokens


DRAFTERS = tuple(DrafterModel(name, 0.01 * (1 + at), 1e-4, 0.0, 0.8 - 0.1 * at, 0.1) for at, name in enumerate("abc"))
CLUSTER = Cluster(
    name="small", requests=64, gpus=16, worker_gpus=2, prompt_tokens=10, lengths=Lengths(300, 0.8, 3000),
    target=TargetModel(0.05, 2e-4, 1e-6), drafters=DRAFTERS, max_helped=4,
    exchange_seconds=0.01, transfer_seconds=0.1, prepare_seconds=2.0, learn_seconds=20.0,
)  # fmt: skip
# One request of 1000 tokens on one worker, in which caches cost nothing and p is nearly the same for all.
ALONE = replace(
    CLUSTER, requests=1, gpus=2, lengths=Lengths(1e9, 0.1, 1000), target=TargetModel(0.05, 2e-4, 0.0),
    drafters=(DrafterModel("a", 0.01, 0.0, 0.0, 0.8, 1e-6),),
)  # fmt: skip
METHODS = [
    Method("plain"),
    Method("twice", gpus=2),
    Method("coupled", "coupled", ("a",)),
    Method("disaggregated", "disaggregated", ("a",)),
    Method("decoupled", "decoupled", ("a",)),
    Method("reconfigured", "decoupled", ("a",), reconfigure=True),
    Method("best of n", "decoupled", ("a", "b", "c"), reconfigure=True, best_of_n=True),
    Method("pool", "decoupled", ("a", "b", "c"), reconfigure=True, best_of_n=True, shared_pool=True),
]


def test_one_request_takes_what_its_periods_take() -> None:
    assert simulate(ALONE, METHODS[0]).rollout_seconds == pytest.approx(1000 * 0.0502)
    coupled = simulate(ALONE, METHODS[2])
    w = coupled.plan.window
    expected = 1000 / committed_tokens(0.8, w + 1) * (w * 0.01 + 0.05 + (w + 1) * 2e-4)
    assert w > 1 and coupled.rollout_seconds == pytest.approx(expected, rel=1e-3)
    decoupled = simulate(replace(ALONE, gpus=3), METHODS[4])
    w = decoupled.plan.window
    share = 1 / (2 - 0.8**w)  # of the periods, in which a window is there to verify
    period = max(w * 0.01, 0.05 + share * w * 2e-4)
    assert decoupled.rollout_seconds == pytest.approx(1000 / (share * committed_tokens(0.8, w)) * period, rel=1e-3)


def test_a_steps_time_counts_rewards_and_learning() -> None:
    plain, meanwhile = (simulate(CLUSTER, Method("plain", overlap=overlap)) for overlap in (False, True))
    assert plain.step_seconds == plain.rollout_seconds + 22
    assert plain.rollout_seconds + 20 < meanwhile.step_seconds < plain.step_seconds
    assert simulate(CLUSTER, METHODS[1]).step_seconds == simulate(CLUSTER, METHODS[1]).rollout_seconds + 11


@settings(max_examples=30)
@given(seed=st.integers(0, 999), method=st.sampled_from(METHODS), sigma=st.floats(0.1, 1.5))
def test_each_request_ends_once_and_no_worker_does_two_things(seed: int, method: Method, sigma: float) -> None:
    cluster = replace(CLUSTER, lengths=replace(CLUSTER.lengths, sigma=sigma))
    outcome = simulate(cluster, method, seed)
    assert len(outcome.ends) == cluster.requests and outcome.ends[-1] == outcome.rollout_seconds
    assert outcome.plan.batch == -(-cluster.requests // len(outcome.spans))  # requests of the fullest worker
    assert 0 <= outcome.idle_share < 1
    for spans in outcome.spans:
        edges = [edge for start, end, _ in spans for edge in (start, end)]
        assert edges == sorted(edges) and edges[-1] <= outcome.rollout_seconds
    assert simulate(cluster, method, seed) == outcome


def seconds(outcomes: list[Outcome]) -> float:
    return fmean(outcome.rollout_seconds for outcome in outcomes)


def test_helpers_shorten_the_tail() -> None:
    drafters = tuple(replace(drafter, fixed_seconds=0.01, acceptance=0.6, spread=0.25) for drafter in DRAFTERS)
    target = TargetModel(0.05, 5e-3, 1e-6)  # a batch of 8 takes nearly twice as long as one of 1
    cluster = replace(CLUSTER, transfer_seconds=0.0, max_helped=2, target=target, drafters=drafters)
    alone, best_of_n, own, pool = (
        [simulate(cluster, method, seed) for seed in range(4)]
        for method in (*METHODS[-3:-1], METHODS[0], Method("plain pool", shared_pool=True))
    )
    assert seconds(best_of_n) < 0.95 * seconds(alone)
    assert seconds(pool) < 0.99 * seconds(own)
    assert fmean(each.idle_share for each in pool) < 0.97 * fmean(each.idle_share for each in own)


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        (CLUSTER, {"requests": 0}, "requests=0"),
        (CLUSTER, {"worker_gpus": 17}, "worker_gpus=17 exceeds gpus=16"),
        (CLUSTER, {"drafters": ()}, r"drafters has the names \[\]"),
        (CLUSTER, {"drafters": DRAFTERS[:1] * 2}, r"drafters has the names \['a', 'a'\]"),
        (CLUSTER, {"learn_seconds": -1.0}, "learn_seconds=-1.0"),
        (CLUSTER.target, {"fixed_seconds": 1e-300}, "fixed_seconds=1e-300 is out of range"),  # would never end
        (CLUSTER.lengths, {"sigma": 800.0}, "sigma=800.0 is out of range; it must be greater than 0 and at most 10"),
        (CLUSTER.lengths, {"maximum": 10**400}, "maximum=10+ is out of range"),
        (CLUSTER, {"requests": 10**9}, "requests=1000000000 .* must be greater than 0 and at most 200000"),
        (CLUSTER, {"gpus": 2000, "lengths": Lengths(300, 0.8, 10**5)}, "1000 workers .*maximum=100000.*Lower gpus"),
        (CLUSTER, {"drafters": tuple(replace(DRAFTERS[0], name=str(i)) for i in range(17))}, "drafters has 17"),
        (CLUSTER.target, {"token_seconds": 1e300}, "token_seconds=1e[+]300"),
        (DRAFTERS[0], {"spread": 0.5}, "spread=0.5 of 'a' does not go with acceptance=0.8"),
        (DRAFTERS[0], {"spread": 1e-160}, "spread=1e-160 of 'a' does not go with"),
        (DRAFTERS[0], {"acceptance": 1.5}, "acceptance=1.5"),
    ],
)
def test_refusals(part: object, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(part, **changes)  # type: ignore[type-var]


def test_methods_without_drafters_are_refused() -> None:
    for changes in ({"best_of_n": True}, {"execution": "decoupled"}):
        with pytest.raises(ValueError, match=r"drafters=\(\) of the method 'm' .* name at least one"):
            Method("m", **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"drafters=\('a', 'd'\) of the method 'm' .* has \['a', 'b', 'c'\]"):
        simulate(CLUSTER, Method("m", "coupled", ("a", "d")))
