"""A training script as many recipes have it, after the one that open-r1 made known: parsed dataclasses, a model that
TRL loads without `use_cache` under gradient checkpointing, resuming, saving, evaluating."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, set_seed
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, ModelConfig, ScriptArguments, TrlParser, get_peft_config

from spec_trl import SpecGRPOConfig
from tests.trainers.harness import PROMPTS


def count_digits(completions: list[Any], **_: Any) -> list[float]:
    return [float(sum(letter.isdigit() for letter in message["content"])) for (message,) in completions]


REWARDS = {"digits": count_digits}


@dataclass
class RewardArguments(ScriptArguments):
    reward_funcs: list[str] = field(default_factory=lambda: ["digits"])


@dataclass
class StockConfig(GRPOConfig):
    benchmarks: list[str] = field(default_factory=list)
    system_prompt: str | None = field(default=None)


@dataclass
class OurConfig(SpecGRPOConfig):
    benchmarks: list[str] = field(default_factory=list)
    system_prompt: str | None = field(default=None)


def main(trainer_class: Any, config_class: Any, argv: list[str]) -> Any:
    """Returns the trainer, after training, saving and evaluating."""
    parser = TrlParser((RewardArguments, config_class, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config(argv)
    set_seed(training_args.seed)
    training_args.get_process_log_level()
    last = get_last_checkpoint(training_args.output_dir) if Path(training_args.output_dir).is_dir() else None
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    training_args.model_init_kwargs = dict(
        revision=model_args.model_revision,
        attn_implementation=model_args.attn_implementation,
        dtype=model_args.dtype,
        use_cache=not training_args.gradient_checkpointing,
    )
    system = [{"role": "system", "content": training_args.system_prompt}] if training_args.system_prompt else []
    dataset = Dataset.from_list([{"problem": prompt} for prompt in PROMPTS]).map(
        lambda example: {"prompt": [*system, {"role": "user", "content": example["problem"]}]}
    )
    trainer = trainer_class(
        model=model_args.model_name_or_path,
        reward_funcs=[REWARDS[name] for name in script_args.reward_funcs],
        args=training_args,
        train_dataset=dataset,
        eval_dataset=dataset.select(range(1)) if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
        processing_class=tokenizer,
    )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint or last)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    trainer.model.generation_config.eos_token_id = tokenizer.eos_token_id
    trainer.save_model(training_args.output_dir)
    trainer.create_model_card(dataset_name=script_args.dataset_name, tags=["a-recipe"])
    trainer.model.config.use_cache = True  # for those who load it to generate
    trainer.model.config.save_pretrained(training_args.output_dir)
    if training_args.do_eval:
        trainer.save_metrics("eval", trainer.evaluate())
    return trainer
