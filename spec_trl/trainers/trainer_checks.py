"""Checks before any work that TRL and transformers are known, and that no rollout will fail. A prompt that is drawn
later is checked then, and the error shows its text."""

import copy
import math
import warnings
from collections.abc import Callable, Collection
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from trl.models import unwrap_model_for_generation

from ..generation.call import of_model
from ..generation.drafters.mtp.mtp_drafter import OWN, MtpDrafter, served_heads
from ..generation.drafters.small_model import states_of
from ..generation.engine.network.family import Family
from ..generation.engine.requirements import (
    check_generation_config,
    check_lengths,
    check_model,
    policy_in,
    position_limit,
)
from ..generation.keyword import move_stop_strings, override
from ..generation.options import SpeculativeConfig
from ..generation.refusals import MEDIA, SHARDED, Asked, Features, check
from ..generation.strategies import check_assistants
from ..native.native_code import compiler
from ..papers import load
from .prompt_media import check_media, of_media
from .sampler_mismatch import FILTERS, changed_by


KNOWN = "trl 1.16 and transformers 5.17 to 5.24"
_REMEDY = "Install trl>=1.16,<1.17, or a spec_trl that knows the installed version."
OVERRIDDEN = (
    "_calculate_rewards", "_generate", "_generate_and_score_completions", "_generate_single_turn",
    "_get_per_token_logps_and_entropies", "_tool_call_loop", "compute_loss", "save_model", "train", "training_step",
)  # fmt: skip
"""Methods that the trainer overrides, and calls."""
_CALLED = ("_tokenize_prompts",)
READ = (
    "_dist", "_metrics", "_tokenizer", "accelerator", "aux_loss_enabled", "callback_handler", "eval_dataset",
    "generation_config", "generation_kwargs", "model", "model_wrapped", "rollout_func", "state", "tools",
    "train_dataset",
)  # fmt: skip
"""Attributes that the trainer reads."""
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_LOOKED_AT = 1024  # rows of a dataset, evenly spread, whose texts are compared
_TOKENIZED = 16  # number of longest texts among them


# ---- base classes, whose private methods may change --------------------------------------


def check_methods(ours: type, theirs: type, lacking: Collection[str] = ()) -> None:
    """Raises ImportError unless every method of `ours` that overrides one of `theirs` has the same parameters in the
    same order. Parameters taken by our `*args` may change; methods named in `lacking` may be missing."""
    for name in (*OVERRIDDEN, *_CALLED):
        if not hasattr(theirs, name) and name not in lacking:
            raise _unknown(ours, f"{theirs.__name__} has no {name}")
        if not hasattr(theirs, name) or name in _CALLED:
            continue
        mine, base = signature(getattr(ours, name)), signature(getattr(theirs, name))
        passes_on = any(one.kind is Parameter.VAR_POSITIONAL for one in mine.parameters.values())
        wanted = [one.name for one in mine.parameters.values() if one.kind in _POSITIONAL]
        named = list(base.parameters)[: len(wanted) if passes_on else None]
        if named != wanted:
            known, new = (", ".join(one.parameters) for one in (mine, base))
            raise _unknown(ours, f"{theirs.__name__}.{name} takes ({new}), where ({known}) is known")
    keywords = {"gather_deepspeed3_params", "generation_kwargs", "gradient_checkpointing_kwargs"}
    if unknown := sorted(keywords - {*signature(unwrap_model_for_generation).parameters}):
        raise _unknown(ours, f"trl.models.unwrap_model_for_generation takes no {', '.join(unknown)}")


def check_attributes(trainer: object, theirs: type, lacking: Collection[str] = ()) -> None:
    """Raises ImportError if the base class `theirs` has not set an attribute that `trainer` reads, except those named
    in `lacking`."""
    if missing := [name for name in READ if not hasattr(trainer, name) and name not in lacking]:
        raise _unknown(type(trainer), f"a {theirs.__name__} has no {', '.join(missing)}")


def _unknown(ours: type, difference: str) -> ImportError:
    return ImportError(
        f"{ours.__name__} knows {KNOWN}; trl {trl.__version__} and transformers {transformers.__version__} are "
        f"installed, and differ: {difference}. {_REMEDY}"
    )


# ---- rollouts -------------------------------------------------------------------------------------------------------


def asked(trainer: Any, config: SpeculativeConfig) -> dict[str, Asked]:
    """The features that our trainer `trainer` asks for, for :func:`~.refusals.check`."""
    args, device, dist, generates = trainer.args, trainer.accelerator.device, trainer._dist, generates_by_us(trainer)
    policy = policy_in(trainer.model)
    assistant = args.assistant_model if config.specactor.draft_ranks else None
    found = args.asked(config) | {
        "fsdp_version=1": dist.fsdp_version == 1,
        "torch.nn.DataParallel": args.n_gpu > 1 and f"torch.nn.DataParallel on {args.n_gpu} devices",
        SHARDED: (dist.zero_stage == 3 and "DeepSpeed ZeRO-3") or (dist.is_fsdp and "FSDP"),
        "tools": bool(getattr(trainer, "tools", None)),
        "rollout_func": not generates and ("use_vllm=True" if getattr(args, "use_vllm", False) else True),
        "a loss without log-probabilities": "_get_per_token_logps_and_entropies" in trainer.lacking,
        "several ranks that share rollouts": args.rollout_sharing == "pool" and trainer.accelerator.num_processes > 1,
    }
    if generates:
        datasets = {name: vars(trainer)[name] for name in ("train_dataset", "eval_dataset")}
        found |= of_model(Family.of(policy), config, device) | of_media(datasets, trainer.processing_class)
        found["an assistant with states"] = assistant is not None and states_of("assistant_model", assistant)
    if args.exact_logprobs:
        layers = (name for name, layer in policy.named_modules() if isinstance(layer, nn.Dropout) and layer.p > 0)
        found |= {
            "a policy outside of a CPU": device.type != "cpu" and f"a policy on {device}",
            "no C++ compiler": compiler() is None,
            "another dtype": policy.dtype == torch.float64 and "a policy in torch.float64",
            "DeepSpeed ZeRO-3": dist.zero_stage == 3,
            "dropout": f"dropout of the policy ({name})" if (name := next(layers, "")) else False,
            "attention_dropout": bool(getattr(policy.config.get_text_config(decoder=True), "attention_dropout", 0)),
            "AWQ": config.draft_quantization.startswith("awq"),
        }
    return found


def generates_by_us(trainer: Any) -> bool:
    """Whether neither a `rollout_func` nor vLLM generates the rollouts."""
    return getattr(trainer, "rollout_func", None) is None and not getattr(trainer.args, "use_vllm", False)


def check_trainer(trainer: Any, config: SpeculativeConfig, features: Features) -> LogitsProcessorList | None:
    """Raises ValueError if the `features` of our trainer `trainer` exclude each other, or if a rollout would fail
    under `config`. Returns the processors of a rollout; None: a `rollout_func` generates."""
    if features.get(MEDIA):
        check_media(policy_in(trainer.model), trainer.args, bool(features["tools"]))
    check(features)
    policy, args, settings, processors = policy_in(trainer.model), trainer.args, trainer.generation_config, None
    if generates_by_us(trainer):
        instead = f"use {args.base_trainer}"
        processors = check_generation(policy, settings, trainer._tokenizer, instead)
        check_assistants(args.assistant_strategy, args.assistant_model, config, policy)
        drafter = config.tts.drafter if args.assistant_strategy == "tts" else args.assistant_strategy
        if drafter == MtpDrafter.strategy and args.assistant_model is None:
            served_heads(None, policy, OWN)
        if (profile := config.efficient_rollout.profile) is not None and Path(profile).exists():
            load("papers.efficient_rollout.profile").Profile.load(profile)
        for name in ("train_dataset", "eval_dataset"):
            check_dataset(policy, settings, name, vars(trainer)[name], trainer._tokenize_prompts)
    image = [getattr(policy.config, "image_token_id", None)]  # TRL suppresses it, and the sampler never draws it
    drawn = [one for one in processors or () if getattr(one, "suppress_tokens", torch.empty(0)).tolist() != image]
    other = changed_by(drawn, args.temperature, FILTERS if args.logprobs_over == "support" else ())
    check({**features, "another distribution": other or False})
    return processors


def check_generation(
    policy: PreTrainedModel, generation_config: GenerationConfig, tokenizer: PreTrainedTokenizerBase, instead: str
) -> LogitsProcessorList:
    """Raises ValueError if the first rollout would fail, possibly after a calibration; `instead`: its last remedy.
    Returns the processors of a rollout."""
    check_model(policy)
    prompt = torch.zeros(1, 1, dtype=torch.long, device=policy.device)
    processors = LogitsProcessorList()
    try:
        place = "trainer.generation_config, as of generation_kwargs or cache_implementation"
        overridden = override(policy, generation_config, {}, place)
        completed, _ = policy._prepare_generation_config(overridden)
        check_generation_config(completed)
        first = copy.copy(overridden)
        first.max_new_tokens = 1  # the last token too, which some processors wait for
        moved: dict[str, Any] = {}
        if completed.stop_strings:
            moved["tokenizer"] = tokenizer
            move_stop_strings(completed.stop_strings, moved)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the length
            # Runs `generate` up to the decoding method: it merges settings and makes processors and criteria.
            policy.generate(
                prompt, attention_mask=torch.ones_like(prompt), generation_config=first,
                custom_generate=partial(_process_once, processors), **moved,
            )  # fmt: skip
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(
            f"{kind}{error} Look in generation_kwargs and the model's own generation_config, or {instead}."
        ) from error
    return processors


def _process_once(
    seen: LogitsProcessorList,
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    **_: Any,
) -> Tensor:
    """Decodes nothing: adds the processors to `seen`, and runs them and the criteria."""
    if (rows := len(input_ids)) > 1:
        check({"num_return_sequences": f"num_return_sequences={rows}", "num_generations": True})
    scores = torch.zeros(1, model.config.get_text_config(decoder=True).vocab_size, device=input_ids.device)
    seen.extend(logits_processor)
    logits_processor(input_ids, scores)
    stopping_criteria(input_ids, None)
    return input_ids


def check_dataset(
    policy: PreTrainedModel,
    generation_config: GenerationConfig,
    name: str,
    dataset: object,
    tokenize: Callable[[list[Any]], Any],
) -> None:
    """Raises ValueError, naming the row, if a prompt of `dataset`, or of a dict of datasets, is longer than the
    positions of `policy`. Reads a part of a large one; `tokenize` returns token ids first."""
    if position_limit(policy) is None:
        return
    if isinstance(dataset, dict):
        for key, part in dataset.items():
            check_dataset(policy, generation_config, f"{name}[{key!r}]", part, tokenize)
    if not isinstance(dataset, Dataset) or not len(dataset) or "prompt" not in dataset.column_names:
        return
    rows = range(0, len(dataset), math.ceil(len(dataset) / _LOOKED_AT))
    texts = dataset.select(rows)["prompt"]
    longest = sorted(range(len(rows)), key=lambda place: len(str(texts[place])))[-_TOKENIZED:]
    try:
        ids = tokenize([texts[place] for place in longest])[0]
    except Exception:  # some prompts become text only when they are drawn, and are checked then
        return
    _check(policy, generation_config, ids, lambda at: f"{name}[{rows[longest[at]]}]['prompt']")


def check_drawn(
    policy: PreTrainedModel,
    generation_config: GenerationConfig,
    prompts: list[list[int]],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Raises ValueError, showing the prompt, if one of a rollout's `prompts` (token ids) is longer than the positions
    of `policy`."""

    def name(row: int) -> str:
        text = tokenizer.decode(prompts[row])
        return f"the prompt {text if len(text) <= 160 else f'{text[:60]} ... {text[-100:]}'!r}"

    if prompts and position_limit(policy) is not None:
        _check(policy, generation_config, prompts, name)


def _check(
    policy: PreTrainedModel, generation_config: GenerationConfig, ids: list[list[int]], name: Callable[[int], str]
) -> None:
    check_lengths(policy, position_limit(policy), list(map(len, ids)), generation_config.max_new_tokens or 0, name)
