"""Lists the combinations that configs, calls and trainers refuse, in one table.

Configs, calls and trainers name the features asked for, and :func:`check` raises the first refusal that names two of
them. The page docs/refusals.md is made from the table.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .registry import CHOOSING, DRAFTERS, assistant_of, find


if TYPE_CHECKING:
    from .engine.drafter import Drafter
    from .options import SpeculativeConfig


Asked: TypeAlias = "bool | str | Callable[[], bool | str]"
"""Whether a feature is asked for, or the user's words for it. A function is called for the second feature of a refusal
if the first one is asked for."""
Features: TypeAlias = Mapping[str, Asked]
"""Features by their names in the table."""


class Refusal(NamedTuple):
    """Two features by name, the reason why they exclude each other, and a remedy."""

    what: str
    other: str
    because: str
    instead: str


ALWAYS, REJECTION = 'sd_toggle="always"', 'verification="rejection"'
DECOUPLED = 'specactor.decoupled_execution="always"'
RANKS, PROFILE = "specactor.draft_ranks", "efficient_rollout.profile"
CHAINS = "several chains per row"
NOT_AHEAD, LEARNING_MODEL = "drafters that cannot draft ahead", 'tts.drafter="model" or specactor.draft_ranks'
STATES, MEDIA = "a model with states of convolutions or scans", "prompts with images"
ADAPTATION, EXACT_LOGPROBS, SHARDED = "drafter_adaptation=True", "exact_logprobs=True", "FSDP or ZeRO-3"
OVER_SUPPORT = 'logprobs_over="support"'
NOT_ADAPTED = "torch_compile=True", "torch.nn.DataParallel", SHARDED
_EXACTLY, _NO_RANKS = 'Use verification="exact"', "Set specactor.draft_ranks=0"
_IN_TURNS = 'Set specactor.decoupled_execution="never"'
_UNLIKE_SAMPLER = "the loss's forward could differ from the sampler's"

REFUSALS = [
    Refusal(*row)
    for row in (
        # what drafts and verifies
        ("assistant_strategy", "custom_generate", "both name a decoding method", "Pass one of them"),
        ("speculative_config", "no assistant_strategy", "nothing would read the options", "Name a strategy"),
        ("an option of one strategy", "another strategy", "it reads none such", "Drop one of them"),
        ("assistant_model", "a strategy without assistant", "the strategy uses none", "Drop one of them"),
        ("assistant_model=None", "a strategy with an assistant", "it drafts with one", "Name a path or hub id"),
        (ALWAYS, "several drafters", "one must be chosen", 'Name one drafter, or set sd_toggle="measured"'),
        (PROFILE, "no sd_toggle", "nothing reads it", 'Drop it, or set sd_toggle="measured" or "roofline"'),
        (REJECTION, CHAINS, "the longest of chains accepted by chance would bias samples", _EXACTLY),
        (REJECTION, "drafters without probabilities", "rejection sampling needs draft probabilities", _EXACTLY),
        (REJECTION, DECOUPLED, "a draft stays valid only where it equals the sampled token", _EXACTLY),
        (DECOUPLED, NOT_AHEAD, "its drafts follow hidden states, stored texts, or states that cannot go back",
         'Use "self", "model" or "ngram", or set specactor.decoupled_execution="never"'),
        ("a model on a GPU", "a drafter on a thread", "both would share the device, slower than in turns",
         'Set specactor.decoupled_execution="never" or "auto", or give the drafter a rank of its own'),
        # models, prompts and arguments
        (STATES, CHAINS, "a scan takes one chain of a row", "Set specactor.race=False"),
        (STATES, 'tts.drafter="self"', "the copy cannot learn through states", 'Use assistant_strategy="self"'),
        (STATES, "a copy that drafts ahead", "each window of the copy would need states of its own",
         f"{_IN_TURNS} and specactor.draft_ranks=0"),
        ("an assistant with states", LEARNING_MODEL, "states cannot go back, nor learn",
         'Name an assistant whose layers only attend, use assistant_strategy="model", or set specactor.draft_ranks=0'),
        (MEDIA, "drafters that read prompts", "they read text alone", 'Use "self", "ngram", "history" or "auto"'),
        (MEDIA, DECOUPLED, "the drafter's thread reads text alone", _IN_TURNS),
        ('runner="graph"', "a model outside of CUDA", "it captures CUDA graphs", 'Move it, or use runner="auto"'),
        ('runner="compiled"', "exact=True on a GPU", "a compiler chooses the order of sums", 'Use runner="auto"'),
        ("streamer", "several rows", "a streamer prints one row", "Pass one prompt, or no streamer"),
        ("a processor or criterion that may look at other rows", "a smaller max_batch_size",
         "it is shown all rows at each step",
         "Raise max_batch_size, or set prefix_only = True on it if it looks at a row's own tokens and scores alone"),
        ("synced_gpus=True", "assistant_strategy", "ranks take different numbers of rounds",
         "Leave synced_gpus unset, and gather the weights around generate (TRL does so for ZeRO-3)"),
        # trainers
        ("another engine", "speculative rollouts", "they call generate", "Set it to False, or use TRL's own trainer"),
        ("ds3_gather_for_generation=False", "speculative rollouts", "ranks run different numbers of forwards",
         "Set ds3_gather_for_generation=True"),
        ("fsdp_version=1", "speculative rollouts", "a drafter is made of each weight, and layers are flat there",
         'Set fsdp_version: 2 in the file for accelerate, or fsdp_config={"version": 2}'),
        ("seed", "speculate", "all rollouts would have the same noise", "Use torch.manual_seed"),
        ("num_return_sequences", "num_generations", "the latter counts completions", "Leave the former unset"),
        (RANKS, NOT_AHEAD, "a rank drafts on from its own drafts", _NO_RANKS),
        (RANKS, 'rollout_sharing="own"', "their prompts go to others", 'Set rollout_sharing="pool"'),
        (RANKS, REJECTION, "a draft stays valid only where it equals the sampled token", _EXACTLY),
        (RANKS, DECOUPLED, "both say where drafts are made", _IN_TURNS),
        (RANKS, 'sd_toggle="never"', "nothing would draft", _NO_RANKS),
        (ADAPTATION, "several learned drafters", "one is trained", "Name one, or set drafter_adaptation=False"),
        *((ADAPTATION, other, "the policy's forward gives no whole hidden states",
           "Set drafter_adaptation=False, or train with one process per device, DDP or ZeRO-2, and no torch_compile")
          for other in NOT_ADAPTED),
        *((MEDIA, other, because, "Leave one of them out, or use TRL's own trainer")
          for other, because in (("tools", "turns are text alone"), (RANKS, "other ranks get no images"),
                                 ("a processing_class without images", "it reads text alone"))),
        *((EXACT_LOGPROBS, other, because, "Set exact_logprobs=False")
          for other, because in (("a loss without log-probabilities", "nothing would read them"),
                                 ("a policy outside of a CPU", "exact sums are made on a CPU"),
                                 ("no C++ compiler", "exact sums are made in C++"),
                                 ("another dtype", "its rounding decides no token"),
                                 ("rollout_func", "the engine does not sample"),
                                 ("another distribution", "the loss is of the model's own"),
                                 ("dropout", f"{_UNLIKE_SAMPLER}; set disable_dropout=True"),
                                 ("attention_dropout", _UNLIKE_SAMPLER), ("torch_compile=True", _UNLIKE_SAMPLER),
                                 ("DeepSpeed ZeRO-3", "weights are whole only in forwards"),
                                 ("AWQ", "the copy reads the layers' inputs in the loss's forward"))),
        *((OVER_SUPPORT, other, because, 'Set logprobs_over="vocabulary"')
          for other, because in (("a loss without log-probabilities", "nothing would read them"),
                                 ("rollout_func", "the engine does not sample"),
                                 (MEDIA, "it reads text alone"),
                                 ("another distribution", "the loss has its temperature and filters alone"))),
        (OVER_SUPPORT, "several ranks that share rollouts", "supports stay on the rank that samples",
         'Set rollout_sharing="own"'),
    )
]  # fmt: skip
"""Two features by name, the reason, and a remedy."""


_READ_BY = {
    "ngram_size": "ngram", "history_max_tokens": "history", "tts": "tts", "drafters": "best_of_n",
    "assistants": "best_of_n", "budget": "best_of_n", "race": "best_of_n",
    **dict.fromkeys(("draft_ranks", "draft_length_up", "draft_length_down", "draft_length_patience"), "trainers"),
}  # fmt: skip
"""Strategy, drafter or trainers by an option's name or group. Left out are options of all drafters and of the
quantized copy, which most strategies use: strategies are compared under one config."""


def check(features: Features) -> None:
    """Raises ValueError, with reason and remedy, for the first refusal of these features."""
    for what, other, because, instead in REFUSALS:
        if (one := features.get(what)) and (two := features.get(other)):
            two = two() if callable(two) else two
            if two:
                one, two = what if one is True else one, other if two is True else two
                raise ValueError(f"{one} does not go with {two}: {because}. {instead}.")


def of_drafting(
    strategy: str,
    config: "SpeculativeConfig",
    assistant: object = None,
    given: Sequence["Drafter"] | None = None,
    options: "SpeculativeConfig | None" = None,
) -> dict[str, Asked]:
    """Features of a strategy with its `assistant`, or of the `given` drafters instead, under `config`. `options`: the
    user's config, if `config` has other defaults."""
    own, words = given is None, f"assistant_strategy={strategy!r}"
    if given is not None:
        words = f"drafter={[type(drafter).__name__ for drafter in given]}"
    profile = config.efficient_rollout.profile
    decoupled, toggle = config.specactor.decoupled_execution == "always", config.sd_toggle

    def kinds() -> Sequence[Any]:
        members = {"none": (), "auto": ("self", "history"), "best_of_n": config.specactor.drafters}
        return [DRAFTERS[name] for name in members.get(strategy, (strategy,))] if given is None else given

    def on_thread() -> bool | str:
        if any(kind.beside == "thread" for kind in given or ()):
            return "drafter=DecoupledDrafter(DraftThread(...))"
        return decoupled and not all(kind.beside for kind in kinds()) and 'specactor.decoupled_execution="always"'

    return {
        "assistant_strategy": words,
        "another strategy": words,
        "an option of one strategy": own and _unread(strategy, options or config, options is not None),
        "assistant_model": assistant is not None,
        "a strategy without assistant": lambda: own and assistant_of(strategy) == "none" and words,
        "several drafters": lambda: (strategy in CHOOSING if own else len(kinds()) > 1) and words,
        "drafters without probabilities": lambda: (
            not all(getattr(kind, "has_probabilities", True) for kind in kinds()) and words
        ),
        NOT_AHEAD: lambda: own and not getattr(find(strategy), "drafts_ahead", False) and words,
        "drafters that read prompts": lambda: (
            any(kind.reads_prompts and not kind.looks_up for kind in kinds()) and words
        ),
        "a drafter on a thread": on_thread,
        ALWAYS: toggle == "always",
        'sd_toggle="never"': toggle == "never",
        "no sd_toggle": toggle in ("always", "never") and f'sd_toggle="{toggle}"',
        PROFILE: profile is not None and f"efficient_rollout.profile={profile!r}",
        REJECTION: config.verification == "rejection",
        DECOUPLED: decoupled,
        CHAINS: own and strategy == "best_of_n" and config.specactor.race and words,
        "a copy that drafts ahead": own and decoupled and strategy == "self" and DECOUPLED,
        'tts.drafter="self"': own and strategy == "tts" and config.tts.drafter == "self",
    }


def _unread(strategy: str, config: "SpeculativeConfig", in_trainer: bool) -> str:
    """Names a non-default option in `config` that `strategy` does not read, or "". `"none"` may have any, for
    comparisons."""
    reading = {"auto": {"history"}, "best_of_n": {"best_of_n", *config.specactor.drafters}}.get(strategy, {strategy})
    reading = reading | {"trainers"} if in_trainer else reading
    for name, group in vars(config).items() if strategy != "none" else ():
        default = getattr(type(config), name)
        if group is default:
            continue
        nested = hasattr(group, "group")
        for inner, value in vars(group).items() if nested else ((name, group),):
            reader = _READ_BY.get(inner, _READ_BY.get(name))
            if reader not in {None, *reading} and value != (vars(default)[inner] if nested else default):
                return f"{name + '.' + inner if nested else name}={value!r}, an option of {reader!r},"
    return ""
