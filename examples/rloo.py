"""TRL's RLOOTrainer whose rollouts draft: towards short sentences.

    python examples/rloo.py --model PATH_OR_HUB_ID

The default is the model of this clone, which is too small to gain from drafts.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import RLOOConfig, RLOOTrainer

import spec_trl


DATA = Path(__file__).parent / "data"


def short_sentences(completions: list[str], **_: Any) -> list[float]:
    """Full stops per word."""
    return [text.count(".") / (1 + len(text.split())) for text in completions]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DATA / "stories260K"))
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args(given)
    stories, gpu = json.loads((DATA / "stories.json").read_text()), torch.cuda.is_available()
    trainer = RLOOTrainer(
        model=options.model,
        reward_funcs=short_sentences,
        train_dataset=Dataset.from_dict({"prompt": [story.partition(".")[0] + "." for story in stories]}),
        args=RLOOConfig(
            output_dir="rloo", max_steps=options.steps, max_completion_length=64, per_device_train_batch_size=8,
            num_generations=8, logging_steps=1, save_strategy="no", report_to="none", bf16=gpu, use_cpu=not gpu,
        ),
    )  # fmt: skip
    speculation = spec_trl.speculate(trainer)  # the only line that TRL does not need
    trainer.train()
    print(speculation.verdict)


if __name__ == "__main__":
    main()
