"""A training run's log as a trainer would write it, its values drawn from a small model of one, and a profile."""

import math
import random
from pathlib import Path

from spec_trl.generation.engine.statistics import DraftCounts, PlanChange, RequestTimeline, RoundPoint
from spec_trl.generation.planner.model_constants import ModelConstants, ProfileKey
from spec_trl.papers.efficient_rollout.profile import Profile
from spec_trl.papers.efficient_rollout.roofline import Coefficients, Roofline
from spec_trl.papers.efficient_rollout.sweep import Sample
from spec_trl.trainers.run_log import LOG_FILE, RolloutRecord, RunHeader, RunLog, StepRecord


BATCH = 64


def make_roofline() -> Roofline:
    """A 0.5 B model on some processor: speculation pays at few rows and does not at 64."""
    constants = ModelConstants("shape", 1e9, 3e8, 1e9, 9e4, 12288)
    return Roofline(constants, Coefficients(4e11, 2e10, 1.0, 1.2, 1e-4, 1e-4, 3e-4))


def make_header(**changes: object) -> RunHeader:
    facts = dict(
        started="2026-11-21T10:00:00", hardware="some <CPU>, 2 threads", model="some & model", dtype="bfloat16",
        strategy="self", settings={"sd_toggle": "roofline", "draft_length": [5, 7, 9]}, profile=None,
    )  # fmt: skip
    return RunHeader(**(facts | changes))  # type: ignore[arg-type]


def make_rollout(index: int, seed: int = 0, **changes: object) -> RolloutRecord:
    """Rollout `index`: entropy falls and acceptance rises; with many rows it decodes autoregressively."""
    chance = random.Random(1000 * seed + index)
    gamma = 5 + 2 * (index // 8)
    entropy = 1.5 * math.exp(-index / 15) + 0.3 + chance.gauss(0, 0.01)
    alpha = 0.99 - 0.12 * entropy
    tau = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    roofline = make_roofline()
    points, plans, curve, second, finished = [], [], [], 0.0, 0
    for batch in (64, 32, 16, 8, 4, 2, 1):
        length = 60.0 * (8 - batch.bit_length())
        for speculates in {4: (False, True)}.get(batch, (batch <= 8,)):
            seconds = roofline.target_seconds(batch, length)
            if speculates:
                seconds = roofline.cycle_seconds(batch, length, gamma)
            seconds *= chance.uniform(0.97, 1.03)
            tokens = round(12 * batch * (tau if speculates else 1))
            drafter = "self" if speculates else None
            points.append(RoundPoint(batch, length, gamma * speculates, drafter, 12, 12 * seconds, tokens))
            plans.append(PlanChange(12 * len(plans), gamma * speculates, batch, drafter))
            second += 12 * seconds
        finished += batch - batch // 2
        curve.append((second, finished))
    blocks = 200
    record = dict(
        mode="train", rollout=index, step=index, strategy="self", drafter="self", seconds=second + 0.2,
        refresh_seconds=0.1, tokens=sum(p.tokens for p in points), requests=BATCH,
        phase_seconds={"prefill": 0.02, "draft": 0.4 * second, "verify": 0.5 * second, "accept": 0.02 * second},
        block_efficiency=tau, acceptance_rate=(tau - 1) / gamma, first_token_acceptance=alpha,
        target_entropy=entropy, draft_length=gamma, mean_draft_length=float(gamma), sd_on_fraction=0.6,
        predicted_speedup=1.3, measured_speedup=1.3 * chance.uniform(0.9, 1.1), rounds=96,
        speculating=plans, completion_curve=curve,
        per_depth={
            0: DraftCounts(blocks * gamma, round(blocks * (tau - 1)), blocks, committed=round(blocks * tau)),
            512: DraftCounts(blocks // 4 * gamma, 50, blocks // 4, committed=round(blocks / 4 * 0.8 * tau)),
        },
        points=points,
        timeline=[
            RequestTimeline(request, [(0.1, 0, []), (curve[-4][0], 36, ["self"])], curve[-1][0])
            for request in range(4)
        ],
        reason="speculation predicted 1.30×, measured 1.28× in 58 rounds",
        plain_seconds=chance.uniform(1.1, 1.3) * (second + 0.2) + 0.05,
    )  # fmt: skip
    return RolloutRecord(**(record | changes))  # type: ignore[arg-type]


def make_step(index: int, **changes: object) -> StepRecord:
    """Step `index` of 1, 2, ...; the first one is slow."""
    rollout = 30.0 if index == 1 else 6.0
    record = dict(
        step=index, seconds=rollout + 4.0,
        phases={"rollout": rollout, "reward": 0.5, "logprobs": 1.0, "update": 2.0, "other": 0.5},
        reward=0.2 + 0.01 * index,
    )  # fmt: skip
    return StepRecord(**(record | changes))  # type: ignore[arg-type]


def write_run(folder: Path, rollouts: int = 24, **header: object) -> Path:
    """Writes the log of a run of `rollouts` rollouts and as many steps; returns its path."""
    log = RunLog(folder / LOG_FILE)
    log.append(make_header(**header))
    for index in range(rollouts):
        log.append(make_rollout(index))
        log.append(make_step(index + 1))
    log.append(make_rollout(0, mode="eval"))
    return log.path


def make_profile() -> Profile:
    """A profile whose samples are its own predictions, except that verification of 2 rows took nine times as long."""
    roofline = make_roofline()
    samples = []
    for batch in (1, 2, 4, 8, 16, 32, 64):
        for length in (128.0, 512.0):
            samples.append(Sample(batch, length, 0, "target", roofline.target_seconds(batch, length)))
            samples.append(Sample(batch, length, 0, "draft", roofline.draft_seconds(batch, length)))
            for gamma in (3, 7):
                seconds = roofline.verify_seconds(batch, length, gamma) * (9 if batch == 2 else 1)
                samples.append(Sample(batch, length, gamma, "verify", seconds))
    key = ProfileKey("some CPU, 2 threads", "24 layers of 896", "bfloat16", "rtn-w4-g128", "torch_int4")
    return Profile(key, roofline, 48, {}, "2026-11-21", samples)
