"""Makes `generate` of one model speculate by default: `speculate`, for any trainer or loop."""

import copy
import inspect
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from accelerate.utils import get_mixed_precision_context_manager
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationMixin, PreTrainedModel, Trainer
from transformers.generation import BaseStreamer

from ..generation.call import of_model
from ..generation.engine.network.family import Family
from ..generation.engine.requirements import check_model, policy_in, with_wrappers
from ..generation.engine.rollout import RequestQueue
from ..generation.engine.rows import Request
from ..generation.generate import SpeculativeOutput
from ..generation.keyword import DEFAULTS, setting
from ..generation.options import SpeculativeConfig
from ..generation.refusals import check, of_drafting
from ..generation.registry import strategies
from ..generation.session import Session
from ..generation.strategies import Assistant, make_drafters, refresh
from ..value_checks import require_choice
from .rollout_memory import whole_weights
from .run_log import Mode, read_run
from .saved_heads import head_of, keep_heads
from .speculative_rollouts import SpeculativeRollouts
from .speculator import Speculator
from .step_totals import StepClock
from .trainer_checks import check_generation


_OTHER_ENGINES = "use_vllm", "use_transformers_continuous_batching"
"""Options of TRL's trainers that avoid `generate`."""


def speculate(
    target: Any, strategy: str = "auto", assistant_model: Assistant = None, output_dir: str | Path | None = None,
    **options: Any,
) -> "Speculation":  # fmt: skip
    """Makes all sampling from a policy speculative, without changing the trainer or loop that samples.

    Calls of the policy's `generate` that name no `assistant_strategy` then draft with `strategy`, and sample the
    tokens of `strategy="none"`; under `return_dict_in_generate` they return a :class:`SpeculativeOutput`. A call that
    cannot be served, such as beam search, runs plain, with one warning. A trainer logs the means of its rollouts'
    metrics, as :class:`SpecGRPOTrainer` does; unlike there, ranks do not pool their rows. A second call for a model
    stops the first one's result.

    Args:
        target: a trainer of transformers or TRL, or the model (perhaps wrapped).
        strategy: the drafters, see docs/drafters.md.
        assistant_model: of strategies that take one.
        output_dir: folder of the log, `rollout_log.jsonl`, written by the first rank about its rollouts and steps; by
            default the trainer's. A model alone has none.
        options: fields of :class:`SpeculativeConfig` but `seed`.

    Raises:
        ValueError: options, model or trainer cannot be served; names the argument.
    """
    trainer = target if isinstance(target, Trainer) else None
    if trainer is None and not isinstance(target, nn.Module):
        raise ValueError(f"target is a {type(target).__name__}; give a trainer of transformers or TRL, or the model.")
    if trainer is not None and isinstance(trainer, SpeculativeRollouts):
        raise ValueError(f"a {type(trainer).__name__} speculates by itself, as its config says; leave this call out.")
    model: nn.Module = target if trainer is None else trainer.model
    config, policy = SpeculativeConfig(**options), policy_in(model)
    if not isinstance(policy, PreTrainedModel):
        raise ValueError(f"target is a {type(policy).__name__}; give the transformers model in it.")
    require_choice("assistant_strategy", strategy, strategies())
    args = None if trainer is None else trainer.args
    engines = [f"{name}=True" for name in _OTHER_ENGINES if getattr(args, name, False)]
    if hasattr(args, "vllm_server_base_url") and not hasattr(args, "use_vllm"):
        engines = [f"a {type(trainer).__name__}, which samples on a vLLM server,"]
    check(
        {
            **of_drafting(strategy, config, assistant_model),
            **of_model(Family.of(policy), config, policy.device),
            "speculate": True,
            "speculative rollouts": "speculate",
            "seed": config.seed is not None and f"seed={config.seed}",
            "another engine": "".join(engines[:1]),
        }
    )
    with whole_weights(model), Session.lend(policy) as session:
        check_model(policy)
        drafters = make_drafters(session, strategy, policy, assistant_model, config)  # the assistant may not fit
        if (generation_config := getattr(trainer, "generation_config", None)) is not None:
            check_generation(policy, generation_config, getattr(trainer, "_tokenizer", None), "leave out speculate")
    if dist.is_initialized() and dist.get_rank():
        output_dir = None  # the first rank writes the log
    elif trainer is not None and output_dir is None:
        output_dir = trainer.args.output_dir
    head = head_of(drafters)
    keep_heads(policy, lambda: head)
    return Speculation(model, strategy, config, assistant_model, output_dir, trainer)


class Speculation(Speculator, AbstractContextManager["Speculation"]):
    """Result of :func:`speculate`: ends with `stop()`, or as a context manager.

    Attributes:
        log: of the rollouts; None without `output_dir`, and on all ranks but the first.
    """

    def __init__(
        self, model: nn.Module, strategy: str, config: SpeculativeConfig, assistant: Assistant,
        output_dir: str | Path | None, trainer: Any,
    ) -> None:  # fmt: skip
        super().__init__(strategy, config, output_dir)
        self._model = ref(model)
        self._trainer: Callable[[], Any] = (lambda: None) if trainer is None else ref(trainer)
        self._assistant, self._has_warned = assistant, False
        policy = policy_in(model)
        if isinstance(first := DEFAULTS.get(policy), Speculation):
            first.stop()
        DEFAULTS[policy] = self
        device = policy.device if trainer is None else trainer.args.device
        self._reports = _Reports(device, self._log_step, self._begin_training)
        if trainer is not None:  # before callbacks that report what is logged, such as W&B's
            trainer.callback_handler.callbacks.insert(0, self._reports)

    def stop(self) -> None:
        """Makes `generate` plain again; a running call ends as it began."""
        for policy in [policy for policy, default in DEFAULTS.items() if default is self]:
            del DEFAULTS[policy]
        trainer = self._trainer()
        if trainer is not None and self._reports in trainer.callback_handler.callbacks:
            trainer.remove_callback(self._reports)

    def __exit__(self, *_: object) -> None:
        self.stop()

    def refresh(self) -> None:
        """Drafts with the policy's present weights. Needed only for changes that a call cannot detect
        (:func:`spec_trl.refresh`)."""
        if (model := self._model()) is not None:
            refresh(model)

    def __call__(self, generate: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Generates in place of the plain `generate(model, *args, **kwargs)`."""
        names = list(inspect.signature(generate).parameters)[1:]
        kwargs = dict(zip(names, args, strict=False)) | kwargs
        decoding = list[bool]()
        outer: nn.Module = model if (target := self._model()) is None else target
        try:
            if kwargs.get("past_key_values") is not None:
                raise ValueError("past_key_values is given, and speculation fills no cache of the caller.")
            output = self.rollout(model, kwargs, decoding)
        except ValueError as error:
            if decoding or any(isinstance(module, FSDPModule) for module in outer.modules()):
                raise  # it is no refusal; or other ranks, whose calls are served, would gather no weights
            if not self._has_warned:
                warnings.warn(f"a call of generate does not speculate: {error}", stacklevel=3)
                self._has_warned = True
            self.log_plain_call(policy_in(outer), str(error))
            return generate(model, **kwargs)
        wants_dict = setting("return_dict_in_generate", kwargs.get("return_dict_in_generate"), model, (), kwargs)
        return output if wants_dict else output.sequences

    def rollout(self, model: Any, kwargs: dict[str, Any], decoding: list[bool]) -> SpeculativeOutput:
        """Samples for a call of the `generate` of `model` with `kwargs`, and logs the rollout. `decoding` gets an item
        when decoding begins: an earlier error is a refusal."""
        call = kwargs | {"assistant_strategy": self._strategy, "speculative_config": self._config}
        if (config := kwargs.get("generation_config")) is None:
            call["return_dict_in_generate"] = True
        else:  # next to a config it is deprecated
            call.pop("return_dict_in_generate", None)
            call["generation_config"] = copy.copy(config)
            call["generation_config"].return_dict_in_generate = True
        if self._assistant is not None:
            call["assistant_model"] = self._assistant
        if (streamer := kwargs.get("streamer")) is not None:
            call["streamer"] = _HeldStreamer(streamer, decoding)

        def begin(requests: list[Request]) -> RequestQueue:
            decoding.append(True)
            return RequestQueue(requests)

        outer: nn.Module = model if (target := self._model()) is None else target
        is_prepared = any("_original_forward" in vars(one) for one in with_wrappers(outer))  # by Accelerate
        autocast = get_mixed_precision_context_manager(native_amp=True) if is_prepared else nullcontext()
        started, trainer = time.perf_counter(), self._trainer()
        with self._reports.phase("prepare"), self._reports.phase("rollout"), whole_weights(outer), autocast:
            # Not the model's own `generate`: it may add work before and after.
            output: SpeculativeOutput = GenerationMixin.generate(model, **call, make_queue=begin)
        assert output.statistics is not None and output.lengths is not None
        mode: Mode = "train" if trainer is None or self._reports.in_step else "eval"
        self._begin(mode, sum(self.counts.values()) if trainer is None else trainer.state.global_step)
        self._sums.add(output.statistics, len(output.lengths), time.perf_counter() - started)
        drafters = list(Session.of(model).drafters.values())
        self._sums.add_refreshes(drafters)
        lengths = dict.fromkeys(output.statistics.tallies, self._config.first_draft_length)
        _, logged = self._finish(model, drafters, lengths)
        self.counts[mode] += 1
        if trainer is not None:  # without one nothing logs the metrics, and they would pile up
            self._reports.add(mode, logged)
        return output

    def _log_step(self, step: int, seconds: float, phases: dict[str, float]) -> None:
        if (model := self._model()) is not None:
            self.log_step(policy_in(model), step, seconds, phases, None)

    def _begin_training(self, step: int) -> None:
        self.begin_run()
        if self.log is not None and step and self.log.path.exists():
            self.counts = {"train": 0, "eval": 0}
            for record in read_run(self.log.path).rollouts:
                self.counts[record.mode] += record.step < step + (record.mode == "eval")


class _HeldStreamer(BaseStreamer):
    """Buffers streamer output until decoding starts: a refused call that falls back prints its prompt only once."""

    def __init__(self, streamer: BaseStreamer, decoding: list[bool]) -> None:
        self._streamer, self._decoding, self._held = streamer, decoding, list[torch.Tensor]()

    def put(self, value: torch.Tensor) -> None:
        self._held.append(value)
        while self._decoding and self._held:
            self._streamer.put(self._held.pop(0))

    def end(self) -> None:
        self._streamer.end()


class _Reports(StepClock):
    """Adds means of the rollouts' metrics to what a trainer logs, and times its steps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._values: dict[Mode, dict[str, list[float]]] = {"train": {}, "eval": {}}

    def add(self, mode: Mode, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._values[mode].setdefault(name, []).append(value)

    def on_log(
        self, args: Any, state: Any, control: Any, *, model: Any, logs: dict[str, float], **kwargs: Any
    ) -> None:  # fmt: skip
        mode: Mode = "train" if model.training else "eval"  # as in the logs of TRL
        prefix = "rollout" if mode == "train" else "eval_rollout"
        means = {f"{prefix}/{name}": fmean(values) for name, values in self._values[mode].items()}
        self._values[mode].clear()
        logs |= means
        state.log_history[-1].update(means)  # a copy of `logs`
