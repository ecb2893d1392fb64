"""The options of speculative generation, each declared once: its default, what it does, what values it may have.

Configs of trainers, the `--help` of commands and the tables in docs/options.md take them from here.
"""

import functools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from ..json_files import jsonable
from ..value_checks import did_you_mean, require_choice, require_folder_or_id, require_value
from .planner.acceptance import MAX_DRAFT_LENGTH
from .registry import CHOOSING, DRAFTERS, drafting_ahead, needing_assistant, strategies, taking_assistant


Verification = Literal["exact", "rejection"]
Toggle = Literal["measured", "roofline", "always", "never"]
Mismatch = Literal["recalibrate", "error"]
Decoupled = Literal["never", "always", "auto"]
Runner = Literal["auto", "eager", "graph", "compiled"]
Head = Literal["auto", "dense", "packed"]
TTSDrafter = Literal["self", "model", "eagle3", "dflash", "mtp"]
TTSScope = Literal["request", "rollout", "run"]
TTSAnchor = Literal["current", "initial"]


def option(default: Any, help: str, **bounds: Any) -> Any:
    """A field of a config with its help. Its annotation says which types or words its value may have; `bounds` are
    arguments of :func:`~.require_value`."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help} | bounds)
    return field(default=default, metadata={"help": help} | bounds)


@functools.cache
def kinds_of(declared: Field[Any]) -> tuple[Any, ...]:
    """Types and words that the option `declared` may have, such as `(int, "adaptive")`."""

    def kinds(annotation: Any) -> list[Any]:
        if get_origin(annotation) in (Literal, Union, UnionType):
            return [kind for part in get_args(annotation) for kind in kinds(part)]
        return [annotation]

    return tuple(kinds(declared.type))


def check_option(declared: Field[Any], value: object, **bounds: Any) -> None:
    """Raises ValueError unless the option `declared` may have `value`."""
    if value is declared.default:  # HfArgumentParser drops None from the field's type
        return
    bounds |= declared.metadata
    del bounds["help"]
    require_value(declared.name, value, kinds_of(declared), **bounds)


def document(config: type, declaring: type) -> None:
    """Appends the options that the class `declaring` declares to the docstring of the class `config`, which has them,
    with their defaults and what they do."""
    config.__doc__ = f"{config.__doc__}\n    Options:"
    for declared in fields(config):
        if declared.name in declaring.__annotations__:
            default = declared.default if declared.default_factory is MISSING else declared.default_factory()
            text = textwrap.indent(textwrap.fill(declared.metadata["help"], 105), " " * 12)
            config.__doc__ += f"\n        {declared.name} (defaults to `{default!r}`):\n{text}"


@dataclass(frozen=True)
class SpeculativeConfig:
    """How `generate(assistant_strategy=...)` drafts and verifies. A dict of the same keys is accepted everywhere.

    Raises:
        ValueError: an option is unknown, or its value is not allowed; the message names both, and a remedy.
    """

    draft_length: int = option(
        5,
        'γ, draft tokens per round. Under sd_toggle="measured" half of it or twice it where that promises more.',
        low=1,
        high=MAX_DRAFT_LENGTH,
    )
    ngram_size: int = option(
        3,
        '"ngram": longest suffix of a row, in tokens, that is looked up in its own prompt and output.',
        low=1,
        high=64,
    )
    history_max_tokens: int = option(
        16_000_000,
        '"history": number of prompt and output tokens that each device keeps for later drafts; the oldest go first. '
        "They take four bytes each, in memory and in a trainer's checkpoints.",
        low=1,
    )
    verification: Verification = option(
        "exact",
        '"exact": outputs are token-identical to those of "none" (a draft token is accepted when it equals what the '
        'target samples with the same noise). "rejection": identical in distribution only (accepted with probability '
        "min(1, p/q), else the residual is resampled; Leviathan et al. 2023, ER §2.1).",
    )
    seed: int | None = option(
        None,
        "Keys the noise together with request, position and token. None: drawn from torch's global generator, so that "
        "torch.manual_seed rules as in plain generate.",
    )

    sd_toggle: Toggle = option(
        "measured",
        'When to speculate. "measured": where the rounds so far say that it ends the rollout sooner; trials are paid '
        'from a budget, and nothing is calibrated. "roofline": where the roofline predicts a '
        "speedup, to the letter of ER §3.2; a machine without a profile is calibrated before the first token "
        '(minutes, once). "auto" and "best_of_n" are then decided as under "measured", from calibrated times. '
        '"always": in every round that the kernels of the one drafter can serve. "never": decode autoregressively.',
    )
    sd_margin: float = option(0.05, "ε, predicted speedup beyond 1 that speculation needs.", low=0)
    roofline_profile: str | None = option(
        None,
        'Path of the roofline profile. A missing file is calibrated and saved there under sd_toggle="roofline", and '
        'refused under "measured". None: the one in the user\'s cache for this hardware, shape, dtype and kernel.',
    )
    roofline_mismatch: Mismatch = option(
        "recalibrate",
        'What to do with a roofline_profile of other hardware, shape, dtype or kernel. "recalibrate": warn and '
        'calibrate into the user\'s cache (under sd_toggle="measured": measure rounds instead). "error": refuse it.',
    )

    decoupled_execution: Decoupled = option(
        "never",
        "Draft the next window while the target verifies the one before (SpecActor §4.1), on a thread that has the "
        'CPU cores that torch leaves. "always": with "self", "model" and "ngram", not on a GPU. "auto": where cores '
        "are left, and a roofline profile and the acceptance of earlier calls predict that it beats drafting and "
        'verifying in turns. A "model" has a K/V cache of its own; "self" has 2 (γ + 1) columns per row.',
    )
    max_batch_size: int | None = option(
        None, "Number of rows in flight; further prompts wait until rows finish. None: as many as memory holds.", low=1
    )
    runner: Runner = option(
        "auto",
        'How forwards run. "eager": as the modules are. "graph": captured as CUDA graphs. "compiled": the same with '
        'compiled decoder layers; on a CPU, parts of layers in C++. "auto": on a CPU "compiled"; on CUDA "graph", '
        "and compiled where a shape replayed often is faster so. What cannot be captured or compiled runs eagerly.",
    )
    max_graph_memory: float = option(
        4.0,
        "GiB that captured forwards may take, without the K/V cache; further shapes run padded to a captured one, or "
        "eagerly.",
        positive=True,
        hint=' of GiB, e.g. 4.0, or choose runner="eager"',
    )
    keep_graphs: bool | Literal["auto"] = option(
        True,
        "Keep captured forwards and their K/V cache from call to call, until the model dies or "
        'spec_trl.release(model). False: free them after each call, and capture again in the next one. "auto": a '
        "trainer keeps them where its steps so far have left the memory free; elsewhere as True.",
    )

    tts_drafter: TTSDrafter = option(
        "self",
        'What learns from the rounds it drafts under "tts" (arXiv 2605.09329): "eagle3", "dflash" or "model", the '
        'checkpoint in assistant_model; "mtp", the policy\'s own head; or "self", low-rank corrections of the '
        "quantized copy.",
    )
    tts_learning_rate: float | None = option(
        None,
        "η of its Adam. None: 3e-4 for low-rank corrections; for weights 3e-4 where the drafter is 256 wide, and less "
        "in proportion where it is wider.",
        positive=True,
    )
    tts_scope: TTSScope = option(
        "request",
        'What a drafter learned is kept for one "request", as in the paper; for one "rollout", a call of generate; or '
        'for the "run", from call to call on the same model and in checkpoints. Under "request" the requests of one '
        "batch learn a low-rank correction each; otherwise all weights learn.",
    )
    tts_steps: int = option(1, "K, optimizer steps per update (TTS §6.5: 1 is best).", low=1)
    tts_stride: int | Literal["adaptive"] = option(
        "adaptive",
        'S: an update every S rounds (TTS App. C.1). "adaptive": where the rounds ahead are expected to save its '
        "seconds. Low-rank corrections, which slow each draft, then do not learn.",
        low=1,
    )
    tts_anchor_weight: float = option(0.0, "λ, weight of the loss term that keeps the drafter near the anchor.", low=0)
    tts_anchor: TTSAnchor = option(
        "current",
        '"current": the drafter before the update, which has an effect for tts_steps > 1 only. "initial": the drafter '
        "as it was loaded.",
    )
    tts_asynchronous: bool = option(False, "Update during the next rounds, S - 1, instead of between two rounds.")
    tts_rank: int = option(8, "Rank of low-rank corrections.", low=1)

    best_of_n_drafters: Sequence[str] = option(
        ("self", "history", "ngram"),
        'Strategies of one drafter that may draft under "best_of_n" (SpecActor §4.2), without repetition.',
    )
    best_of_n_assistants: Mapping[str, Any] | None = option(
        None,
        'Assistants by drafter: a path or hub id, or for "model" a module. A single one may be given as '
        "assistant_model instead.",
    )
    best_of_n_budget: int | None = option(
        None, "Most tokens of one verification of a race, all rows together. None: as many as pay.", low=1
    )
    best_of_n_race: bool = option(True, "Several drafters race for a row if verification has room. False: one drafts.")

    exact: bool | Literal["auto"] = option(
        "auto",
        "Sums each number in one order, whatever else a forward computes: then drafts and other rows change no bit. "
        'True: refuse a model of which that is not so here. "auto": try it once per machine and say so in '
        "`statistics.exact`; on CUDA as False. False: do not try it.",
    )
    draft_quantization: str = option(
        "auto",
        'Quantization of the self-drafter: "rtn-w4-g128" (or g64, g32), "rtn-w8", "nf4" (with bitsandbytes), or '
        '"awq-w4-g128" (or g64, g32), which rounds to nearest until a training step has shown activations. "auto": '
        '"rtn-w8" for a float32 policy on a CPU where a C++ compiler is installed, else "rtn-w4-g128".',
    )
    draft_kernel: str = option(
        "auto",
        'Kernel of the self-drafter\'s quantized layers, by its name in spec_trl.quantization.kernels. "auto": the '
        "fastest one that serves a layer.",
    )
    draft_lm_head: Head = option(
        "auto",
        'Output head of the self-drafter. "dense": the policy\'s own. "packed": a quantized one. "auto": packed where '
        "it is a large share of a draft step.",
    )

    def __new__(cls, *_: Any, **options: Any) -> "SpeculativeConfig":
        known = cls.__dataclass_fields__
        if unknown := sorted(options.keys() - known.keys()):
            hint = did_you_mean(unknown[0], known)
            raise ValueError(f"speculative_config has no field {unknown}; its fields are {list(known)}.{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not OPTIONS[name].default:
                check_option(OPTIONS[name], value)
        # Imported here: they bring torch, and `spec-trl --help` reads the options without it.
        if self.draft_quantization != "auto":
            from ..quantization.rtn import SCHEMES

            require_choice("draft_quantization", self.draft_quantization, ["auto", *(one.name for one in SCHEMES)])
        if self.draft_kernel != "auto":
            from ..quantization.kernels import KERNELS

            require_choice("draft_kernel", self.draft_kernel, ["auto", *dict.fromkeys(one.name for one in KERNELS)])
        if self.roofline_profile is not None:
            self._check_profile(self.roofline_profile)
        if self.best_of_n_drafters != OPTIONS["best_of_n_drafters"].default or self.best_of_n_assistants is not None:
            self._check_best_of_n()

    def _check_profile(self, path: str) -> None:
        if self.sd_toggle in ("always", "never"):
            raise ValueError(
                f"roofline_profile={path!r} is not read under sd_toggle={self.sd_toggle!r}; set "
                'sd_toggle="measured" or "roofline", or drop the profile.'
            )
        if self.sd_toggle == "measured" and not Path(path).is_file():
            raise ValueError(
                f'roofline_profile={path!r} does not exist; correct the path, or set sd_toggle="roofline", '
                "which calibrates and writes it."
            )
        if not Path(path).parent.is_dir() or Path(path).is_dir():
            raise ValueError(f"roofline_profile={path!r} must be a file in a folder that exists; correct the path.")

    def _check_best_of_n(self) -> None:
        names = self.best_of_n_drafters
        known = isinstance(names, list | tuple) and bool(names) and set(names) <= DRAFTERS.keys()
        if not known or len(set(names)) < len(names):
            raise ValueError(f"best_of_n_drafters={names!r} must be one or more different ones of {list(DRAFTERS)}.")
        assistants = self.best_of_n_assistants
        if assistants is None:
            return
        takers = [name for name in names if name in taking_assistant()]
        if not isinstance(assistants, Mapping) or not assistants or set(assistants) - {*takers}:
            raise ValueError(
                f"best_of_n_assistants={assistants!r} must be a dict with some of {takers}, the members of "
                f"best_of_n_drafters={list(names)} that take an assistant."
            )
        for name, assistant in assistants.items():
            require_folder_or_id(f"best_of_n_assistants[{name!r}]", assistant)

    def assistants_of_best_of_n(self, assistant: object) -> dict[str, Any]:
        """The assistant of each member of `best_of_n_drafters` that has one. `assistant`, i.e. `assistant_model`, is
        for the one member that lacks its own.

        Raises:
            ValueError: a member lacks its assistant, or not exactly one lacks the one that is given.
        """
        assistants = dict(self.best_of_n_assistants or {})
        needs = {*needing_assistant()} | ({"tts"} if self.tts_drafter in needing_assistant() else set())
        lacking = [name for name in self.best_of_n_drafters if name in needs and name not in assistants]
        if assistant is not None and len(lacking) == 1:
            assistants[lacking.pop()] = assistant
        elif assistant is not None or lacking:
            shown = type(assistant).__name__ if not isinstance(assistant, str | None) else repr(assistant)
            raise ValueError(
                f"assistant_model={shown} with best_of_n_drafters={list(self.best_of_n_drafters)}, of which {lacking} "
                "lack an assistant: assistant_model serves exactly one of them. Name them in best_of_n_assistants, "
                "e.g. {'eagle3': 'path/or/hub-id'}."
            )
        return assistants

    def choice_of_draft_lengths(self, lengths: Sequence[int] = ()) -> tuple[int, ...]:
        """Each γ that a planner may choose, ascending: `lengths` (default: γ and 2γ), and half of the shortest where
        there are several, which is cheap to try. Decoupled execution plans for γ alone."""
        if self.decoupled_execution != "never":
            return (self.draft_length,)
        lengths = lengths or (self.draft_length, min(2 * self.draft_length, MAX_DRAFT_LENGTH))
        return tuple(sorted({*lengths, max(lengths[0] // 2, 1)} if len(lengths) > 1 else lengths))

    def packing(self) -> tuple[str, str, str]:
        """Scheme, kernel and head of the quantized copy."""
        return self.draft_quantization, self.draft_kernel, self.draft_lm_head

    def distillation(self) -> "Distillation":
        """How a drafter of `"tts"` learns."""
        options = {name: vars(self)[f"tts_{name}"] for name in Distillation.__dataclass_fields__}
        return Distillation(**options | {"stride": None if self.tts_stride == "adaptive" else self.tts_stride})

    def to_dict(self) -> dict[str, Any]:
        """Its options, as a GenerationConfig that carries it saves them."""
        options: dict[str, Any] = jsonable(dict(vars(self)))
        return options

    @classmethod
    def coerce(cls, value: "SpeculativeConfig | Mapping[str, Any] | None") -> "SpeculativeConfig":
        """Accepts a config, a mapping of its fields, or None for the defaults."""
        if not isinstance(value, SpeculativeConfig | Mapping | None):
            kind = type(value).__name__
            raise ValueError(f"speculative_config={value!r} is a {kind}; pass a SpeculativeConfig or a dict.")
        return value if isinstance(value, SpeculativeConfig) else cls(**(value or {}))


document(SpeculativeConfig, SpeculativeConfig)
OPTIONS = {field.name: field for field in fields(SpeculativeConfig)}
"""The options by name."""


@dataclass(frozen=True)
class Distillation:
    """How a drafter learns while it drafts: the options `tts_...` of :class:`SpeculativeConfig`, which raise the same
    ValueErrors; `stride` None is "adaptive"."""

    learning_rate: float | None = SpeculativeConfig.tts_learning_rate
    scope: str = SpeculativeConfig.tts_scope
    steps: int = SpeculativeConfig.tts_steps
    stride: int | None = None
    anchor_weight: float = SpeculativeConfig.tts_anchor_weight
    anchor: str = SpeculativeConfig.tts_anchor
    asynchronous: bool = SpeculativeConfig.tts_asynchronous
    rank: int = SpeculativeConfig.tts_rank

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_option(OPTIONS[f"tts_{name}"], "adaptive" if name == "stride" and value is None else value)


def check_strategy(strategy: str) -> str:
    """Returns `strategy`, or raises ValueError naming the ones that exist."""
    require_choice("assistant_strategy", strategy, strategies())
    return strategy


def check_combination(strategy: str, config: SpeculativeConfig) -> None:
    """Raises ValueError where `strategy` can not be verified, controlled or decoupled as `config` says."""
    if config.sd_toggle == "always" and strategy in CHOOSING:
        raise ValueError(
            f'sd_toggle="always" is for one drafter, and assistant_strategy={strategy!r} has several. Name one of '
            'them, e.g. assistant_strategy="self", or set sd_toggle="measured".'
        )
    rejects, decoupled = config.verification == "rejection", config.decoupled_execution == "always"
    if rejects and strategy == "best_of_n":
        raise ValueError(
            'verification="rejection" does not go with assistant_strategy="best_of_n", which races: taking the '
            'longest of chains accepted by chance favours what is easy to draft. Use verification="exact".'
        )
    if rejects and strategy == "auto":
        raise ValueError(
            'verification="rejection" needs draft probabilities, which the history among the drafters of '
            'assistant_strategy="auto" has none of. Use verification="exact", or name the drafter.'
        )
    if decoupled and strategy not in drafting_ahead():
        raise ValueError(
            f'decoupled_execution="always" does not go with assistant_strategy={strategy!r}: only the drafters of '
            f"{list(drafting_ahead())} can draft on from their own drafts. Name one of these, or set "
            'decoupled_execution="never".'
        )
    if decoupled and rejects:
        raise ValueError(
            'verification="rejection" does not go with decoupled_execution="always": a draft stays valid only where '
            'it equals what the target samples. Use verification="exact", or decoupled_execution="never".'
        )
