"""Tries every family that transformers has, and writes into docs/families.md which ones spec_trl serves.

A tiny random model of each decodes three unequal prompts under every strategy, in float64, and is compared with
transformers' own greedy `generate` of each prompt by itself.

    nice python -m tests.families                          # all of them, into docs/families.md
    python -m tests.families --families llama bart qwen2_vl  # some, on the terminal alone
"""

import argparse
import re
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import spec_trl  # noqa: F401
from spec_trl.generation.engine.requirements import check_model
from spec_trl.generation.engine.statistics import SpeculationStatistics
from tests.tiny_families import VISION, make


DOCUMENT = Path(__file__).parents[1] / "docs" / "families.md"
STRATEGIES = ("none", "ngram", "self")
PLAIN = "## Served, with nothing to know"
NEW_TOKENS = 24
PROMPTS = ((9, 41, 23, 8, 17), (33, 5, 60, 12, 51, 28, 37, 14, 22, 45, 3), (7, 19, 4))
# Different tokens in an output that says something, and the weights (std, seed) that are tried until one comes.
VARIED = 8
WEIGHTS = ((0.3, 0), (0.5, 0), (0.2, 0), (0.3, 1), (0.5, 1), (0.2, 1))
SERVED, REFUSED, WRONG, CRASH, UNTRIED = "served", "refused", "wrong tokens", "crash", "not tried"


@dataclass(frozen=True)
class Outcome:
    """What became of a family.

    Attributes:
        family: its name in transformers' mappings.
        verdict: one of the five words above.
        why: the refusal, the error, or what to know of a family that is served.
        drafted, accepted: draft tokens of the calls that were compared with generate's.
    """

    family: str
    verdict: str
    why: str = ""
    drafted: int = 0
    accepted: int = 0

    @property
    def row(self) -> str:
        """A line for the terminal."""
        drafts = f", {self.accepted} of {self.drafted} draft tokens accepted" if self.drafted else ""
        return f"{self.family}: {self.verdict}{drafts}{self.why and f', {self.why}'}"


def left_padded() -> dict[str, Tensor]:
    """The prompts as generate takes them."""
    width = max(map(len, PROMPTS))
    return {
        "input_ids": torch.tensor([(0,) * (width - len(row)) + row for row in PROMPTS]),  # [B, width]
        "attention_mask": torch.tensor([(0,) * (width - len(row)) + (1,) * len(row) for row in PROMPTS]),
    }


def plain(model: PreTrainedModel, inputs: dict[str, Tensor], new_tokens: int) -> list[list[int]]:
    """New tokens of transformers' own greedy generate."""
    return model.generate(**inputs, do_sample=False, max_new_tokens=new_tokens)[:, -new_tokens:].tolist()


def row_by_row(model: PreTrainedModel, new_tokens: int) -> list[list[int]]:
    """The same for each prompt by itself."""
    rows = [torch.tensor([row]) for row in PROMPTS]
    return [plain(model, {"input_ids": row, "attention_mask": torch.ones_like(row)}, new_tokens)[0] for row in rows]


def speculate(model: PreTrainedModel, strategy: str, new_tokens: int) -> tuple[list[list[int]], SpeculationStatistics]:
    """New tokens under a strategy, and what was drafted."""
    result = model.generate(
        **left_padded(), do_sample=False, max_new_tokens=new_tokens, return_dict_in_generate=True,
        assistant_strategy=strategy,
        speculative_config={"draft_length": 4, "draft_kernel": "reference", "sd_toggle": "always", "seed": 0},
    )  # fmt: skip
    return result.sequences[:, -new_tokens:].tolist(), result.statistics


def examine(family: str, new_tokens: int = NEW_TOKENS) -> Outcome:
    """Tries one family."""
    default = torch.get_default_dtype()
    # XGLM makes a tensor of the default dtype out of its own dtype's minimum.
    torch.set_default_dtype(torch.float64 if family == "xglm" else default)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _examine(family, new_tokens)
    finally:
        torch.set_default_dtype(default)


def _examine(family: str, new_tokens: int) -> Outcome:
    reference: list[list[int]] = []
    for std, seed in WEIGHTS:
        try:
            model = make(family, std, seed)
        except Exception as error:
            return Outcome(family, UNTRIED, f"no tiny model of it can be made: {_sentence(error)}")
        try:
            check_model(model)
        except ValueError as error:
            return Outcome(family, REFUSED, _sentence(error))
        try:
            reference = row_by_row(model, new_tokens)
        except Exception as error:
            return Outcome(family, UNTRIED, f"transformers' own generate fails: {_sentence(error)}")
        if len({token for row in reference for token in row}) >= VARIED:
            break
    notes = [] if len({token for row in reference for token in row}) >= VARIED else ["nearly constant output"]
    drafted = accepted = 0
    for strategy in STRATEGIES:
        try:
            found, statistics = speculate(model, strategy, new_tokens)
        except Exception as error:
            return Outcome(family, CRASH, f'"{strategy}": {_sentence(error)}')
        if found != reference:
            return Outcome(family, WRONG, f'"{strategy}"')
        drafted, accepted = drafted + statistics.total.drafted, accepted + statistics.total.accepted
        if statistics.drafter_failure is not None:
            notes.append(f'"{strategy}" does without its drafter: {_sentence(statistics.drafter_failure)}')
        elif strategy == "self" and not statistics.total.drafted:
            notes.append('"self" drafts nothing')
    try:
        if plain(model, left_padded(), new_tokens) != reference:
            notes.append("generate itself gives other tokens for a padded prompt; here padding changes nothing")
    except Exception as error:
        notes.append(f"generate itself fails for a padded prompt: {_sentence(error)}")
    return Outcome(family, SERVED, "; ".join(notes), drafted, accepted)


def _sentence(error: object) -> str:
    """What an error says first, short enough for a table."""
    text = re.sub(r"\s+", " ", str(error)).replace("|", "/")
    text = re.sub(r"^model type '[^']*' (is not served: )?", "", text)
    return text.split(". ")[0].rstrip(".")[:200]


def families() -> list[str]:
    """Every causal language model of transformers, and the vision-language models that are tried."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VISION})


def documented(text: str) -> dict[str, str]:
    """Family → verdict as the document has them."""
    found = dict.fromkeys(re.findall(r"`(\S+)`", text.partition(PLAIN)[2].partition("##")[0]), SERVED)
    rows = re.findall(rf"^\| (.+) \| ({SERVED}|{REFUSED}|{UNTRIED}|{WRONG}|{CRASH}) \|", text, re.MULTILINE)
    return found | {name: verdict for names, verdict in rows for name in names.split(", ")}


def document(outcomes: Sequence[Outcome]) -> str:
    """The page."""
    counts = {verdict: [o for o in outcomes if o.verdict == verdict] for verdict in (SERVED, REFUSED, UNTRIED)}
    constant = sum("nearly constant" in o.why for o in counts[SERVED])
    said = f"{len(counts[SERVED])} served" + (f" ({constant} of them with nearly constant output)" if constant else "")
    plain = ", ".join(f"`{o.family}`" for o in counts[SERVED] if not o.why)
    drafted, accepted = sum(o.drafted for o in outcomes), sum(o.accepted for o in outcomes)
    remarks: dict[tuple[str, str], list[str]] = {}
    for o in outcomes:
        if o.why or o.verdict != SERVED:
            remarks.setdefault((o.verdict, "" if o.verdict == UNTRIED else o.why), []).append(o.family)
    rows = [f"| {', '.join(names)} | {verdict} | {why} |" for (verdict, why), names in remarks.items()]
    return f"""# Model families

```
python -m tests.families --families llama qwen2_vl     # tries some; without names all, and writes this page
```

Made with transformers {transformers.__version__}; a test marked `slow` checks it. Every causal language model of
transformers, and common vision-language models, were tried as a tiny random model with every kind of layer, in
float64, three unequal prompts, {NEW_TOKENS} tokens, greedy, under `"none"`, `"ngram"` and `"self"`.

* **served**: each row's tokens are those of `generate` for the row by itself, of vision-language models for text;
  with images `gemma3`, `idefics3`, `qwen2_vl`, `qwen2_5_vl`, `qwen3_vl`, `qwen3_vl_moe` and `smolvlm`.
  In these checks {accepted:,} of {drafted:,} draft tokens were accepted.
* **refused**: a `ValueError` says why before any work. **not tried**: transformers cannot make or run a tiny one.

{len(outcomes)} families: {said}, {len(counts[REFUSED])} refused, {len(counts[UNTRIED])} not tried.

{PLAIN}

{textwrap.fill(plain, 130, break_long_words=False, break_on_hyphens=False)}

## What else to know

| families | | why, or what to know |
|---|---|---|
""" + "\n".join(rows) + "\n"


def run(names: Iterable[str]) -> list[Outcome]:
    """Tries families one after the other; says those at once that are wrong or crash."""
    outcomes = []
    for name in (bar := tqdm(list(names), unit="family")):
        bar.set_postfix_str(name)
        outcomes.append(examine(name))
        if outcomes[-1].verdict in (WRONG, CRASH):
            tqdm.write(outcomes[-1].row)
    return outcomes


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_const", const=["llama"], dest="families", help="llama alone")
    parser.add_argument("--families", nargs="+", choices=families(), metavar="NAME", help="only these; writes nothing")
    chosen = parser.parse_args(arguments).families
    transformers.logging.set_verbosity_error()
    outcomes = run(chosen or families())
    if chosen is None:
        DOCUMENT.write_text(document(outcomes), encoding="utf-8")
    else:
        print("\n".join(outcome.row for outcome in outcomes))
    if any(outcome.verdict in (WRONG, CRASH) for outcome in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
