"""A tiny policy, a tiny task, and runs on them that keep what was sampled."""

import io
import json
from contextlib import redirect_stdout
from dataclasses import dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
)
from trl import DistillationTrainer

from examples.demo.task import build_tokenizer
from spec_trl import (
    SpecDistillationTrainer,
    SpecGMPOTrainer,
    SpecGRPOConfig,
    SpecGRPOTrainer,
    SpecRLOOTrainer,
    SpeculativeConfig,
)
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.planner.control import Control
from spec_trl.generation.planner.planner import Planner
from spec_trl.generation.registry import CHOOSING
from spec_trl.quantization.awq import ActivationStatistics
from spec_trl.trainers.run_log import LOG_FILE, read_run
from tests.conftest import TRANSFORMERS
from tests.tiny_families import tiny_settings


PROMPTS = ["a3+b8=", "c5+d9+e1=", "f2+g2=", "1+2+3+4=", "k=", "p7+q6+r5=", "z9=", "a1+b1+c1+d1="]


def tiny_policy(seed: int = 0, **config: Any) -> LlamaForCausalLM:
    """A random float64 Llama of 70 k parameters, peaked enough that its 4-bit copy is right often but not always."""
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    sizes = dict(
        vocab_size=48, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(sizes | config))).double()


def hybrid_policy() -> PreTrainedModel:
    """One with layers of a gated delta rule, and one that attends."""
    if TRANSFORMERS < (5, 21):
        pytest.skip("such families are refused")
    settings = tiny_settings(CONFIG_MAPPING["qwen3_5_text"]) | dict(vocab_size=48, eos_token_id=2)
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3_5_text"](**settings), dtype=torch.float64)
    for parameter in policy.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.2)
    return policy


def tiny_dataset(rows: int = 64) -> Dataset:
    """Prompts of different lengths."""
    return Dataset.from_list([{"prompt": PROMPTS[i % len(PROMPTS)]} for i in range(rows)])


@dataclass(frozen=True)
class Call:
    """What the trainer gave to `generate` in one rollout.

    `draft_lengths` are those of the control's candidates then; `known` is its ledger then.
    """

    step: int
    request_ids: list[int]
    drafters: list[Drafter]
    control: Control
    draft_lengths: list[int]
    known: dict[str, Any]


@dataclass
class Run(TrainerCallback):
    """What a trainer left behind.

    `rewarded` holds, per call of the reward function, whether it was in training and the completions' token ids;
    `calls` are those of `generate` by SpecGRPOTrainer; `logs` is what a callback such as W&B's was given; `refreshed`
    are the steps at which copies were requantized. `weights`, the `log` for `spec-trl report` and the `lines` that we
    printed are those after `train`.
    """

    rewarded: list[tuple[str, list[list[int]]]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    refreshed: list[int] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    log: Any = None
    trainer: Any = None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self.logs.append(dict(logs))

    @property
    def completions(self) -> list[list[list[int]]]:
        """Token ids of each training rollout, rows in the order they were generated."""
        return [ids for mode, ids in self.rewarded if mode == "train"]

    @property
    def losses(self) -> list[float]:
        return [entry["loss"] for entry in self.logs if "loss" in entry]

    @property
    def folder(self) -> Path:
        return Path(self.trainer.args.output_dir)

    def metric(self, name: str) -> list[float]:
        """Logged values of `name`, in order."""
        return [entry[name] for entry in self.logs if name in entry]

    def train(self, resume: Path | bool | None = None) -> "Run":
        """Trains, from the checkpoint `resume` on if there is one; True: the newest. What is left can be seen after
        an error too."""
        refresh = SelfDrafter.refresh

        def watched(drafter: SelfDrafter, statistics: ActivationStatistics | None = None) -> None:
            self.refreshed.append(self.trainer.state.global_step)
            refresh(drafter, statistics)

        printed = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
            patch.setattr(SelfDrafter, "refresh", watched)
            try:
                self.trainer.train(resume_from_checkpoint=str(resume) if isinstance(resume, Path) else resume)
            finally:
                self.lines = [line for line in printed.getvalue().splitlines() if line.startswith("spec_trl ")]
                self.weights = {name: p.detach().clone() for name, p in self.trainer.model.named_parameters()}
                self.log = read_run(self.folder) if (self.folder / LOG_FILE).exists() else None
        return self


class Distillation(SpecDistillationTrainer):
    """Hands in what it sampled, as the others do to the reward function."""

    run: Run

    def _generate(self, prompts: list[Any]) -> Any:
        result = super()._generate(prompts)
        self.run.rewarded.append(("train" if self.model.training else "eval", [list(ids) for ids in result[1]]))
        return result


DRAFTING = {each.name for each in fields(SpeculativeConfig)} - {"seed"}
"""Options of a SpeculativeConfig; the seed is the trainer's."""
OTHERS: dict[str, dict[str, Any]] = {
    "rloo": {"kind": SpecRLOOTrainer, "beta": 0.0}, "distillation": {"kind": Distillation},
    "gmpo": {"kind": SpecGMPOTrainer},
}  # fmt: skip
"""Options of :func:`make_run` with which other trainers than SpecGRPOTrainer run; RLOO without a reference policy,
which it would load by its name."""


def make_run(
    output_dir: Path,
    strategy: str = "self",
    policy: PreTrainedModel | None = None,
    tokenizer: Any = None,
    trainer: dict[str, Any] | None = None,
    kind: type[Trainer] = SpecGRPOTrainer,
    **config: Any,
) -> Run:
    """A run, not begun, whose trainer is a `kind` on the tiny task.

    `trainer` has further arguments of the trainer, `config` further fields of its config and of the SpeculativeConfig
    in that. In a distillation no reward
    is asked for, and another tiny policy teaches.
    """
    run = Run()

    def count_digits(completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Digits count one, "+" counts against: any reward will do that differs between completions."""
        mode = "train" if run.trainer.model.training else "eval"
        run.rewarded.append((mode, [list(ids) for ids in completion_ids]))
        return [sum((4 <= i < 14) - 0.5 * (i % 7 == 0) for i in ids) / len(ids) for ids in completion_ids]

    policy = policy if policy is not None else tiny_policy()
    settings = dict(
        output_dir=str(output_dir), assistant_strategy=strategy, max_steps=3, per_device_train_batch_size=8,
        num_generations=4, max_completion_length=16, learning_rate=3e-3, lr_scheduler_type="constant",
        logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False,
        disable_tqdm=True, seed=3,
    )  # fmt: skip
    drafting = {name: config.pop(name) for name in DRAFTING & config.keys()}
    settings["speculative_config"] = {"sd_toggle": "measured" if strategy in CHOOSING else "always"} | drafting
    arguments: dict[str, Any] = dict(reward_funcs=count_digits, train_dataset=tiny_dataset(), callbacks=[run])
    if issubclass(kind, DistillationTrainer):
        del settings["num_generations"], arguments["reward_funcs"]
        arguments["teacher_model"] = tiny_policy(1)
    run.trainer = kind(
        model=policy,
        args=getattr(kind, "config_class", SpecGRPOConfig)(**(settings | config)),
        processing_class=tokenizer or build_tokenizer(),
        **(arguments | (trainer or {})),
    )
    run.trainer.run = run
    run.trainer.remove_callback(PrinterCallback)  # comes with disable_tqdm
    generate = policy.generate

    def watched(*inputs: Any, **given: Any) -> Any:
        if "control" in given:  # not in calls by TRL's own trainer
            control, step = given["control"], run.trainer.state.global_step
            lengths = [candidate.draft_length for candidate in control.candidates]
            known = json.loads(json.dumps(control.state_dict())) if isinstance(control, Planner) else {}
            run.calls.append(Call(step, given["request_ids"], given["drafter"], control, lengths, known))
        return generate(*inputs, **given)

    policy.generate = watched
    return run


def train(output_dir: Path, strategy: str = "self", resume: Path | bool | None = None, **options: Any) -> Run:
    """Trains; takes the options of :func:`make_run`."""
    return make_run(output_dir, strategy, **options).train(resume)


def roll_out(output_dir: Path, strategy: str = "self", dataset: Dataset | None = None, **options: Any) -> Run:
    """One rollout, that of an evaluation of eight rows."""
    run = make_run(output_dir, strategy, per_device_eval_batch_size=8, **options)
    run.trainer.evaluate(dataset or tiny_dataset(2))
    return run


def assert_same_training(one: Run, other: Run) -> None:
    """Every sampled token, every loss and every final weight are equal to the last bit."""
    for step, (ours, theirs) in enumerate(zip(one.rewarded, other.rewarded, strict=True)):
        assert ours == theirs, f"completions differ in rollout {step}"
    assert one.losses == other.losses
    assert one.weights.keys() == other.weights.keys()
    for name, weight in one.weights.items():
        assert torch.equal(weight, other.weights[name]), f"{name} differs"


_plain: dict[str, Run] = {}


def train_plainly(**options: Any) -> Run:
    """`train` without a drafter. Many tests compare with the same run: of equal options, which must show what they are
    where they are printed, it is made once."""
    key = repr(sorted(options.items()))
    if key not in _plain:
        with TemporaryDirectory() as folder:
            _plain[key] = train(Path(folder), "none", **options)
    return _plain[key]
