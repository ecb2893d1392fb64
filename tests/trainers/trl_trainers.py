"""Trainers of TRL, and a loop of one's own, that know nothing of spec_trl, under `speculate`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import GenerationConfig, LlamaForCausalLM
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.a2po import A2POConfig, A2POTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

import spec_trl
from examples.demo.task import build_tokenizer
from spec_trl.trainers.run_log import RolloutRecord, read_run
from tests.trainers.harness import PROMPTS, tiny_dataset, tiny_policy


GROUPS = dict(num_generations=4, per_device_train_batch_size=4)
MESSAGES = Dataset.from_list(
    [{"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": "11"}]} for p in PROMPTS]
)
TOLD = Dataset.from_list([{"prompt": prompt, "privileged_context": "a1"} for prompt in PROMPTS])


def count_digits(completions: list[Any], **_: Any) -> list[float]:
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [sum(letter.isdigit() for letter in text) / (1 + len(text)) for text in texts]


def some_digits(completions: list[Any], **_: Any) -> list[float]:
    return [float("1" in text) for text in completions]


def rewarded(kind: Any, reward: Callable[..., list[float]] = count_digits) -> Callable[..., Any]:
    return lambda **given: kind(reward_funcs=reward, **given)


def taught(kind: Any) -> Callable[..., Any]:
    return lambda **given: kind(teacher_model=stored(tiny_policy(1), Path(given["args"].output_dir) / "of"), **given)


def stored(model: LlamaForCausalLM, folder: Path) -> LlamaForCausalLM:
    """Some trainers load a model, or its tokenizer, again."""
    build_tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)  # of several ranks, the first one does
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    model.config._name_or_path = model.name_or_path = str(folder)
    return model


TRAINERS: dict[str, tuple[Callable[..., Any], Any, Dataset, dict[str, Any]]] = {
    "rloo": (rewarded(RLOOTrainer), RLOOConfig, tiny_dataset(8), GROUPS),
    "grpo": (rewarded(GRPOTrainer), GRPOConfig, tiny_dataset(8), GROUPS),
    "gmpo": (rewarded(GMPOTrainer), GMPOConfig, tiny_dataset(8), GROUPS),
    "online_dpo": (rewarded(OnlineDPOTrainer), OnlineDPOConfig, tiny_dataset(8), dict(max_new_tokens=16)),
    "distillation": (taught(DistillationTrainer), DistillationConfig, tiny_dataset(8), {}),
    "gkd": (taught(GKDTrainer), GKDConfig, MESSAGES, dict(max_new_tokens=16, lmbda=1.0)),
    "gold": (taught(GOLDTrainer), GOLDConfig, MESSAGES, dict(lmbda=1.0, use_extended_uld=False)),
    "iw_opd": (taught(IWOPDTrainer), IWOPDConfig, MESSAGES, dict(lmbda=1.0)),
    "sdft": (SDFTTrainer, SDFTConfig, TOLD, GROUPS | dict(distillation_topk=8)),
    "sdpo": (rewarded(SDPOTrainer), SDPOConfig, tiny_dataset(8), GROUPS | dict(success_reward_threshold=0.1)),
    "a2po": (rewarded(A2POTrainer, some_digits), A2POConfig, tiny_dataset(8), dict(filter_all_incorrect=False)),
}


def make_trainer(
    name: str, folder: Path, trainer: dict[str, Any] | None = None, is_fresh: bool = False,
    policy: LlamaForCausalLM | None = None, **options: Any,
) -> Any:  # fmt: skip
    """`is_fresh`: rollouts find nothing of earlier ones; `policy`: instead of one that is made for it."""
    kind, config, dataset, needed = TRAINERS[name]
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    settings = dict(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=4, learning_rate=3e-3, logging_steps=1,
        report_to="none", save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False, seed=3,
        disable_tqdm=True,
    )  # fmt: skip
    length = {} if {"max_new_tokens"} & needed.keys() else {"max_completion_length": 16}
    policy, args = policy or stored(tiny_policy(), folder / "policy"), config(**(settings | length | needed | options))
    made = kind(model=policy, args=args, train_dataset=dataset, processing_class=tokenizer, **(trainer or {}))
    made.generate_calls = watch(spec_trl.generation.engine.requirements.policy_in(made.model), is_fresh)
    return made


def watch(policy: LlamaForCausalLM, is_fresh: bool) -> list[list[list[int]]]:
    """What each call of `generate` returned that named no strategy."""
    calls, generate = [], policy.generate

    def watched(*args: Any, **kwargs: Any) -> Any:
        if is_fresh:
            spec_trl.release(policy)
        output = generate(*args, **kwargs)
        if not {"assistant_strategy", "custom_generate"} & kwargs.keys():
            calls.append((output if isinstance(output, torch.Tensor) else output.sequences).tolist())
        return output

    policy.generate = watched  # type: ignore[method-assign]
    return calls


def train(name: str, folder: Path, strategy: str, resume: Path | None = None, **options: Any) -> tuple[Any, Any]:
    """The trainer after training, and what `speculate` returned."""
    trainer = make_trainer(name, folder, **options)
    toggle = "measured" if strategy == "auto" else "always"
    with spec_trl.speculate(trainer, strategy, sd_toggle=toggle, draft_length=3) as speculation:
        trainer.train(None if resume is None else str(resume))
    return trainer, speculation


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_same(one: Any, other: Any) -> None:
    assert one.generate_calls and one.generate_calls == other.generate_calls
    assert losses(one) and losses(one) == losses(other)
    for (name, mine), theirs in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def rollouts(folder: Path) -> list[RolloutRecord]:
    return read_run(folder).rollouts


IDS = torch.tensor([[0, 0, 1, 14, 6, 40], [1, 16, 7, 40, 17, 40]])
PROMPT = {"input_ids": IDS, "attention_mask": (IDS > 0).long()}


def loop(kind: str, folder: Path, strategy: str, is_fresh: bool = False) -> dict[str, Any]:
    """Samples, and raises the likelihood of what it sampled; `is_fresh`: nothing is left of earlier calls."""
    policy, accelerator = tiny_policy().float(), Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, fused=True)
    if kind == "AdamW8bit":
        optimizer = pytest.importorskip("bitsandbytes").optim.AdamW8bit(policy.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(policy, optimizer)
    sampled = []
    torch.manual_seed(5)
    with spec_trl.speculate(model, strategy, output_dir=folder, sd_toggle="always") as speculation:
        for _ in range(6):
            if is_fresh:
                spec_trl.release(policy)
            config = GenerationConfig(do_sample=True, max_new_tokens=24, pad_token_id=0, top_k=0)
            ids = accelerator.unwrap_model(model).generate(**PROMPT, generation_config=config)
            sampled.append(ids.tolist())
            accelerator.backward(model(ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()
    assert speculation.verdict.rollouts == 6
    efficiency = [record.block_efficiency for record in rollouts(folder)]
    return {"sampled": sampled, "efficiency": efficiency, "has_log": speculation.log is not None}
