"""End to end: GRPO training with each way to generate rollouts (ER Tab. 2), and the paper's ablations on this machine.

Every method trains the same policy for the same steps from the same seeds with a fresh trainer; `trl` is
trl.GRPOTrainer with transformers' generate, the rest is SpecGRPOTrainer as in `METHODS` and `ABLATIONS`. A repeat
trains all of them once, every second repeat in reverse order, so that a slow minute of the machine does not hit the
same one. A time is the mean over steps, the first one left out (ER App. F), of the median over repeats. The learned
auxiliary drafter of Table 2 needs a checkpoint for the policy, which --learned names.

    python -m benchmarks.end_to_end [--ablations]
    python -m benchmarks.end_to_end --model FOLDER --methods trl --learned eagle3 DRAFTER --learning-rate 1e-5

docs/performance.md has the command of a real chat model.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from spec_trl import SpecGRPOConfig
from spec_trl.papers.efficient_rollout.calibration import calibrate

from .measure import Finding, Options, begin, fresh_cache, write_result
from .models import DTYPES, check_targets, model_line, weights_line
from .training import (
    DEMO,
    DEMO_SIZE,
    OTHER_SIZE,
    Size,
    Training,
    TrainingTask,
    config_fields,
    demo_task,
    question_task,
    settings_of,
    text_task,
    train,
)
from .workload import STORY_MODEL


# ---- what is compared: fields of SpecGRPOConfig, or of its speculative_config, by name -----------------------------


AUTOREGRESSIVE, TRL, EFFICIENT_ROLLOUT, ALWAYS = "autoregressive", "trl", "efficient-rollout", "self-always"
LADDER = [5, 7, 9, 11]
"""Γ (ER §4.1)."""
FIXED = (3, 5, 7)
"""Draft lengths among which the always-on baseline has its best, γ* (ER §4.1)."""

_SELF: dict[str, Any] = {"assistant_strategy": "self", "draft_quantization": "rtn-w4-g128"}
_ALWAYS = _SELF | {"sd_toggle": "always"}
_TOGGLED = _SELF | {"sd_toggle": "roofline"}
_ADAPTIVE: dict[str, Any] = {"draft_length": LADDER}  # ε, and when γ moves, are the defaults, which are the paper's


def always_on(draft_length: int) -> str:
    """Name of the always-on quantized self-drafter at a fixed γ."""
    return f"{ALWAYS}-{draft_length}"


METHODS: dict[str, dict[str, Any]] = {
    AUTOREGRESSIVE: {"assistant_strategy": "none"},
    TRL: {},  # trl.GRPOTrainer, which knows none of these fields
    # A lookup costs next to nothing, so the paper's history baseline has no toggle either.
    "history": {"assistant_strategy": "history", "sd_toggle": "always"} | _ADAPTIVE,
    **{always_on(length): _ALWAYS | {"draft_length": [length]} for length in FIXED},
    EFFICIENT_ROLLOUT: _TOGGLED | _ADAPTIVE,
    "auto": {"assistant_strategy": "auto", "draft_length": LADDER},
}
"""Rows of Table 2; the always-on ones become one, at γ*."""
ABLATIONS: dict[str, dict[str, Any]] = {
    **{f"self-toggle-{length}": _TOGGLED | {"draft_length": [length]} for length in LADDER},  # Fig. 4a
    "self-always-adaptive": _ALWAYS | _ADAPTIVE,  # Fig. 5
    **{
        f"w8-always-{length}": _ALWAYS | {"draft_length": [length], "draft_quantization": "rtn-w8"}
        for length in FIXED
    },  # Tab. 4
    "awq-always-5": _ALWAYS | {"draft_length": [5], "draft_quantization": "awq-w4-g128"},  # Fig. 7
}
"""What the paper varies. They are read against these rows of `METHODS`:"""
ABLATED = (AUTOREGRESSIVE, *map(always_on, FIXED), EFFICIENT_ROLLOUT)
CHOICES = [*(name for name in METHODS if name not in map(always_on, FIXED)), ALWAYS]


def learned(kind: str, checkpoint: str, learning_rate: float) -> dict[str, dict[str, Any]]:
    """The learned auxiliary drafter of Table 2 (ER App. F.5), always on: kept, adapted to the policy after each
    micro-batch, and learning from each round (TTS). `kind`: "eagle3" or "dflash"; the rate is the adaptation's."""
    fields = {"assistant_model": checkpoint, "sd_toggle": "always", "draft_length": [5]}
    return {
        "learned-frozen": fields | {"assistant_strategy": kind, "drafter_adaptation": False},
        "learned-adapted": fields
        | {"assistant_strategy": kind, "drafter_adaptation": {"learning_rate": learning_rate}},
        "learned-tts": fields | {"assistant_strategy": "tts", "tts": {"drafter": kind, "scope": "run"}},
    }


OURS = "autoregressive (ours)"
_NAMES = {
    AUTOREGRESSIVE: OURS,
    TRL: "trl.GRPOTrainer (transformers generate)",
    "history": "history-based, lossless",
    "auto": "auto",
    EFFICIENT_ROLLOUT: "EfficientRollout: toggle, adaptive γ",
    **{always_on(length): f"quantized self, always on, γ = {length}" for length in FIXED},
    "learned-frozen": "learned auxiliary, as it came",
    "learned-adapted": "learned auxiliary, adapted after each micro-batch",
    "learned-tts": "learned auxiliary, learning from each round (TTS)",
    **{f"self-toggle-{length}": f"toggle, γ = {length} (Fig. 4a, 5)" for length in LADDER},
    "self-always-adaptive": "always on, adaptive γ (Fig. 5)",
    **{f"w8-always-{length}": f"always on, γ = {length}, RTN W8 (Tab. 4)" for length in FIXED},
    "awq-always-5": "always on, γ = 5, AWQ W4 (Fig. 7)",
}


def uses_profile(fields: dict[str, Any]) -> bool:
    """Whether a method needs a calibrated roofline."""
    return fields.get("sd_toggle") == "roofline"


def expand(
    methods: Sequence[str], ablations: bool, auxiliary: tuple[str, str, float] | None = None
) -> dict[str, dict[str, Any]]:
    """Configurations by name, autoregressive decoding always among them. `auxiliary`: kind, checkpoint and learning
    rate of a learned drafter."""
    wanted = {AUTOREGRESSIVE, *methods}
    wanted |= {always_on(length) for length in FIXED} if ALWAYS in wanted else set()
    wanted |= {*ABLATED, *ABLATIONS} if ablations else set()
    chosen = {name: fields for name, fields in (METHODS | ABLATIONS).items() if name in wanted}
    return chosen | (learned(*auxiliary) if auxiliary else {})


# ---- what comes of it ----------------------------------------------------------------------------------------------


def in_turns(names: Sequence[str], repeats: int, work: Callable[[str, int], Training]) -> dict[str, list[Training]]:
    """`work(name, repeat)` for all of them, every second repeat in reverse order."""
    runs: dict[str, list[Training]] = {name: [] for name in names}
    for repeat in range(repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            runs[name].append(work(name, repeat))
    return runs


@dataclass
class Summary:
    """One method. Times are seconds, means over steps but the first of medians over repeats; None: does not apply."""

    preparation_seconds: float  # making the drafter anew after each update
    rollout_seconds: float  # generation without it
    step_seconds: float  # the whole optimizer step
    block_efficiency: float | None  # τ, mean over steps
    draft_length: float | None  # γ̄ of the rounds that speculated, likewise
    sd_on_fraction: float | None  # their share of all rounds, likewise
    tokens: float  # generated per step
    tokens_per_second: float  # of a rollout without the preparation
    identical_steps: int | None  # until the first one that differs from autoregressive decoding, over repeats
    steps: int


def summarise(runs: Sequence[Training], baseline: Sequence[Training] | None) -> Summary:
    """Numbers of a method's runs; `baseline`: autoregressive decoding's of the same repeats, where rollouts must equal
    them."""
    rollouts = [record for run in runs for record in run.rollouts[1:]]
    tokens = statistics.fmean(sum(map(len, rows)) for run in runs for rows in run.completions[1:])
    rollout_seconds = over_steps([run.rollout_seconds for run in runs])
    pairs = [] if baseline is None else zip(runs, baseline, strict=True)
    return Summary(
        preparation_seconds=over_steps([run.preparation_seconds for run in runs]),
        rollout_seconds=rollout_seconds,
        step_seconds=over_steps([[step.seconds for step in run.steps] for run in runs]),
        block_efficiency=mean_known([record.block_efficiency for record in rollouts]),
        draft_length=mean_known([record.mean_draft_length for record in rollouts]),
        sd_on_fraction=mean_known([record.sd_on_fraction for record in rollouts]),
        tokens=tokens,
        tokens_per_second=tokens / rollout_seconds,
        identical_steps=min((identical_until(a.completions, b.completions) for a, b in pairs), default=None),
        steps=len(runs[0].steps),
    )


def over_steps(by_repeat: Sequence[Sequence[float]]) -> float:
    """Mean over the steps but the first of the median over repeats: every repeat does the same work in a step."""
    return statistics.fmean(statistics.median(step) for step in list(zip(*by_repeat, strict=True))[1:])


def mean_known(values: Sequence[float | None]) -> float | None:
    """Mean of those that are not None; None without any."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def identical_until(ours: list[list[list[int]]], theirs: list[list[list[int]]]) -> int:
    """Steps before the first one in which completions differ. After it policies differ, and so may all the rest."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((step for step, (one, other) in pairs if one != other), len(ours))


def best_fixed(methods: dict[str, Summary]) -> str | None:
    """The always-on configuration with the shortest rollouts, at γ*."""
    names = [name for name in map(always_on, FIXED) if name in methods]
    return min(names, key=lambda name: methods[name].rollout_seconds, default=None)


def findings(result: dict[str, Any]) -> list[Finding]:
    """Each method against TRL's own trainer and against autoregressive decoding: Table 2, then the ablations."""
    methods, model, found = result["methods"], model_line(result["target"]), []
    base, trl = methods[AUTOREGRESSIVE], methods.get(TRL)
    for name in (name for name in _NAMES if name in methods and name != TRL):
        own, what = methods[name], f"{model}: {_NAMES[name]}" + " = γ*" * (name == result["best_fixed"])
        if trl is not None:  # which draws other texts, so times alone would not compare
            faster = own["tokens_per_second"] / trl["tokens_per_second"]
            found.append(Finding(f"{what}, rollout tokens/s", faster, "×", _NAMES[TRL]))
            own_rate, trl_rate = (each["tokens"] / each["step_seconds"] for each in (own, trl))
            found.append(Finding(f"{what}, tokens/s of a whole step", own_rate / trl_rate, "×", _NAMES[TRL]))
        if name != AUTOREGRESSIVE:
            for part in ("rollout", "step"):
                change = own[f"{part}_seconds"] / base[f"{part}_seconds"] - 1
                found.append(Finding(f"{what}, time of a {part}", change, "±%", OURS))
        if own["block_efficiency"] is not None:
            found.append(Finding(f"{what}, block efficiency", own["block_efficiency"], "tokens per round"))
    return found


def setup(result: dict[str, Any]) -> str:
    """How it was measured, and whether completions were the same."""
    options = result["options"]
    text = (
        f"GRPO, {options['steps']} steps of {options['rows']} completions ({options['group']} of a prompt) of up to "
        f"{options['max_completion_length']} tokens at temperature 1, {options['questions']} prompts of up to "
        f"{options['longest_prompt']} tokens, the same seeds for each method. Times: mean over the steps but the "
        f"first of the median over {options['repeats']} repeats; making the drafter counts in a step's time alone."
        + weights_line(result["target"])
    )
    if file := options["questions_file"]:
        text += f" Prompts are questions of {file}; the reward is whether the answer is right."
    if (calibration := result["calibration"]) is not None:
        text += f" Calibration, in none of the times: {calibration['seconds']:.1f} s."
    compared = {n: m for n, m in result["methods"].items() if m["identical_steps"] is not None and n != AUTOREGRESSIVE}
    same = sum(m["identical_steps"] == m["steps"] for m in compared.values())
    return text + f" Completions identical in every step: {same} of {len(compared)} configurations."


# ---- the command ---------------------------------------------------------------------------------------------------


TINY = f"--model {STORY_MODEL} --methods trl auto history --steps 2 --rows 2 --group 2 --repeats 1 --epochs 1 "
TINY += "--max-completion-length 4 --dtype float64"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Options(__doc__, "end_to_end", TINY)
    add, sizes = parser.add_argument, (asdict(DEMO_SIZE), asdict(OTHER_SIZE))

    def default(name: str) -> str:
        return "default, demo and other models: {}, {}".format(*(size[name] for size in sizes))

    add("--model", default=DEMO, help="demo (its policy and task), or a folder of a checkpoint")
    add("--methods", nargs="+", default=CHOICES, choices=CHOICES, help="besides autoregressive")
    add("--ablations", action="store_true", help="toggle and γ (Fig. 4a, 5), W4 and W8 (Tab. 4), AWQ (Fig. 7)")
    add("--learned", nargs=2, metavar=("KIND", "DRAFTER"), help="three more: a drafter (eagle3 or dflash, and its "
        "folder) kept, adapted, and learning while it drafts")  # fmt: skip
    add("--learning-rate", type=float, help="of the policy; default: the task's")
    add("--drafter-learning-rate", type=float, default=1e-6, help="of an adapted drafter")
    add("--steps", type=int, help=f"optimizer steps; {default('steps')}")
    add("--rows", type=int, help=f"completions per step; {default('rows')}")
    add("--group", type=int, help=f"of one prompt; {default('group')}")
    add("--max-completion-length", type=int, help=f"tokens; {default('max_completion_length')}")
    add("--epochs", type=float, default=2.0, help="how often a prompt comes up; a history needs 2")
    add("--repeats", type=int, default=4, help="trainings of each method")
    add("--dtype", default="float32", choices=list(DTYPES), help="of the weights")
    add("--prompts", type=Path, help="JSON list of strings; default: examples/data/stories.json; not for the demo")
    add("--questions", type=Path, help=".jsonl with questions and answers, as of GSM8K, that a chat model trains on; "
        "the reward is whether its answer is right; default: texts, and a reward that says nothing")  # fmt: skip
    add("--calibration-seconds", type=float, default=120.0, help="at most, for the sweep")
    add("--runs", type=Path, help="folder that keeps the runs' logs for spec-trl report")
    options = parser.read(arguments, "repeats", "epochs")
    given = {name: getattr(options, name) for name in sizes[0] if getattr(options, name) is not None}
    options.size = size = replace(DEMO_SIZE if options.model == DEMO else OTHER_SIZE, **given)
    if options.model != DEMO:
        check_targets(parser, [f"{options.model},{options.dtype}"])
    if options.learned is not None:
        kind, drafter = options.learned
        if kind not in ("eagle3", "dflash") or not Path(drafter).is_dir():
            parser.error(f"--learned {kind} {drafter}: give eagle3 or dflash, and the folder of a drafter")
    if min(options.drafter_learning_rate, options.learning_rate or 1) <= 0:
        parser.error("--learning-rate and --drafter-learning-rate must be above 0")
    if size.steps < 2:
        parser.error(f"--steps {size.steps}: the first step is not timed; give 2 or more")
    if size.group < 2 or size.rows % size.group:
        parser.error(f"--rows {size.rows} is no multiple of --group {size.group}, or that is below 2: change one")
    if options.questions is not None and (options.model == DEMO or options.prompts or not options.questions.is_file()):
        parser.error(f"--questions {options.questions}: name a .jsonl, and a --model, and leave out --prompts")
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
    return text_task(options.model, dtype, questions, options.seed, options.prompts)


def make_profile(
    task: TrainingTask, size: Size, device: torch.device, budget: float, path: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Calibrates once for all runs; returns what to report of it, and the fields that name it."""
    policy = task.make_policy().to(device)
    fields = config_fields(METHODS[EFFICIENT_ROLLOUT])
    config = SpecGRPOConfig(output_dir=str(path.parent), use_cpu=True, bf16=False, **fields)
    started, longest = time.perf_counter(), task.longest_prompt + size.max_completion_length
    profile = calibrate(policy, config.rollout_config(), size.rows, longest, budget)
    facts = {"seconds": time.perf_counter() - started, "diagnostics": profile.diagnostics}
    profile.save(path)
    return facts, {"efficient_rollout": {"profile": str(path), "mismatch": "error"}}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    machine = begin(options)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers renames options that TRL still sets
    device = torch.device(options.device)
    task, size = make_task(options), options.size
    auxiliary = None if options.learned is None else (*options.learned, options.drafter_learning_rate)
    configurations = expand(options.methods, options.ablations, auxiliary)
    rate = {} if options.learning_rate is None else {"learning_rate": options.learning_rate}
    with ExitStack() as stack:
        folder = options.runs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(fresh_cache())
        calibration: dict[str, Any] | None = None
        profile: dict[str, Any] = {}
        if any(map(uses_profile, configurations.values())):
            path = folder / "roofline_profile.json"
            calibration, profile = make_profile(task, size, device, options.calibration_seconds, path)
        bar = stack.enter_context(tqdm(total=len(configurations) * options.repeats * size.steps, desc="training"))

        def run(name: str, repeat: int) -> Training:
            bar.set_description(name)
            fields = configurations[name] | (profile if uses_profile(configurations[name]) else {})
            shared = settings_of(task, size, options.seed, device.type == "cpu") | rate
            return train(task, None if name == TRL else fields, shared, folder / f"{name}-{repeat}", bar)

        runs = in_turns(list(configurations), options.repeats, run)
    summaries = {name: summarise(own, None if name == TRL else runs[AUTOREGRESSIVE]) for name, own in runs.items()}
    own = {name: getattr(options, name) for name in ("epochs", "repeats", "dtype", "threads", "seed")}
    own |= {"longest_prompt": task.longest_prompt, "questions": len(task.dataset)}
    own["questions_file"] = None if options.questions is None else options.questions.name
    result: dict[str, Any] = {
        "target": task.facts,
        "options": own | asdict(size) | task.settings | rate,
        "calibration": calibration,
        "configurations": {  # a path would be of this machine
            name: {key: Path(value).name if key == "assistant_model" else value for key, value in fields.items()}
            for name, fields in configurations.items()
        },
        "best_fixed": best_fixed(summaries),
        "methods": {name: asdict(summary) for name, summary in summaries.items()},
    }
    title = f"End to end: {model_line(task.facts)}"
    write_result(options.output, "rollouts", title, setup(result), machine, options.repeats, findings(result), result)


if __name__ == "__main__":
    main()
