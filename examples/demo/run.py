"""The demo: GRPO with speculative rollouts on a small policy, then a comparison of rollout engines.

``python -m examples.demo.run`` trains the shipped policy with `SpecGRPOTrainer` and the quantized self-drafter, draft
length adaptive. It speculates wherever its kernels can, so that there is something to see; on a model this small
drafting costs more than it saves. The toggle finds that out: the demo calibrates this machine and samples the same
prompts with transformers, with spec_trl's "none", with "self" always on, and with "self" under the toggle. Table, JSON
file, plot and the figures of ``spec-trl report`` go to ``demo_output/``.
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
from spec_trl import SpecGRPOConfig, SpecGRPOTrainer, SpeculativeConfig
from spec_trl.cli import figures
from spec_trl.cli.main import main as spec_trl_command
from spec_trl.generation.calibrating import calibrate
from spec_trl.generation.statistics import SpeculationStatistics
from spec_trl.scheduling.profile import Profile
from spec_trl.trainers.run_log import LOG_FILE


OUTPUT = Path("demo_output")
PROFILE = "roofline_profile.json"
CALIBRATION_SECONDS = 4.0  # of the sweep; minutes for a model of any size
STEPS = 40
WINDOW = 10  # steps a reported reward is averaged over; one step is 8 questions, too few
ROLLOUT_BATCH = 16  # rows in flight: as many as the CPU's 4-bit kernels serve, so that every round has drafts
DRAFT_LENGTH = 5  # of the comparison
PROMPTS = 64  # of the comparison
REPEATS = 3  # of each engine, in alternation
ENGINES = ("transformers", "none", "self", "toggle")
NAMES = {
    "transformers": "transformers generate",
    "none": 'spec_trl "none"',
    "self": 'spec_trl "self"',
    "toggle": 'spec_trl "self", toggle',
}


@dataclass
class Measurement:
    """One engine's samples of the comparison prompts, over the repeats.

    `sequences` are `[PROMPTS, prompt + new]` int64 of each repeat; `rates` are tokens/s; the rest, which only
    spec_trl reports, is of each repeat too.
    """

    sequences: list[Tensor] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    statistics: list[SpeculationStatistics] = field(default_factory=list)


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
        sd_toggle="always",
        rollout_batch_size=ROLLOUT_BATCH,
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
            assistant_strategy="self" if engine == "toggle" else engine,
            speculative_config=speculative_config(engine, seed),
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


def speculative_config(engine: str, seed: int) -> SpeculativeConfig:
    """Options of one engine; the profile is that of :func:`calibrate_machine`."""
    if engine != "toggle":
        return SpeculativeConfig(draft_length=DRAFT_LENGTH, seed=seed)
    profile = str(OUTPUT / PROFILE)
    return SpeculativeConfig(draft_length=DRAFT_LENGTH, seed=seed, sd_toggle="roofline", roofline_profile=profile)


def calibrate_machine(policy: PreTrainedModel, longest: int) -> Profile:
    """Measures this machine with the policy and saves the profile; `longest` is the longest text in tokens."""
    config = SpeculativeConfig(draft_length=DRAFT_LENGTH)
    profile = calibrate(policy, config, PROMPTS, longest, CALIBRATION_SECONDS, progress=False)
    profile.save(OUTPUT / PROFILE)
    return profile


def comparison_prompts(tokenizer: PreTrainedTokenizerFast) -> dict[str, Tensor]:
    """Left-padded `input_ids` and `attention_mask`, each `[PROMPTS, width]` int64."""
    return dict(tokenizer(build_dataset(PROMPTS, seed=1)["prompt"][:], padding=True, return_tensors="pt"))


def compare(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, bar: tqdm) -> dict[str, Measurement]:
    """Samples the same prompts with every engine in alternation, after one warm-up that is thrown away."""
    inputs = comparison_prompts(tokenizer)
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
        if engine in ("self", "toggle"):
            row["speculative_rounds"] = median(map(speculative_share, measured.statistics))
            row["identical_rows"] = count_identical(measured.sequences, measurements["none"].sequences)
            if row["speculative_rounds"]:
                row["block_efficiency"] = median(s.block_efficiency for s in measured.statistics)
                row["acceptance_rate"] = median(s.acceptance_rate for s in measured.statistics)
        rows.append(row)
    return rows


def speculative_share(statistics: SpeculationStatistics) -> float:
    """Of the decoding rounds, those with a draft."""
    ends = [start for start, _ in statistics.speculating[1:]] + [statistics.rounds]
    drafted = sum(e - start for (start, length), e in zip(statistics.speculating, ends, strict=True) if length)
    return drafted / statistics.rounds


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
    lines = [f"{'':25}{'tokens/s':>9}{'seconds':>9}{'drafting':>10}{'tau':>6}{'accepted':>10}  phases in seconds"]
    for row in rows:
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row.get("phase_seconds", {}).items())
        drafting = f"{row['speculative_rounds']:.0%}" if "speculative_rounds" in row else "-"
        tau = f"{row['block_efficiency']:.2f}" if "block_efficiency" in row else "-"
        accepted = f"{row['acceptance_rate']:.3f}" if "acceptance_rate" in row else "-"
        lines.append(
            f"{NAMES[row['engine']]:25}{row['tokens_per_second']:9.0f}{row['seconds']:9.2f}{drafting:>10}{tau:>6}"
            f"{accepted:>10}  {phases or '-'}"
        )
    same = ", ".join(f"{NAMES[row['engine']]}: {row['identical_rows']}" for row in rows if "identical_rows" in row)
    lines.append(f'drafting: share of decoding rounds. Rows identical to "none" with the same seed: {same}')
    return "\n".join(lines)


def describe_training(history: list[dict[str, float]], correlation: float | None) -> list[str]:
    """What training did, in sentences."""
    first, last = (sum(e["reward"] for e in part) / len(part) for part in (history[:WINDOW], history[-WINDOW:]))
    r = "none" if correlation is None else f"{correlation:.2f}"
    return [
        f"reward: {first:.2f} in the first {WINDOW} steps, {last:.2f} in the last {WINDOW}",
        f"policy entropy against first-token acceptance over {len(history)} steps: Pearson r = {r}",
    ]


def describe_toggle(profile: Profile, measured: Measurement, tau: float, seconds: float) -> str:
    """What the toggle expects of speculation with a block efficiency `tau`, and what it did."""
    most = min(PROMPTS, profile.draft_max_rows or PROMPTS)
    length = MAX_COMPLETION_LENGTH / 2
    one, many = (profile.roofline.speedup(batch, length, tau, DRAFT_LENGTH) for batch in (1, most))
    share = median(map(speculative_share, measured.statistics))
    return (
        f"toggle: calibrated in {seconds:.1f} s; at tau {tau:.2f} it predicts {one:.2f}x by speculation for one row, "
        f"{many:.2f}x for {most} rows, and speculated in {share:.0%} of the rounds"
    )


def plot(
    history: list[dict[str, float]],
    correlation: float | None,
    measurements: dict[str, Measurement],
    path: Path,
) -> None:
    """Draws reward, draft length with τ, entropy with first-token acceptance, and the completion curve."""
    figure, ((left, middle), (scatter, right)) = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    steps = range(1, len(history) + 1)
    rewards = [entry["reward"] for entry in history]
    left.plot(steps, rewards, color="tab:blue", alpha=0.35, label="step")
    smoothed = [sum(rewards[max(0, i - WINDOW) : i]) / min(i, WINDOW) for i in steps]
    left.plot(steps, smoothed, color="tab:blue", label=f"mean of {WINDOW} steps")
    left.set(title="Reward (exact match)", xlabel="GRPO step", ylim=(0, 1))
    left.legend(loc="lower right")
    middle.plot(steps, [entry["rollout/block_efficiency"] for entry in history], label="τ, tokens per verified block")
    # The mean over rounds: the last rounds of a rollout have no room for a whole draft.
    lengths = [entry["rollout/draft_length"] for entry in history]
    middle.step(steps, lengths, where="mid", linestyle="--", label="γ, draft tokens per block")
    middle.set(title="Draft length and block efficiency", xlabel="GRPO step", ylim=(1, max(lengths) + 1.2))
    middle.legend(loc="lower right")
    entropies = [entry["rollout/target_entropy"] for entry in history]
    accepted = [entry["rollout/first_token_acceptance"] for entry in history]
    points = scatter.scatter(entropies, accepted, c=list(steps), cmap="cividis")
    figure.colorbar(points, ax=scatter, label="GRPO step")
    r = "" if correlation is None else f", Pearson r = {correlation:.2f}"
    scatter.set(title=f"Policy entropy and drafts{r}", xlabel="entropy (nats)", ylabel="first-token acceptance")
    for engine in ENGINES[1:]:
        seconds, finished = zip(*measurements[engine].statistics[0].completion_curve, strict=True)
        right.step([0, *seconds], [0, *finished], where="post", label=NAMES[engine])
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
    (OUTPUT / LOG_FILE).unlink(missing_ok=True)  # of an earlier demo; a trainer would take itself for resumed
    started = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    # float32, because small updates are lost in bfloat16.
    policy = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    with tqdm(total=STEPS + len(ENGINES) * (REPEATS + 1), desc="GRPO") as bar:
        history = train(policy, tokenizer, bar)
        policy.eval()
        bar.set_description("calibrating")
        before = time.perf_counter()
        width = comparison_prompts(tokenizer)["input_ids"].shape[1]
        profile = calibrate_machine(policy, width + MAX_COMPLETION_LENGTH)
        calibration_seconds = time.perf_counter() - before
        measurements = compare(policy, tokenizer, bar)
        bar.set_description("done")
    correlation = figures.pearson(
        [entry["rollout/target_entropy"] for entry in history],
        [entry["rollout/first_token_acceptance"] for entry in history],
    )
    rows = summarize(measurements)
    tau = median(s.block_efficiency for s in measurements["self"].statistics)
    lines = [
        format_table(rows),
        describe_toggle(profile, measurements["toggle"], tau, calibration_seconds),
        *describe_training(history, correlation),
    ]
    (OUTPUT / "table.txt").write_text("\n".join(lines) + "\n")
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
        "threads": torch.get_num_threads(),
    }
    result = {
        "machine": machine,
        "calibration_seconds": calibration_seconds,
        "comparison": rows,
        "entropy_acceptance_correlation": correlation,
        "history": history,
    }
    plot(history, correlation, measurements, OUTPUT / "demo.png")
    print("\n" + "\n".join(lines))
    print(f"\nspec-trl report {OUTPUT} --profile {OUTPUT / PROFILE}")
    spec_trl_command(["report", str(OUTPUT), "--profile", str(OUTPUT / PROFILE)])
    result["seconds"] = time.perf_counter() - started
    (OUTPUT / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{OUTPUT}/: table.txt, result.json, demo.png, report/report.html ({result['seconds']:.0f} s)")


if __name__ == "__main__":
    main()
