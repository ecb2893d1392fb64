"""Options of one speculative generation."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..quantization.kernels import KERNELS
from ..quantization.scheme import SCHEMES
from ..scheduling.draft_length import MAX_DRAFT_LENGTH


STRATEGIES = ("none", "self", "model", "ngram", "history", "eagle3", "dflash", "tts", "auto", "best_of_n")
BEST_OF_N_DRAFTERS = ("self", "history", "ngram", "model", "eagle3", "dflash", "tts")
CHOOSE_BY_LADDER = ("auto", "best_of_n")
NEED_ASSISTANT = ("model", "eagle3", "dflash")
TAKE_ASSISTANT = (*NEED_ASSISTANT, "tts", "auto", "best_of_n")
TTS_DRAFTERS = ("self", "model", "eagle3", "dflash")
VERIFICATIONS = ("exact", "rejection")
TOGGLES = ("measured", "roofline", "always", "never")
RUNNERS = ("auto", "eager", "graph", "compiled")
_CHOICES: dict[str, tuple[str, ...]] = {
    "verification": VERIFICATIONS,
    "sd_toggle": TOGGLES,
    "roofline_mismatch": ("recalibrate", "error"),
    "draft_quantization": tuple(scheme.name for scheme in SCHEMES),
    "draft_kernel": ("auto", *dict.fromkeys(kernel.name for kernel in KERNELS)),
    "draft_lm_head": ("auto", "dense", "packed"),
    "runner": RUNNERS,
    "tts_drafter": TTS_DRAFTERS,
    "tts_scope": ("request", "rollout", "run"),
    "tts_anchor": ("current", "initial"),
}


@dataclass(frozen=True)
class Distillation:
    """How a drafter learns while it drafts.

    Args:
        learning_rate: η of Adam; None: by what learns, see :mod:`~spec_trl.generation.drafters.tts.learners`.
        scope: what a drafter learns is kept for one "request", one "rollout" (a call of `generate`), or the whole
            "run". The paper's is "request".
        steps: K, optimizer steps per update (TTS §6.5: 1 is best).
        stride: S, an update every S rounds that drafted (TTS App. C.1); None: adaptive.
        anchor_weight: λ of the second KL term, which holds q near the anchor.
        anchor: "current", q_t, the drafter before the update, or "initial", q_0. At K = 1 the term has no gradient
            at q = q_t, so it acts there with "initial" only.
        asynchronous: update beside the next S - 1 rounds, instead of before them.
        rank: of low-rank corrections, where these learn instead of the weights.
    """

    learning_rate: float | None = None
    scope: str = "request"
    steps: int = 1
    stride: int | None = 1
    anchor_weight: float = 0.0
    anchor: str = "current"
    asynchronous: bool = False
    rank: int = 8

    def __post_init__(self) -> None:
        if self.learning_rate is not None:
            require_number("tts_learning_rate", self.learning_rate, positive=True)
        require_int("tts_steps", self.steps, 1, None)
        if self.stride is not None:
            require_int("tts_stride", self.stride, 1, None)
        require_number("tts_anchor_weight", self.anchor_weight, positive=False)
        require_int("tts_rank", self.rank, 1, None)
        if not isinstance(self.asynchronous, bool):
            raise ValueError(f"tts_asynchronous={self.asynchronous!r} is no bool; pass True or False.")
        for name in ("scope", "anchor"):
            _require_choice(f"tts_{name}", getattr(self, name))


@dataclass(frozen=True)
class SpeculativeConfig:
    """How `generate(assistant_strategy=...)` drafts and verifies. A dict of the same keys is accepted everywhere.

    > Drafting

    Args:
        draft_length: γ, draft tokens per round, 1 to 64. `"auto"` and `"best_of_n"` draft with it, half of it or twice
            it, whichever promises most.
        ngram_size: `"ngram"`: longest suffix of a row that is looked up in its own prompt and output, in tokens.
        history_max_tokens: `"history"`: bound on the prompt and output tokens kept for later drafts, the newest ones;
            four bytes each, in memory and in a trainer's checkpoints.

    > Verification

    Args:
        verification: `"exact"` accepts a draft token when it equals the token the target samples with the same
            counter-based noise: token-identical to `"none"`. `"rejection"` accepts with min(1, p/q) and resamples the
            residual (Leviathan et al. 2023; ER §2.1): identical in distribution.
        seed: keys the noise together with (request, position, token). `None` draws one from torch's global generator,
            so `torch.manual_seed` rules as in plain `generate`.

    > When to speculate

    Args:
        sd_toggle: `"measured"` tries the drafter for a few rounds and speculates where they were faster than
            autoregressive ones; a roofline profile or draft ladder that an earlier calibration left is used, and none
            is made. `"roofline"` calibrates this machine before the first token where it has no profile (minutes,
            once), and speculates where the roofline predicts a speedup (ER §3.2) and measured rounds bear it out.
            `"always"` speculates in every round that the drafter's kernels can serve. `"never"` decodes
            autoregressively. `"auto"` and `"best_of_n"` may decode autoregressively in any case: under `"roofline"`
            and `"always"` they first profile the draft ladder (half a minute, once); under `"measured"` rounds fill it
            instead, and `"best_of_n"` races from the call after that on.
        sd_margin: ε, predicted speedup beyond 1 from which on to speculate.
        roofline_profile: path of the profile. Where the file is missing, `sd_toggle="roofline"` calibrates this
            machine and saves the profile there; `"measured"` refuses it. `None`: one in the user's cache, by hardware,
            shape, dtype and kernel.
        roofline_mismatch: what to do with a `roofline_profile` of other hardware, shape, dtype or kernel:
            `"recalibrate"`, with a warning, into the user's cache (`sd_toggle="measured"` leaves it aside and measures
            rounds), or `"error"`.

    > Batching

    Args:
        max_batch_size: rows in flight; further prompts are admitted as rows finish. `None`: all at once.

    > Captured forwards (CUDA)

    Args:
        runner: how forwards run. `"eager"`: as the modules are; `"graph"`: captured as CUDA graphs, for the shapes
            that come again; `"compiled"`: the same with compiled decoder layers; `"auto"`: `"graph"` on CUDA, where
            shapes that are replayed thousands of times also try the compiled layers and keep what measures faster;
            `"eager"` elsewhere. A network that cannot be captured or compiled runs eagerly, with a warning.
        max_graph_memory: GiB that captured forwards may take, the K/V cache not counted.
        keep_graphs: keep captured forwards, and the K/V cache they write to, from call to call, until the model dies;
            `spec_trl.release(model)` frees them before. `False`: free them after each call and capture again.

    > Test-Time Speculation (`"tts"`): a drafter that learns from the rounds it drafted (arXiv 2605.09329)

        tts_drafter: what learns: `"eagle3"`, `"dflash"` or `"model"`, the checkpoint in `assistant_model`; or
            low-rank corrections of the quantized copy, `"self"`.
        tts_learning_rate: η of Adam; `None`: 3e-4 for low-rank corrections, and for weights 3e-4 where the drafter is
            256 wide and less in proportion where it is wider.
        tts_scope: how long it is kept what a drafter learned: for one `"request"`, as in the paper; for one
            `"rollout"`, a call of `generate`; or for the `"run"`, from call to call on the same model. Requests of one
            batch learn apart, low-rank corrections each; in the wider scopes, and alone, all weights.
        tts_steps: K, optimizer steps per update.
        tts_stride: S, an update every S rounds; or `"adaptive"`: more often while the block efficiency falls, less
            often while it is level.
        tts_anchor_weight: λ, weight of the loss term that keeps the drafter near the anchor.
        tts_anchor: `"current"`, the drafter before the update, which matters for `tts_steps` > 1 only, or
            `"initial"`, the one that was loaded.
        tts_asynchronous: update beside the next S - 1 rounds instead of between two rounds.
        tts_rank: rank of low-rank corrections.

    > Several drafters (`"best_of_n"`): selection by history and ladder, races in the tail (SpecActor §4.2)

        best_of_n_drafters: the strategies that may draft, without repetition, of `"self"`, `"history"`, `"ngram"`,
            `"model"`, `"eagle3"`, `"dflash"` and `"tts"`. The ladder is profiled with `draft_length`, half of it and
            twice it, and each drafter uses the one that promises most.
        best_of_n_assistants: assistants by drafter, for several that need one: a path or hub id, or for `"model"` a
            module. A single one may be given as `assistant_model` instead.
        best_of_n_budget: tokens that one verification of a race may have, all rows together. `None`: those that the
            roofline says are free; without a profile, as many as the rollout's first speculative round verified.
        best_of_n_tolerance: share by which the roofline may predict a longer verification for tokens that count as
            free.
        best_of_n_race: whether rows race; `False`: one drafter per row.

    > The quantized self-drafter (`"self"`)

    Args:
        draft_quantization: `"rtn-w4-g128"`, `"rtn-w4-g64"`, `"rtn-w4-g32"` or `"rtn-w8"`; or `"awq-w4-g128"` and its
            smaller groups, which round to nearest until a drafter is refreshed with activation statistics.
        draft_kernel: `"auto"` or the name of a kernel in `spec_trl.quantization.kernels`.
        draft_lm_head: `"dense"` shares the policy's output head, `"packed"` quantizes it for the drafter as well,
            `"auto"` packs it where it is a large share of a draft step.
    """

    draft_length: int = 5
    ngram_size: int = 3
    history_max_tokens: int = 16_000_000
    verification: Literal["exact", "rejection"] = "exact"
    seed: int | None = None
    sd_toggle: Literal["measured", "roofline", "always", "never"] = "measured"
    sd_margin: float = 0.05
    roofline_profile: str | None = None
    roofline_mismatch: Literal["recalibrate", "error"] = "recalibrate"
    max_batch_size: int | None = None
    runner: Literal["auto", "eager", "graph", "compiled"] = "auto"
    max_graph_memory: float = 4.0
    keep_graphs: bool = True
    tts_drafter: Literal["self", "model", "eagle3", "dflash"] = "self"
    tts_learning_rate: float | None = None
    tts_scope: Literal["request", "rollout", "run"] = "request"
    tts_steps: int = 1
    tts_stride: int | Literal["adaptive"] = 1
    tts_anchor_weight: float = 0.0
    tts_anchor: Literal["current", "initial"] = "current"
    tts_asynchronous: bool = False
    tts_rank: int = 8
    best_of_n_drafters: Sequence[str] = ("self", "history", "ngram")
    best_of_n_assistants: Mapping[str, Any] | None = None
    best_of_n_budget: int | None = None
    best_of_n_tolerance: float = 0.05
    best_of_n_race: bool = True
    draft_quantization: str = "rtn-w4-g128"
    draft_kernel: str = "auto"
    draft_lm_head: Literal["auto", "dense", "packed"] = "auto"

    def __new__(cls, *_: Any, **options: Any) -> "SpeculativeConfig":
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(options) - set(known)):
            hint = did_you_mean(unknown[0], known)
            raise ValueError(f"speculative_config has no field {unknown}; its fields are {known}.{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        require_int("draft_length", self.draft_length, 1, MAX_DRAFT_LENGTH)
        require_int("ngram_size", self.ngram_size, 1, 64)
        require_int("history_max_tokens", self.history_max_tokens, 1, None)
        if self.max_batch_size is not None:
            require_int("max_batch_size", self.max_batch_size, 1, None)
        require_number("sd_margin", self.sd_margin, positive=False)
        require_graph_memory(self.max_graph_memory)
        if self.roofline_profile is not None and self.sd_toggle in ("always", "never"):
            raise ValueError(
                f'roofline_profile={self.roofline_profile!r} is not read under sd_toggle={self.sd_toggle!r}; set '
                'sd_toggle="measured" or "roofline", or drop the profile.'
            )
        if self.roofline_profile is not None:
            require_profile(self.roofline_profile, calibrates=self.sd_toggle == "roofline")
        self.distillation()
        self._check_best_of_n()
        if self.seed is not None:
            require_int("seed", self.seed, None, None)
        for name in _CHOICES:
            _require_choice(name, vars(self)[name])

    def _check_best_of_n(self) -> None:
        names = self.best_of_n_drafters
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        if not is_list or not names or len(set(names)) < len(names) or set(names) - {*BEST_OF_N_DRAFTERS}:
            raise ValueError(
                f"best_of_n_drafters={names!r} must be one or more different ones of {list(BEST_OF_N_DRAFTERS)}."
            )
        if self.best_of_n_assistants is not None:
            takers = [name for name in names if name in TAKE_ASSISTANT]
            given = self.best_of_n_assistants
            if not isinstance(given, Mapping) or not given or set(given) - {*takers}:
                raise ValueError(
                    f"best_of_n_assistants={given!r} must be a dict with some of {takers}, the members of "
                    f"best_of_n_drafters={list(names)} that take an assistant."
                )
            for name, assistant in given.items():
                require_folder_or_id(f"best_of_n_assistants[{name!r}]", assistant)
        if self.best_of_n_budget is not None:
            require_int("best_of_n_budget", self.best_of_n_budget, 1, None)
        require_number("best_of_n_tolerance", self.best_of_n_tolerance, positive=False)
        if not isinstance(self.best_of_n_race, bool):
            raise ValueError(f"best_of_n_race={self.best_of_n_race!r} is no bool; pass True or False.")

    def assistants_of_best_of_n(self, assistant: object) -> dict[str, Any]:
        """The assistant of each member of `best_of_n_drafters` that has one.

        Args:
            assistant: `assistant_model`, for the one member without an assistant of its own; None: none.

        Raises:
            ValueError: a member lacks its assistant, or it is not clear or not possible whose `assistant` is.
        """
        found = dict(self.best_of_n_assistants or {})
        needs = {*NEED_ASSISTANT} | ({"tts"} if self.tts_drafter != "self" else set())
        lacking = [name for name in self.best_of_n_drafters if name in needs and name not in found]
        if assistant is not None and len(lacking) == 1:
            found[lacking.pop()] = assistant
        elif assistant is not None or lacking:
            raise ValueError(
                f"assistant_model={_shown(assistant)} with best_of_n_drafters={list(self.best_of_n_drafters)}, of "
                f"which {lacking} lack an assistant: assistant_model serves exactly one of them. Name them in "
                "best_of_n_assistants, e.g. {'eagle3': 'path/or/hub-id'}."
            )
        return found

    def ladder_draft_lengths(self) -> tuple[int, ...]:
        """Each γ that the draft ladder is profiled with, ascending."""
        lengths = {max(self.draft_length // 2, 1), self.draft_length, min(2 * self.draft_length, MAX_DRAFT_LENGTH)}
        return tuple(sorted(lengths))

    def packing(self) -> tuple[str, str, str]:
        """Scheme, kernel and head of the quantized copy."""
        return self.draft_quantization, self.draft_kernel, self.draft_lm_head

    def distillation(self) -> Distillation:
        """How a drafter of `"tts"` learns."""
        return Distillation(
            learning_rate=self.tts_learning_rate,
            scope=self.tts_scope,
            steps=self.tts_steps,
            stride=None if self.tts_stride == "adaptive" else self.tts_stride,
            anchor_weight=self.tts_anchor_weight,
            anchor=self.tts_anchor,
            asynchronous=self.tts_asynchronous,
            rank=self.tts_rank,
        )

    @classmethod
    def coerce(cls, value: "SpeculativeConfig | Mapping[str, Any] | None") -> "SpeculativeConfig":
        """Accepts a config, a mapping of its fields, or None for the defaults."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(
                f"speculative_config={value!r} is a {type(value).__name__}; pass a SpeculativeConfig or a dict."
            )
        return cls(**value)


def check_strategy(strategy: str) -> str:
    """Returns `strategy`, or raises ValueError naming the ones that exist."""
    if strategy not in STRATEGIES:
        hint = did_you_mean(strategy, STRATEGIES)
        raise ValueError(f"assistant_strategy={strategy!r} is unknown; choose one of {list(STRATEGIES)}.{hint}")
    return strategy


def check_verification(strategy: str, verification: str) -> None:
    """Raises ValueError where `strategy` cannot be verified so."""
    if strategy == "best_of_n" and verification == "rejection":
        raise ValueError(
            'verification="rejection" does not go with assistant_strategy="best_of_n", which races: chains that are '
            "accepted by chance disagree, and taking the longest would favour what is easy to draft. Use "
            'verification="exact".'
        )
    if strategy == "auto" and verification == "rejection":
        raise ValueError(
            'verification="rejection" needs draft probabilities, which the history among the drafters of '
            'assistant_strategy="auto" has none of. Use verification="exact", or name the drafter.'
        )


def _shown(assistant: object) -> str:
    """An assistant in a message: a module by its class alone."""
    return repr(assistant) if assistant is None or isinstance(assistant, str) else type(assistant).__name__


def _require_choice(name: str, value: object) -> None:
    if value not in _CHOICES[name]:
        hint = did_you_mean(value, _CHOICES[name])
        raise ValueError(f"{name}={value!r} is unknown; choose one of {list(_CHOICES[name])}.{hint}")


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A question to end a message with, where `name` is nearly one of `known`; else nothing."""
    near = get_close_matches(str(name), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def require_folder_or_id(name: str, assistant: object) -> None:
    """Raises ValueError, naming `name`, where `assistant` is a text that neither is a folder nor can be a hub id."""
    if not isinstance(assistant, str) or Path(assistant).is_dir():
        return
    try:
        validate_repo_id(assistant)
    except HFValidationError:
        raise ValueError(f"{name}={assistant!r} is a folder that does not exist; correct the path.") from None


def require_profile(path: str, calibrates: bool) -> None:
    """Raises ValueError unless the roofline profile `path` can be read, or, where it `calibrates`, be written."""
    if not calibrates and not Path(path).is_file():
        raise ValueError(
            f'roofline_profile={path!r} is no file that exists; correct the path, or set sd_toggle="roofline", which '
            "calibrates and writes it."
        )
    if not Path(path).parent.is_dir() or Path(path).is_dir():
        raise ValueError(f"roofline_profile={path!r} must be a file in a folder that exists; correct the path.")


def require_number(name: str, value: object, positive: bool) -> None:
    """Raises ValueError, naming `name`, unless `value` is a finite number, of at least 0 or more than it."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (positive and value == 0):  # type: ignore[operator]
        bound = "above 0" if positive else "of at least 0"
        raise ValueError(f"{name}={value!r} is out of range; it must be a number {bound}.")


def require_graph_memory(value: object) -> None:
    """Raises ValueError unless `value` is a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(
            f"max_graph_memory={value!r} is out of range; it must be a positive number of GiB, e.g. 4.0, or choose "
            'runner="eager".'
        )


def require_int(name: str, value: object, low: int | None, high: int | None) -> None:
    """Raises ValueError, naming `name`, unless `value` is an integer of low..high; None: unbounded."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} is a {type(value).__name__}; pass an integer.")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"{low} to {high}" if high is not None else f"at least {low}"
        raise ValueError(f"{name}={value} is out of range; it must be {bounds}.")
