"""The demo: GRPO with speculative rollouts on a small policy, then a comparison of rollout engines.

``python -m examples.demo.run`` trains the shipped policy with `SpecGRPOTrainer` and the quantized self-drafter, then
samples the same prompts with transformers, with spec_trl's "none" and with "self", and writes a table, a JSON file and
a plot to ``demo_output/``.
"""

import json
import platform
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib


matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import transformers
import trl
from torch import Tensor
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)

from examples.demo.pretrain import POLICY
from examples.demo.task import MAX_COMPLETION_LENGTH, build_dataset, exact_match
from spec_trl import SpecGRPOConfig, SpecGRPOTrainer


OUTPUT = Path("demo_output")
STEPS = 40
WINDOW = 10  # steps a reported reward is averaged over; one step is 8 questions, too few
DRAFT_LENGTH = 5
PROMPTS = 64  # of the comparison
REPEATS = 3  # of each engine, in alternation
ENGINES = ("transformers", "none", "self")


@dataclass
class Measurement:
    """One engine's samples of the comparison prompts, over the repeats.

    `sequences` are `[PROMPTS, prompt + new]` int64 of each repeat; `rates` are tokens/s; the rest, which only
    spec_trl reports, is of each repeat too.
    """

    sequences: list[Tensor] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    statistics: list[Any] = field(default_factory=list)


class ShowProgress(TrainerCallback):
    """Moves the demo's one progress bar by a training step, and shows reward and τ beside it."""

    def __init__(self, bar: tqdm) -> None:
        self.bar = bar

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" in logs:
            self.bar.update()
            self.bar.set_postfix(reward=f"{logs['reward']:.2f}", tau=f"{logs['rollout/block_efficiency']:.2f}")


def train(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, bar: tqdm) -> list[dict[str, float]]:
    """Trains `policy` in place with GRPO; returns the log of each step."""
    config = SpecGRPOConfig(
        output_dir=str(OUTPUT),
        assistant_strategy="self",
        initial_draft_length=DRAFT_LENGTH,
        max_steps=STEPS,
        per_device_train_batch_size=64,
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
    trainer = SpecGRPOTrainer(
        model=policy,
        args=config,
        reward_funcs=exact_match,
        train_dataset=build_dataset(4096, seed=0),
        processing_class=tokenizer,
        callbacks=[ShowProgress(bar)],
    )
    trainer.remove_callback(PrinterCallback)  # comes with disable_tqdm
    trainer.train()
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def sample(policy: PreTrainedModel, inputs: dict[str, Tensor], engine: str, seed: int, into: Measurement) -> None:
    """Samples one completion of each prompt with `engine` and adds what was measured to `into`."""
    sampling = dict(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=MAX_COMPLETION_LENGTH)
    started = time.perf_counter()
    if engine == "transformers":
        torch.manual_seed(seed)
        sequences = policy.generate(**inputs, **sampling)
    else:
        output = policy.generate(
            **inputs,
            **sampling,
            assistant_strategy=engine,
            speculative_config={"draft_length": DRAFT_LENGTH, "seed": seed},
            return_dict_in_generate=True,
        )
        sequences = output.sequences
        into.statistics.append(output.statistics)
    seconds = time.perf_counter() - started
    new = sequences[:, inputs["input_ids"].shape[1] :]  # [B, new]
    ended = (new == policy.config.eos_token_id).long().cumsum(1)  # [B, new]
    tokens = int((ended == 0).sum() + (ended[:, -1] > 0).sum())  # up to each row's EOS, which counts
    into.sequences.append(sequences)
    into.seconds.append(seconds)
    into.rates.append(tokens / seconds)


def compare(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, bar: tqdm) -> dict[str, Measurement]:
    """Samples the same prompts with every engine in alternation, after one warm-up that is thrown away."""
    policy.eval()
    prompts = build_dataset(PROMPTS, seed=1)["prompt"][:]
    inputs = dict(tokenizer(prompts, padding=True, return_tensors="pt"))
    measurements = {engine: Measurement() for engine in ENGINES}
    for repeat in range(-1, REPEATS):
        for engine in ENGINES:
            bar.set_description(f"comparing {engine}")
            sample(policy, inputs, engine, repeat + 1, Measurement() if repeat < 0 else measurements[engine])
            bar.update()
    return measurements


def summarize(measurements: dict[str, Measurement]) -> list[dict[str, Any]]:
    """One row per engine: medians over the repeats."""
    rows = []
    for engine, measured in measurements.items():
        row: dict[str, Any] = {
            "engine": engine,
            "tokens_per_second": median(measured.rates),
            "seconds": median(measured.seconds),
        }
        if measured.statistics:
            row["phase_seconds"] = {
                phase: median(s.phase_seconds.get(phase, 0.0) for s in measured.statistics)
                for phase in measured.statistics[0].phase_seconds
            }
        if engine == "self":
            row["block_efficiency"] = median(s.block_efficiency for s in measured.statistics)
            row["acceptance_rate"] = median(s.acceptance_rate for s in measured.statistics)
            row["identical_rows"] = count_identical(measured.sequences, measurements["none"].sequences)
        rows.append(row)
    return rows


def count_identical(ours: list[Tensor], reference: list[Tensor]) -> str:
    """How many rows of all repeats are the same token for token, as "192 of 192"."""
    same = total = 0
    for pair in zip(ours, reference, strict=True):
        width = max(sequences.shape[1] for sequences in pair)
        one, other = (F.pad(sequences, (0, width - sequences.shape[1])) for sequences in pair)  # [B, width], pad is 0
        same, total = same + int((one == other).all(1).sum()), total + len(one)
    return f"{same} of {total}"


def format_table(rows: list[dict[str, Any]]) -> str:
    """The comparison as text."""
    names = {"transformers": "transformers generate", "none": 'spec_trl "none"', "self": 'spec_trl "self"'}
    lines = [f"{'':22}{'tokens/s':>10}{'seconds':>9}{'tau':>7}{'accepted':>10}  phases in seconds"]
    for row in rows:
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row.get("phase_seconds", {}).items())
        tau = f"{row['block_efficiency']:.2f}" if "block_efficiency" in row else "-"
        accepted = f"{row['acceptance_rate']:.3f}" if "acceptance_rate" in row else "-"
        lines.append(
            f"{names[row['engine']]:22}{row['tokens_per_second']:10.0f}{row['seconds']:9.2f}{tau:>7}{accepted:>10}"
            f"  {phases or '-'}"
        )
    lines.append(f'rows of "self" identical to "none" with the same seed: {rows[-1]["identical_rows"]}')
    return "\n".join(lines)


def plot(history: list[dict[str, float]], measurements: dict[str, Measurement], path: Path) -> None:
    """Draws reward, τ and the completion curve side by side."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    steps = range(1, len(history) + 1)
    rewards = [entry["reward"] for entry in history]
    left.plot(steps, rewards, color="tab:blue", alpha=0.35, label="step")
    smoothed = [sum(rewards[max(0, i - WINDOW) : i]) / min(i, WINDOW) for i in steps]
    left.plot(steps, smoothed, color="tab:blue", label=f"mean of {WINDOW} steps")
    left.set(title="Reward (exact match)", xlabel="GRPO step", ylim=(0, 1))
    left.legend(loc="lower right")
    middle.plot(steps, [entry["rollout/block_efficiency"] for entry in history])
    middle.set(title="Block efficiency τ", xlabel="GRPO step", ylabel="tokens per verified block")
    middle.set_ylim(1, DRAFT_LENGTH + 1.2)  # from "no draft accepted" to just over "all accepted"
    for engine in ("none", "self"):
        seconds, finished = zip(*measurements[engine].statistics[0].completion_curve, strict=True)
        right.step([0, *seconds], [0, *finished], where="post", label=f'spec_trl "{engine}"')
    # transformers hands all rows over at its end, and keeps the finished ones in the batch until then.
    right.axvline(measurements["transformers"].seconds[0], color="grey", linestyle="--", label="transformers returns")
    right.set(title="Completion curve", xlabel="seconds", ylabel=f"finished of {PROMPTS} requests")
    right.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # the demo has its own
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers renames options that TRL still sets
    OUTPUT.mkdir(exist_ok=True)
    started = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    # float32, because small updates are lost in bfloat16.
    policy = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    with tqdm(total=STEPS + len(ENGINES) * (REPEATS + 1), desc="GRPO") as bar:
        history = train(policy, tokenizer, bar)
        measurements = compare(policy, tokenizer, bar)
        bar.set_description("done")
    rows = summarize(measurements)
    table = format_table(rows)
    first, last = (sum(e["reward"] for e in part) / len(part) for part in (history[:WINDOW], history[-WINDOW:]))
    reward = f"reward: {first:.2f} in the first {WINDOW} steps, {last:.2f} in the last {WINDOW}"
    (OUTPUT / "table.txt").write_text(f"{table}\n{reward}\n")
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
        "threads": torch.get_num_threads(),
    }
    result = {"machine": machine, "seconds": time.perf_counter() - started, "comparison": rows, "history": history}
    (OUTPUT / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(history, measurements, OUTPUT / "demo.png")
    print(f"\n{table}\n{reward}\n{OUTPUT}/: table.txt, result.json, demo.png ({result['seconds']:.0f} s)")


if __name__ == "__main__":
    main()
