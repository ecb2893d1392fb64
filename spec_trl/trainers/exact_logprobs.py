"""Computes training log-probabilities that equal the sampler's bit for bit, on a CPU.

The sampler's engine reads a micro-batch as generated, without gradient, and stores the input of every decoder layer.
In the policy's forward all layers but the last compute nothing and return the stored input of the next layer, and the
engine's log-probabilities replace those of the head. In the backward pass a layer runs as usual on its stored input,
as under gradient checkpointing, with its ordinary gradient.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import LogitsProcessor, PreTrainedModel

from ..generation.engine.forwards.runner import EagerRunner
from ..generation.engine.forwards.runner_choice import exactness, runner_for
from ..generation.engine.kv.base import Capacity
from ..generation.engine.kv.cache import autocast_dtype
from ..generation.engine.network.family import Family
from ..generation.engine.network.shadow import decoder_layers
from ..generation.engine.network.snapshot import snapshot_of
from ..generation.engine.requirements import policy_in
from ..generation.engine.rows import Request, Rows
from ..generation.engine.sampling.noise import token_logprobs, widen
from ..generation.options import SpeculativeConfig
from ..generation.session import Session


class ExactLogprobs:
    """Computes log-probabilities of completions by the sampler's engine, with the gradient of TRL's forward.

    Args:
        model: trained; may wrap the policy.
        accelerator: of the training.
        config: of rollouts.
        processors: of rollouts; each acts on one position at a time.

    Raises:
        ValueError: sampler and training could differ.
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
            exact = exactness(snapshot_of(policy), policy, replace(config, exact="auto"))
        if exact is not True:
            raise _refusal(f"{type(policy).__name__} is not exact on this machine: {exact}")
        self._accelerator, self._config, self._processors = accelerator, config, list(processors or ())
        self._beside: list[tuple[None, ...] | None] = _returned_beside(policy)
        self._rehearse(model)

    def _rehearse(self, model: nn.Module) -> None:
        """Scores four tokens, with a gradient, by layers that return stored states."""
        ids = torch.arange(4, device=self._accelerator.device)[None]
        learned = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        try:
            with torch.enable_grad():
                logprobs, *_ = self(model, ids, torch.ones_like(ids), 2)
                torch.autograd.grad(logprobs.sum(), learned, allow_unused=True)
        except _OtherInput as error:
            raise _refusal(error.reason) from None

    def __call__(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Replaces TRL's `_get_per_token_logps_and_entropies`: log-probabilities in nats, and entropies if requested,
        `[B, n]` each, of the last n = `logits_to_keep` columns of `input_ids` `[B, T]`."""
        policy, size, parts = policy_in(self._accelerator.unwrap_model(model)), batch_size or len(input_ids), []
        for ids, mask in zip(input_ids.split(size), attention_mask.split(size), strict=True):
            with self._accelerator.autocast():
                logprobs, states = self._read(policy, ids, mask, logits_to_keep)
                labels = ids.masked_fill(mask == 0, -100)[:, -logits_to_keep:]  # [B, n]
                logprobs, entropies = logprobs.masked_fill(labels == -100, 0), None
                if torch.is_grad_enabled() or compute_entropy:
                    with (
                        _returning(decoder_layers(policy), states, self._beside),
                        _before_completions(policy, logits_to_keep),
                    ):
                        output = model(
                            input_ids=ids, attention_mask=mask, position_ids=_positions(mask), shift_labels=labels,
                            fused_lm_head=True,
                        )  # fmt: skip
                    logprobs, entropies = _Value.apply(output.log_probs, logprobs), output.entropy
            parts.append((logprobs, entropies))
        joined = [torch.cat(part) for part in zip(*parts, strict=True) if part[0] is not None]
        return joined[0], joined[1] if compute_entropy else None, None

    def _read(self, policy: PreTrainedModel, ids: Tensor, mask: Tensor, width: int) -> tuple[Tensor, list[Tensor]]:
        """Returns log-probabilities `[B, width]`, and the inputs of the decoder layers after the first, `[B, T,
        hidden]` each; values at padding are undefined."""
        texts, is_real = ids[:, :-width].cpu(), mask[:, :-width].bool().cpu()  # one copy for all rows
        prompts = [text[real] for text, real in zip(texts, is_real, strict=True)]
        columns, exact = max(map(len, prompts)) + width, self._config.exact is True
        layers = range(1, len(decoder_layers(policy)))
        with Session.lend(policy) as session:
            family, capacity = Family.of(policy), Capacity(len(ids), columns)
            runner = runner_for(session, policy, family, self._config, capacity, exact=exact)
            try:
                logprobs, states = read_completions(runner, prompts, ids[:, -width:], layers, self._process)
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


def _positions(mask: Tensor) -> Tensor:
    """Position ids `[B, T]` int64, counted from the first token; padding has valid ones."""
    return (mask.cumsum(1) - 1).clamp(min=0)


@contextmanager
def _before_completions(policy: PreTrainedModel, width: int) -> Iterator[None]:
    """Passes to the head, within the block, only the states that predict the `width` tokens of completions."""

    def cut(_: nn.Module, __: Any, output: Any) -> None:
        output.last_hidden_state = output.last_hidden_state[:, -width - 1 : -1]  # [B, width, hidden]

    handle = policy.get_decoder().register_forward_hook(cut)
    try:
        yield
    finally:
        handle.remove()


def _returned_beside(policy: PreTrainedModel) -> list[tuple[None, ...] | None]:
    """The results of each decoder layer after its hidden states; None: it returns a tensor alone. Raises ValueError
    for results other than None."""
    seen: list[Any] = []
    layers = decoder_layers(policy)
    hooks = [layer.register_forward_hook(lambda _, __, output: seen.append(output)) for layer in layers]
    try:
        with torch.no_grad():
            policy(input_ids=torch.arange(2, device=policy.device)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for layer, output in zip(layers, seen, strict=True):
        if not isinstance(output, Tensor) and any(value is not None for value in output[1:]):
            raise _refusal(f"a {type(layer).__name__} returns more than hidden states")
    return [None if isinstance(output, Tensor) else output[1:] for output in seen]


@contextmanager
def _returning(
    layers: nn.ModuleList, states: Sequence[Tensor], beside: Sequence[tuple[None, ...] | None]
) -> Iterator[None]:
    """Makes all decoder `layers` but the last return `states` within the block, and the last one its usual result;
    `beside`: see :func:`_returned_beside`."""
    forwards = [vars(layer).get("forward") for layer in layers]
    returned: list[Tensor] = []
    for layer, output, others in zip(layers, [*states, None], beside, strict=True):
        layer.forward = _replacement(layer, layer.forward, output, others, returned)
    try:
        yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _replacement(
    layer: Any,
    usual: Callable[..., Any],
    output: Tensor | None,
    beside: tuple[None, ...] | None,
    returned: list[Tensor],
) -> Callable[..., Any]:
    """Makes a forward that returns `output`, and a layer's results `beside` it, with the gradient of the `usual`
    forward, and stores `output` in `returned`; None: the usual forward. It checks that its input is the output stored
    by the layer before."""

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        others = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.requires_grad]
        if others or (returned and hidden_states is not returned[0]):
            raise _OtherInput(layer)
        if output is None:
            return usual(hidden_states, *args, **kwargs)

        def compute(fed: Tensor) -> Tensor:
            checkpoints = getattr(layer, "gradient_checkpointing", False)
            layer.gradient_checkpointing = False  # the same object
            try:
                result = usual(fed, *args, **kwargs)
            finally:
                layer.gradient_checkpointing = checkpoints
            return result if beside is None else result[0]

        learned = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        value: Tensor = _Layer.apply(compute, output, hidden_states, *learned)
        returned[:] = [value]
        return value if beside is None else (value, *beside)

    return forward


class _OtherInput(RuntimeError):
    def __init__(self, layer: nn.Module) -> None:
        self.reason = f"a {type(layer).__name__} is fed more than what the layer before returns"
        super().__init__(f"exact_logprobs=True: {self.reason}. Set exact_logprobs=False.")


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
) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities of `completions`, and hidden states.

    Args:
        runner: new, over a cache with a row per prompt, and columns for the longest text.
        prompts: `[length]` int64 each. Equal prompts are read once.
        completions: `[B, n]` int64, n > 0. Padding is read like any token.
        layers: whose inputs are returned, in transformers' count (:func:`keep_states`).
        process: the logits processors of a generation, on `[m, vocabulary]` scores.

    Returns:
        `[B, n]` float32 in nats, and for each of `layers` `[B, columns, hidden]`, by position; values at a row's last
        token and at padding are undefined.
    """
    rows, columns = Rows(runner.cache.rows, runner.cache.columns, completions.device), runner.cache.columns
    length, states = completions.shape[1], list[Tensor]()

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
    where = completions.device
    admission = rows.admit(
        [Request(at, prompt, len(prompt) + length, 0, device=where) for at, prompt in enumerate(prompts)]
    )
    _, logits = runner.read_prompts(rows, admission)  # [leaders, 1, V]
    assert logits is not None
    order = torch.tensor(rows.indices)  # [B]
    tokens = completions[order]  # [B, n]
    rows.write(0, tokens)
    for state in states:
        state[order[admission.followers]] = state[order[admission.sources]]
    scores = [score(logits[[*admission.first_token_rows.values()]], tokens[:, :1])]
    most = max(_LOGITS // (len(prompts) * logits.shape[2]), 1)
    for first in range(0, length - 1, most):
        count = min(most, length - 1 - first)
        logits = runner.forward(rows.window(first, count), rows.columns_after(first, count), columns)
        runner.cache.commit([count] * len(prompts))
        scores.append(score(logits, tokens[:, first + 1 : first + 1 + count]))
    logprobs = torch.empty(completions.shape)
    logprobs[order] = torch.cat(scores, dim=1)
    return logprobs, states
