"""The options that say how rollouts are drafted and verified: a part of the config of each of our trainers."""

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, ClassVar

from accelerate import PartialState
from torch import nn
from transformers import GenerationConfig, Trainer

from ..drafter_training.adaptation import ADAPTABLE
from ..generation.options import OPTIONS, SpeculativeConfig, check_option, option
from ..generation.planner.acceptance import MAX_DRAFT_LENGTH
from ..generation.refusals import ADAPTATION, EXACT_LOGPROBS, LEARNING_MODEL, Asked, check, of_drafting
from ..generation.registry import needing_assistant, strategies, taking_assistant
from ..json_files import jsonable
from ..papers import load
from ..value_checks import did_you_mean, require_choice, require_folder_or_id
from .checkpoint import DraftLengthState


if TYPE_CHECKING:
    from trl import GRPOConfig as TrainerConfig

    from ..papers.efficient_rollout.draft_length import DraftLengthController
else:
    TrainerConfig = object


def shared(name: str, default: Any = MISSING) -> Any:
    """The option `name` of :class:`SpeculativeConfig`, which checks it, with the help and, unless another `default` is
    given, the default that it has there."""
    default = OPTIONS[name].default if default is MISSING else default
    return option(list(default) if isinstance(default, tuple) else default, OPTIONS[name].metadata["help"])


_INSTEAD = {
    "draft_length": "Set draft_lengths=[5], which keeps one, or initial_draft_length, with which several start.",
    "max_batch_size": "Set rollout_batch_size.",
    "ngram_size": "It is an option of generate alone.",
    "speculative_config": "Its fields are options here: {}(verification=..., draft_quantization=...).",
    "drafter": "Name it by assistant_strategy.",
    "max_prompt_length": "TRL has it no longer: cut prompts in the dataset.",
}
"""Replacements for names of `generate` and of other TRL releases."""

_BOUNDS: dict[str, dict[str, Any]] = {
    "draft_length_patience": {"low": 1}, "rollout_batch_size": {"low": 1}, "draft_ranks": {"low": 0},
    "drafter_learning_rate": {"positive": True},
}  # fmt: skip
"""Bounds of options. Not in metadata of fields: the command line's parser takes only `help` from there."""


@dataclass
class RolloutOptions(TrainerConfig):
    """Options of speculative rollouts, which stand before a config of TRL among the base classes of a config.

    Attributes:
        base_trainer: name of TRL's trainer of this config.
    """

    # Choices are `str` here: of a Literal, TrlParser answers a misspelt one with its whole usage.

    base_trainer: ClassVar[str]

    assistant_strategy: str = option(
        "auto",
        'How rollouts are drafted; the tokens are the same under each strategy. "auto": by the quantized copy of the '
        'policy, the history, the head of "mtp" or an assistant, whichever is fastest, or not at all. "self": by the '
        'copy, which is refreshed when the weights have changed. "model": by a smaller causal LM. "ngram": by lookup '
        'in the prompt. "history": by lookup in earlier rollouts of the same prompt and in the other completions of '
        'its group. "eagle3", "dflash", "mtp": by a learned drafter, which follows the policy (drafter_adaptation); '
        '"mtp" is the multi-token-prediction head of the checkpoint. "tts": by a drafter that learns from the rounds '
        'it drafts (tts_drafter). "best_of_n": as "auto" with best_of_n_drafters, several of them for the same rows '
        'where that pays. "none": not at all.',
    )
    assistant_model: str | None = option(
        None,
        'Path or hub id of the drafter of "model", "eagle3" or "dflash", or of "tts" with such a tts_drafter; for '
        '"mtp" of a checkpoint with another head. "auto" considers it, a causal LM, as well; under "best_of_n" it is '
        "that of the one member that needs one.",
    )
    draft_lengths: list[int] = option(
        [5, 7, 9, 11],
        'Γ, draft lengths from 1 to 64, ascending; one entry keeps it fixed. Under sd_toggle="measured" each round '
        'takes the one that promises most, or half of the shortest. Under "always", or "roofline" with one drafter, a '
        "controller moves among them (ER §3.3), as the next four options say.",
    )
    initial_draft_length: int | None = option(None, "γ₀, the draft length to start with. None: the first one.")
    draft_length_up: float = option(
        0.94, "The draft length γ rises when the block efficiency stays at 1 + γ draft_length_up or more."
    )
    draft_length_down: float = option(
        0.85, "The draft length γ falls when the block efficiency stays at 1 + γ draft_length_down or less."
    )
    draft_length_patience: int = option(2, "Number of training rollouts in a row after which the draft length moves.")
    sd_toggle: str = shared("sd_toggle")
    sd_margin: float = shared("sd_margin")
    roofline_profile: str | None = shared("roofline_profile")
    roofline_mismatch: str = shared("roofline_mismatch")
    history_max_tokens: int = shared("history_max_tokens")
    verification: str = shared("verification")
    decoupled_execution: str = shared("decoupled_execution")
    exact: str = shared("exact")  # or a bool; a text for the command line
    exact_logprobs: bool = option(
        False,
        "The loss's log-probabilities are the sampler's, bit for bit, while the policy is the one that sampled, on a "
        "CPU: the sampler's engine computes them, and layers run again in the backward pass, as under "
        "gradient_checkpointing. False: TRL's forward, which sums in another order.",
    )
    draft_quantization: str = shared("draft_quantization")
    draft_kernel: str = shared("draft_kernel")
    draft_lm_head: str = shared("draft_lm_head")
    rollout_batch_size: int | None = option(
        None,
        "Number of rows that each device decodes together; the others of the generation batch follow as rows finish. "
        "None: as many as memory holds.",
    )
    rollout_sharing: str = option(
        "pool",
        'How several ranks decode a generation batch; the tokens are the same. "pool": together. A rank with free '
        "rows takes the next prompt, whoever owns it, and those first that were long before; when none is left, a "
        'rank without rows takes over some of another. "own": each its own prompts, and all wait for the slowest.',
    )
    draft_ranks: int = option(
        0,
        "Number of ranks that only draft in rollouts: the last ones. Each drafts for one of the first ranks, which "
        "verifies meanwhile (SpecActor's decoupled execution). 0: all ranks decode.",
    )
    runner: str = shared("runner")
    max_graph_memory: float = shared("max_graph_memory")
    keep_graphs: str = shared("keep_graphs", "auto")  # or a bool; a text for the command line, as below

    drafter_adaptation: bool = option(
        True,
        'Train the drafter of "eagle3", "dflash" or "mtp", also within "auto", along with the policy, on the hidden '
        "states of the loss's own forward. It costs the drafter's forward and backward pass in each micro-batch, and "
        "changes neither completions nor the policy. False: it stays as it was loaded.",
    )
    drafter_learning_rate: float = option(1e-6, "Learning rate of the drafter's own AdamW, constant.")
    drafter_hidden_weight: float = option(
        1.0, "Weight of the regression of the drafter's hidden states onto the policy's; 0 leaves it out."
    )
    drafter_token_weight: float = option(
        0.1, "Weight of the drafter's soft cross-entropy against the policy's distributions."
    )

    tts_drafter: str = shared("tts_drafter")
    tts_learning_rate: float | None = shared("tts_learning_rate")
    tts_scope: str = shared("tts_scope", "run")  # training comes back to the same task in every rollout
    tts_steps: int = shared("tts_steps")
    tts_stride: str = shared("tts_stride")  # a text: the command line knows no union of types
    tts_anchor_weight: float = shared("tts_anchor_weight")
    tts_anchor: str = shared("tts_anchor")
    tts_asynchronous: bool = shared("tts_asynchronous")
    tts_rank: int = shared("tts_rank")

    best_of_n_drafters: list[str] = shared("best_of_n_drafters")
    best_of_n_assistants: dict[str, Any] | str | None = shared("best_of_n_assistants")  # on the command line JSON
    best_of_n_budget: int | None = shared("best_of_n_budget")
    best_of_n_race: bool = shared("best_of_n_race")

    def __new__(cls, *_: Any, **options: Any) -> "RolloutOptions":
        known = signature(cls.__init__).parameters  # a subclass may take more
        if any(one.kind is Parameter.VAR_KEYWORD for one in known.values()):
            return super().__new__(cls)
        for name in sorted(options.keys() - known.keys()):
            given = f"{name!r} (given {options[name]!r:.60})"
            raise ValueError(f"{cls.__name__} has no option {given}. {cls.remedy(name, known)}")
        return super().__new__(cls)

    @classmethod
    def remedy(cls, name: str, known: Iterable[str]) -> str:
        """What to do about the option `name`, which is none of those `known`."""
        remedy = _INSTEAD.get(name) or did_you_mean(name, known).strip() or "The installed TRL has none."
        return remedy.format(cls.__name__)

    def __post_init__(self) -> None:
        if self.use_cpu:  # transformers gives ddp_timeout to the process groups of GPUs alone
            PartialState(cpu=True, backend=self.ddp_backend, timeout=self.ddp_timeout_delta)
        super().__post_init__()
        self._check_generation()
        require_choice("assistant_strategy", self.assistant_strategy, strategies())
        for declared in fields(self):
            if declared.name in self.own_options().keys() - OPTIONS.keys() - {"draft_lengths"}:
                check_option(declared, vars(self)[declared.name], **_BOUNDS.get(declared.name, {}))
        require_choice("rollout_sharing", self.rollout_sharing, ("pool", "own"))
        self._check_draft_lengths()
        config = self.speculative_config()  # checks the options that it has
        if not isinstance(self.assistant_model, str | nn.Module | None):
            raise ValueError(
                f"assistant_model={self.assistant_model!r} is a {type(self.assistant_model).__name__}; give the path "
                "or hub id as text, or a model."
            )
        require_folder_or_id("assistant_model", self.assistant_model)
        check(self.asked(config))
        if self.assistant_strategy == "best_of_n":
            config.assistants_of_best_of_n(self.assistant_model)

    def _check_generation(self) -> None:
        name = type(self).__name__
        for setting in ("assistant_strategy", "assistant_model", "speculative_config"):
            if setting in (self.generation_kwargs or {}):
                remedy = _INSTEAD.get(setting, f"Set {{}}({setting}=...).").format(name)
                raise ValueError(f"generation_kwargs has {setting!r}, which is for model.generate. {remedy}")
        known = vars(GenerationConfig())
        for setting in self.generation_kwargs or {}:
            if setting not in known:  # a GenerationConfig takes any name
                hint = did_you_mean(setting, known)
                raise ValueError(f"generation_kwargs has {setting!r}, which generate does not know; drop it.{hint}")

    def _check_draft_lengths(self) -> None:
        lengths, first = self.draft_lengths, self.initial_draft_length
        if not isinstance(lengths, list | tuple) or not lengths or any(type(length) is not int for length in lengths):
            raise ValueError(f"draft_lengths={lengths!r} must be a list of at least one integer, e.g. [5, 7, 9, 11].")
        if list(lengths) != sorted(set(lengths)):
            raise ValueError(f"draft_lengths={lengths} is not ascending; use {sorted(set(lengths))}.")
        if lengths[0] < 1 or lengths[-1] > MAX_DRAFT_LENGTH:
            raise ValueError(f"draft_lengths={lengths} must lie between 1 and {MAX_DRAFT_LENGTH}.")
        if first is not None and first not in lengths:
            raise ValueError(
                f"initial_draft_length={first!r} is not one of draft_lengths={lengths}; choose one of them, or "
                f"set draft_lengths=[{first}] to keep it fixed."
            )
        up, down = self.draft_length_up, self.draft_length_down
        if not 0 < down < up <= 1:
            raise ValueError(
                f"draft_length_down={down} and draft_length_up={up} must be shares, the first the smaller one: "
                "0 < draft_length_down < draft_length_up <= 1."
            )

    def asked(self, config: SpeculativeConfig) -> dict[str, Asked]:
        """The features that these options, and `config` of them, ask for, for :func:`~.refusals.check`."""
        strategy, words = self.assistant_strategy, f"assistant_strategy={self.assistant_strategy!r}"
        drafter = self.tts_drafter if strategy == "tts" else strategy
        words += f", tts_drafter={drafter!r}" if strategy == "tts" else ""
        engines = (name for name in ("use_vllm", "use_transformers_continuous_batching") if getattr(self, name, False))
        learned, ranks = self.adaptable_drafters(), self.draft_ranks > 0 and f"draft_ranks={self.draft_ranks}"
        asked = of_drafting(strategy, config, self.assistant_model, options=self)
        return asked | {
            "no sd_toggle": words if strategy == "none" else asked["no sd_toggle"],
            "assistant_model=None": self.assistant_model is None,
            "a strategy without assistant": drafter not in taking_assistant() and words,
            "a strategy with an assistant": drafter in needing_assistant() and words,
            "speculative rollouts": self.trainer,
            "another engine": f"{name}=True" if (name := next(engines, None)) else False,
            "ds3_gather_for_generation=False": not self.ds3_gather_for_generation,
            'rollout_sharing="own"': self.rollout_sharing == "own",
            "draft_ranks": ranks,
            LEARNING_MODEL: ranks,
            "a copy that drafts ahead": asked["a copy that drafts ahead"] or (strategy == "self" and ranks),
            "drafter_hidden_weight=0": not self.drafter_hidden_weight,
            "drafter_token_weight=0": not self.drafter_token_weight,
            ADAPTATION: self.drafter_adaptation and bool(learned),
            "several learned drafters": len(learned) > 1 and f"the drafters {learned}",
            EXACT_LOGPROBS: self.exact_logprobs,
            "torch_compile=True": self.torch_compile,
        }

    def adaptable_drafters(self) -> list[str]:
        """Strategies of the drafters that `drafter_adaptation` can train."""
        members = self.best_of_n_drafters if self.assistant_strategy == "best_of_n" else [self.assistant_strategy]
        return [name for name in members if name in ADAPTABLE]

    def speculative_config(self) -> SpeculativeConfig:
        """The same options as `generate` takes them; their checks name the options of this class."""
        options = {name: value for name, value in vars(self).items() if name in OPTIONS}  # `seed` of TRL's config too
        options["draft_length"] = self.initial_draft_length or self.draft_lengths[0]  # γ₀
        options["max_batch_size"] = self.rollout_batch_size
        for name in ("keep_graphs", "exact"):
            options[name] = {"true": True, "false": False}.get(str(options[name]).lower(), options[name])
        options["tts_stride"] = int(self.tts_stride) if str(self.tts_stride).isdecimal() else self.tts_stride
        options["best_of_n_race"] = self.best_of_n_race and self.assistant_strategy == "best_of_n"
        return SpeculativeConfig(**options)

    def choice_of_draft_lengths(self) -> tuple[int, ...]:
        """Each γ that a planner may choose, ascending; one alone where plans are for that one."""
        config = self.speculative_config()
        return (config.draft_length,) if self.draft_ranks else config.choice_of_draft_lengths(self.draft_lengths)

    def draft_length_controllers(
        self, strategies: Sequence[str], saved: Mapping[str, DraftLengthState]
    ) -> "dict[str, DraftLengthController]":
        """For each drafter by its strategy: where a checkpoint `saved` it, or at its start. None where a planner
        chooses γ in each round."""
        controllers: dict[str, DraftLengthController] = {}
        for name in strategies if self.sd_toggle in ("always", "roofline") else ():
            controllers[name] = load("papers.efficient_rollout.draft_length").DraftLengthController(
                self.draft_lengths, self.speculative_config().draft_length, self.draft_length_up,
                self.draft_length_down, self.draft_length_patience,
            )  # fmt: skip
            if name in saved:
                controllers[name].load_state_dict(vars(saved[name]))
        return controllers

    def get_process_log_level(self) -> int:
        """As in transformers. A trainer asks when it is made: one that does not read these options warns, once."""
        asking = sys._getframe(1).f_locals.get("self")
        if isinstance(asking, Trainer) and not isinstance(self, getattr(asking, "config_class", ())):
            ours, theirs = type(self).__name__, type(asking).__name__
            warnings.warn(
                f"args is a {ours}, and a {theirs} reads none of its options of rollouts: they are plain. Use "
                f"{self.trainer}, or call spec_trl.speculate(trainer).",
                stacklevel=2,
            )
        level: int = super().get_process_log_level()
        return level

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON has them, for TensorBoard, W&B and others."""
        options: dict[str, Any] = super().to_dict() | jsonable(self.own_options())
        return options

    def own_options(self) -> dict[str, Any]:
        """The options that TRL's config does not have, by name."""
        return {declared.name: vars(self)[declared.name] for declared in fields(RolloutOptions)}

    @property
    def trainer(self) -> str:
        """Name of our trainer of this config."""
        return f"Spec{self.base_trainer.rpartition('.')[2]}"
