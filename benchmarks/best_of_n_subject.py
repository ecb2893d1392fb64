"""A model with drafters and prompts, as the best-of-N benchmarks need it."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import LogitsProcessorList

from spec_trl import SpeculativeConfig
from spec_trl.generation.drafters.history import HistoryDrafter
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.drafters.small_model import SmallModelDrafter, load_assistant
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.scheduling.control import Control

from .calls import Way, way
from .copying import Copying, copy_heavy
from .measure import add_machine_arguments
from .models import DTYPES, LoadedModel, load_model
from .workload import Workload, end_tokens


STORY, COPY = "story", "copy-heavy"
NONE = "none"
PASSAGE = 32  # tokens of a prompt; in copy-heavy ones they come over and over
BEGUN = 4  # tokens of it that such a prompt has begun to repeat


@dataclass(frozen=True)
class Subject:
    """What is measured of one model.

    Args:
        loaded: the target.
        drafters: by method.
        processors: make synthetic weights copy.
    """

    loaded: LoadedModel
    drafters: dict[str, Drafter]
    processors: LogitsProcessorList

    def work(self, prompts: Sequence[list[int]], kinds: Sequence[str], new_tokens: int) -> Workload:
        """Prompts of the `kinds`, without an end of sequence: rows of one length are the same work in every way."""
        chosen = [
            copy_heavy(ids, PASSAGE, BEGUN) if kind == COPY else ids[:PASSAGE]
            for ids, kind in zip(prompts, kinds, strict=True)
        ]
        return Workload(chosen, new_tokens, 1.0, (), self.loaded.model.generation_config.pad_token_id or 0)

    def way(
        self,
        strategy: str,
        names: Sequence[str] = (),
        config: SpeculativeConfig | None = None,
        control: Control | None = None,
    ) -> Way:
        """A way to generate with the drafters called `names`."""
        def drafters() -> list[Drafter]:
            # A history would know the completions that the way before has just made of these prompts.
            return [empty_history() if name == "history" else self.drafters[name] for name in names]

        given = {"logits_processor": self.processors, "control": control}
        return way(self.loaded.model, strategy, config or SpeculativeConfig(), drafters, **given)


def empty_history() -> HistoryDrafter:
    """One that has no texts yet."""
    return HistoryDrafter(SpeculativeConfig.history_max_tokens)


def make_subject(target: str, options: argparse.Namespace) -> Subject:
    """Loads or trains all that one model needs."""
    spec, dtype = target.rsplit(",", 1)
    loaded = load_model(spec, DTYPES[dtype], options.device, options.agreement, options.seed)
    model = loaded.model
    end_tokens(loaded, ignore_eos=True)
    drafters: dict[str, Drafter] = {
        "self": SelfDrafter(model, "rtn-w4-g128"),
        "history": empty_history(),
        "ngram": NgramDrafter(SpeculativeConfig.ngram_size),
    }
    if options.assistant is not None and loaded.tokenizer is not None:
        drafters["model"] = SmallModelDrafter(load_assistant(str(options.assistant), model), model)
    # Ids of a large vocabulary hardly come twice by chance: two of three tokens tell a passage.
    copying = [Copying(3, options.copied)] if loaded.tokenizer is None else []
    return Subject(loaded, drafters, LogitsProcessorList(copying))


def add_arguments(parser: argparse.ArgumentParser, targets: Sequence[str], result: str) -> None:
    """Those of :func:`make_subject`, and those of every benchmark."""
    add = parser.add_argument
    add("--models", nargs="+", default=targets, metavar="MODEL,DTYPE", help="folder, wide:FOLDER*k, shape:NAME; dtype")
    add("--assistant", type=Path, help="folder of a small LM, for models with a tokenizer")
    add("--agreement", type=float, default=0.93, help="shape models: overlap with their 4-bit copy (%(default)s)")
    add("--copied", type=float, default=0.95, help="shape models: probability of a copied token (%(default)s)")
    add_machine_arguments(parser, result)
