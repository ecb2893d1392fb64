"""Tries in which families drafts, other rows and threads change no bit, and writes docs/family_bits.md.

A tiny random model of each family that is served, of sizes that fill no register, samples the same rows in every
situation of `spec-trl certify` and in random ones, in three dtypes.

    nice python -m tests.family_bits --jobs 2             # all of them, into docs/family_bits.md
    python -m tests.family_bits --families llama qwen3_5   # some, on the terminal alone
"""

import argparse
import multiprocessing
import random
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import PreTrainedModel

from spec_trl import release
from spec_trl.cli.certify import ROWS, Situation, certify, situations
from spec_trl.generation.engine.requirements import check_model, position_limit
from spec_trl.hardware import hardware_name, instruction_set
from tests.families import families
from tests.tiny_families import ODD_SIZES, SIZES, VOCABULARY, make


DOCUMENT = Path(__file__).parents[1] / "docs" / "family_bits.md"
DTYPES = ("float32", "bfloat16", "float16")
NEW_TOKENS = 8
RANDOM = 2  # situations of a family in a dtype
LENGTHS = (5, 1, 16, 17, 33, 5, 9, 90)  # of prompts: a scan takes 16 or 64 tokens at once


@dataclass
class Bits:
    """What became of a family in a dtype: `exact` as the engine says it, tokens with the bits of the reference, of how
    many, and draft tokens."""

    family: str
    dtype: str
    exact: Any
    equal: int = 0
    tokens: int = 0
    drafted: int = 0
    at_random: int = 0  # calls

    @property
    def is_wrong(self) -> bool:
        """Whether the engine promises bits that differ, or nothing was tried, or it failed."""
        return isinstance(self.exact, str) or self.exact is True and (self.equal < self.tokens or not self.drafted)

    @property
    def verdict(self) -> str:
        if self.exact is True:
            return "exact"
        return self.exact if isinstance(self.exact, str) else "; ".join(self.exact)


def build(family: str) -> PreTrainedModel:
    """With odd sizes, where the family takes them."""
    try:
        model = make(family, sizes=ODD_SIZES)
        model(input_ids=torch.arange(3)[None])
    except Exception:
        model = make(family, sizes=SIZES | {"max_position_embeddings": 256})
    return model


def prompts(longest: int | None) -> list[list[int]]:
    """Of `longest` tokens at most. The first and the sixth are equal."""
    lengths = [min(length, longest or length) for length in LENGTHS]
    rows = [[(7919 * (100 * at + i) + 11) % (VOCABULARY - 4) + 4 for i in range(n)] for at, n in enumerate(lengths)]
    return 2 * [*rows[:5], rows[0], *rows[6:]]


def at_random(seed: str) -> Iterator[Situation]:
    """Random rows in random calls, in any order, with random drafts, rows in flight, rows that leave, and threads."""
    dice = random.Random(seed)
    for _ in range(RANDOM):
        rows, size = dice.sample(range(ROWS), dice.randint(1, ROWS)), dice.choice([1, 2, 3, 5, ROWS])
        strategy = dice.choice(["none", "self", "self", "ngram", "history", "auto"])
        options: dict[str, Any] = {"max_batch_size": dice.choice([None, 1, 2, 3, 6])}
        if strategy not in ("none", "auto"):
            options |= {"draft_length": dice.randint(1, 13), "sd_toggle": "always"}
        calls = [rows[i : i + size] for i in range(0, len(rows), size)]
        # Another number of threads is tried for exactness anew, which takes longest.
        yield Situation(strategy, calls, strategy, options, dice.choice([None, None, 2]), dice.choice([None, 2, 3]))


def examine(family: str, short: bool = False, seed: int = 0) -> list[Bits]:
    """Tries one family, in all situations or the fewest, and in random ones; [] if it is not served."""
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = build(family)
            made.generate(torch.arange(3)[None], max_new_tokens=2, pad_token_id=0)
            check_model(made)
        except Exception:
            return []
        found = []
        for dtype in DTYPES:
            model, dice = made.to(getattr(torch, dtype)), [*at_random(f"{seed} {family} {dtype}")]
            try:
                limit = position_limit(model)
                rows = prompts(None if limit is None else limit - NEW_TOKENS)
                result = certify(model, rows, NEW_TOKENS, [*situations(short), *dice])
            except Exception as error:
                found.append(Bits(family, dtype, f"{type(error).__name__}: {error}"))
                continue
            lines = result["lines"]
            equal, tokens, drafted = (sum(line[name] for line in lines) for name in ("equal", "tokens", "drafted"))
            calls = sum(len(each.calls) for each in dice)
            found.append(Bits(family, dtype, result["exact"], equal, tokens, drafted, calls))
            release(model)
        return found


def document(found: Sequence[Bits], short: bool) -> str:
    """The page."""
    by_family: dict[str, list[Bits]] = {}
    for bits in found:
        by_family.setdefault(bits.family, []).append(bits)
    exact = [name for name, each in by_family.items() if all(bits.exact is True for bits in each)]
    others: dict[tuple[str, ...], list[str]] = {}
    for name, each in by_family.items():
        if name not in exact:
            others.setdefault(tuple(f"{bits.verdict}: {_count(bits)}" for bits in each), []).append(name)
    rows = [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in others.items()]
    sure = [bits for bits in found if bits.exact is True]
    tokens, drafted, calls = (sum(getattr(bits, name) for bits in sure) for name in ("tokens", "drafted", "at_random"))
    names = ", ".join(f"`{name}`" for name in exact)
    names = textwrap.fill(names, 119, break_long_words=False, break_on_hyphens=False)
    where = "all situations" if not short else "two situations (rows alone, and drafts of four tokens)"
    return f"""# Families whose bits drafts do not change

```
python -m tests.family_bits --families llama qwen3_5     # tries some; without names all, and writes this page
```

Made with transformers {transformers.__version__} on {hardware_name(torch.device("cpu"))}, {instruction_set()}. A tiny
random model of each family that is [served](families.md), of sizes that fill no register, samples {ROWS} rows of
{NEW_TOKENS} tokens after prompts of 1 to 90 tokens, some equal, in {where} of
[`spec-trl certify`](cli.md#what-changes-a-bit), and in {RANDOM} random ones: which rows, their order, calls, drafts,
rows in flight, rows that leave, threads.

* Where `statistics.exact` was True, all of {tokens:,} tokens had the bits of the reference, {drafted:,} draft tokens
  tried. {calls:,} of the calls were random.
* Of the others the table says what the engine names, and how many tokens had equal bits all the same.

## Exact in float32, bfloat16 and float16: {len(exact)} of {len(by_family)}

{names}

## Not exact in some dtype

| families | {" | ".join(DTYPES)} |
|---|---|---|---|
""" + "\n".join(rows) + "\n"


def _count(bits: Bits) -> str:
    return f"{bits.equal:,} of {bits.tokens:,}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script; fails where the engine promises what does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_const", const=["llama"], dest="families", help="llama alone")
    parser.add_argument("--short", action="store_true", help="two situations: rows alone, and drafts of four tokens")
    parser.add_argument("--jobs", type=int, default=1, help="families at once (%(default)s)")
    parser.add_argument("--families", nargs="+", choices=families(), metavar="NAME", help="only these; writes nothing")
    parser.add_argument("--seed", type=int, default=0, help="of the random situations (%(default)s)")
    options = parser.parse_args(arguments)
    chosen, found = options.families, list[Bits]()
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        each = pool.imap(partial(examine, short=options.short, seed=options.seed), chosen or families())
        for bits in (bits for bits_of_family in tqdm(each, unit="family") for bits in bits_of_family):
            found.append(bits)
            if chosen or bits.is_wrong:
                said = f"{bits.family} {bits.dtype}: {bits.verdict}, {_count(bits)} equal, {bits.drafted} drafted"
                tqdm.write(said)
    if chosen is None:
        DOCUMENT.write_text(document(found, options.short), encoding="utf-8")
    if any(bits.is_wrong for bits in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
