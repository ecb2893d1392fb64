"""Options of one speculative generation."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..quantization.kernels import KERNELS
from ..quantization.scheme import SCHEMES
from ..scheduling.draft_length import MAX_DRAFT_LENGTH


STRATEGIES = ("none", "self", "model", "ngram", "history", "eagle3", "dflash", "auto")
NEED_ASSISTANT = ("model", "eagle3", "dflash")
TAKE_ASSISTANT = (*NEED_ASSISTANT, "auto")
VERIFICATIONS = ("exact", "rejection")
TOGGLES = ("roofline", "always", "never")
RUNNERS = ("auto", "eager", "graph", "compiled")
_CHOICES: dict[str, tuple[str, ...]] = {
    "verification": VERIFICATIONS,
    "sd_toggle": TOGGLES,
    "roofline_mismatch": ("recalibrate", "error"),
    "draft_quantization": tuple(scheme.name for scheme in SCHEMES),
    "draft_kernel": ("auto", *dict.fromkeys(kernel.name for kernel in KERNELS)),
    "draft_lm_head": ("auto", "dense", "packed"),
    "runner": RUNNERS,
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """How `generate(assistant_strategy=...)` drafts and verifies. A dict of the same keys is accepted everywhere.

    > Drafting

    Args:
        draft_length: γ, draft tokens per round, 1 to 64.
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
        sd_toggle: `"always"` speculates in every round that the drafter's kernels can serve; `"roofline"` only where
            the calibrated roofline predicts a speedup (ER §3.2) and measured rounds bear it out; `"never"` decodes
            autoregressively. Under `assistant_strategy="auto"` anything but `"roofline"` chooses by measuring alone.
        sd_margin: ε, predicted speedup beyond 1 from which on to speculate.
        roofline_profile: path of the profile for `sd_toggle="roofline"`; where the file is missing, this machine is
            calibrated once (minutes) and the profile saved there. `None`: one in the user's cache, by hardware, shape,
            dtype and kernel.
        roofline_mismatch: what to do with a `roofline_profile` of other hardware, shape, dtype or kernel:
            `"recalibrate"`, with a warning, into the user's cache, or `"error"`.

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
    sd_toggle: Literal["roofline", "always", "never"] = "always"
    sd_margin: float = 0.05
    roofline_profile: str | None = None
    roofline_mismatch: Literal["recalibrate", "error"] = "recalibrate"
    max_batch_size: int | None = None
    runner: Literal["auto", "eager", "graph", "compiled"] = "auto"
    max_graph_memory: float = 4.0
    keep_graphs: bool = True
    draft_quantization: str = "rtn-w4-g128"
    draft_kernel: str = "auto"
    draft_lm_head: Literal["auto", "dense", "packed"] = "auto"

    def __post_init__(self) -> None:
        require_int("draft_length", self.draft_length, 1, MAX_DRAFT_LENGTH)
        require_int("ngram_size", self.ngram_size, 1, 64)
        require_int("history_max_tokens", self.history_max_tokens, 1, None)
        if self.max_batch_size is not None:
            require_int("max_batch_size", self.max_batch_size, 1, None)
        require_margin(self.sd_margin)
        require_graph_memory(self.max_graph_memory)
        if self.roofline_profile is not None and self.sd_toggle != "roofline":
            raise ValueError(
                f'roofline_profile={self.roofline_profile!r} is read under sd_toggle="roofline" only, and sd_toggle '
                f'is {self.sd_toggle!r}; set sd_toggle="roofline", or drop the profile.'
            )
        if self.seed is not None:
            require_int("seed", self.seed, None, None)
        for name, choices in _CHOICES.items():
            value = vars(self)[name]
            if value not in choices:
                raise ValueError(f"{name}={value!r} is unknown; choose one of {list(choices)}.")

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
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(value) - set(known))
        if unknown:
            raise ValueError(f"speculative_config has no field {unknown}; its fields are {known}.")
        return cls(**value)


def check_strategy(strategy: str) -> str:
    """Returns `strategy`, or raises ValueError naming the ones that exist."""
    if strategy not in STRATEGIES:
        raise ValueError(f"assistant_strategy={strategy!r} is unknown; choose one of {list(STRATEGIES)}.")
    return strategy


def require_margin(value: object) -> None:
    """Raises ValueError unless `value` is a number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"sd_margin={value!r} is out of range; it must be a number of at least 0, e.g. 0.05.")


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
