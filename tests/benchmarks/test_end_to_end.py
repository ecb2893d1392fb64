"""The end-to-end benchmark: what it trains, what it counts as identical, whose numbers a row shows. No test looks at a
time."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import end_to_end
from benchmarks.configurations import (
    ABLATED,
    ABLATIONS,
    AUTOREGRESSIVE,
    EFFICIENT_ROLLOUT,
    FIXED,
    LEARNED_ADAPTED,
    LEARNED_FROZEN,
    LEARNED_TTS,
    METHODS,
    TRL,
    always_on,
    learned,
    toggled,
    uses_profile,
)
from benchmarks.end_to_end import best_fixed, expand, identical_until, in_turns, over_steps, summarise
from benchmarks.timed_training import Training
from benchmarks.training_task import demo_task, model_task, odd_share
from spec_trl import SpecGRPOConfig
from spec_trl.drafter_training.untrained import write_eagle3
from spec_trl.trainers.run_log import RolloutRecord, StepRecord, read_run


LEARNED = dict.fromkeys((LEARNED_FROZEN, LEARNED_ADAPTED, LEARNED_TTS)).keys()


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
    return Training(steps, made, [[[i], [i, i]] for i in range(len(steps))], 10.0)


def test_times_are_means_over_steps_of_medians_over_repeats_without_the_first_step() -> None:
    assert over_steps([[9.0, 1.0, 2.0], [9.0, 3.0, 2.0], [9.0, 99.0, 2.0]]) == 2.5


def test_a_summary_leaves_preparation_out_of_the_rollout() -> None:
    runs = [training([100.0, 3.0, 5.0], [0.0, 0.5, 1.0], refresh=[50.0, 1.0, 1.0], taus=[9.0, 4.0, 5.0])]
    found = summarise("x", runs, [training([1.0, 1.0, 1.0], [0.0, 0.5, 0.75])])
    assert (found.preparation_seconds, found.rollout_seconds, found.step_seconds) == (1.0, 3.0, 5.0)
    assert (found.block_efficiency, found.draft_length, found.sd_on_fraction) == (4.5, 5.0, 0.5)
    assert (found.reward, found.reward_difference) == (1.0, 0.25)
    assert (found.tokens, found.tokens_per_second) == (3.0, 1.0)
    assert found.phase_seconds == {"draft": 1.5}
    assert (found.identical_steps, found.steps) == (3, 3)
    assert summarise("x", runs, None).identical_steps is None


def test_identity_ends_at_the_first_difference() -> None:
    one = [[[1], [2]], [[3], [4]], [[5], [6]]]
    assert identical_until(one, [[[1], [2]], [[3], [4]], [[5], [6]]]) == 3
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
    made = {
        always_on(n): summarise(always_on(n), [training([1.0, s], [0.0, 0.0])], None)
        for n, s in zip(FIXED, (3, 1, 2), strict=True)
    }
    assert best_fixed(made) == always_on(5)
    assert best_fixed({}) is None


def test_every_configuration_is_one_that_the_trainer_takes(tmp_path: Path) -> None:
    for name, fields in (METHODS | ABLATIONS | learned("eagle3", "somewhere", 1e-5)).items():
        if name != TRL:
            config = SpecGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **fields)
            assert uses_profile(fields) == (config.sd_toggle == "roofline" and config.assistant_strategy != "none")
    assert METHODS.keys().isdisjoint(ABLATIONS)
    assert METHODS[EFFICIENT_ROLLOUT]["draft_lengths"] == [5, 7, 9, 11]
    assert ABLATIONS[toggled(7)]["draft_lengths"] == [7]


def test_methods_are_expanded() -> None:
    assert list(expand(["history"], False)) == [AUTOREGRESSIVE, "history"]
    assert list(expand([end_to_end.ALWAYS], False)) == [AUTOREGRESSIVE, *map(always_on, FIXED)]
    assert set(expand([TRL], True)) == {TRL, *ABLATED, *ABLATIONS}
    assert list(expand([], False, ("dflash", "somewhere", 1e-6))) == [AUTOREGRESSIVE, *LEARNED]
    assert set(expand(end_to_end.CHOICES, True)) == METHODS.keys() | ABLATIONS.keys()


def test_a_shape_model_gets_prompts_and_completions_that_end() -> None:
    task = model_task("shape:tiny", torch.float32, 64, 6, 0, 0.93, None)
    policy = task.make_policy()
    ids = task.tokenizer(task.dataset["prompt"][:])["input_ids"]
    assert max(map(len, ids)) == task.longest_prompt == 64 and len(ids) == 6
    assert task.tokenizer.decode(ids[0]).split() == task.dataset["prompt"][0].split()
    ends = policy.generation_config.eos_token_id
    assert len(ends) == 512 // 32 and task.tokenizer.eos_token_id in ends and 0 not in ends
    assert policy is not task.make_policy()
    assert task.reward(completion_ids=[[1, 2], [3, 5]]) == odd_share([[1, 2], [3, 5]]) == [0.5, 1.0]


def test_the_demo_task_starts_from_the_same_weights() -> None:
    task = demo_task(torch.float32, 4, 0)
    first, second = task.make_policy(), task.make_policy()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert len(task.dataset) == 4 and task.longest_prompt > 4


@pytest.mark.slow
def test_the_command_trains_and_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output, runs = tmp_path / "end_to_end.json", tmp_path / "runs"
    arguments = ["--steps", "2", "--rows", "4", "--group", "2", "--max-completion-length", "12", "--repeats", "1"]
    arguments += ["--dtype", "float64", "--ablations", "--calibration-seconds", "1", "--epochs", "1.5"]
    policy = demo_task(torch.float64, 1, 0).make_policy()
    write_eagle3(tmp_path / "auxiliary", policy)
    arguments += ["--learned", "eagle3", str(tmp_path / "auxiliary"), "--learning-rate", "1e-3"]
    monkeypatch.setattr(sys, "argv", ["end_to_end", *arguments, "--runs", str(runs), "--output", str(output)])
    end_to_end.main()
    result = json.loads(output.read_text())
    methods = result["methods"]
    assert methods.keys() == METHODS.keys() | ABLATIONS.keys() | LEARNED
    for name, method in methods.items():
        assert method["steps"] == len(method["by_step"]["reward"]) == 2
        assert method["step_seconds"] > method["rollout_seconds"] > 0
        if name != TRL:  # in float64 there are no near-ties to excuse a difference
            assert method["identical_steps"] == 2, name
            assert method["by_step"]["reward"] == methods[AUTOREGRESSIVE]["by_step"]["reward"]
    assert methods[AUTOREGRESSIVE]["preparation_seconds"] is methods[TRL]["preparation_seconds"] is None
    assert methods[always_on(3)]["block_efficiency"] > 1.5
    assert methods[always_on(7)]["draft_length"] > methods[always_on(3)]["draft_length"]
    assert result["best_fixed"] in map(always_on, FIXED)
    assert result["calibration"]["seconds"] > 0
    assert result["configurations"][LEARNED_ADAPTED]["assistant_model"] == "auxiliary"
    assert all(methods[name]["block_efficiency"] >= 1 for name in LEARNED)
    log = read_run(runs / f"{EFFICIENT_ROLLOUT}-0")
    assert result["options"]["learning_rate"] == 1e-3
    assert log.header.settings["roofline_profile"] == str(runs / end_to_end.PROFILE)
    text = output.with_suffix(".md").read_text()
    for part in (
        "EfficientRollout",
        "(TTS)",
        "The policy learns at 0.001",
        "always on at γ* = ",
        "(Fig. 4a)",
        "(Fig. 5)",
        "(Tab. 4)",
        "(Fig. 7)",
    ):
        assert part in text
    # Tab. 4's ratio, from the shape: an 8-bit copy reads more than a 4-bit one.
    w8, w4 = (next(line for line in text.splitlines() if line.startswith(f"| RTN {bits}")) for bits in ("W8", "W4"))
    assert float(w8.split("|")[2]) > float(w4.split("|")[2])
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "1"], "the first step is not timed"),
        (["--model", "nowhere"], "--model nowhere: no such folder"),
        (["--rows", "6", "--group", "4"], "--rows 6 is no multiple of --group 4"),
        (["--learned", "ngram", "."], "--learned ngram .: give eagle3 or dflash"),
        (["--learned", "eagle3", "nowhere"], "--learned eagle3 nowhere: give eagle3 or dflash"),
        (["--drafter-learning-rate", "0"], "--drafter-learning-rate 0.0 must be above 0"),
        (["--repeats", "0"], "must be 1 or more"),
        (["--runs", "."], "is not empty"),
    ],
)
def test_wrong_options_are_named(arguments, message, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["end_to_end", *arguments])
    with pytest.raises(SystemExit):
        end_to_end.main()
    assert message in capsys.readouterr().err
