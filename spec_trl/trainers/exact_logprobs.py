"""Log-probabilities of training forwards that equal the sampler's, bit for bit, on a CPU.

The sampler's engine reads a micro-batch as it was generated, without gradient, and leaves what each decoder layer is
fed. In TRL's forward the layers, but for the last, return that and compute nothing, and the engine's log-probabilities
take the place of TRL's. In the backward pass a layer runs as usual on what it is fed, as under gradient checkpointing,
and has its ordinary gradient.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, PreTrainedModel
from trl import GRPOTrainer

from ..cpu_products import DTYPES, reading_prompts
from ..generation.configuration import SpeculativeConfig
from ..generation.engine.cache import autocast_dtype
from ..generation.engine.hidden_states import keep_states
from ..generation.engine.kept_runner import exactness, keep_shadow, runner_for
from ..generation.engine.noise import token_logprobs
from ..generation.engine.processors import widen
from ..generation.engine.requirements import policy_in
from ..generation.engine.shadow import decoder_layers
from ..native_code import compiler
from .sampler_mismatch import is_comparable


_LOGITS = 1 << 25
"""Logits that are computed at a time: 128 MiB in float32."""


class ExactLogprobs:
    """What the sampler's engine computes for given completions, with the gradient of TRL's forward.

    Args:
        trainer: whose rollouts it repeats.
        config: of rollouts.
        processors: of rollouts, which act on each position alone.

    Raises:
        ValueError: the two could differ.
    """

    def __init__(
        self, trainer: GRPOTrainer, config: SpeculativeConfig, processors: Iterable[LogitsProcessor] | None
    ) -> None:
        policy = policy_in(trainer.model)
        _check(trainer, policy, config, processors)
        with trainer.accelerator.autocast():
            exact = exactness(policy, replace(config, exact="auto"), policy)
        if exact is not True:
            raise _refusal(f"{type(policy).__name__} is not exact on this machine: {exact}")
        self._accelerator, self._config, self._processors = trainer.accelerator, config, list(processors or ())

    def __call__(
        self,
        score: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]],
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As `score`, TRL's `_get_per_token_logps_and_entropies`, for `input_ids` and `attention_mask` `[B, T]`:
        left-padded prompts, and right-padded completions of `logits_to_keep` columns."""
        policy, size, parts = policy_in(self._accelerator.unwrap_model(model)), batch_size or len(input_ids), []
        for ids, mask in zip(input_ids.split(size), attention_mask.split(size), strict=True):
            with torch.no_grad(), self._accelerator.autocast():
                logprobs, states = self._read(policy, ids, mask, logits_to_keep)
            with _at_positions(policy, mask), _returning(decoder_layers(policy), states):
                found = score(model, ids, mask, logits_to_keep, **more)
            counts = mask[:, -logits_to_keep:].bool()  # [B, n]
            parts.append((_Value.apply(found[0], logprobs.masked_fill(~counts, 0)), found[1]))
        entropies = [entropy for _, entropy in parts if entropy is not None]
        return torch.cat([own for own, _ in parts]), torch.cat(entropies) if entropies else None, None

    def _read(self, policy: PreTrainedModel, ids: Tensor, mask: Tensor, width: int) -> tuple[Tensor, list[Tensor]]:
        """Log-probabilities `[B, width]`, and what the decoder layers after the first are fed, `[B, T, hidden]` each.
        Padding and the last column have any values."""
        leaders, followers, sources = _by_prompt(ids, mask, width)
        order = torch.tensor(leaders + followers)  # of rows in the cache
        ids, mask = ids[order], mask[order]
        (rows, total), lengths = ids.shape, mask[:, :-width].sum(1, keepdim=True)  # [B, 1], of prompts
        longest, starts = int(lengths.max()), total - width - lengths  # [B, 1], the columns where prompts begin
        tokens = ids.gather(1, (starts + torch.arange(longest + width)).clamp(max=total - 1))
        runner = runner_for(policy, rows, longest + width, self._config, exact=self._config.exact is True)
        newest: dict[int, Tensor] = {}  # what layers are fed in the newest forward
        states: list[Tensor] = []

        def keep(positions: Tensor) -> None:
            if not states:
                states.extend(state.new_zeros(rows, total, state.shape[2]) for state in newest.values())
            columns = starts[: len(positions)] + positions  # [b, q]
            row, at = (columns < total).nonzero(as_tuple=True)
            for state, new in zip(states, newest.values(), strict=True):
                state[order[row], columns[row, at]] = new[row, at]

        hooks = keep_states(runner.network, range(1, len(decoder_layers(runner.network))), newest)
        try:
            positions = torch.arange(longest).expand(len(leaders), -1)
            ends = [(row, int(length) - 1) for row, length in enumerate(lengths[: len(leaders)])]
            with reading_prompts():
                logits = runner.prefill(tokens[: len(leaders), :longest], positions, longest, 0, ends)
            assert logits is not None
            keep(positions)
            runner.cache.copy_rows(sources, list(range(len(leaders), rows)), lengths[len(leaders) :, 0].tolist())
            for state in states:
                state[followers] = state[[leaders[source] for source in sources]]
            found = [self._logprobs(logits[[*range(len(leaders)), *sources]], tokens.gather(1, lengths))]
            step = max(_LOGITS // (rows * logits.shape[2]), 1)
            for first in range(0, width - 1, step):
                positions = lengths + torch.arange(first, min(first + step, width - 1))  # [B, q]
                logits = runner.forward(tokens.gather(1, positions), positions, longest + first + step)
                found.append(self._logprobs(logits, tokens.gather(1, positions + 1)))
                keep(positions)
        finally:
            for hook in hooks:
                hook.remove()
        keep_shadow(policy, runner.network)
        logprobs = torch.empty(rows, width)
        logprobs[order] = torch.cat(found, 1)
        return logprobs, states

    def _logprobs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """`[b, q, V]` and `[b, q]` → `[b, q]` float32, as the sampler has them."""
        scores = widen(logits).flatten(0, 1)
        for processor in self._processors:
            scores = processor(tokens.view(-1, 1), scores)
        return token_logprobs(scores.view(logits.shape), tokens).float()


def _check(
    trainer: Any, policy: PreTrainedModel, config: SpeculativeConfig, processors: Iterable[LogitsProcessor] | None
) -> None:
    """Raises ValueError for a training whose two forwards could differ, or whose layers cannot be run later."""
    args, device = trainer.args, trainer.accelerator.device
    dropout = [name for name, module in policy.named_modules() if isinstance(module, nn.Dropout) and module.p > 0]
    reasons = {
        f"the policy is on {device}, not on a CPU": device.type != "cpu",
        "there is no C++ compiler": compiler() is None,
        "hooks on the policy's decoder layers would act twice": any(
            layer._forward_hooks or layer._forward_pre_hooks for layer in decoder_layers(policy)
        ),
        f"the policy is in {policy.dtype}, not in one of {list(DTYPES)}": policy.dtype not in DTYPES,
        "a rollout_func generates": processors is None,
        "tools take turns, which are read as prompts": bool(trainer.tools),
        "tokens are drawn from another distribution (top_p, top_k, min_p, a penalty, ...) than the loss is of": (
            not is_comparable(processors or (), args.temperature)
        ),
        f"the policy has dropout ({', '.join(dropout[:3])}, ...); set disable_dropout=True": bool(dropout),
        "the policy's config has attention_dropout": bool(getattr(policy.config, "attention_dropout", 0)),
        "torch_compile=True": args.torch_compile,
        "FSDP or ZeRO-3 shards the weights": trainer._dist.is_fsdp or trainer._dist.zero_stage == 3,
        "the routers' loss reads their logits; set router_aux_loss_coef=0": trainer.aux_loss_enabled,
        "draft_quantization='awq-...' reads what layers are fed in the loss's forward": (
            config.draft_quantization.startswith("awq")
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise _refusal(reason)


def _refusal(reason: str) -> ValueError:
    return ValueError(f"exact_logprobs=True is not served: {reason}. Set exact_logprobs=False.")


def _by_prompt(ids: Tensor, mask: Tensor, width: int) -> tuple[list[int], list[int], list[int]]:
    """The first row of each prompt, all other rows, and for each of these the place of its prompt among the first."""
    first: dict[tuple[int, ...], int] = {}
    texts = [tuple(row[own.bool()].tolist()) for row, own in zip(ids[:, :-width], mask[:, :-width], strict=True)]
    of_row = [first.setdefault(text, row) for row, text in enumerate(texts)]
    leaders = [*first.values()]
    followers = [row for row, other in enumerate(of_row) if row != other]
    return leaders, followers, [leaders.index(of_row[row]) for row in followers]


@contextmanager
def _at_positions(policy: PreTrainedModel, mask: Tensor) -> Iterator[None]:
    """Within it forwards of the decoder count positions from the prompt's first token, as rollouts do. TRL names none,
    and learned positions would count the padding."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # [B, T]

    def add(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs | {"position_ids": positions}

    handle = policy.get_decoder().register_forward_pre_hook(add, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _returning(layers: nn.ModuleList, states: Sequence[Tensor]) -> Iterator[None]:
    """Within it decoder `layers` return `states`, but for the last one."""
    forwards = [vars(layer).get("forward") for layer in layers]
    returned: list[Tensor] = []
    for layer, output in zip(layers, [*states, None], strict=True):
        layer.forward = _replacement(layer, layer.forward, output, returned)
    try:
        yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _replacement(
    layer: Any, usual: Callable[..., Tensor], output: Tensor | None, returned: list[Tensor]
) -> Callable[..., Tensor]:
    """A forward that returns `output`, and leaves it in `returned`, with the gradient of the `usual` one; None: the
    usual one. It checks that it is fed what the layer before has left there."""

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        others = [given for given in (*args, *kwargs.values()) if isinstance(given, Tensor) and given.requires_grad]
        if others or (returned and hidden_states is not returned[0]):
            raise RuntimeError(
                f"exact_logprobs=True: a {type(layer).__name__} is fed more than what the layer before returns. Set "
                "exact_logprobs=False."
            )
        if output is None:
            return usual(hidden_states, *args, **kwargs)

        def compute(given: Tensor) -> Tensor:
            checkpoints = getattr(layer, "gradient_checkpointing", False)
            layer.gradient_checkpointing = False  # it is this very thing
            try:
                return usual(given, *args, **kwargs)
            finally:
                layer.gradient_checkpointing = checkpoints

        learned = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        value: Tensor = _Layer.apply(compute, output, hidden_states, *learned)
        returned[:] = [value]
        return value

    return forward


class _Layer(torch.autograd.Function):
    """`output` `[B, T, hidden]`, with the gradient that `compute` of `hidden` has, which runs in the backward pass."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], output: Tensor, hidden: Tensor, *learned: Tensor) -> Any:
        ctx.compute, ctx.autocast = compute, autocast_dtype(hidden.device)
        ctx.save_for_backward(hidden, *learned)
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, *learned = ctx.saved_tensors
        with torch.enable_grad(), torch.autocast(hidden.device.type, ctx.autocast, ctx.autocast is not None):
            given = hidden.detach().requires_grad_()
            output = ctx.compute(given)
        return None, None, *torch.autograd.grad(output, [given, *learned], gradient, allow_unused=True)


class _Value(torch.autograd.Function):
    """`value`, with the gradient of `given`, of the same shape."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, value: Tensor) -> Tensor:
        return value.to(given.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None
