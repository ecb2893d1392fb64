"""The end-to-end benchmark: what it counts as identical, whose numbers a row shows, which configurations it trains."""

from pathlib import Path

from benchmarks import end_to_end as known
from benchmarks.end_to_end import identical_until, over_steps, summarise
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


def test_every_configuration_is_one_that_the_trainer_takes(tmp_path: Path) -> None:
    for name, fields in (known.METHODS | known.ABLATIONS | known.learned("eagle3", "somewhere", 1e-5)).items():
        if name != known.TRL:
            config = SpecGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **fields)
            by_profile = config.sd_toggle == "roofline" and config.assistant_strategy != "none"
            assert known.uses_profile(fields) == by_profile
    assert known.METHODS.keys().isdisjoint(known.ABLATIONS)
    assert known.METHODS[known.EFFICIENT_ROLLOUT]["draft_lengths"] == [5, 7, 9, 11]
    assert known.ABLATIONS["self-toggle-7"]["draft_lengths"] == [7]
