"""Scans and convolutions of transformers' mixers, replaced in a shadow by functions for rows of different lengths.

:func:`mixer_class` gives a mixer's forward a twin with other functions under the names of the family's scan over many
tokens and of its convolution; the family's functions stay reachable, including kernels of transformers.

* Prompts run through the family's function, on a CPU one by one and without padding: products of several matrices at
  once sum in an order that depends on their number. Elsewhere all rows of a forward run together, padded by tokens
  that change no state; only rows of equal length, where the family's function bounds time steps from below.
* Later tokens, on a CPU with a compiler: our C++ (:mod:`cpu_states`): steps write states, verifications hold inputs,
  commits replay them. So does Triton for the gated delta rule on CUDA without `fla`. Elsewhere a step is the mixer's,
  and a verification runs the family's function for one token repeatedly, with the sums of decoding.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ....native.cpu_products import by_registers
from ..cuda.kernels import run_on
from ..kv.memory import sent
from . import cpu_states


Arguments = dict[str, Any]
"""Arguments of a scan, by name."""
Compiled = Callable[[Arguments, Tensor, Any], tuple[Tensor, Callable[[Tensor], None]]]
_IDLE_STEP = -1e4  # of a Mamba time step: its softplus is exactly 0, in half precision too


class Steps(Protocol):
    """Runs `step`, the family's function for one token, over all tokens of a scan's arguments, from `state` on.

    Returns outputs as the scan's, and the state after the last token. It does not write to `state`.
    """

    def __call__(self, mixer: Any, step: Callable[..., Any], given: Arguments, state: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""


@dataclass(frozen=True)
class Scan:
    """A recurrence over tokens, as families of transformers call it.

    Args:
        step: name of the family's function for one token.
        axes: arguments with an axis of tokens, and which axis that is; `out_axis`: that of the outputs.
        state: argument that takes the state; None: the function begins with zeros.
        idle: values of arguments with which a token does not change a bit of the state.
        run: the scan token by token.
        compiled: the scan on a CPU, from a state that it may write; returns outputs, and a :data:`Replay`.
    """

    step: str
    axes: Mapping[str, int]
    out_axis: int
    state: str | None
    idle: Mapping[str, float]
    run: Steps
    compiled: Compiled


@dataclass(frozen=True)
class Taken:
    """How many tokens of a forward the states take. What layers compute of it, they share."""

    lengths: Tensor  # [B] int64, on the states' device
    most: int  # that a row takes
    _columns: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Taken":
        return cls(sent(torch.tensor(lengths), device), max(lengths))

    def columns(self, kernel: int) -> Tensor:
        """`[B, kernel]`: columns of a window, followed by all tokens, up to the last token that is taken."""
        if kernel not in self._columns:
            self._columns[kernel] = self.lengths[:, None] + torch.arange(kernel, device=self.lengths.device)
        return self._columns[kernel]

    @cached_property
    def others(self) -> Tensor:
        """`[B, most]` bool, the tokens that are not taken."""
        return torch.arange(self.most, device=self.lengths.device) >= self.lengths[:, None]


class Holder(Protocol):
    """Interface of the current forward's cache for a mixer's functions."""

    prompt: Sequence[int] | None
    is_step: bool

    def taken(self, device: torch.device) -> Taken | None: ...

    def recurrent_state(self, layer: int) -> Tensor | None: ...

    def first_state(self, layer: int) -> Tensor | None: ...

    def hold(self, key: object, replay: Callable[[Taken], None]) -> None: ...

    def fed_window(self) -> tuple[object, Tensor] | None: ...


def _delta_rule(mixer: Any, step: Callable[..., Any], given: Arguments, state: Tensor) -> tuple[Tensor, Tensor]:
    # Contiguous: Kimi's arguments lie channel by channel where they are several tokens, and sums follow the layout.
    tokens = {name: given[name].contiguous() for name in ("query", "key", "value", "g", "beta")}
    more = {"use_qk_l2norm_in_kernel": given["use_qk_l2norm_in_kernel"], "output_final_state": True}
    outputs: tuple[Tensor, Tensor] = step(**tokens, **more, initial_state=state)
    return outputs


def _mamba_2(mixer: Any, step: Callable[..., Any], given: Arguments, state: Tensor) -> tuple[Tensor, Tensor]:
    x, state = given["hidden_states"], state.clone()  # [B, T, heads, d], [B, heads, d, n]; a step writes to its state
    size = x.shape[-1]
    A = given["A"][:, None, None].expand(-1, size, given["B"].shape[-1])
    D, bias = (given[name][:, None].expand(-1, size) for name in ("D", "dt_bias"))
    outputs = [
        step(
            state, x[:, at], given["dt"][:, at, :, None].expand(-1, -1, size), A, given["B"][:, at], given["C"][:, at],
            D=D, dt_bias=bias, dt_softplus=given["dt_softplus"], z=None,
        )
        for at in range(x.shape[1])
    ]  # fmt: skip
    return torch.stack(outputs, dim=1), state


def _mamba_1(mixer: Any, step: Callable[..., Any], given: Arguments, state: Tensor) -> tuple[Tensor, Tensor]:
    x, state = given["hidden_states"], state.clone()  # [B, d, T], [B, d, n]
    more = {"dt_bias": given["delta_bias"], "dt_softplus": given["delta_softplus"]}
    outputs = [
        # The mixer gives D in float32 to its scan, and as it is to its step.
        step(
            state, x[..., at], given["dt"][..., at], given["A"], given["B"][..., at], given["C"][..., at], mixer.D,
            z=given["z"][..., at], **more,
        )
        for at in range(x.shape[2])
    ]  # fmt: skip
    return torch.stack(outputs, dim=2), state


def _delta(step: str) -> Scan:
    axes = dict.fromkeys(("query", "key", "value", "g", "beta"), 1)
    return Scan(step, axes, 1, "initial_state", {"g": 0.0, "beta": 0.0}, _delta_rule, cpu_states.delta_rule)


SCANS = {
    "torch_chunk_gated_delta_rule": _delta("torch_recurrent_gated_delta_rule"),
    "chunk_kimi_delta_attention": _delta("recurrent_kimi_delta_attention"),
    "mamba2_chunk_scan": Scan(
        "mamba2_selective_state_update", dict.fromkeys(("hidden_states", "dt", "B", "C"), 1), 1, "initial_states",
        {"dt": _IDLE_STEP}, _mamba_2, cpu_states.mamba_2,
    ),
    "mamba_selective_scan": Scan(
        "mamba_selective_state_update", dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), 2), 2, None,
        {"dt": _IDLE_STEP}, _mamba_1, cpu_states.mamba_1,
    ),
}  # fmt: skip
"""By the name of the family's function over many tokens."""
_CONVOLUTION = "causal_conv1d_fn"


@functools.cache
def forward_of(kind: Any) -> FunctionType | None:
    """The forward of a mixer's class in transformers, below the classes that a shadow adds."""
    kinds = [base for base in kind.__mro__ if "forward" in vars(base) and base.__module__.startswith("transformers.")]
    forward = inspect.unwrap(kinds[0].forward) if kinds else None
    return forward if isinstance(forward, FunctionType) else None


def _names_in(kind: Any) -> tuple[str, ...]:
    forward = forward_of(kind)
    return () if forward is None else forward.__code__.co_names


def _scan_in(kind: Any) -> str | None:
    """The name of the known scan that the forward of a module's class calls; None: none."""
    return next((name for name in SCANS if name in _names_in(kind)), None)


def keeps_windows(kind: Any) -> bool:
    """Whether modules of class `kind` keep columns of a convolution in a cache."""
    return "update_conv_state" in _names_in(kind)


def convolves() -> bool:
    """Whether a mixer runs in this thread whose convolution calls :meth:`Holder.fed_window`."""
    return _present.mixer is not None and _present.mixer.convolves


def is_slow(step: Callable[..., Any]) -> bool:
    """Whether a family's function is that of transformers, which calls `fla` where that is installed."""
    return find_spec("fla") is None and getattr(inspect.unwrap(step), "__module__", "").startswith("transformers.")


def steps_compiled(state: Tensor) -> bool:
    """Whether the mixer that runs in this thread takes steps from such a state by its scan over many tokens."""
    kind: Any = type(_present.mixer)
    name = _scan_in(kind)
    return name is not None and _twin_of(kind).__globals__[name].compiled(state) is not None


def follows_states(network: nn.Module) -> bool:
    """Whether `network` keeps states beside K/V, all of which :class:`States` serves."""
    kinds = {type(module) for module in network.modules()}
    scans = [kind for kind in kinds if "update_recurrent_state" in _names_in(kind)]
    mixers = [kind for kind in kinds if keeps_windows(kind)]
    asks = all("get_conv_state" in _names_in(kind) for kind in mixers)  # before transformers 5.21 they read attributes
    return bool(mixers) and asks and all(_scan_in(kind) is not None for kind in scans)


def is_mixer(kind: Any) -> bool:
    """Whether modules of class `kind` keep states, and :func:`mixer_class` has not made it."""
    return (_scan_in(kind) is not None or keeps_windows(kind)) and not issubclass(kind, _Mixer)


@functools.cache
def mixer_class(kind: Any) -> Any:
    """A subclass of a mixer's class for rows of different lengths."""
    convolves = _CONVOLUTION in _names_in(kind)
    return type(kind.__name__, (_Mixer, kind), {"__module__": kind.__module__, "convolves": convolves})


class _Present(threading.local):
    """The mixer that runs in this thread, and the cache it runs with."""

    mixer: "_Mixer | None" = None
    cache: Holder | None = None


_present = _Present()


class _Mixer(nn.Module):
    """A mixer of transformers whose forward calls our functions instead of its family's."""

    layer_idx: int
    convolves: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cache = next((value for value in (*args, *kwargs.values()) if getattr(value, "has_states", False)), None)
        if cache is None:
            return super().forward(*args, **kwargs)
        _present.mixer, _present.cache = self, cache
        kind: Any = type(self)
        try:
            return _twin_of(kind)(self, *args, **kwargs)
        finally:  # threads live longer
            _present.mixer = _present.cache = None


@functools.cache
def _twin_of(kind: Any) -> FunctionType:
    """The forward of a mixer class with our functions instead of its scan and its convolution."""
    forward, name = forward_of(kind), _scan_in(kind)
    assert forward is not None
    known = dict(forward.__globals__)
    if name is not None:
        scan = SCANS[name]
        known[name] = _Scanner(scan, known[name], known[scan.step])
    if _CONVOLUTION in known:
        known[_CONVOLUTION] = _Convolution(known[_CONVOLUTION])
    twin = FunctionType(forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__)
    twin.__kwdefaults__ = forward.__kwdefaults__
    return twin


class _Convolution:
    """Replaces the convolution over many tokens of a mixer class."""

    def __init__(self, many: Callable[..., Tensor]) -> None:
        self._many = many

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
    ) -> Tensor:
        cache = _present.cache
        fed = None if cache is None else cache.fed_window()
        if cache is None or fed is None:
            # Here the activation's bits would depend on the number of columns (`by_registers`).
            apart = activation if x.dtype == weight.dtype and not torch.is_autocast_enabled(x.device.type) else None
            y = self._many(x, weight, bias, activation=None if apart else activation, **kwargs)
            return by_registers(ACT2FN[apart], y) if apart else y
        key, state = fed
        is_silu = activation in ("silu", "swish")
        outputs, replay = cpu_states.convolve(x, state, weight, bias, is_silu, cache.is_step)
        if not cache.is_step:
            cache.hold(key, lambda taken: replay(taken.lengths))
        return outputs if is_silu or activation is None else ACT2FN[activation](outputs)


class _Scanner:
    """Replaces the scan over many tokens of a mixer class."""

    def __init__(self, scan: Scan, many: Callable[..., Any], step: Callable[..., Any]) -> None:
        self._scan, self._many, self._step = scan, many, step
        self._has_kernel = scan.run is _delta_rule and is_slow(step)
        parameters = inspect.signature(many).parameters.values()
        self._names = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
        self._defaults = {each.name: each.default for each in parameters if each.default is not each.empty}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache, mixer = _present.cache, _present.mixer
        assert cache is not None and mixer is not None
        given = self._defaults | dict(zip(self._names, args, strict=False)) | kwargs
        state = cache.recurrent_state(mixer.layer_idx)
        if cache.prompt is not None:
            return self._over_prompts(given, state, cache)
        if state is None:  # no row has a text: a probe
            return self._many(**given)
        compiled, taken = self.compiled(state), cache.taken(state.device)
        if (begin := cache.first_state(mixer.layer_idx)) is None:
            pass
        elif compiled in (None, self._scan.compiled):
            state.copy_(begin)
        else:  # read there, and written here
            given["initial_state"] = begin
        if compiled is not None:
            outputs, replay = compiled(given, state, cache.is_step if taken is None else taken.lengths)
            if not cache.is_step and taken is None:
                cache.hold(mixer.layer_idx, lambda taken: replay(taken.lengths))
        else:
            outputs, after = self._scan.run(mixer, self._step, given, state)
            if taken is not None:
                state.copy_(state.where(taken.others.view(-1, *[1] * (state.dim() - 1)), after))
            elif not cache.is_step:
                cache.hold(mixer.layer_idx, partial(self._replay, mixer, given, state))
        return outputs, state

    def compiled(self, state: Tensor) -> Compiled | None:
        """What runs later tokens from such a state; None: the family's functions."""
        if cpu_states.serves(state):
            return self._scan.compiled
        if not (self._has_kernel and state.dtype == torch.float32 and run_on(state.device)):
            return None
        from ..cuda.kernels.delta_rule import delta_rule  # imports Triton

        return delta_rule

    def _over_prompts(self, given: Arguments, state: Tensor | None, cache: Holder) -> tuple[Tensor, Tensor]:
        """Outputs and states of the first `cache.prompt[b]` tokens of each row; outputs of other tokens are any."""
        scan, outputs, lengths = self._scan, None, cache.prompt
        assert lengths is not None
        first, axis = next((given[name], axis) for name, axis in scan.axes.items() if given[name] is not None)
        tokens, pads = first.shape[axis], given.get("dt_limit", (0.0,))[0] <= 0
        for length, rows in prompt_groups(lengths, alone=first.device.type == "cpu", pads=pads):
            picked = slice(None) if len(rows) == len(lengths) else rows  # a list is sent to the device
            if min(lengths[row] for row in rows) < length:
                taken = cache.taken(first.device)
                assert taken is not None
                given = self._idle(given, taken)
            part = {
                name: value[picked].narrow(scan.axes[name], 0, length).contiguous()  # sums follow the layout
                if name in scan.axes and value is not None
                else value
                for name, value in given.items()
            }
            before = None if state is None else state[picked]
            if scan.state is None and before is not None and bool(before.any()):
                # The function would begin with zeros.
                result, after = scan.run(_present.mixer, self._step, part, before)
            else:
                result, after = self._many(**(part if scan.state is None else part | {scan.state: before}))
            if outputs is None:
                shape = list(result.shape)
                shape[0], shape[scan.out_axis] = len(lengths), tokens
                outputs = result.new_zeros(shape)
                state = after.new_zeros(len(lengths), *after.shape[1:]) if state is None else state.clone()
            assert state is not None
            outputs.narrow(scan.out_axis, 0, length)[picked] = result
            state[picked] = after.to(state.dtype)
        assert outputs is not None and state is not None
        return outputs, state

    def _replay(self, mixer: _Mixer, given: Arguments, state: Tensor, taken: Taken) -> None:
        """Replays the tokens that are taken of the held arguments into `state`."""
        state.copy_(self._scan.run(mixer, self._step, self._idle(given, taken), state)[1])

    def _idle(self, given: Arguments, taken: Taken) -> Arguments:
        """`given` with the first `taken.most` tokens, of which those not taken change no state."""
        given = dict(given)
        for name, axis in self._scan.axes.items():
            if given[name] is None:
                continue
            given[name] = value = given[name].narrow(axis, 0, taken.most)
            if name in self._scan.idle:
                shape = [1] * value.dim()
                shape[0], shape[axis] = taken.others.shape
                given[name] = value.masked_fill(taken.others.view(shape), self._scan.idle[name])
        return given


def prompt_groups(lengths: Sequence[int], alone: bool, pads: bool) -> list[tuple[int, list[int]]]:
    """Rows that a scan runs over together, and its tokens: `alone`, one row each; all rows if it `pads`; otherwise
    those of one length. Rows of a length of 0 may be left out."""
    if alone:
        return [(count, [row]) for row, count in enumerate(lengths) if count]
    if pads:
        return [(max(lengths), [*range(len(lengths))])]
    return [
        (length, [row for row, count in enumerate(lengths) if count == length]) for length in sorted({*lengths} - {0})
    ]
