"""End to end: GRPO training with each way to generate rollouts (ER Tab. 2), and the paper's ablations on this machine.

Every method trains the same policy for the same steps from the same seeds with a fresh trainer; `trl` is
trl.GRPOTrainer with transformers' generate, the rest is SpecGRPOTrainer as in `benchmarks/configurations.py`. A repeat
trains all of them once, every second repeat in reverse order, so that a slow minute of the machine does not hit the
same one. A time is the mean over steps, the first one left out (ER App. F), of the median over repeats. The learned
auxiliary drafter of Table 2 needs a checkpoint for the policy, which --learned names.

    python -m benchmarks.end_to_end [--ablations]
    python -m benchmarks.end_to_end --model FOLDER --methods trl --learned eagle3 DRAFTER --learning-rate 1e-5
    python -m benchmarks.end_to_end --model "wide:examples/data/stories260K*16" --before-end 24 --rows 16 --steps 10
    python -m benchmarks.end_to_end --model shape:qwen2.5-0.5b --methods autoregressive self-always efficient-rollout

docs/performance.md has the command of a real chat model.
"""

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from spec_trl import SpecGRPOConfig
from spec_trl.efficient_rollout.fill_profile import calibrate

from .configurations import (
    ABLATED,
    ABLATIONS,
    AUTOREGRESSIVE,
    EFFICIENT_ROLLOUT,
    FIXED,
    METHODS,
    TRL,
    always_on,
    learned,
    uses_profile,
)
from .end_to_end_report import findings, idealized, setup
from .measure import add_machine_arguments, begin, write_result
from .models import DTYPES, SHAPE_PREFIX, check_model, model_line
from .timed_training import Training, settings_of, train
from .training_task import DEMO, DEMO_SIZE, OTHER_SIZE, Size, TrainingTask, demo_task, model_task, question_task


PROFILE = "roofline_profile.json"
ALWAYS = "self-always"
CHOICES = [*(name for name in METHODS if name not in map(always_on, FIXED)), ALWAYS]


def in_turns(names: Sequence[str], repeats: int, work: Callable[[str, int], Training]) -> dict[str, list[Training]]:
    """`work(name, repeat)` for all of them, every second repeat in reverse order."""
    runs: dict[str, list[Training]] = {name: [] for name in names}
    for repeat in range(repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            runs[name].append(work(name, repeat))
    return runs


@dataclass
class Summary:
    """One method. Times are seconds, means over steps but the first of medians over repeats; None: does not apply.

    Args:
        method: its name in `configurations`.
        preparation_seconds: making the drafter anew after each update.
        rollout_seconds: generation without it.
        step_seconds: the whole optimizer step.
        block_efficiency, draft_length, sd_on_fraction: τ, γ̄ of the rounds that speculated, and their share of all
            rounds; means over steps.
        tokens: generated per step.
        tokens_per_second: of a rollout without the preparation.
        reward: mean over the last third of the steps.
        identical_steps: steps until the first one whose completions are not autoregressive decoding's, over repeats.
        steps: how many there were.
        reward_difference: largest difference of a step's reward from autoregressive decoding's.
        phase_seconds: of one rollout.
        by_step: reward, τ, γ and seconds of each step of the first repeat.
        training_seconds: the whole run, median over repeats.
    """

    method: str
    preparation_seconds: float | None
    rollout_seconds: float
    step_seconds: float
    block_efficiency: float | None
    draft_length: float | None
    sd_on_fraction: float | None
    tokens: float
    tokens_per_second: float
    reward: float
    identical_steps: int | None
    steps: int
    reward_difference: float | None
    phase_seconds: dict[str, float] = field(default_factory=dict)
    by_step: dict[str, list[Any]] = field(default_factory=dict)
    training_seconds: float = 0.0


def summarise(method: str, runs: Sequence[Training], baseline: Sequence[Training] | None) -> Summary:
    """Numbers of a method's runs; `baseline`: autoregressive decoding's of the same repeats, where rollouts must equal
    them."""
    rollouts = [record for run in runs for record in run.rollouts[1:]]
    first = runs[0]
    tokens = statistics.fmean(sum(map(len, rows)) for run in runs for rows in run.completions[1:])
    rollout_seconds = over_steps([run.rollout_seconds for run in runs])
    pairs = [] if baseline is None else list(zip(runs, baseline, strict=True))
    return Summary(
        method=method,
        preparation_seconds=over_steps([run.preparation_seconds for run in runs]) if drafts(first) else None,
        rollout_seconds=rollout_seconds,
        step_seconds=over_steps([[step.seconds for step in run.steps] for run in runs]),
        block_efficiency=mean_known([record.block_efficiency for record in rollouts]),
        draft_length=mean_known([record.mean_draft_length for record in rollouts]),
        sd_on_fraction=mean_known([record.sd_on_fraction for record in rollouts]),
        tokens=tokens,
        tokens_per_second=tokens / rollout_seconds,
        reward=statistics.fmean(reward for run in runs for reward in run.rewards[-last_third(len(first.steps)) :]),
        identical_steps=min((identical_until(a.completions, b.completions) for a, b in pairs), default=None),
        steps=len(first.steps),
        reward_difference=max(
            (abs(x - y) for a, b in pairs for x, y in zip(a.rewards, b.rewards, strict=True)), default=None
        ),
        phase_seconds={
            phase: statistics.fmean(record.phase_seconds.get(phase, 0.0) for record in rollouts)
            for phase in dict.fromkeys(phase for record in rollouts for phase in record.phase_seconds)
        },
        by_step={
            "reward": first.rewards,
            "block_efficiency": [record.block_efficiency for record in first.rollouts],
            "draft_length": [record.draft_length for record in first.rollouts],
            "rollout_seconds": first.rollout_seconds,
            "step_seconds": [step.seconds for step in first.steps],
        },
        training_seconds=statistics.median(run.seconds for run in runs),
    )


def drafts(run: Training) -> bool:
    """Whether it had a drafter to prepare."""
    return any(record.strategy != "none" for record in run.rollouts)


def over_steps(by_repeat: Sequence[Sequence[float]]) -> float:
    """Mean over the steps but the first of the median over repeats: every repeat does the same work in a step."""
    return statistics.fmean(statistics.median(step) for step in list(zip(*by_repeat, strict=True))[1:])


def last_third(steps: int) -> int:
    """Number of steps that the final reward is a mean of."""
    return max(1, steps // 3)


def mean_known(values: Sequence[float | None]) -> float | None:
    """Mean of those that are not None; None without any."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def identical_until(ours: list[list[list[int]]], theirs: list[list[list[int]]]) -> int:
    """Steps before the first one in which completions differ. After it policies differ, and so may all the rest."""
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            return step
    return len(ours)


def expand(
    methods: Sequence[str], ablations: bool, auxiliary: tuple[str, str, float] | None = None
) -> dict[str, dict[str, Any]]:
    """Configurations by name, in the order of `configurations`, autoregressive decoding always among them.

    Args:
        methods: names.
        ablations: those too.
        auxiliary: kind, checkpoint and learning rate of a learned drafter; None: none.
    """
    wanted = {AUTOREGRESSIVE, *methods}
    if ALWAYS in wanted:
        wanted |= {always_on(length) for length in FIXED}
    if ablations:
        wanted |= {*ABLATED, *ABLATIONS}
    chosen = {name: fields for name, fields in (METHODS | ABLATIONS).items() if name in wanted}
    return chosen | (learned(*auxiliary) if auxiliary else {})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=DEMO, help="demo (its policy and task), a folder of a checkpoint, wide:FOLDER*k, or "
        "shape:NAME (default: %(default)s)")  # fmt: skip
    add("--methods", nargs="+", default=CHOICES, choices=CHOICES, help="besides autoregressive (default: all)")
    add("--ablations", action="store_true", help="toggle and draft length (Fig. 4a, 5), W4 and W8 (Tab. 4), AWQ "
        "(Fig. 7)")  # fmt: skip
    add("--learned", nargs=2, metavar=("KIND", "DRAFTER"), help="three more: a drafter (eagle3 or dflash, and its "
        "folder) kept, adapted, and learning while it drafts")  # fmt: skip
    add("--learning-rate", type=float, help="of the policy (default: the task's)")
    add("--drafter-learning-rate", type=float, default=1e-6, help="of an adapted drafter (default: %(default)s)")
    add("--steps", type=int, help=f"optimizer steps (default: {DEMO_SIZE.steps}, other models {OTHER_SIZE.steps})")
    add("--rows", type=int, help=f"completions per step (default: {DEMO_SIZE.rows}, other models {OTHER_SIZE.rows})")
    add("--group", type=int, help=f"of one prompt (default: {DEMO_SIZE.group}, other models {OTHER_SIZE.group})")
    add("--max-completion-length", type=int, help=f"tokens (default: {DEMO_SIZE.max_completion_length}, other models "
        f"{OTHER_SIZE.max_completion_length})")  # fmt: skip
    add("--epochs", type=float, default=2.0, help="how often a prompt comes up; a history needs 2 (default: "
        "%(default)s)")  # fmt: skip
    add("--repeats", type=int, default=4, help="trainings of each method (default: %(default)s)")
    add("--dtype", choices=list(DTYPES), help="of the weights (default: float32, shape models bfloat16)")
    add("--agreement", type=float, default=0.93, help="shape models: overlap with their 4-bit copy (%(default)s)")
    add("--prompts", type=Path, help="JSON list of strings (default: examples/data/stories.json); not for the demo")
    add("--questions", type=Path, help=".jsonl with questions and answers, as of GSM8K, that a chat model trains on; "
        "the reward is whether its answer is right (default: texts, and a reward that says nothing)")  # fmt: skip
    add("--before-end", type=int, help="prompts end so many tokens before their text, and completions of a model that "
        "ends texts soon or late (default: prompts are beginnings)")  # fmt: skip
    add("--calibration-seconds", type=float, default=120.0, help="at most, for the sweep (default: %(default)s)")
    add("--runs", type=Path, help="folder that keeps the runs' logs for spec-trl report (default: none)")
    add_machine_arguments(parser, "end_to_end")
    options = parser.parse_args()
    size = DEMO_SIZE if options.model == DEMO else OTHER_SIZE
    given = {name: getattr(options, name) for name in asdict(size) if getattr(options, name) is not None}
    options.size = size = replace(size, **given)
    if options.model != DEMO:
        try:
            check_model(options.model)
        except ValueError as error:
            parser.error(f"--model {error}")
    if options.learned is not None:
        kind, drafter = options.learned
        if kind not in ("eagle3", "dflash") or not Path(drafter).is_dir():
            parser.error(f"--learned {kind} {drafter}: give eagle3 or dflash, and the folder of a drafter")
    for name in ("learning_rate", "drafter_learning_rate"):
        if (rate := getattr(options, name)) is not None and rate <= 0:
            parser.error(f"--{name.replace('_', '-')} {rate} must be above 0")
    if options.dtype is None:
        options.dtype = "bfloat16" if options.model.startswith(SHAPE_PREFIX) else "float32"
    if size.steps < 2:
        parser.error(f"--steps {size.steps}: the first step is not timed; give 2 or more")
    if size.group < 2 or size.rows % size.group:
        parser.error(f"--rows {size.rows} is no multiple of --group {size.group}, or that is below 2: change one")
    if options.repeats < 1 or options.epochs < 1:
        parser.error(f"--repeats {options.repeats} and --epochs {options.epochs:g} must be 1 or more")
    if options.before_end is not None and options.before_end < 1:
        parser.error(f"--before-end {options.before_end} must be 1 or more")
    if options.before_end is not None and (options.model == DEMO or options.model.startswith(SHAPE_PREFIX)):
        parser.error(f"--before-end: the prompts of {options.model} are no texts; name a checkpoint, or leave it out")
    if options.questions is not None:
        if options.model == DEMO or options.model.startswith(SHAPE_PREFIX) or options.prompts or options.before_end:
            parser.error("--questions is for a checkpoint, without --prompts and --before-end: leave those out")
        if not options.questions.is_file():
            parser.error(f"--questions {options.questions}: no such file; name a .jsonl")
    if options.runs is not None and options.runs.exists() and any(options.runs.iterdir()):
        parser.error(f"--runs {options.runs} is not empty, and logs would be mixed up: name another folder")
    return options


def make_task(options: argparse.Namespace) -> TrainingTask:
    """The task that the options ask for."""
    size, dtype = options.size, DTYPES[options.dtype]
    per_step = size.rows // size.group
    questions = max(per_step, round(per_step * size.steps / options.epochs))
    if options.model == DEMO:
        return demo_task(dtype, questions, options.seed)
    if options.questions is not None:
        return question_task(options.model, dtype, size.max_completion_length, questions, options.questions)
    return model_task(
        options.model, dtype, size.max_completion_length, questions, options.seed, options.agreement, options.prompts,
        options.before_end,
    )  # fmt: skip


def main() -> None:
    options = parse_arguments()
    machine = begin(options)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers renames options that TRL still sets
    started = time.perf_counter()
    device = torch.device(options.device)
    task, size = make_task(options), options.size
    auxiliary = None if options.learned is None else (*options.learned, options.drafter_learning_rate)
    configurations = expand(options.methods, options.ablations, auxiliary)
    rate = {} if options.learning_rate is None else {"learning_rate": options.learning_rate}
    with ExitStack() as stack:
        folder = options.runs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["SPEC_TRL_CACHE"] = stack.enter_context(tempfile.TemporaryDirectory())  # nothing of an earlier run
        calibration: dict[str, Any] | None = None
        profile: dict[str, str] = {}
        if any(map(uses_profile, configurations.values())):
            calibration, profile = make_profile(task, size, device, options.calibration_seconds, folder / PROFILE)
        bar = stack.enter_context(tqdm(total=len(configurations) * options.repeats * size.steps, desc="training"))

        def run(name: str, repeat: int) -> Training:
            bar.set_description(name)
            fields = configurations[name] | (profile if uses_profile(configurations[name]) else {})
            shared = settings_of(task, size, options.seed, device.type == "cpu") | rate
            return train(task, None if name == TRL else fields, shared, folder / f"{name}-{repeat}", bar)

        runs = in_turns(list(configurations), options.repeats, run)
    summaries = {
        name: summarise(name, trainings, None if name == TRL else runs[AUTOREGRESSIVE])
        for name, trainings in runs.items()
    }
    kept = ("epochs", "repeats", "dtype", "agreement", "before_end", "threads", "seed")
    own = {name: getattr(options, name) for name in kept}
    own["questions_file"] = None if options.questions is None else options.questions.name
    lengths = {"longest_prompt": task.longest_prompt, "questions": len(task.dataset)}
    result: dict[str, Any] = {
        "target": task.facts,
        "options": own | asdict(size) | task.settings | rate | lengths,
        "calibration": calibration,
        "configurations": {  # a path would be of this machine
            name: {key: Path(value).name if key == "assistant_model" else value for key, value in fields.items()}
            for name, fields in configurations.items()
        },
        "best_fixed": best_fixed(summaries),
        "methods": {name: asdict(summary) for name, summary in summaries.items()},
        "seconds": time.perf_counter() - started,
    }
    result["idealized_draft_ratio"] = idealized(
        result, task.make_policy().config.get_text_config(decoder=True).to_dict()
    )
    title = f"End to end: {model_line(task.facts)}"
    write_result(options.output, "rollouts", title, setup(result), machine, findings(result), result)


def make_profile(
    task: TrainingTask, size: Size, device: torch.device, budget: float, path: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """Calibrates once for all runs; returns what to report of it, and the fields that name it."""
    policy = task.make_policy().to(device)
    config = SpecGRPOConfig(output_dir=str(path.parent), use_cpu=True, bf16=False, **METHODS[EFFICIENT_ROLLOUT])
    started = time.perf_counter()
    profile = calibrate(
        policy, config.speculative_config(), size.rows, task.longest_prompt + size.max_completion_length, budget
    )
    seconds = time.perf_counter() - started
    profile.save(path)
    facts = {"seconds": seconds, "max_rows": profile.draft_max_rows, "diagnostics": profile.diagnostics}
    return facts, {"roofline_profile": str(path), "roofline_mismatch": "error"}


def best_fixed(summaries: dict[str, Summary]) -> str | None:
    """The always-on configuration with the shortest rollouts, at γ*."""
    names = [name for name in map(always_on, FIXED) if name in summaries]
    return min(names, key=lambda name: summaries[name].rollout_seconds, default=None)


if __name__ == "__main__":
    main()
