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
from transformers import LogitsProcessor, PreTrainedModel

from ..generation.engine.forwards.runner import EagerRunner
from ..generation.engine.forwards.runner_choice import exactness, runner_for
from ..generation.engine.kv.base import Capacity
from ..generation.engine.kv.cache import autocast_dtype
from ..generation.engine.network.family import TOKEN_TYPES, Family
from ..generation.engine.network.family_hooks import takes_positions
from ..generation.engine.network.media import MediaPrompt, media_prompts, take_inputs
from ..generation.engine.network.shadow import decoder_layers
from ..generation.engine.network.snapshot import snapshot_of
from ..generation.engine.requirements import policy_in
from ..generation.engine.rows import Request, Rows, Spans
from ..generation.engine.sampling.noise import token_logprobs, widen
from ..generation.engine.saved_row import TARGET, SavedRow
from ..generation.options import SpeculativeConfig
from ..generation.session import Session
from .rollout_memory import whole_weights


class ExactLogprobs:
    """Computes log-probabilities of completions by the sampler's engine, with the gradient of TRL's forward.

    Args:
        model: trained; may wrap the policy.
        accelerator: of the training.
        config: of rollouts.
        processors: of rollouts; each acts on one position at a time.

    Raises:
        ValueError: sampler and training could differ, or a rehearsal fails.
    """

    def __init__(
        self,
        model: nn.Module,
        accelerator: Accelerator,
        config: SpeculativeConfig,
        processors: Iterable[LogitsProcessor] | None,
    ) -> None:
        policy = policy_in(model)
        with accelerator.autocast():
            exact = exactness(snapshot_of(policy), policy, replace(config, exact="auto"), policy)
        if exact is not True:
            raise _refusal(f"{type(policy).__name__} is not exact on this machine: {exact}")
        self._accelerator, self._config, self._processors = accelerator, config, list(processors or ())
        self._beside: list[Beside] | None  # None: a layer passes on more than hidden states, so none skips a forward
        try:
            self._rehearse(model, policy)
        except Exception as error:
            raise _refusal(f"a rehearsal failed with {type(error).__name__}: {error}") from error

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

        def forward(input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **inputs: Any) -> Any:
            """`log_probs` in nats, 0 at labels -100, and perhaps `entropy`, `[B, width]` each, of `[B, T]` inputs."""
            turns = [[range(width)]] * len(input_ids)
            if masks is not None:
                turns = [_turns(mask, width) for mask in islice(masks, len(input_ids))]
            labels, whole = labels[:, -width:], self._accelerator.unwrap_model(model)
            with self._accelerator.autocast():
                with whole_weights(whole) as policy:
                    read = self._read(policy, input_ids, attention_mask, turns, width, take_inputs(dict(inputs)))
                logprobs, states = read[0].masked_fill(labels == -100, 0), read[1]
                if not torch.is_grad_enabled() and not computes_entropy:
                    return SimpleNamespace(log_probs=logprobs)
                inputs |= {"input_ids": input_ids, "attention_mask": attention_mask, "shift_labels": labels}
                output = self._forward(model, policy, states, width, inputs)
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
                    runner, prompts, ids[:, -width:], layers, self._process, turns, images
                )
            except BaseException:
                session.shadow = None  # the hooks that read its states may be on it
                raise
            session.check_shadow()
        positions = _positions(mask)[..., None]  # [B, T, 1]
        return logprobs, [state.take_along_dim(positions, dim=1) for state in states]

    def _process(self, scores: Tensor) -> Tensor:
        for processor in self._processors:
            scores = processor(torch.empty(len(scores), 0, dtype=torch.long), scores)
        return scores


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


_LOGITS = 1 << 25
"""Most logits computed at a time: 128 MiB in float32."""


@torch.no_grad()
def read_completions(
    runner: EagerRunner,
    prompts: Sequence[Tensor],
    completions: Tensor,
    layers: Sequence[int],
    process: Callable[[Tensor], Tensor],
    turns: Sequence[Sequence[range]] | None = None,
    media: Sequence[MediaPrompt | None] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities of `completions`, and hidden states.

    Args:
        runner: new, over a cache with a row per prompt, and columns for the longest text; with several turns, for the
            longest turn after it.
        prompts: `[length]` int64 each. Equal prompts are read once.
        completions: `[B, n]` int64, n > 0. Padding is read like any token.
        layers: whose inputs are returned, in transformers' count (:func:`keep_states`).
        process: the logits processors of a generation, on `[m, vocabulary]` scores.
        turns: of each row, columns of completions that were generated in one turn, ascending; a tool wrote the rest.
            None: one turn wrote all.
        media: of each prompt; None: there is none.

    Returns:
        `[B, n]` float32 in nats, 0 where a tool wrote, and for each of `layers` `[B, columns, hidden]`, by position;
        values at a row's last token and at padding are undefined.
    """
    columns, device = runner.cache.columns, completions.device
    turns, media = turns or [(range(completions.shape[1]),)] * len(prompts), media or [None] * len(prompts)
    logprobs, states, saved = torch.zeros(completions.shape), list[Tensor](), dict[int, SavedRow]()
    texts = [torch.cat([prompt, row]) for prompt, row in zip(prompts, completions.cpu(), strict=True)]

    def store(features: Tensor, positions: Tensor, first: int) -> None:
        if not states:
            states.extend(features.new_zeros(len(prompts), columns, part.shape[2]) for part in split(features))
        to = torch.tensor(rows.indices[first : first + len(positions)])[:, None]  # [b, 1]
        for state, part in zip(states, split(features), strict=True):
            state[to, positions] = part

    def split(features: Tensor) -> tuple[Tensor, ...]:
        return features.chunk(len(layers), dim=-1)  # [b, q, hidden] each

    def score(logits: Tensor, tokens: Tensor) -> Tensor:
        return token_logprobs(process(widen(logits).flatten(0, 1)).view(logits.shape), tokens).float()  # [b, q]

    if layers:
        runner.listen(layers, store)
    for turn in range(max(map(len, turns))):
        rows = Rows(runner.cache.rows, columns, device)
        requests = []
        for index, (text, prompt, own) in enumerate(zip(texts, prompts, turns, strict=True)):
            if turn < len(own):
                spans: Spans = tuple((len(prompt) + one[0], len(prompt) + one[-1]) for one in own[:turn])
                start, end = len(prompt) + own[turn].start, len(prompt) + own[turn].stop
                request = Request(index, text[:start], end, 0, saved.pop(index, None), spans, media[index], device)
                requests.append(request)
        admission = rows.admit(requests)
        _, logits = runner.read_prompts(rows, admission)  # [leaders, 1, V]
        assert logits is not None
        order = torch.tensor(rows.indices)  # [b]
        for state in states:
            state[order[admission.followers]] = state[order[admission.sources]]
        lengths = [len(turns[index][turn]) for index in rows.indices]
        length = max(lengths)
        for row, index in enumerate(rows.indices):
            rows.tokens[row, rows.host_lengths[row] : len(texts[index])] = texts[index][rows.host_lengths[row] :]
        tokens = rows.window(0, length)  # [b, length]
        scores = [score(logits[[*admission.first_token_rows.values()]], tokens[:, :1])]
        most = max(_LOGITS // (len(requests) * logits.shape[2]), 1)
        for first in range(0, length - 1, most):
            count = min(most, length - 1 - first)
            logits = runner.forward(rows.window(first, count), rows.columns_after(first, count), columns)
            runner.cache.commit([min(max(own - 1 - first, 0), count) for own in lengths])
            scores.append(score(logits, tokens[:, first + 1 : first + 1 + count]))
        for row, (index, values) in enumerate(zip(rows.indices, torch.cat(scores, dim=1), strict=True)):
            own = turns[index]
            logprobs[index, own[turn].start : own[turn].stop] = values[: lengths[row]]
            if turn + 1 < len(own):  # the next turn reads the last token
                end = len(prompts[index]) + own[turn][-1]
                kv = runner.cache.export_row(row, 0, end)
                saved[index] = SavedRow(None, None, 0, {TARGET: (end, partial(dict[Any, Any], kv))})
    return logprobs, states
