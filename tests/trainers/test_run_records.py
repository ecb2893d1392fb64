"""What training runs leave behind: metrics, the log for `spec-trl report`, and the line that says whether it helped.

Each run is made once and looked at from several sides.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.demo.task import build_tokenizer
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.trainers.run_log import Run as Log
from spec_trl.trainers.run_log import read_run
from spec_trl.trainers.verdict import verdict_of
from tests.trainers.harness import Run, make_trainer, tiny_dataset, tiny_policy, train


ALWAYS = {"seconds", "tokens_per_second", "target_entropy", "tail_seconds", "tail_rounds"}
DRAFTED = ALWAYS | {
    "block_efficiency", "acceptance_rate", "first_token_acceptance", "draft_length", "sd_on_fraction",
    "drafter_refresh_seconds", "block_efficiency_from_0",
}  # fmt: skip


@dataclass
class Left:
    """What a run left: metrics, log, and printed lines of ours, of which the last is the verdict."""

    run: Run
    log: Log
    lines: list[str]


Make = Callable[..., Left]


@pytest.fixture(scope="module")
def leave(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Trains on the tiny task and collects what is left."""

    def make(strategy: str = "self", **options: Any) -> Left:
        folder, printed = tmp_path_factory.mktemp("run"), io.StringIO()
        trainer, run = make_trainer(folder, strategy, **options)
        with redirect_stdout(printed), warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*acceptance rate")
            trainer.train()
        lines = [line for line in printed.getvalue().splitlines() if line.startswith("spec_trl ")]
        log = read_run(folder)
        verdict = f"spec_trl verdict: {verdict_of(log)[0]}"
        assert [line for line in lines if "verdict" in line] == lines[-1:] == [verdict]
        return Left(run, log, lines)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEC_TRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield make


@pytest.fixture(scope="module")
def always(leave: Make) -> Left:
    """Four steps that draft in all rounds, with an evaluation after the second and the fourth."""
    return leave(
        max_steps=4, draft_lengths=[3], eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4,
        trainer={"eval_dataset": tiny_dataset(1)},
    )  # fmt: skip


def names(run: Run, prefix: str = "rollout/") -> set[str]:
    return {name.removeprefix(prefix) for entry in run.logs for name in entry if name.startswith(prefix)}


def test_log_has_every_rollout_and_step(always: Left) -> None:
    log, run = always.log, always.run
    assert log.header.strategy == "self" and log.header.settings["draft_lengths"] == [3]
    assert log.header.dtype == "float64"
    train_records, steps = log.of("train"), log.steps
    assert [record.rollout for record in train_records] == [record.step for record in train_records] == [0, 1, 2, 3]
    assert [record.step for record in steps] == [1, 2, 3, 4]
    assert [record.step for record in log.of("eval")] == [2, 4]
    for step, reward, record in zip(steps, run.metric("reward"), train_records, strict=True):
        assert step.reward == pytest.approx(reward)
        # The phases make up the step, and the rollout is the one that was logged.
        assert sum(step.phases.values()) == pytest.approx(step.seconds, rel=0.02)
        assert min(step.phases.values()) >= 0 and step.phases["update"] > 0 and step.phases["reward"] > 0
        assert record.seconds <= step.phases["rollout"] <= step.seconds
    for record, completions in zip(train_records, run.completions, strict=True):
        assert (record.drafter, record.draft_length, record.requests) == ("self", 3, 8)
        assert record.tokens == sum(map(len, completions))
        assert record.completion_curve[-1][1] == 8
        assert sum(point.rounds for point in record.points) == record.rounds
        assert sum(point.tokens for point in record.points) == record.tokens
        assert 0 < sum(point.rounds * point.seconds for point in record.points) <= record.seconds
        assert record.per_depth[0].committed <= record.tokens
        assert record.speculating[0] == (0, 3)
        assert sorted(timeline.request for timeline in record.timeline) == list(range(8))
        assert record.timeline[-1].ended == record.completion_curve[-1][0] <= record.seconds
        assert all(timeline.changes[0][1:] == (0, ["self"]) for timeline in record.timeline)
        # Making the drafter counts, as requantizing does; at step 2 the evaluation came first and paid for it.
        assert 0 <= record.refresh_seconds < record.seconds and (record.refresh_seconds > 0) == (record.step != 2)
        half = next(second for second, done in record.completion_curve if done >= 4)
        assert record.tail_seconds == pytest.approx(record.completion_curve[-1][0] - half)


def test_every_metric_is_logged_and_says_what_the_log_says(always: Left) -> None:
    run, records = always.run, always.log.of("train")
    assert names(run) == names(run, "eval_rollout/") == DRAFTED
    for entry in run.logs:
        assert not ("eval_rollout/seconds" in entry and any(name.startswith("rollout/") for name in entry))
    for name in (
        "seconds", "block_efficiency", "acceptance_rate", "first_token_acceptance", "target_entropy", "sd_on_fraction",
        "tail_seconds", "tail_rounds",
    ):  # fmt: skip
        assert run.metric(f"rollout/{name}") == pytest.approx([vars(record)[name] for record in records])
    assert run.metric("rollout/drafter_refresh_seconds") == [record.refresh_seconds for record in records]
    assert run.metric("rollout/tokens_per_second") == [record.tokens / record.seconds for record in records]
    # One depth bin holds all of 16 tokens.
    assert run.metric("rollout/block_efficiency_from_0") == run.metric("rollout/block_efficiency")
    for record, draft_length in zip(records, run.metric("rollout/draft_length"), strict=True):
        assert 0 <= record.tail_seconds < record.seconds and 0 <= record.tail_rounds < 16
        assert 1 < record.block_efficiency <= 4  # γ + 1
        assert 0 < record.acceptance_rate < 1 and 0 < record.first_token_acceptance < 1
        assert 2 < draft_length == record.mean_draft_length <= 3  # shorter where a row has little room left
        assert 0.5 < record.sd_on_fraction <= 1
    assert always.lines[0] == "spec_trl rollouts: sd_toggle=always"
    assert always.lines[-1].endswith("the speedup over plain decoding is not known: no plain round was measured.")


def test_some_metrics_need_a_drafter_drafts_or_a_copy(leave: Make) -> None:
    plain, lookup = leave("none", max_steps=1), leave("ngram", max_steps=1, max_completion_length=80)
    (record,) = plain.log.rollouts
    assert record.drafter is record.block_efficiency is record.mean_draft_length is None
    assert record.sd_on_fraction == 0 and record.speculating == [(0, 0)] and names(plain.run) == ALWAYS
    assert names(lookup.run) == DRAFTED - {"drafter_refresh_seconds"} | {"block_efficiency_from_64"}
    shallow, deep = (lookup.run.metric(f"rollout/block_efficiency_from_{edge}")[0] for edge in (0, 64))
    assert min(shallow, deep) <= lookup.log.rollouts[0].block_efficiency <= max(shallow, deep)
    run = leave(max_completion_length=1, max_steps=2).run  # one token leaves nothing to draft
    assert run.metric("rollout/sd_on_fraction") == run.metric("rollout/draft_length") == [0.0] * 2
    assert run.metric("rollout/block_efficiency") == []  # nothing to report, and no NaN in TRL's averages
    assert all(run.metric("rollout/target_entropy"))


def test_a_run_that_drafts_ends_with_what_it_gained(leave: Make, profiles: dict[str, str]) -> None:
    left = leave(max_steps=1, max_completion_length=48, sd_toggle="roofline", roofline_profile=profiles["pays"])
    # 8 rows of at most 17 tokens of prompt and 24 of output; by the profile 5 / (5 × 0.63 + 1).
    first, last = left.lines
    assert re.fullmatch(r"spec_trl rollouts: speculation predicted 1\.20× at 8 rows × \d\d tokens: speculating", first)
    pattern = r"spec_trl verdict: rollouts \d+\.\d\d× of plain decoding, .* s (saved|lost) \(calibration and refresh "
    assert re.match(pattern, last)
    log, (record,) = left.log, left.log.rollouts
    assert 0 < log.header.calibration_seconds < 60
    assert log.header.profile == str(log.path.parent / "roofline_profile.json") and Path(log.header.profile).exists()
    assert record.plain_seconds > 0 and record.reason.startswith("speculation ")
    assert record.predicted_speedup > 1
    assert [length > 0 for _, length in record.speculating][:2] == [False, True]
    assert {point.draft_length for point in record.points} >= {0, 5}
    assert record.phase_seconds["control"] > 0


def test_a_run_that_does_not_draft_says_why(leave: Make, profiles: dict[str, str]) -> None:
    left = leave(max_steps=2, sd_toggle="roofline", roofline_profile=profiles["does not"])
    assert left.lines[-1].startswith("spec_trl verdict: nothing was drafted (speculation predicted 0.10× at ")
    records = left.log.rollouts
    assert [record.predicted_speedup for record in records] == left.run.metric("rollout/predicted_speedup")
    never = leave(sd_toggle="never", max_steps=1).lines[-1]
    assert never == "spec_trl verdict: nothing was drafted (sd_toggle=never): rollouts were plain decoding."
    for record in records:
        assert record.predicted_speedup == pytest.approx(5 / 51, rel=0.01)
        assert record.plain_seconds == pytest.approx(record.seconds - record.refresh_seconds, rel=1e-6)


def test_target_entropy_is_the_surprise_of_what_was_sampled(tmp_path: Path) -> None:
    texts: list[tuple[str, list[int]]] = []

    def remember(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        texts.extend(zip(prompts, completion_ids, strict=True))
        return [float(len(ids)) for ids in completion_ids]

    trainer, run = make_trainer(tmp_path, max_steps=1, temperature=0.7, trainer={"reward_funcs": remember})
    trainer.train()
    policy, tokenizer = tiny_policy(), build_tokenizer()
    logprobs = []
    for prompt, completion in texts:
        ids = torch.tensor([*tokenizer(prompt).input_ids, *completion])
        with torch.no_grad():
            logits = policy(ids[None]).logits[0, -len(completion) - 1 : -1]  # [new, V]
        logprobs.append((logits / 0.7).log_softmax(-1).gather(1, ids[-len(completion) :, None]))
    assert run.metric("rollout/target_entropy")[0] == pytest.approx(-torch.cat(logprobs).mean().item(), rel=1e-5)


def test_awq_learns_from_the_training_forwards(tmp_path: Path) -> None:
    scaled: list[bool] = []

    def look(completion_ids: list[list[int]], **_: Any) -> list[float]:
        layers = run.calls[-1].drafters[0].quantized.layers.values()
        scaled.append(any(bool((layer.inverse_scales != 1).any()) for layer in layers))
        return [float(len(ids)) for ids in completion_ids]

    options = dict(max_steps=2, draft_quantization="awq-w4-g128", trainer={"reward_funcs": look})
    trainer, run = make_trainer(tmp_path, **options)
    trainer.train()
    assert scaled == [False, True]  # before the first step nothing was seen


def test_collapse_of_acceptance_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its second refresh on the drafter holds noise. (In the other runs here a warning is an error.)"""
    refresh, count = SelfDrafter.refresh, [0]

    def damaged(drafter: SelfDrafter, statistics: object = None) -> None:
        refresh(drafter)
        count[0] += 1
        if count[0] >= 2:
            torch.manual_seed(count[0])
            for layer in drafter.quantized.layers.values():
                for buffer in layer.packed.buffers():
                    if buffer.is_floating_point():
                        buffer.copy_(buffer[torch.randperm(len(buffer))].flip(-1) * -1)

    monkeypatch.setattr(SelfDrafter, "refresh", damaged)
    with pytest.warns(UserWarning, match="the drafter 'self' fell from 0.[3-9].* to 0.[01]") as seen:
        train(tmp_path, max_steps=3)
    assert len([warning for warning in seen if "acceptance rate" in str(warning.message)]) == 1
