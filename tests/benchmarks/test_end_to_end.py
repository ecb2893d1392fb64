"""The end-to-end benchmark: what it counts as identical, whose numbers a row shows, which configurations it trains."""

from pathlib import Path

import pytest

from benchmarks import end_to_end as known
from benchmarks.end_to_end import best_fixed, expand, identical_until, in_turns, over_steps, summarise
from benchmarks.training import Training
from spec_trl import SpecGRPOConfig
from spec_trl.trainers.run_log import RolloutRecord, StepRecord


def record(step: int, refresh: float = 0.0, tau: float | None = None, gamma: int = 0) -> RolloutRecord:
    return RolloutRecord(
        mode="train", rollout=step, step=step, strategy="self", drafter="self" if tau else None, seconds=2.0,
        refresh_seconds=refresh, tokens=4, requests=2, phase_seconds={"draft": float(step)}, block_efficiency=tau,
        acceptance_rate=None, first_token_acceptance=None, target_entropy=None, draft_length=gamma,
        mean_draft_length=gamma or None, sd_on_fraction=0.5, predicted_speedup=None, measured_speedup=None, rounds=3,
    )  # fmt: skip


def training(rollouts: list[float], rewards: list[float], **records: list[float]) -> Training:
    steps = [
        StepRecord(i + 1, seconds + 1.0, {"rollout": seconds}, reward)
        for i, (seconds, reward) in enumerate(zip(rollouts, rewards, strict=True))
    ]
    refresh = records.get("refresh", [0.0] * len(steps))
    taus = records.get("taus", [None] * len(steps))
    made = [record(i, r, tau, 5 if tau else 0) for i, (r, tau) in enumerate(zip(refresh, taus, strict=True))]
    return Training(steps, made, [[[i], [i, i]] for i in range(len(steps))])


def test_a_summary_leaves_preparation_out_of_the_rollout() -> None:
    runs = [training([100.0, 3.0, 5.0], [0.0, 0.5, 1.0], refresh=[50.0, 1.0, 1.0], taus=[9.0, 4.0, 5.0])]
    found = summarise(runs, [training([1.0, 1.0, 1.0], [0.0, 0.5, 0.75])])
    assert (found.preparation_seconds, found.rollout_seconds, found.step_seconds) == (1.0, 3.0, 5.0)
    assert (found.block_efficiency, found.draft_length, found.sd_on_fraction) == (4.5, 5.0, 0.5)
    assert (found.tokens, found.tokens_per_second) == (3.0, 1.0)
    assert (found.identical_steps, found.steps) == (3, 3)
    assert summarise(runs, None).identical_steps is None


def test_means_of_medians_and_identity_up_to_the_first_difference() -> None:
    # Means over steps of medians over repeats, without the first step.
    assert over_steps([[9.0, 1.0, 2.0], [9.0, 3.0, 2.0], [9.0, 99.0, 2.0]]) == 2.5
    one = [[[1], [2]], [[3], [4]], [[5], [6]]]
    assert identical_until(one, [list(step) for step in one]) == 3
    assert identical_until(one, [[[1], [2]], [[3], [9]], [[5], [6]]]) == 1


def test_every_second_repeat_runs_in_reverse() -> None:
    order: list[tuple[str, int]] = []

    def work(name: str, repeat: int) -> Training:
        order.append((name, repeat))
        return training([1.0], [0.0])

    runs = in_turns(["a", "b"], 3, work)
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert [len(made) for made in runs.values()] == [3, 3]


def test_the_best_fixed_draft_length_has_the_shortest_rollouts() -> None:
    rollouts = {
        known.always_on(n): [training([1.0, s], [0.0, 0.0])] for n, s in zip(known.FIXED, (3, 1, 2), strict=True)
    }
    assert best_fixed({name: summarise(runs, None) for name, runs in rollouts.items()}) == known.always_on(5)
    assert best_fixed({}) is None


def test_every_configuration_is_one_that_the_trainer_takes(tmp_path: Path) -> None:
    for name, fields in (known.METHODS | known.ABLATIONS | known.learned("eagle3", "somewhere", 1e-5)).items():
        if name != known.TRL:
            config = SpecGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **fields)
            by_profile = config.sd_toggle == "roofline" and config.assistant_strategy != "none"
            assert known.uses_profile(fields) == by_profile
    assert known.METHODS.keys().isdisjoint(known.ABLATIONS)
    assert known.METHODS[known.EFFICIENT_ROLLOUT]["draft_lengths"] == [5, 7, 9, 11]
    assert known.ABLATIONS["self-toggle-7"]["draft_lengths"] == [7]


@pytest.mark.parametrize(
    ("methods", "ablations", "drafter", "expected"),
    [
        (["history"], False, None, [known.AUTOREGRESSIVE, "history"]),
        ([known.ALWAYS], False, None, [known.AUTOREGRESSIVE, *map(known.always_on, known.FIXED)]),
        ([known.TRL], True, None, [known.TRL, *known.ABLATED, *known.ABLATIONS]),
        (
            [],
            False,
            ("dflash", "somewhere", 1e-6),
            [known.AUTOREGRESSIVE, *known.learned("dflash", "somewhere", 1e-6)],
        ),
        (known.CHOICES, True, None, [*known.METHODS, *known.ABLATIONS]),
    ],
)
def test_methods_are_expanded(methods, ablations, drafter, expected) -> None:
    found = list(expand(methods, ablations, drafter))
    assert found == sorted(expected, key=found.index) and len(found) == len(set(expected))
