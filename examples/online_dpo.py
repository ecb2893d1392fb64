"""TRL's OnlineDPOTrainer whose rollouts draft: towards short sentences.

    python examples/online_dpo.py --model PATH_OR_HUB_ID

The default is the model of this clone, which is too small to gain from drafts.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

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
    trainer = OnlineDPOTrainer(
        model=options.model,
        processing_class=AutoTokenizer.from_pretrained(options.model),
        reward_funcs=short_sentences,
        train_dataset=Dataset.from_dict({"prompt": [story.partition(".")[0] + "." for story in stories]}),
        args=OnlineDPOConfig(
            output_dir="online_dpo", max_steps=options.steps, max_new_tokens=64, per_device_train_batch_size=8,
            logging_steps=1, save_strategy="no", report_to="none", bf16=gpu, use_cpu=not gpu,
        ),
    )  # fmt: skip
    speculation = spec_trl.speculate(trainer)  # the only line that TRL does not need
    trainer.train()
    print(speculation.verdict)


if __name__ == "__main__":
    main()
