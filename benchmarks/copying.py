"""Copy-heavy work: prompts whose completion repeats what stands in them, as those of summaries and edits do.

Neither a story model nor synthetic weights copy by themselves. :func:`train` teaches a small model to: first to repeat
random tokens, from which heads that look for the same context arise, then to repeat passages of stories while it stays
close to what it was on all other text. To synthetic weights :class:`Copying` adds it, as a logits processor.

    python -m benchmarks.copying --model ../shared/models/bit-stories3M --output copier
    python -m benchmarks.copying --model copier --teacher ../shared/models/bit-stories3M --steps 0 1000 --seed 1 \\
        --output copier
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, PreTrainedModel

from .workload import STORIES


SHORTEST, LONGEST = 96, 128  # tokens of a text to learn from, of noise and of passages
HELD_OUT = 100  # stories from the beginning that prompts are taken from
_RATE = 0.03  # of a step, over the standard deviation of a weight: sub-norms make the scale of weights arbitrary
_VECTOR = 0.3  # stands for that deviation where weights are all ones
_DISTANCE = 2.0  # weight of the distance to the teacher next to the copied tokens' loss


class Copying(LogitsProcessor):
    """Where the last `context` tokens stood in the row before, but for one of them, the token that followed them there
    is likely again: a token in another's place does not end the copying, as in an edit.

    Args:
        context: tokens of which all but one must agree, at least 2. Of ordinary text next to none should, so that it
            goes on as it would.
        probability: of the copied token, at temperature 1.
    """

    prefix_only = True

    def __init__(self, context: int, probability: float) -> None:
        self._context = context
        self._odds = math.log(probability / (1 - probability))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[B, V]` of the token after `input_ids` `[B, n]` int64."""
        if input_ids.shape[1] <= self._context:
            return scores
        windows = input_ids.unfold(1, self._context, 1)  # [B, n - context + 1, context]
        agreeing = (windows[:, :-1] == windows[:, -1:]).sum(-1)  # [B, n - context]
        same = agreeing >= self._context - 1  # [B, n - context]
        places = torch.arange(same.shape[1], device=same.device).where(same, -1).amax(1)  # [B], the newest
        followers = input_ids.gather(1, (places.clamp(min=0) + self._context)[:, None])  # [B, 1]
        raised = scores.logsumexp(1, keepdim=True) + self._odds  # [B, 1]
        raised = raised.where(places[:, None] >= 0, scores.gather(1, followers))
        return scores.scatter(1, followers, raised)


def copy_heavy(prompt: Sequence[int], passage: int, begun: int) -> list[int]:
    """A prompt that has its first `passage` tokens twice and begins with them again; its first one, which begins all
    texts, once."""
    first, rest = list(prompt[:1]), list(prompt[1:passage])
    return first + rest + rest + rest[:begun]


Sample = tuple[list[int], int]
"""Tokens, and from which place on they repeat what stood before; their number where none does."""


def train(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    stories: Sequence[list[int]],
    steps: tuple[int, int],
    seed: int = 0,
) -> None:
    """Teaches `model` to copy, in place.

    Args:
        model: on the CPU.
        teacher: what it stays close to on other text.
        stories: token ids, each more than `LONGEST`.
        steps: optimizer steps on random tokens, and on passages.
        seed: of the texts.
    """
    rng = random.Random(seed)
    length, vocabulary = SHORTEST, model.config.vocab_size

    def story() -> Sample:
        text = rng.choice(stories)
        start = rng.choice((0, rng.randrange(len(text) - length)))
        return text[start : start + length], length

    def repeated(passage: list[int]) -> Sample:
        return (stories[0][:1] + passage * length)[:length], 1 + len(passage)

    def passage(low: int, high: int) -> list[int]:
        text, count = rng.choice(stories), rng.randrange(low, high)
        start = rng.randrange(1, len(text) - count)
        return text[start : start + count]

    def noise() -> Sample:
        return repeated([rng.randrange(3, vocabulary) for _ in range(rng.randrange(3, 24))])

    def mixed() -> list[Sample]:
        kinds: list[Callable[[], Sample]] = [story, noise, lambda: repeated(passage(8, 56))]
        return [rng.choices(kinds, (0.15, 0.51, 0.34))[0]() for _ in range(12)]

    _optimise(model, None, mixed, steps[0], "random tokens")
    length = LONGEST
    _optimise(
        model, teacher.eval(), lambda: [story() for _ in range(6)] + [repeated(passage(16, 64)) for _ in range(6)],
        steps[1], "passages",
    )  # fmt: skip


def _optimise(
    model: PreTrainedModel, teacher: PreTrainedModel | None, batch: Callable[[], list[Sample]], steps: int, title: str
) -> None:
    """Adam over the loss of copied tokens, and over the distance to the teacher of all others (without one: over the
    loss of stories)."""
    groups = [
        {"params": [weight], "base": _RATE * (weight.std().item() if weight.dim() > 1 else _VECTOR)}
        for weight in model.parameters()
    ]
    optimiser = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0, betas=(0.9, 0.98))
    with tqdm(range(steps), title) as bar:
        for step in bar:
            # Heads that copy arise suddenly, at a rate that does not fall before; distilling wants one that does.
            fall = 1.0 if teacher is None else 1 - step / steps
            for group in optimiser.param_groups:
                group["lr"] = group["base"] * (min(1.0, (step + 1) / 30) * fall + 0.02)
            texts, begins = zip(*batch(), strict=True)
            tokens, starts = torch.tensor(texts), torch.tensor(begins)  # [B, n], [B]
            width = tokens.shape[1]
            copied = (
                torch.arange(1, width) > starts[:, None]
            )  # [B, n - 1]; the first repeated token is anybody's guess
            scores = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)  # [B, n - 1, V]
            losses = -scores.gather(-1, tokens[:, 1:, None]).squeeze(-1)  # [B, n - 1]
            plain = starts[:, None] >= width  # [B, 1]
            if teacher is None:
                loss = losses[copied | plain].mean()
            else:
                with torch.no_grad():
                    wanted = teacher(input_ids=tokens).logits[:, :-1].log_softmax(-1)  # [B, n - 1, V]
                distance = F.kl_div(scores, wanted, log_target=True, reduction="none").sum(-1)  # [B, n - 1]
                loss = losses[copied].mean() + _DISTANCE * distance[~copied].mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a small story model")
    parser.add_argument("--teacher", help="folder of what it stays close to (default: --model)")
    parser.add_argument("--seed", type=int, default=0, help="of the texts (default: %(default)s)")
    parser.add_argument("--stories", type=Path, default=STORIES, help="JSON list of strings (%(default)s)")
    parser.add_argument("--steps", type=int, nargs=2, default=[1200, 1500], help="on random tokens, on passages")
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint")
    options = parser.parse_args()
    started = time.perf_counter()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    stories = tokenizer(json.loads(options.stories.read_text())[HELD_OUT:])["input_ids"]
    teacher = AutoModelForCausalLM.from_pretrained(options.teacher or options.model, dtype=torch.float32)
    train(model, teacher, [text for text in stories if len(text) > LONGEST], tuple(options.steps), options.seed)
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    print(f"trained in {time.perf_counter() - started:.0f} s: {options.output}")


if __name__ == "__main__":
    main()
