r"""GRPO on grade-school maths (GSM8K) with speculative rollouts.

    python examples/grpo_gsm8k.py
    accelerate launch examples/grpo_gsm8k.py --assistant_strategy none --report_to wandb

trains Qwen2.5-0.5B-Instruct on the hub's openai/gsm8k. Any causal LM and any .jsonl file with "question" and "answer"
will do, for instance a small model on a CPU:

    python examples/grpo_gsm8k.py --model path/to/model --dataset path/to/train.jsonl --max_steps 3

Every field of SpecGRPOConfig is an option (--help lists them); a YAML file can hold them (--config FILE).
"""

import re
import statistics
import sys
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from trl import TrlParser

from spec_trl import SpecGRPOConfig, SpecGRPOTrainer


INSTRUCTION = "Reason step by step, then give the final answer as a number behind ####."
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
# Where the answer stands, the clearest mark first; without any of them it is the last number.
MARKS = (re.compile(r"####([^\n]*)"), re.compile(r"\\boxed\{([^{}]*)\}"))


@dataclass
class TaskArguments:
    """What is trained on what."""

    model: str = field(
        default="Qwen/Qwen2.5-0.5B-Instruct", metadata={"help": "Causal LM to train: hub id or local folder."}
    )
    dataset: str = field(
        default="openai/gsm8k",
        metadata={"help": "Hub id with a 'main' configuration, or a local .jsonl with 'question' and 'answer'."},
    )


def find_answer(text: str) -> Decimal | None:
    """The number a solution ends in: after ####, in \\boxed{}, or else the last one; None without any number.

    Of several marks of one kind the last counts.
    """
    for mark in MARKS:
        marked = mark.findall(text)
        if marked and (numbers := NUMBER.findall(marked[-1])):
            return Decimal(numbers[0].replace(",", ""))
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def answer_reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1.0 where the completion's number equals the reference solution's, else 0.0."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(find_answer(text) == find_answer(solution)) for text, solution in zip(texts, answer, strict=True)]


def build_dataset(source: str, tokenizer: PreTrainedTokenizerBase, longest_prompt: int) -> Dataset:
    """Questions as prompts, in chat format where the tokenizer has a chat template.

    Args:
        source: hub id or local .jsonl.
        tokenizer: the policy's.
        longest_prompt: in tokens; questions that need more are left out.

    Returns:
        Columns "prompt" and "answer".
    """
    if Path(source).suffix == ".jsonl":
        rows = load_dataset("json", data_files=source, split="train")
    else:
        rows = load_dataset(source, "main", split="train")
    is_chat = tokenizer.chat_template is not None

    def prepare(row: dict[str, str]) -> dict[str, Any]:
        if not is_chat:
            prompt = f"Question: {row['question']}\n{INSTRUCTION}\nAnswer:"
            return {"prompt": prompt, "length": len(tokenizer(prompt, verbose=False).input_ids)}
        messages = [{"role": "user", "content": f"{row['question']}\n\n{INSTRUCTION}"}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return {"prompt": messages, "length": len(ids)}

    fitting = rows.map(prepare).filter(lambda length: length <= longest_prompt, input_columns="length")
    if len(fitting) == 0:
        raise ValueError(
            f"no question of dataset={source!r} fits into {longest_prompt} tokens; lower --max_completion_length."
        )
    return fitting.select_columns(["prompt", "answer"])


def main() -> None:
    parser = TrlParser((TaskArguments, SpecGRPOConfig), description="GRPO on GSM8K with speculative rollouts.")
    parser.set_defaults(
        output_dir="grpo_gsm8k",
        bf16=torch.cuda.is_available(),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,
        num_generations=8,
        max_completion_length=512,
        learning_rate=1e-6,
        max_steps=200,
        logging_steps=1,
        save_steps=50,
        report_to="none",
    )
    task, config = parser.parse_args_and_config()

    tokenizer = AutoTokenizer.from_pretrained(task.model)
    context = AutoConfig.from_pretrained(task.model).get_text_config(decoder=True).max_position_embeddings
    config.max_completion_length = min(config.max_completion_length, context // 2)
    longest_prompt = context - config.max_completion_length
    with config.main_process_first():
        dataset = build_dataset(task.dataset, tokenizer, longest_prompt)
    trainer = SpecGRPOTrainer(
        model=task.model,
        args=config,
        reward_funcs=answer_reward,
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    trainer.accelerator.print(
        f"{len(dataset)} questions of up to {longest_prompt} tokens, "
        f"completions of up to {config.max_completion_length} tokens"
    )
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model()
    if trainer.accelerator.is_main_process:
        print_summary(trainer.state.log_history, config.assistant_strategy)


def print_summary(history: list[dict[str, Any]], strategy: str) -> None:
    """One line: what was learnt, and how fast rollouts were."""
    steps = [entry for entry in history if "rollout/seconds" in entry]
    drafted = [entry for entry in steps if "rollout/block_efficiency" in entry]  # the toggle may have kept it off

    def mean(name: str) -> float:
        return statistics.fmean(entry[name] for entry in steps if name in entry)

    line = (
        f"{len(steps)} logged steps, reward {steps[0]['reward']:.3f} to {steps[-1]['reward']:.3f}; "
        f"rollouts with assistant_strategy={strategy!r}: {sum(entry['rollout/seconds'] for entry in steps):.1f} s, "
        f"{mean('rollout/tokens_per_second'):.0f} tokens/s"
    )
    if drafted:
        line += (
            f", {mean('rollout/sd_on_fraction'):.0%} of the rounds speculative, "
            f"{mean('rollout/block_efficiency'):.2f} tokens per verified block, "
            f"{mean('rollout/acceptance_rate'):.3f} of drafts accepted"
        )
    elif strategy != "none":
        line += "; speculation would not have paid here"
    print(line)


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:  # what was asked for is not there, or does not go together
        sys.exit(f"grpo_gsm8k.py: error: {' '.join(str(error).split())}")
