"""The demo's task: sums with written-out working.

The prompt is a sum of labelled digits, ``a3+b8+c5+d9=``. A completion adds the terms up from left to right and writes
every step, ``a3+b8=11;11+c5=16;16+d9=25``, or guesses at once, ``=25``. Most sums are short and a few are long, and
so are the rollouts: the long tail that speculative decoding is for. The labels let a very small model find the next
term.
"""

import random
from typing import Any

from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


LABELS = "abcdefghijklmnopqrstuvwxyz"
MIN_TERMS, MAX_TERMS = 2, len(LABELS)
MEAN_EXTRA_TERMS = 3.0  # mean of the exponential distribution of what comes on top of MIN_TERMS; it makes the tail
MAX_COMPLETION_LENGTH = 256  # tokens, with EOS

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
CHARACTERS = "0123456789" + LABELS + "+=;"


def draw_terms(rng: random.Random, mean_extra_terms: float = MEAN_EXTRA_TERMS) -> list[int]:
    """Draws the terms of one sum: 2 to 26 numbers of 1 to 9, few terms far more often than many."""
    extra = int(rng.expovariate(1 / mean_extra_terms))
    return [rng.randint(1, 9) for _ in range(min(MIN_TERMS + extra, MAX_TERMS))]


def write_prompt(terms: list[int]) -> str:
    """The question, ``"a3+b8+c5+d9="``."""
    return "+".join(f"{label}{term}" for label, term in zip(LABELS, terms, strict=False)) + "="


def write_working(
    terms: list[int],
    rng: random.Random,
    guess: float = 0.0,
    slip: float = 0.0,
    bold: float = 0.0,
    bold_slip: float = 0.0,
) -> str:
    """Writes one solution, ``"a3+b8=11;11+c5=16;16+d9=25"``, or a guess without working, ``"=25"``.

    Args:
        terms: the numbers to add.
        rng: source of the choices below.
        guess: probability of a guess, which is up to 9 off.
        slip: probability that the sum of a step is wrong.
        bold: probability that a step adds two terms at once.
        bold_slip: probability that the sum of such a step is wrong.
    """
    if rng.random() < guess:
        return f"={max(1, sum(terms) + rng.randint(-9, 9))}"
    labelled = [f"{label}{term}" for label, term in zip(LABELS, terms, strict=False)]
    total, shown, done = terms[0], labelled[0], 1
    steps = []
    while done < len(terms):
        taken = 2 if len(terms) - done > 1 and rng.random() < bold else 1
        total += sum(terms[done : done + taken])
        if rng.random() < (bold_slip if taken == 2 else slip):
            total = max(1, total + rng.choice([-10, -2, -1, 1, 2, 10]))
        steps.append("+".join([shown, *labelled[done : done + taken]]) + f"={total}")
        shown, done = str(total), done + taken
    return ";".join(steps)


def build_dataset(size: int, seed: int) -> Dataset:
    """Builds `size` questions with columns "prompt" and "answer" (both str); the same seed gives the same rows."""
    rng = random.Random(seed)
    questions = [draw_terms(rng) for _ in range(size)]
    return Dataset.from_dict(
        {"prompt": [write_prompt(q) for q in questions], "answer": [str(sum(q)) for q in questions]}
    )


def exact_match(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Reward for TRL: 1.0 where what follows the last "=" is the answer to the letter, else 0.0."""
    return [float(text.rsplit("=", 1)[-1] == a) for text, a in zip(completions, answer, strict=True)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the character tokenizer: BOS put in front, padding on the left."""
    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
