"""Declares the options of speculative generation; options of a paper are in its folder."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..papers import load
from ..value_checks import DeclaredOptions, declared_in, document, option, require_choice, require_value
from .planner.acceptance import MAX_DRAFT_LENGTH


if TYPE_CHECKING:
    from ..papers.efficient_rollout.options import EfficientRolloutOptions
    from ..papers.specactor.options import SpecActorOptions
    from ..papers.test_time_speculation.options import TTSOptions


_RENAMED = {"draft_lengths": "draft_length", "rollout_batch_size": "max_batch_size"}


def place_of(name: str) -> str | None:
    """The text that sets an option by its own or its earlier `name`; None: unknown name."""
    name = name.rpartition(".")[2]
    for wanted in (_RENAMED.get(name, name), re.sub("^(tts|best_of_n|sd|roofline|draft)_", "", name)):
        for group, _, inner in (place.rpartition(".") for place in OPTIONS):
            if inner == wanted:
                inside = f'{{"{inner}": ...}}'
                return "speculative_config=" + (f'{{"{group}": {inside}}}' if group else inside)
    return None


@dataclass(frozen=True)
class SpeculativeConfig(DeclaredOptions):
    """How `generate(assistant_strategy=...)` drafts and verifies. A dict of the same keys is accepted everywhere, and
    a dict in it for `tts`, `specactor` and `efficient_rollout`.

    Raises:
        ValueError: an option is unknown, or its value is not allowed; the message names both, and a remedy.
    """

    draft_length: int | Sequence[int] | None = option(
        None,
        "γ, draft tokens per round, or those to choose from, ascending. None: 5; in trainers [5, 7, 9, 11]. "
        '"measured" chooses in each round, also half of the shortest and twice a single one. Otherwise one is fixed, '
        'and among several a trainer with "always" or "roofline" moves (ER §3.3).',
        low=1,
        high=MAX_DRAFT_LENGTH,
    )
    verification: Literal["exact", "rejection"] = option(
        "exact",
        '"exact": the tokens of "none". "rejection": their distribution alone (Leviathan et al. 2023).',
    )
    ngram_size: int = option(3, '"ngram": longest suffix that is looked up, tokens.', low=1, high=64)
    history_max_tokens: int = option(
        16_000_000, '"history": tokens that each device keeps, of four bytes each, in checkpoints too.', low=1
    )
    seed: int | None = option(
        None, "Keys the noise with request and position. None: from torch's generator; in trainers their `seed`."
    )
    sd_toggle: Literal["measured", "roofline", "always", "never"] = option(
        "measured",
        'When to draft. "measured": where rounds so far say that drafts end the rollout sooner. "roofline": where a '
        'calibrated roofline predicts a speedup (ER §3.2). "always": in every round, with one drafter. "never".',
    )
    max_batch_size: int | None = option(
        None, "Number of rows in flight, per device; others wait. None: as many as memory holds.", low=1
    )
    runner: Literal["auto", "eager", "graph", "compiled"] = option(
        "auto",
        'Forwards run "eager", as CUDA "graph"s, or "compiled" (on a CPU: parts in C++). "auto": the fastest.',
    )
    max_graph_memory: float = option(
        4.0,
        "GiB that captured forwards may take, without the K/V cache.",
        positive=True,
        hint=' of GiB, e.g. 4.0, or choose runner="eager"',
    )
    keep_graphs: bool | Literal["auto"] = option(
        "auto",
        'Keep captured forwards and K/V cache from call to call. "auto": in trainers, where memory is free.',
    )
    exact: bool | Literal["auto"] = option(
        "auto",
        "Sum in one order, so that drafts change no bit. True: refuse a model where that fails. "
        '"auto": try it and say so in `statistics.exact`; on CUDA as False.',
    )
    draft_quantization: str = option(
        "auto",
        'Of the policy\'s copy: "rtn-w4-g128", "awq-w4-g128" (or g64, g32), "rtn-w8", "nf4". "auto": "rtn-w8" for '
        'float32 and 16 bits on a CPU with a C++ compiler, else "rtn-w4-g128".',
    )
    draft_kernel: str = option("auto", 'Of the copy\'s layers, by name. "auto": the fastest that serves a layer.')
    efficient_rollout: "EfficientRolloutOptions" = option(
        load("papers.efficient_rollout.options").EfficientRolloutOptions(), "The roofline and the controller of γ."
    )
    tts: "TTSOptions" = option(
        load("papers.test_time_speculation.options").TTSOptions(), 'How the drafter of "tts" learns.'
    )
    specactor: "SpecActorOptions" = option(
        load("papers.specactor.options").SpecActorOptions(), "Drafting ahead, and with several drafters."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # Imported here: they bring torch, and `spec-trl --help` reads the options without it.
        if self.draft_quantization != "auto":
            from ..quantization.rtn import SCHEMES

            require_choice("draft_quantization", self.draft_quantization, ["auto", *(one.name for one in SCHEMES)])
        if self.draft_kernel != "auto":
            from ..quantization.kernels import KERNELS

            require_choice("draft_kernel", self.draft_kernel, ["auto", *dict.fromkeys(one.name for one in KERNELS)])
        if self.efficient_rollout.profile is not None:
            self._check_profile(self.efficient_rollout.profile)
        first = self.efficient_rollout.initial_draft_length
        if isinstance(self.draft_length, Sequence) or (first is not None and self.draft_length is not None):
            self._check_draft_lengths(list(self.draft_lengths), first)

    @classmethod
    def remedy(cls, name: str, known: Iterable[str]) -> str:
        place = place_of(name)
        return f"Give {place}." if place else super().remedy(name, known)

    def _check_profile(self, path: str) -> None:
        given = f"efficient_rollout.profile={path!r}"
        if self.sd_toggle == "measured" and not Path(path).is_file():
            how = 'correct the path, or set sd_toggle="roofline", which calibrates and writes it'
            raise ValueError(f"{given} does not exist; {how}.")
        if not Path(path).parent.is_dir() or Path(path).is_dir():
            raise ValueError(f"{given} must be a file in a folder that exists; correct the path.")

    def _check_draft_lengths(self, lengths: list[int], first: int | None) -> None:
        for length in lengths:
            require_value("draft_length", length, [int], low=1, high=MAX_DRAFT_LENGTH)
        if not lengths or lengths != sorted(set(lengths)):
            raise ValueError(f"draft_length={lengths} is not ascending; use {sorted(set(lengths)) or [5, 7, 9, 11]}.")
        if first is not None and first not in lengths:
            raise ValueError(
                f"efficient_rollout.initial_draft_length={first} is not one of draft_length={lengths}; choose one of "
                f"them, or set draft_length=[{first}] to keep it fixed."
            )

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        lengths = 5 if self.draft_length is None else self.draft_length
        return tuple(lengths) if isinstance(lengths, Sequence) else (lengths,)

    @property
    def first_draft_length(self) -> int:
        first = self.draft_length[0] if isinstance(self.draft_length, Sequence) else self.draft_length
        return self.efficient_rollout.initial_draft_length or first or 5

    def choice_of_draft_lengths(self) -> tuple[int, ...]:
        """Each γ that a planner may choose, ascending: the given ones; for a single number also twice it; and half of
        the shortest, cheap to try. Drafting ahead plans for one γ alone."""
        if self.specactor.decoupled_execution != "never" or self.specactor.draft_ranks:
            return (self.first_draft_length,)
        single = self.first_draft_length
        lengths = self.draft_length
        if not isinstance(lengths, Sequence):
            lengths = (single, min(2 * single, MAX_DRAFT_LENGTH))
        return tuple(sorted({*lengths, max(lengths[0] // 2, 1)} if len(lengths) > 1 else lengths))


document(SpeculativeConfig, SpeculativeConfig)
OPTIONS = dict(declared_in(SpeculativeConfig))
"""The options by place, such as "tts.stride"."""
