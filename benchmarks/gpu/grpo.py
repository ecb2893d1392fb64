"""GRPO steps with our rollouts and with TRL's, by its default and by continuous batching, on a policy trained here.

The policy starts from random weights and learns, for a stated number of seconds, a language whose next token is drawn
from a few successors of the last: its 4-bit copy then agrees with it as training made it, and τ is what it is. Tokens
may end a text, so completions have a long tail. All ways sample from the same policy for the same prompts; ours alone
share their noise, so tokens per second are given too. The first step is not counted: it compiles and captures.

Ours has the trainer's defaults but for what a way's name says. A script that gives a model's name and bf16=True, as
the README's does, trains float32 weights under bfloat16 autocast; the other ways train bfloat16 weights.
"""

import copy
import gc
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.training import Size, Training, TrainingTask, odd_share, settings_of, train

from .shapes import TINY, config_of, random_model
from .stage import Stage


SHAPE = "qwen2.5-0.5b"
PAD, END, FIRST = 0, 1, 2  # token ids; states of the language follow
STATES, SUCCESSORS = 512, 8
MEAN_LENGTH = 150  # tokens of a text
PROMPT = 64
LESSON_SECONDS = 15.0
LESSON_ROWS, LESSON_LENGTH = 32, 256
LEARNING_RATE = 5e-4
SIZE = Size(steps=3, rows=32, group=8, max_completion_length=384)
SMOKE_SIZE = Size(steps=2, rows=4, group=2, max_completion_length=8)
OURS, TRL, PLAIN = "ours", "TRL", "none"
README = ", float32 under autocast"
RECORDED = ("block_efficiency", "sd_on_fraction", "refresh_seconds")


@dataclass(frozen=True)
class Language:
    """A Markov chain over STATES tokens: s is followed by `successors[s]`, one half, one quarter, ... of the time."""

    successors: Tensor  # [STATES, SUCCESSORS] int64 token ids
    shares: Tensor  # [SUCCESSORS]

    @classmethod
    def draw(cls, seed: int, device: torch.device) -> "Language":
        generator = torch.Generator().manual_seed(seed)
        successors = FIRST + torch.randint(STATES, (STATES, SUCCESSORS), generator=generator)
        shares = 0.5 ** torch.arange(1, SUCCESSORS + 1)
        return cls(successors.to(device), (shares / shares.sum()).to(device))

    def texts(self, rows: int, length: int, ends: bool, generator: torch.Generator) -> Tensor:
        """[rows, length] int64; with `ends`, a text ends after MEAN_LENGTH tokens on average, and padding follows."""
        device = self.successors.device
        token = FIRST + torch.randint(STATES, (rows,), generator=generator, device=device)  # [rows]
        picks = torch.multinomial(self.shares.expand(rows, -1), length, replacement=True, generator=generator)
        stops = torch.rand(rows, length, generator=generator, device=device) < 1 / MEAN_LENGTH  # [rows, length]
        columns = []
        for column in range(length):
            columns.append(token)
            token = self.successors[token - FIRST, picks[:, column]]  # [rows]
        texts = torch.stack(columns, dim=1)  # [rows, length]
        if ends:
            seen = stops.long().cumsum(1)  # [rows, length]: 0 before the end
            texts = texts.masked_fill(seen > 0, PAD).masked_fill((seen == 1) & stops, END)
        return texts


def teach(stage: Stage, policy: PreTrainedModel, language: Language) -> dict[str, Any]:
    """Trains `policy` (float32) in place by next tokens; bfloat16 products, as trainers do it."""
    seconds = 0.3 if stage.is_smoke else LESSON_SECONDS
    rows, length = (8, 32) if stage.is_smoke else (LESSON_ROWS, LESSON_LENGTH)
    generator = torch.Generator(stage.device).manual_seed(stage.seed + 1)
    policy.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    losses: list[float] = []
    started, warm_up = time.perf_counter(), 20
    while (spent := time.perf_counter() - started) < seconds:
        rate = LEARNING_RATE * min(1.0, (len(losses) + 1) / warm_up) * max(0.05, 1 - spent / seconds)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = language.texts(rows, length, True, generator)  # [rows, length]
        with torch.autocast(stage.device.type, torch.bfloat16):
            logits = policy(input_ids=ids[:, :-1]).logits  # [rows, length - 1, V]
        labels = ids[:, 1:].masked_fill(ids[:, 1:] == PAD, -100)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    policy.eval()
    last = losses[-max(1, len(losses) // 10) :]
    return {
        "seconds": time.perf_counter() - started, "steps": len(losses), "first_loss": losses[0],
        "last_loss": sum(last) / len(last),
    }


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Writes token i as "<i>": no word is part of another."""
    words = {f"<{token}>": token for token in range(FIRST + STATES)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=f"<{PAD}>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=f"<{PAD}>", eos_token=f"<{END}>", padding_side="left"
    )


def make_task(stage: Stage, policy: PreTrainedModel, language: Language, size: Size) -> TrainingTask:
    """Prompts of the language; reward: the share of odd tokens. The learning rate leaves bfloat16 weights as they are,
    so that all steps do the same work."""
    generator = torch.Generator(stage.device).manual_seed(stage.seed + 2)
    count = size.steps * size.rows // size.group
    texts = language.texts(count, 8 if stage.is_smoke else PROMPT, False, generator).tolist()
    prompts = [" ".join(f"<{token}>" for token in text) for text in texts]
    dataset, settings = Dataset.from_dict({"prompt": prompts}), dict(learning_rate=1e-6, lr_scheduler_type="constant")
    make_policy = lambda: copy.deepcopy(policy)  # noqa: E731
    return TrainingTask(make_policy, make_tokenizer(), dataset, odd_share, {}, len(texts[0]), settings)


def summarise(run: Training) -> dict[str, Any]:
    """Medians over the steps but the first; rollouts hold making the drafter anew."""
    rollouts = [step.phases["rollout"] for step in run.steps][1:]
    tokens = [sum(map(len, rows)) for rows in run.completions][1:]
    return {
        "rollout_seconds": median(rollouts),
        "step_seconds": median(step.seconds for step in run.steps[1:]),
        "by_step": {"rollout": rollouts, "step": [step.seconds for step in run.steps[1:]], "tokens": tokens},
        "tokens_per_second": median(count / seconds for count, seconds in zip(tokens, rollouts, strict=True)),
        "first_rollout_seconds": run.steps[0].phases["rollout"],
        **{name: [vars(record)[name] for record in run.rollouts] for name in RECORDED},
        "phase_seconds": run.rollouts[-1].phase_seconds if run.rollouts else {},
    }


def grpo(stage: Stage) -> None:
    """All ways, the most telling first."""
    shape, size = (TINY, SMOKE_SIZE) if stage.is_smoke else (SHAPE, SIZE)
    language = Language.draw(stage.seed, stage.device)
    # Dropout-free and with an end: what is learnt is what rollouts sample from.
    config = config_of(shape, **({"vocab_size": FIRST + STATES + 6} if stage.is_smoke else {}))
    config.eos_token_id = END
    wide = random_model(config, stage.device, torch.float32, stage.seed)
    wide.generation_config.eos_token_id, wide.generation_config.pad_token_id = END, PAD
    if stage.measure("lesson", partial(teach, stage, wide, language)) is None:
        return
    narrow = copy.deepcopy(wide).to(torch.bfloat16)
    ways: list[tuple[str, PreTrainedModel, dict[str, Any] | None, dict[str, Any]]] = [
        (OURS, narrow, {}, {}),
        (TRL, narrow, None, {}),
        (PLAIN, narrow, dict(assistant_strategy="none"), {}),
        (f"{OURS}{README}", wide, {}, dict(bf16=True)),
        (f"{TRL}{README}", wide, None, dict(bf16=True)),
    ]
    if stage.device.type == "cuda":
        ways.append((f"{TRL}, continuous batching", narrow, None, dict(use_transformers_continuous_batching=True)))
    with tempfile.TemporaryDirectory() as scratch, tqdm(disable=True) as bar:
        for name, policy, fields, more in ways:

            def work(policy: PreTrainedModel = policy, fields: Any = fields, more: Any = more) -> dict[str, Any]:
                folder = Path(scratch) / str(len(stage.found))
                task = make_task(stage, policy, language, size)
                shared = settings_of(task, size, stage.seed, stage.device.type == "cpu")
                return summarise(train(task, fields, shared | more, folder, bar))

            stage.measure(name, work, needs=0.0 if stage.is_smoke else 15.0)
            ours = stage.found.get(f"{OURS}{README}" if name.endswith(README) else OURS)
            if ours and not name.startswith(OURS) and name in stage.found:
                theirs = stage.found[name]
                stage.record(f"{name}, over ours", {
                    "rollout": theirs["rollout_seconds"] / ours["rollout_seconds"],
                    "step": theirs["step_seconds"] / ours["step_seconds"],
                    "tokens per second": ours["tokens_per_second"] / theirs["tokens_per_second"],
                })  # fmt: skip
            gc.collect()
