"""Declares the options of rollouts in the configs of our trainers."""

import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, ClassVar

from accelerate import PartialState
from torch import nn
from transformers import GenerationConfig, Trainer

from ..drafter_training.adaptation import ADAPTABLE, AdaptationOptions
from ..generation.options import SpeculativeConfig, place_of
from ..generation.refusals import (
    ADAPTATION,
    EXACT_LOGPROBS,
    LEARNING_MODEL,
    OVER_SUPPORT,
    RANKS,
    Asked,
    check,
    of_drafting,
)
from ..generation.registry import assistant_of, strategies
from ..json_files import jsonable
from ..value_checks import did_you_mean, document, option, require_choice, require_folder_or_id, require_value


if TYPE_CHECKING:
    from trl import GRPOConfig as TrainerConfig
else:
    TrainerConfig = object


DRAFT_LENGTHS = (5, 7, 9, 11)
"""Γ of ER §3.3, where draft_length is not given."""
_INSTEAD = {
    "drafter": "Name it by assistant_strategy.",
    "no_drafter_adaptation": "Give drafter_adaptation=False.",
    "max_prompt_length": "TRL has it no longer: cut prompts in the dataset.",
} | {
    f"drafter_{name}": f'Give drafter_adaptation={{"{name}": ...}}.'
    for name in ("learning_rate", "hidden_weight", "token_weight")
}
"""Replacements for names of `generate` and of other releases of TRL or of this package."""
_BOOLS = dict.fromkeys(("true", "yes", "t", "y", "1"), True) | dict.fromkeys(("false", "no", "f", "n", "0"), False)
"""Bools as transformers' command line reads them."""


@dataclass
class RolloutOptions(TrainerConfig):
    """Options of speculative rollouts; precede a config of TRL among the base classes of a config.

    Attributes:
        base_trainer: name of TRL's trainer of this config.
        other_engines: options of TRL's config that avoid both `generate` and a vLLM of ours.
    """

    base_trainer: ClassVar[str]
    other_engines: ClassVar[tuple[str, ...]] = ("use_transformers_continuous_batching",)

    assistant_strategy: str = option(
        "auto",
        'Who drafts rollouts; tokens are the same. "self": the policy\'s quantized copy. "model": a smaller model. '
        '"ngram": lookup in the prompt. "history": lookup in earlier rollouts. "eagle3", "dflash", "mtp": a learned '
        'drafter. "tts": one that learns while it drafts. "auto": the fastest at hand. "best_of_n": several at once. '
        '"none": nobody.',
    )
    assistant_model: str | None = option(
        None, 'Path or hub id of the drafter of "model", "eagle3", "dflash", or of another "mtp" head.'
    )
    speculative_config: dict[str, Any] | str | None = option(
        None, "Options of the rollouts' generate, a SpeculativeConfig or a dict; on a command line JSON."
    )
    rollout_sharing: str = option(
        "pool", 'Ranks decode a generation batch together, "pool", or each its "own" prompts; tokens are the same.'
    )
    drafter_adaptation: str = option(  # or a bool or a dict
        True,
        "Train a learned drafter along with the policy, which stays the same. A dict sets learning_rate, and the "
        "weights of its loss, hidden_weight and token_weight.",
    )
    exact_logprobs: bool = option(
        False, "The loss has the sampler's log-probabilities, bit for bit, on a CPU. False: TRL's forward."
    )
    logprobs_over: str = option(
        "vocabulary",
        'The loss\'s log-probabilities are over the whole "vocabulary", as in TRL, or over the "support": the tokens '
        "that top-k, top-p and min-p kept when the token was sampled.",
    )

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        of_trl = getattr(super(), "_VALID_DICT_FIELDS", [])
        cls._VALID_DICT_FIELDS = [*of_trl, "speculative_config", "drafter_adaptation"]
        if "base_trainer" in vars(cls):
            document(cls, RolloutOptions)

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
        """The remedy for the option `name`, absent from `known`."""
        place = place_of(name)
        near = f"Give {place}." if place else did_you_mean(name, known).strip()
        return _INSTEAD.get(name) or near or "The installed TRL has none."

    def __post_init__(self) -> None:
        if self.use_cpu:  # transformers gives ddp_timeout to the process groups of GPUs alone
            PartialState(cpu=True, backend=self.ddp_backend, timeout=self.ddp_timeout_delta)
        super().__post_init__()
        self._check_generation()
        require_choice("assistant_strategy", self.assistant_strategy, strategies())
        require_value("exact_logprobs", self.exact_logprobs, [bool])
        require_choice("rollout_sharing", self.rollout_sharing, ("pool", "own"))
        require_choice("logprobs_over", self.logprobs_over, ("vocabulary", "support"))
        config = self.rollout_config()
        if not isinstance(self.assistant_model, str | nn.Module | None):
            raise ValueError(
                f"assistant_model={self.assistant_model!r} is a {type(self.assistant_model).__name__}; give the path "
                "or hub id as text, or a model."
            )
        require_folder_or_id("assistant_model", self.assistant_model)
        check(self.asked(config))
        if self.assistant_strategy == "best_of_n":
            config.specactor.assistants_with(self.assistant_model, config.tts.drafter)

    def _check_generation(self) -> None:
        name = type(self).__name__
        for setting in ("assistant_strategy", "assistant_model", "speculative_config"):
            if setting in (self.generation_kwargs or {}):
                raise ValueError(
                    f"generation_kwargs has {setting!r}, which is for model.generate. Set {name}({setting}=...)."
                )
        known = vars(GenerationConfig())
        for setting in {} if getattr(self, "use_vllm", False) else self.generation_kwargs or {}:
            if setting not in known:  # a GenerationConfig takes any name
                hint = did_you_mean(setting, known)
                raise ValueError(f"generation_kwargs has {setting!r}, which generate does not know; drop it.{hint}")

    def asked(self, config: SpeculativeConfig) -> dict[str, Asked]:
        """The features that these options, and `config`, ask for, for :func:`~.refusals.check`."""
        strategy, words = self.assistant_strategy, f"assistant_strategy={self.assistant_strategy!r}"
        drafter = config.tts.drafter if strategy == "tts" else strategy
        words += f", tts.drafter={drafter!r}" if strategy == "tts" else ""
        engines = (name for name in self.other_engines if getattr(self, name, False))
        learned, count = self.adaptable_drafters(), config.specactor.draft_ranks
        ranks = count > 0 and f"specactor.draft_ranks={count}"
        options = SpeculativeConfig.coerce(self.speculative_config)
        asked = of_drafting(strategy, config, self.assistant_model, options=options)
        return asked | {
            "no sd_toggle": words if strategy == "none" else asked["no sd_toggle"],
            "assistant_model=None": self.assistant_model is None,
            "a strategy without assistant": assistant_of(drafter) == "none" and words,
            "a strategy with an assistant": assistant_of(drafter) == "required" and words,
            "speculative rollouts": self.trainer,
            "another engine": f"{name}=True" if (name := next(engines, None)) else False,
            "ds3_gather_for_generation=False": not self.ds3_gather_for_generation,
            'rollout_sharing="own"': self.rollout_sharing == "own",
            RANKS: ranks,
            LEARNING_MODEL: ranks,
            "a copy that drafts ahead": asked["a copy that drafts ahead"] or (strategy == "self" and ranks),
            ADAPTATION: self.adaptation is not None and bool(learned),
            "several learned drafters": len(learned) > 1 and f"the drafters {learned}",
            EXACT_LOGPROBS: self.exact_logprobs,
            OVER_SUPPORT: self.logprobs_over == "support",
            "torch_compile=True": self.torch_compile,
        }

    @property
    def adaptation(self) -> AdaptationOptions | None:
        """Options of training a learned drafter along; None: it is not trained."""
        given: Any = self.drafter_adaptation
        given = _BOOLS.get(str(given).lower(), given)
        if not isinstance(given, Mapping | AdaptationOptions):
            require_value("drafter_adaptation", given, [bool], hint=", or a dict of its options")
        return None if given is False else AdaptationOptions.coerce(None if given is True else given)

    def adaptable_drafters(self) -> list[str]:
        """Strategies of the drafters that `drafter_adaptation` can train."""
        members = [self.assistant_strategy]
        if members == ["best_of_n"]:
            members = list(self.rollout_config().specactor.drafters)
        return [name for name in members if name in ADAPTABLE]

    def rollout_config(self) -> SpeculativeConfig:
        """The options of rollouts' `generate`: the given ones, with a trainer's own defaults."""
        given = SpeculativeConfig.coerce(self.speculative_config)
        return replace(
            given,
            draft_length=DRAFT_LENGTHS if given.draft_length is None else given.draft_length,
            seed=self.seed if given.seed is None else given.seed,
            tts=replace(given.tts, scope=given.tts.scope or "run"),  # training comes back to the same task
        )

    def get_process_log_level(self) -> int:
        """As in transformers. A trainer calls it when made: a trainer that ignores these options warns here, once."""
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

    def settings(self) -> dict[str, Any]:
        """The options of rollouts by place, for the log."""
        own = self._own()
        del own["speculative_config"]
        return own | self.rollout_config().by_place()

    def _own(self) -> dict[str, Any]:
        return {declared.name: vars(self)[declared.name] for declared in fields(RolloutOptions)}

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON has them, for TensorBoard, W&B and others."""
        options: dict[str, Any] = super().to_dict() | jsonable(self._own())
        return options

    @property
    def trainer(self) -> str:
        return f"Spec{self.base_trainer.rpartition('.')[2]}"
