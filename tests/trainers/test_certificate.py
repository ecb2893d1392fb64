"""A run certifies by step how far sampler and loss were apart, and names what was not exact or not compared."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spec_trl.json_files import read_json
from spec_trl.native.native_code import compiler
from spec_trl.trainers import certificate
from spec_trl.trainers.certificate import CERTIFICATE_FILE, Certificate, Content, NotExact
from spec_trl.trainers.run_log import StepRecord
from spec_trl.trainers.sampler_mismatch import SamplerMismatch
from tests.cli.sample_run import make_header, make_rollout
from tests.trainers.conftest import schedule
from tests.trainers.harness import OTHERS, tiny_policy, train


DISTANCE = "sampling/sampling_logp_difference/max"
NOT_TRIED = NotExact("exactness was not tried", 1)  # in float64


def read(folder: Path) -> Content:
    return read_json(folder / CERTIFICATE_FILE, Content, "certificate", "")


def step(number: int, distance: float | None = 0.5, compared: int = 10) -> StepRecord:
    return StepRecord(number, 1.0, {}, None, distance, compared)


@pytest.mark.parametrize("options", [{}, OTHERS["gmpo"], OTHERS["rloo"], {"num_iterations": 2, "max_steps": 4}])
def test_each_step_is_certified(tmp_path: Path, options: dict[str, Any]) -> None:
    run = train(tmp_path, policy=tiny_policy().float(), **options)
    found, count = read(tmp_path), options.get("max_steps", 3)
    assert [one.step for one in found.steps] == [*range(1, count + 1)]
    assert [one.distance for one in found.steps] == pytest.approx(run.metric(DISTANCE))
    assert 0 < max(one.distance or 0 for one in found.steps) == found.distance < 1e-4
    trained = [sum(map(len, rows)) for rows in run.completions for _ in range(count // len(run.completions))]
    assert [one.compared for one in found.steps] == trained and found.compared == sum(trained)
    rollouts = run.log.of("train")
    drafts = [sum(each.drafted for each in record.per_depth.values()) for record in rollouts]
    assert sum(drafts) == found.drafted == sum(one.drafted for one in found.steps) > found.accepted > 0
    (part,) = found.parts
    assert (part.dtype, part.strategy, part.exact_logprobs, part.autocast) == ("float32", "self", False, "no")
    assert {*part.versions} == {"spec_trl", "torch", "transformers", "trl"}
    assert (part.hardware, part.started) == (run.log.header.hardware, run.log.header.started)
    assert found.not_exact == [NotExact(what, 1) for what in rollouts[0].not_exact]


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("options", [{}, OTHERS["rloo"]])
def test_the_distance_is_zero_under_exact_logprobs(tmp_path: Path, options: dict[str, Any]) -> None:
    train(tmp_path, policy=tiny_policy().float(), exact_logprobs=True, max_steps=2, **options)
    found = read(tmp_path)
    assert [one.distance for one in found.steps] == [0.0, 0.0] and found.compared and found.accepted
    assert found.parts[0].exact_logprobs and found.not_exact == []


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"top_p": 0.9}, "TopPLogitsWarper changes the distribution"),
        (
            {"generation_kwargs": {"temperature": 0.5}},
            "a temperature of 0.5 (the loss's is 1.0) changes the distribution",
        ),
        (OTHERS["distillation"], "the loss reads no log-probabilities of sampled tokens"),
    ],
)
def test_what_is_not_compared_is_named(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    """No distance is no distance of zero."""
    train(tmp_path, max_steps=1, **options)
    found = read(tmp_path)
    assert found.not_exact == [NotExact(f"not compared: {why}", 1), NOT_TRIED]
    assert [(one.distance, one.compared) for one in found.steps] == [(None, 0)] and found.distance is None
    assert found.drafted


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    options = schedule(max_completion_length=16)
    first = train(tmp_path / "whole", **options)
    whole = read(first.folder)
    (first.folder / "moved").mkdir()
    checkpoint = first.folder / "checkpoint-2"
    resumed = read(train(tmp_path / "other", resume=checkpoint, **options).folder)
    assert resumed.steps == whole.steps and resumed.not_exact == whole.not_exact == [NOT_TRIED]
    assert [part.first_step for part in resumed.parts] == [1, 3] and resumed.drafted == whole.drafted > 0
    checkpoint.rename(first.folder / "moved" / "checkpoint-2")
    lost = train(tmp_path / "lost", resume=first.folder / "moved" / "checkpoint-2", **options)
    found = read(lost.folder)
    assert [one.step for one in found.steps] == [3, 4] and [part.first_step for part in found.parts] == [3]
    assert found.not_exact[0].what.startswith("not known up to step 2: ") and found.not_exact[0].first_step == 1


def test_the_first_step_of_what_is_not_exact(tmp_path: Path) -> None:
    run = Certificate(tmp_path, "bf16")
    run.add(make_header())
    for number, parts in enumerate([[], ["scans"], ["scans", "its device"]]):
        run.add(make_rollout(number, step=number, not_exact=parts))
        run.add(make_rollout(number, step=number, mode="eval", not_exact=["of an evaluation"]))
        run.add(step(number + 1))
    found = read(tmp_path)
    assert found.not_exact == [NotExact("scans", 2), NotExact("its device", 3)]
    each = make_rollout(0).per_depth.values()
    assert found.steps[0].drafted == sum(one.drafted for one in each) and found.parts[0].autocast == "bf16"


def test_steps_without_a_token_or_a_rollout(tmp_path: Path) -> None:
    run = Certificate(tmp_path, "no")
    for one in (make_header(), make_rollout(0), step(1, 0.25), step(2, None, 0), step(3, 0.125)):
        run.add(one)
    found = read(tmp_path)
    assert [one.distance for one in found.steps] == [0.25, None, 0.125] and found.distance == 0.25
    assert found.steps[0].drafted and found.steps[1].drafted == 0 and found.compared == 20


def test_nan_is_no_distance_of_zero(tmp_path: Path) -> None:
    place: Any = SimpleNamespace(gather=lambda x: x)
    given: Any = SimpleNamespace(temperature=1.0, logprobs_over="vocabulary")
    mismatch = SamplerMismatch(place, given, [])
    for change in (0.5, math.nan, 0.25):  # micro-batches
        mismatch.compare(torch.full((1, 2), change), torch.zeros(1, 2), torch.ones(1, 2), True)
    distance, compared = mismatch.take()
    assert distance is not None and math.isnan(distance) and compared == 6
    run = Certificate(tmp_path, "no")
    for one in (make_header(), step(1, 0.25), step(2, distance), step(3, 0.125)):
        run.add(one)
    found = read(tmp_path)
    assert [one.distance for one in found.steps] == [0.25, None, 0.125] and found.distance is None
    assert found.not_exact == [NotExact("a log-probability of the loss is NaN", 2)]


def test_a_smaller_batch_begins_again(tmp_path: Path) -> None:
    run = Certificate(tmp_path, "no")
    for one in (make_header(not_compared="a test"), step(1), step(2)):
        run.add(one)
    run.begin(0, None)
    run.add(step(1, 0.75))
    found = read(tmp_path)
    assert [one.distance for one in found.steps] == [0.75] and len(found.parts) == 1
    assert found.not_exact == [NotExact("not compared: a test", 1)]


def test_a_long_run_writes_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of a short one; and all of a long one at its end."""
    sizes = list[int]()
    monkeypatch.setattr(certificate, "write_json", lambda path, content: sizes.append(len(content.steps)))
    run = Certificate(tmp_path, "no")
    for number in range(1, 10_001):
        run.add(step(number))
    assert sizes[:99] == [*range(1, 100)] and sum(sizes) < 120 * 10_000
    run.write()
    run.write()
    assert sizes[-2] < sizes[-1] == 10_000
