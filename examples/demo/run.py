"""The demo: GRPO on a small policy next to TRL's own trainer, then drafts on a model whose weights take the time.

``python -m examples.demo.run`` trains the shipped policy four times from the same weights, on the same questions and
with the same seed: with TRL's `GRPOTrainer`, and with `SpecGRPOTrainer` without drafts ("none"), with lookups in
earlier rollouts ("history"), and with "auto", which finds out by itself what pays. The trainings take turns, a step
of each (`turns.py`). It says how fast each sampled its rollouts, whether the completions were the same, and how the
reward went. The policy is so small that drafts cannot gain; what they gain on a larger model, the second part shows
(`drafts.py`). Tables, JSON file, plots and the figures of ``spec-trl report`` for the run of "auto" go to
``demo_output/``.
"""

import argparse
import io
import json
import platform
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib


matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
import torch
import transformers
import trl
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from examples.demo import drafts
from examples.demo.pretrain import POLICY
from examples.demo.task import MAX_COMPLETION_LENGTH, build_dataset, exact_match
from examples.demo.turns import Turns
from spec_trl import SpecGRPOConfig, SpecGRPOTrainer
from spec_trl.cli.main import main as spec_trl_command
from spec_trl.trainers.run_log import LOG_FILE


OUTPUT = Path("demo_output")
STEPS = 20
ROWS = 64  # completions of a step, eight of each question
WINDOW = 10  # steps a reported reward is averaged over; one step is 8 questions, too few
WARM_UP = 1  # steps that count in no speed: the first one imports and allocates for all
TRL, NONE, CHOSEN = "TRL's GRPOTrainer", "none", "auto"
METHODS = (TRL, NONE, "history", CHOSEN)


@dataclass(frozen=True)
class Training:
    """One training run.

    `completions` are the token ids of each step; `seconds` are of each step's rollout, `training_seconds` of all its
    turns; `history` is the trainer's log.
    """

    completions: list[list[list[int]]]
    seconds: list[float]
    training_seconds: float
    history: list[dict[str, float]]

    @property
    def rates(self) -> list[float]:
        """Tokens/s of each rollout after the warm-up."""
        steps = list(zip(self.completions, self.seconds, strict=True))
        return [sum(map(len, completions)) / seconds for completions, seconds in steps[WARM_UP:]]

    def over(self, other: "Training") -> float:
        """Median over the steps of this training's tokens/s over those of `other` in the same step, which ran next to
        it."""
        return median(own / its for own, its in zip(self.rates, other.rates, strict=True))

    def reward(self, steps: slice) -> float:
        """Mean reward of some steps."""
        return fmean(entry["reward"] for entry in self.history[steps])

    def mean(self, metric: str) -> float | None:
        """Mean over the steps that logged `metric`; None without any."""
        values = [entry[metric] for entry in self.history if metric in entry]
        return fmean(values) if values else None


class TimedRollouts:
    """A trainer's rollouts by one clock, all that a trainer does for them included."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rollout_seconds: list[float] = []

    def _generate(self, prompts: list[Any]) -> Any:
        started = time.perf_counter()
        result = super()._generate(prompts)  # type: ignore[misc]
        self.rollout_seconds.append(time.perf_counter() - started)
        return result


class TimedGRPOTrainer(TimedRollouts, GRPOTrainer):
    pass


class TimedSpecGRPOTrainer(TimedRollouts, SpecGRPOTrainer):
    pass


class ShowProgress(TrainerCallback):
    """Moves the demo's one progress bar by a training step, and shows the reward next to it."""

    def __init__(self, bar: tqdm) -> None:
        self.bar = bar

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" in logs:
            self.bar.update()
            self.bar.set_postfix(reward=f"{logs['reward']:.2f}")


def make_trainer(
    method: str, output: Path, bar: tqdm
) -> tuple[TimedGRPOTrainer | TimedSpecGRPOTrainer, list[list[list[int]]]]:
    """The trainer of the shipped policy with one of `METHODS`, and the list where each step's completions will be;
    `output` is for what the trainer writes."""
    settings: dict[str, Any] = dict(
        output_dir=str(output),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        num_generations=8,
        max_completion_length=MAX_COMPLETION_LENGTH,
        loss_type="grpo",
        learning_rate=2e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
        temperature=1.0,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=0,
    )
    sampled: list[list[list[int]]] = []

    def right_answer(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        sampled.append(completion_ids)
        return exact_match(completions, **columns)

    arguments: dict[str, Any] = dict(
        # float32, because small updates are lost in bfloat16.
        model=AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32),
        reward_funcs=right_answer,
        train_dataset=build_dataset(4096, seed=0),
        processing_class=AutoTokenizer.from_pretrained(POLICY),
        callbacks=[ShowProgress(bar)],
    )
    if method == TRL:
        trainer: TimedGRPOTrainer | TimedSpecGRPOTrainer = TimedGRPOTrainer(args=GRPOConfig(**settings), **arguments)
    else:
        config = SpecGRPOConfig(**settings, assistant_strategy=method)
        trainer = TimedSpecGRPOTrainer(args=config, **arguments)
    trainer.remove_callback(PrinterCallback)  # comes with disable_tqdm
    return trainer, sampled


def train(methods: Sequence[str]) -> tuple[dict[str, Training], list[str]]:
    """Trains the shipped policy with each of `methods`, a step of each in turn. Returns also whose turn each was."""
    turns, made = Turns(), {}
    with tqdm(total=STEPS * len(methods), desc="part 1 of 2, GRPO") as bar, tempfile.TemporaryDirectory() as folder:
        for method in methods:
            output = OUTPUT if method == CHOSEN else Path(folder) / method
            made[method] = make_trainer(method, output, bar)
            turns.add(method, made[method][0])
        turns.train()
    trainings = {}
    for method, (trainer, sampled) in made.items():
        history = [entry for entry in trainer.state.log_history if "reward" in entry]
        trainings[method] = Training(sampled, trainer.rollout_seconds, sum(turns.seconds[method]), history)
    return trainings, turns.order


def same_steps(one: Training, other: Training) -> int:
    """From the first step on, how many have the same completions, token for token."""
    same = (ours == theirs for ours, theirs in zip(one.completions, other.completions, strict=True))
    return sum(accumulate(same, lambda before, now: before and now))


def summarize(trainings: dict[str, Training]) -> list[dict[str, Any]]:
    """One row per method, the fastest first."""
    rows = [
        {
            "method": method,
            "tokens_per_second": median(training.rates),
            "over_trl": training.over(trainings[TRL]),
            "training_seconds": training.training_seconds,
            "drafting": training.mean("rollout/sd_on_fraction"),
            "accepted": training.mean("rollout/acceptance_rate"),
            "first_reward": training.reward(slice(WINDOW)),
            "last_reward": training.reward(slice(-WINDOW, None)),
            "same_steps": None if method == TRL else same_steps(training, trainings[NONE]),
        }
        for method, training in trainings.items()
    ]
    return sorted(rows, key=lambda row: -row["over_trl"])


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """The comparison as text."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.0%}"

    titles = "".join(f"{title:>10}" for title in ("tokens/s", "over TRL", "training", "drafting", "accepted"))
    lines = [f"{'':19}{titles}  {'reward':14}same"]
    for row in rows:
        name = row["method"] if row["method"] == TRL else f'"{row["method"]}"'
        same = "-" if row["same_steps"] is None else f"{row['same_steps']} of {STEPS}"
        lines.append(
            f"{name:19}{row['tokens_per_second']:10.0f}{row['over_trl']:9.2f}x{row['training_seconds']:8.1f} s"
            f"{share(row['drafting']):>10}{share(row['accepted']):>10}"
            f"  {row['first_reward']:.2f} to {row['last_reward']:.2f}  {same}"
        )
    return "\n".join(lines) + (
        f"\ntokens/s: of a rollout, median of all but the first; over TRL: median of steps over TRL's same step;"
        f"\ntraining: all {STEPS} steps, learning included, without waiting for the others;"
        f"\ndrafting: share of decoding rounds with drafts; reward: first and last {WINDOW} steps;"
        '\nsame: steps from the first one on whose completions are those of "none", token for token.'
        "\nThe trainings took turns, a step of each: what else runs on the machine hits all of them."
    )


def conclude(rows: Sequence[dict[str, Any]]) -> str:
    """What came out, in one sentence that claims what this run has checked."""
    by_method = {row["method"]: row for row in rows}
    ours, theirs = by_method[CHOSEN], by_method[TRL]
    rewards = [f"from {row['first_reward']:.2f} to {row['last_reward']:.2f}" for row in (ours, theirs)]
    same = "in all steps" if ours["same_steps"] == STEPS else f"in the first {ours['same_steps']} of {STEPS} steps"
    return (
        f'SpecGRPOTrainer with "{CHOSEN}" sampled its rollouts {ours["over_trl"]:.2f} times as fast as TRL\'s '
        f"GRPOTrainer, with the completions and rewards of decoding without drafts {same}; the reward went "
        f"{rewards[0]}, and {rewards[1]} with TRL, whose sampler draws other texts."
    )


def plot(trainings: dict[str, Training], path: Path) -> None:
    """Draws the reward, and the seconds that rollouts have taken so far, over the steps."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    steps = range(1, STEPS + 1)
    for method, training in trainings.items():
        smoothed = [training.reward(slice(max(0, step - WINDOW), step)) for step in steps]
        # "none", "history" and "auto" draw one line where their completions are the same.
        left.plot(steps, smoothed, label=method, linestyle="-" if method in (TRL, NONE) else "--")
        right.plot(steps, list(accumulate(training.seconds)), label=method)
    left.set(title=f"Reward (exact match), mean of {WINDOW} steps", xlabel="GRPO step", ylim=(0, 1))
    right.set(title="Seconds spent on rollouts, a step of each in turn", xlabel="GRPO step", ylim=(0, None))
    left.legend(loc="lower right")
    right.legend(loc="upper left")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="folder of a model for the second part (default: the shipped story model, widened)")
    options = parser.parse_args(arguments)
    if options.model is not None and not (Path(options.model) / "config.json").exists():
        parser.error(f"--model {options.model}: there is no config.json in it; name the folder of a checkpoint")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # the demo has its own
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers renames options that TRL still sets
    OUTPUT.mkdir(exist_ok=True)
    (OUTPUT / LOG_FILE).unlink(missing_ok=True)  # of an earlier demo; a trainer would take itself for resumed
    started = time.perf_counter()
    trainings, turns = train(METHODS)
    plot(trainings, OUTPUT / "training.png")
    with redirect_stdout(io.StringIO()):  # the page has the same text
        spec_trl_command(["report", str(OUTPUT)])
    drafted = drafts.compare(options.model, OUTPUT / "cache")
    drafts.plot(drafted, OUTPUT / "drafts.png")
    rows = summarize(trainings)
    text = f"{format_table(rows)}\n\n{drafts.format_table(drafted)}\n\n{conclude(rows)}\n{drafts.conclude(drafted)}\n"
    (OUTPUT / "table.txt").write_text(text)
    result = {
        "machine": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
            "threads": torch.get_num_threads(),
        },
        "comparison": rows,
        "turns": turns,
        "history": {method: training.history for method, training in trainings.items()},
        "drafts": drafted,
        "seconds": time.perf_counter() - started,
    }
    (OUTPUT / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    files = "table.txt, result.json, training.png, drafts.png, report/report.html"
    print(f"\n{OUTPUT}/: {files} ({result['seconds']:.0f} s)\n\n{text}", end="")


if __name__ == "__main__":
    main()
