"""Computes training log-probabilities that equal the sampler's bit for bit, on a CPU.

The sampler's engine reads a micro-batch as generated, without gradient, and stores the input of every decoder layer.
In the policy's forward the stored input replaces what arrives at a layer, and the engine's log-probabilities replace
those of the head. Gradients pass as if nothing were replaced.

Where a layer passes on hidden states alone, all layers but the last skip this forward: they return the stored input
of the next layer, and run in the backward pass on their stored input, as under gradient checkpointing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby, islice
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import LogitsProcessor, PreTrainedModel, TemperatureLogitsWarper

from ..generation.engine.forwards.runner_choice import exactness, runner_for
from ..generation.engine.kv.base import Capacity
from ..generation.engine.kv.cache import autocast_dtype
from ..generation.engine.network.family import TOKEN_TYPES, Family
from ..generation.engine.network.family_hooks import takes_positions
from ..generation.engine.network.media import MediaPrompt, media_prompts, take_inputs
from ..generation.engine.network.shadow import decoder_layers
from ..generation.engine.network.snapshot import snapshot_of
from ..generation.engine.requirements import policy_in
from ..generation.engine.sampling.support import unpack
from ..generation.options import SpeculativeConfig
from ..generation.session import Session
from .read_completions import read_completions
from .rollout_memory import whole_weights
from .sampled_support import SampledSupport


class ExactLogprobs:
    """Computes log-probabilities of completions by the sampler's engine, with the gradient of TRL's forward.

    Args:
        model: trained; may wrap the policy.
        accelerator: of the training.
        config: of rollouts.
        processors: of rollouts; each acts on one position at a time.
        support: of the sampled tokens, in place of the processors but for the temperature; None: there is none.

    Raises:
        ValueError: sampler and training could differ, or a rehearsal fails.
    """

    def __init__(
        self,
        model: nn.Module,
        accelerator: Accelerator,
        config: SpeculativeConfig,
        processors: Iterable[LogitsProcessor] | None,
        support: SampledSupport | None = None,
    ) -> None:
        policy = policy_in(model)
        with accelerator.autocast():
            exact = exactness(snapshot_of(policy), policy, replace(config, exact="auto"))
        if exact is not True:
            raise _refusal(f"{type(policy).__name__} is not exact on this machine: {exact}")
        kinds = LogitsProcessor if support is None else TemperatureLogitsWarper
        self._processors = [one for one in processors or () if isinstance(one, kinds)]
        self._accelerator, self._config, self._support = accelerator, config, None
        self._beside: list[Beside] | None  # None: a layer passes on more than hidden states, so none skips a forward
        try:
            self._rehearse(model, policy)
        except Exception as error:
            raise _refusal(f"a rehearsal failed with {type(error).__name__}: {error}") from error
        self._support = support

    def _rehearse(self, model: nn.Module, policy: PreTrainedModel) -> None:
        """Scores two rows of two tokens, with a gradient; finds what layers return beside hidden states."""
        ids = torch.arange(4, device=self._accelerator.device).expand(2, 4)
        mask = torch.ones_like(ids)
        mask[1, 0] = 0  # padding
        self._beside = _returned_beside(policy)
        learned = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        with torch.enable_grad():
            labels = ids.masked_fill(mask == 0, -100)
            call = {"input_ids": ids, "attention_mask": mask, "labels": labels, "fused_lm_head": True}
            logprobs = self.instead_of(model, 2)(**call).log_probs
            torch.autograd.grad(logprobs.sum(), learned, allow_unused=True)

    def instead_of(
        self, model: nn.Module, width: int, computes_entropy: bool = False, tool_mask: Iterable[Any] | None = None
    ) -> Callable[..., Any]:
        """Returns what TRL calls in place of `model`, on some rows at a time, for log-probabilities of the last
        `width` columns.

        Args:
            model: the policy or a reference policy; may be wrapped.
            width: columns of completions.
            computes_entropy: whether outputs need entropies.
            tool_mask: for each row to come 1 at a token of the model, and 0 at one of a tool, the first `width` at
                most; None: there are no tools.
        """
        masks = None if tool_mask is None else iter(tool_mask)
        supports = None if self._support is None else iter(self._support.of_columns(width))

        def forward(input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **inputs: Any) -> Any:
            """`log_probs` in nats, 0 at labels -100, and perhaps `entropy`, `[B, width]` each, of `[B, T]` inputs."""
            turns = [[range(width)]] * len(input_ids)
            if masks is not None:
                turns = [_turns(mask, width) for mask in islice(masks, len(input_ids))]
            packed = None if supports is None else torch.stack([*islice(supports, len(input_ids))])  # [B, n, bytes]
            labels, whole = labels[:, -width:], self._accelerator.unwrap_model(model)
            with self._accelerator.autocast():
                with whole_weights(whole) as policy:
                    media = take_inputs(dict(inputs))
                    read = self._read(policy, input_ids, attention_mask, turns, width, media, packed)
                logprobs, states = read[0].masked_fill(labels == -100, 0), read[1]
                if not torch.is_grad_enabled() and not computes_entropy:
                    return SimpleNamespace(log_probs=logprobs)
                inputs |= {"input_ids": input_ids, "attention_mask": attention_mask}
                if self._support is None or packed is None:
                    output = self._forward(model, policy, states, width, inputs | {"shift_labels": labels})
                else:
                    output = self._forward(model, policy, states, width, inputs | {"fused_lm_head": False})
                    scored = self._support.score(output.logits, input_ids, attention_mask, packed)
                    output.log_probs, output.entropy = scored
                output.log_probs = _Value.apply(output.log_probs, logprobs)
                return output

        return forward

    def _forward(
        self, model: nn.Module, policy: PreTrainedModel, states: list[Tensor], width: int, inputs: dict[str, Any]
    ) -> Any:
        """The output of TRL's head for the last `width` columns, after layers that read `states`."""
        positions, mask = _positions(inputs["attention_mask"]), inputs["attention_mask"]
        # Others are undefined; a routers' loss reads them too.
        is_read = ((mask > 0) & (positions < mask.sum(1, keepdim=True) - 1))[..., None]  # [B, T, 1]
        has_media = bool(take_inputs(dict(inputs)))
        if not has_media and takes_positions(policy):  # with media the family finds positions
            inputs["position_ids"] = positions
        is_sharded = any(isinstance(module, FSDPModule) for module in policy.modules())
        computes = has_media or is_sharded or inputs.get("output_router_logits")
        while True:
            reading = _reading(decoder_layers(policy), states, is_read, None if computes else self._beside)
            try:
                with reading, _before_completions(policy, width):
                    return model(**inputs)
            except _PassesMore:
                self._beside = None

    def _read(
        self,
        policy: PreTrainedModel,
        ids: Tensor,
        mask: Tensor,
        turns: Sequence[Sequence[range]],
        width: int,
        media: dict[str, Any],
        packed: Tensor | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns log-probabilities `[B, width]`, and the inputs of the decoder layers after the first, `[B, T,
        hidden]` each; values at padding are undefined."""
        texts, is_real = ids[:, :-width].cpu(), mask[:, :-width].bool().cpu()  # one copy for all rows
        prompts = [text[real] for text, real in zip(texts, is_real, strict=True)]
        several = max(map(len, turns)) > 1
        columns, exact = max(map(len, prompts)) + width * (1 + several), self._config.exact is True
        layers, images = range(1, len(decoder_layers(policy))), list[MediaPrompt | None]([None] * len(ids))
        if media:
            of_prompts = {name: value[:, :-width] if name in TOKEN_TYPES else value for name, value in media.items()}
            images = media_prompts(policy, of_prompts, prompts, 1)
        offsets = any(image is not None and image.offset for image in images)
        with Session.lend(policy) as session:
            family, capacity = Family.of(policy), Capacity(len(ids), columns)
            runner = runner_for(session, policy, family, self._config, capacity, exact=exact, offsets=offsets)
            try:
                logprobs, states = read_completions(
                    runner, prompts, ids[:, -width:], layers, partial(self._process, packed), turns, images
                )
            except BaseException:
                session.shadow = None  # the hooks that read its states may be on it
                raise
            session.check_shadow()
        positions = _positions(mask)[..., None]  # [B, T, 1]
        return logprobs, [state.take_along_dim(positions, dim=1) for state in states]

    def _process(self, packed: Tensor | None, scores: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        flat = scores.flatten(0, 1)  # [b * q, V]
        for processor in self._processors:
            flat = processor(torch.empty(len(flat), 0, dtype=torch.long), flat)
        scores = flat.view(scores.shape)
        if packed is None:
            return scores
        return scores.masked_fill(~unpack(packed[rows[:, None], columns], scores.shape[2]), -torch.inf)


def _refusal(reason: str) -> ValueError:
    return ValueError(f"exact_logprobs=True is not served: {reason}. Set exact_logprobs=False.")


def _turns(mask: Iterable[Any], width: int) -> list[range]:
    """The columns of each turn's tokens in a completion: where `mask` is 1. Padding is read like any token."""
    ones = [*map(bool, mask)]
    ones += [True] * (width - len(ones))
    if not any(ones):  # a completion that TRL leaves out
        return [range(width)]
    runs = [[*run] for is_ours, run in groupby(range(width), ones.__getitem__) if is_ours]
    return [range(run[0], run[-1] + 1) for run in runs]


def _positions(mask: Tensor) -> Tensor:
    """Position ids `[B, T]` int64, counted from the first token; padding has valid ones."""
    return (mask.cumsum(1) - 1).clamp(min=0)


@contextmanager
def _before_completions(policy: PreTrainedModel, width: int) -> Iterator[None]:
    """Passes to the head, within the block, only the states that predict the `width` tokens of completions."""

    def cut(_: nn.Module, __: Any, output: Any) -> None:
        output.last_hidden_state = output.last_hidden_state[:, -width - 1 : -1]  # [B, width, hidden]

    handle = policy.base_model.register_forward_hook(cut)
    try:
        yield
    finally:
        handle.remove()


Beside = tuple[None, ...] | None
"""What a layer returns after hidden states; None: it returns a tensor alone."""


def _returned_beside(policy: PreTrainedModel) -> list[Beside] | None:
    """The same of each decoder layer; None: some return more."""
    seen: list[Any] = []
    hooks = [layer.register_forward_hook(lambda *called: seen.append(called[2])) for layer in decoder_layers(policy)]
    try:
        with torch.no_grad():
            policy(input_ids=torch.arange(2, device=policy.device)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    beside = [None if isinstance(output, Tensor) else output[1:] for output in seen]
    return None if any(value is not None for values in beside for value in values or ()) else beside


@contextmanager
def _reading(
    layers: nn.ModuleList, states: Sequence[Tensor], is_read: Tensor, beside: Sequence[Beside] | None
) -> Iterator[None]:
    """Within the block the `layers` after the first read `states` in place of what arrives, where `is_read` `[B, T,
    1]`. All but the last skip the forward if `beside` (:func:`_returned_beside`) is given."""
    names, returned = ("forward", "gradient_checkpointing"), list[Tensor]()
    before = [{name: vars(layer)[name] for name in names if name in vars(layer)} for layer in layers]
    layer: Any
    for index, layer in enumerate(layers):
        run = partial(_run, layer, layer.forward)
        if beside is None:
            state = states[index - 1] if index else None
            layer.forward = partial(_compute, run, _checkpoint_of(layer), state, is_read)
        else:
            output = states[index] if index < len(states) else None
            layer.forward = partial(_skip, layer, run, output, beside[index], returned)
        layer.gradient_checkpointing = False  # in transformers 5.17 it would surround this forward
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            for name in names:
                delattr(layer, name)
            for name, value in own.items():
                setattr(layer, name, value)


def _run(layer: Any, usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The `usual` forward of `layer` without gradient checkpointing, which surrounds it."""
    checkpoints = getattr(layer, "gradient_checkpointing", False)
    layer.gradient_checkpointing = False  # the same object
    try:
        return usual(*args, **kwargs)
    finally:
        layer.gradient_checkpointing = checkpoints


def _checkpoint_of(layer: Any) -> Callable[..., Any]:
    """Calls a function with its arguments, under gradient checkpointing where `layer` has it."""
    if layer.training and getattr(layer, "gradient_checkpointing", False):
        checkpoint: Callable[..., Any] = layer._gradient_checkpointing_func
        return checkpoint
    return lambda function, *args: function(*args)


def _compute(
    run: Callable[..., Any],
    checkpoint: Callable[..., Any],
    state: Tensor | None,
    is_read: Tensor,
    hidden_states: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The forward `run` of a layer that reads `state` where `is_read`; None: what arrives."""
    if state is not None:
        hidden_states = _Value.apply(hidden_states, torch.where(is_read, state, hidden_states.detach()))
    return checkpoint(partial(run, **kwargs), hidden_states, *args)


def _skip(
    layer: nn.Module,
    run: Callable[..., Any],
    output: Tensor | None,
    beside: Beside,
    returned: list[Tensor],
    hidden_states: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A forward that returns `output`, and a layer's results `beside` it, with the gradient of the forward `run`, and
    stores `output` in `returned`; None: it runs. It checks that its input is what the layer before returned."""
    passed = (*args, *kwargs.values())
    more = any(isinstance(value, dict) or (isinstance(value, Tensor) and value.requires_grad) for value in passed)
    if more or (returned and hidden_states is not returned[0]):
        raise _PassesMore
    if output is None:
        return run(hidden_states, *args, **kwargs)

    def compute(fed: Tensor) -> Tensor:
        result = run(fed, *args, **kwargs)
        return result if beside is None else result[0]

    learned = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    value: Tensor = _Layer.apply(compute, output, hidden_states, *learned)
    returned[:] = [value]
    return value if beside is None else (value, *beside)


class _PassesMore(Exception):
    """A layer is given more than what the layer before returned."""


class _Layer(torch.autograd.Function):
    """Returns `output` `[B, T, hidden]` with the gradient of `compute(hidden)`, run in the backward pass."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], output: Tensor, hidden: Tensor, *learned: Tensor) -> Any:
        ctx.compute, ctx.autocast = compute, autocast_dtype(hidden.device)
        ctx.save_for_backward(hidden, *learned)
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, *learned = ctx.saved_tensors
        with torch.enable_grad(), torch.autocast(hidden.device.type, ctx.autocast, ctx.autocast is not None):
            fed = hidden.detach().requires_grad_()
            output = ctx.compute(fed)
        return None, None, *torch.autograd.grad(output, [fed, *learned], gradient, allow_unused=True)


class _Value(torch.autograd.Function):
    """Returns `value` with the gradient of `scored`, of the same shape."""

    @staticmethod
    def forward(ctx: Any, scored: Tensor, value: Tensor) -> Tensor:
        return value.to(scored.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None
