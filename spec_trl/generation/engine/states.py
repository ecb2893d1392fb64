"""Convolution windows and recurrent states of rows of different lengths: hold what is fed, replay what is accepted.

A state cannot forget a rejected draft as a column of K/V can. So a forward that verifies writes no state: it HOLDS
what it feeds into convolutions and scans, and :meth:`States.commit` takes each row's accepted tokens from there into
the states, without running the network again. Prompts, and rounds without drafts, write at once.

A convolution needs transformers' Cache API alone. A scan is the family's function over many tokens, which
:func:`mixer_class` replaces in the mixers of a shadow by one that minds how long each row is: rows of equal length run
through the family's function together, and a forward that holds goes token by token through its function for one
token, whose sums are those of decoding.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention import keeps_states
from .cache import RaggedCache, copy_rows_of
from .family_hooks import CACHE_NAMES


Arguments = dict[str, Any]
"""Arguments of a scan, by name."""
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
        idle: values of arguments with which a token leaves the state as it is, bit for bit.
        run: the scan token by token.
    """

    step: str
    axes: Mapping[str, int]
    out_axis: int
    state: str | None
    idle: Mapping[str, float]
    run: Steps


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
    return Scan(step, axes, 1, "initial_state", {"g": 0.0, "beta": 0.0}, _delta_rule)


SCANS = {
    "torch_chunk_gated_delta_rule": _delta("torch_recurrent_gated_delta_rule"),
    "chunk_kimi_delta_attention": _delta("recurrent_kimi_delta_attention"),
    "mamba2_chunk_scan": Scan(
        "mamba2_selective_state_update", dict.fromkeys(("hidden_states", "dt", "B", "C"), 1), 1, "initial_states",
        {"dt": _IDLE_STEP}, _mamba_2,
    ),
    "mamba_selective_scan": Scan(
        "mamba_selective_state_update", dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), 2), 2, None,
        {"dt": _IDLE_STEP}, _mamba_1,
    ),
}  # fmt: skip
"""By the name of the family's function over many tokens."""


@functools.cache
def _forward_of(kind: Any) -> FunctionType | None:
    """The forward of a mixer's class in transformers, below the classes that a shadow puts before it."""
    kinds = [base for base in kind.__mro__ if "forward" in vars(base) and base.__module__.startswith("transformers.")]
    forward = inspect.unwrap(kinds[0].forward) if kinds else None
    return forward if isinstance(forward, FunctionType) else None


def _names_in(kind: Any) -> tuple[str, ...]:
    forward = _forward_of(kind)
    return () if forward is None else forward.__code__.co_names


def _scan_in(kind: Any) -> str | None:
    """The name of the known scan that the forward of a module's class calls; None: none."""
    return next((name for name in SCANS if name in _names_in(kind)), None)


def follows_states(network: nn.Module) -> bool:
    """Whether `network` keeps states beside K/V, all of which :class:`States` serves."""
    kinds = {type(module) for module in network.modules()}
    scans = [kind for kind in kinds if "update_recurrent_state" in _names_in(kind)]
    mixers = [kind for kind in kinds if "update_conv_state" in _names_in(kind)]
    asks = all("get_conv_state" in _names_in(kind) for kind in mixers)  # before transformers 5.21 they read attributes
    return bool(mixers) and asks and all(_scan_in(kind) is not None for kind in scans)


def mixer_class(kind: Any) -> Any:
    """The class that a shadow should have for a module of class `kind`: one whose scan minds how long rows are, where
    it has a known scan."""
    return kind if _scan_in(kind) is None or issubclass(kind, _Mixer) else _with_scan(kind)


@functools.cache
def _with_scan(kind: Any) -> Any:
    return type(kind.__name__, (_Mixer, kind), {"__module__": kind.__module__})


class _Mixer(nn.Module):
    """A mixer of transformers, whose forward calls a :class:`_Scanner` in place of its family's scan."""

    layer_idx: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kind: Any = type(self)
        twin, scanner = _twin_of(kind)
        scanner.mixer = self
        scanner.cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, States)), None)
        try:
            return twin(self, *args, **kwargs)
        finally:  # a scanner lives as long as the process
            scanner.mixer = scanner.cache = None


@functools.cache
def _twin_of(kind: Any) -> tuple[FunctionType, "_Scanner"]:
    """The forward of a class of mixers with a scanner in place of the scan, and that scanner."""
    forward, name = _forward_of(kind), _scan_in(kind)
    assert forward is not None and name is not None
    known, scan = forward.__globals__, SCANS[name]
    scanner = _Scanner(scan, known[name], known[scan.step])
    twin = FunctionType(
        forward.__code__, {**known, name: scanner}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    twin.__kwdefaults__ = forward.__kwdefaults__
    return twin, scanner


class _Scanner(threading.local):
    """Takes the place of the scan over many tokens of a class of mixers, in each thread for one `mixer` at a time."""

    mixer: _Mixer | None = None
    cache: "States | None" = None

    def __init__(self, scan: Scan, many: Callable[..., Any], step: Callable[..., Any]) -> None:
        self._scan, self._many, self._step = scan, many, step
        self._signature = inspect.signature(many)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.cache is None or self.mixer is None:
            return self._many(*args, **kwargs)
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        given |= given.pop("kwargs", {})
        layer, state = self.mixer.layer_idx, self.cache.recurrent_state(self.mixer.layer_idx)
        if self.cache.prompt is not None:
            return self._over_prompts(given, state, self.cache.prompt)
        if state is None:  # no row has a text: something is timed
            return self._many(**given)
        self.cache.hold(layer, self, self.mixer, given)
        return self._scan.run(self.mixer, self._step, given, state)

    def _over_prompts(self, given: Arguments, state: Tensor | None, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Outputs and states of the first `lengths[b]` tokens of each row; outputs of other tokens are zeros."""
        scan, outputs = self._scan, None
        tokens = next(given[name].shape[axis] for name, axis in scan.axes.items() if given[name] is not None)
        for length in sorted(set(lengths) - {0}):
            rows = [row for row, count in enumerate(lengths) if count == length]
            part = {
                name: value[rows].narrow(scan.axes[name], 0, length)
                if name in scan.axes and value is not None
                else value
                for name, value in given.items()
            }
            before = None if state is None else state[rows]
            if scan.state is None and before is not None and bool(before.any()):
                result, after = scan.run(self.mixer, self._step, part, before)  # the function would begin with zeros
            else:
                result, after = self._many(**(part if scan.state is None else part | {scan.state: before}))
            if outputs is None:
                shape = list(result.shape)
                shape[0], shape[scan.out_axis] = len(lengths), tokens
                outputs = result.new_zeros(shape)
                state = after.new_zeros(len(lengths), *after.shape[1:]) if state is None else state.clone()
            assert state is not None
            outputs.narrow(scan.out_axis, 0, length)[rows] = result
            state[rows] = after.to(state.dtype)
        assert outputs is not None and state is not None
        return outputs, state

    def replay(self, mixer: _Mixer, given: Arguments, state: Tensor, lengths: Sequence[int]) -> Tensor:
        """`state` after the first `lengths[b]` tokens of each row of the arguments that a forward held."""
        scan, most = self._scan, max(lengths)
        given = dict(given)
        stays = torch.arange(most)[None] >= torch.tensor(lengths)[:, None]  # [B, most]
        for name, axis in scan.axes.items():
            if given[name] is None:
                continue
            given[name] = value = given[name].narrow(axis, 0, most)
            if name in scan.idle:
                shape = [1] * value.dim()
                shape[0], shape[axis] = stays.shape
                given[name] = value.masked_fill(stays.view(shape).to(value.device), scan.idle[name])
        return scan.run(mixer, self._step, given, state)[1]


def cache_for(network: PreTrainedModel, rows: int, columns: int) -> RaggedCache:
    """A cache for `network`, with states where its layers keep some."""
    return (States if keeps_states(network.config) else RaggedCache).for_network(network, rows, columns)


@torch.no_grad()
def state_bytes(network: PreTrainedModel) -> int:
    """Bytes of the states of one row, told by a forward of one mixer of each class over one token."""
    config = network.config.get_text_config(decoder=True)
    hidden = torch.zeros(1, 1, config.hidden_size, dtype=network.dtype, device=network.device)
    by_kind: dict[type, int] = {}
    total = 0
    for mixer in network.modules():
        kind: Any = type(mixer)
        forward = _forward_of(kind)
        if forward is None or "update_conv_state" not in forward.__code__.co_names:
            continue
        if kind not in by_kind:
            cache = States.for_network(network, 1, 1)
            cache.point_at(torch.zeros(1, 1, dtype=torch.int64, device=network.device), 1, 0)
            cache.feeds([1])
            mixer(hidden, **{name: cache for name in CACHE_NAMES if name in forward.__code__.co_varnames})
            by_kind[kind] = cache.state_bytes
        total += by_kind[kind]
    return total


class States(RaggedCache):
    """States of rows, beside the K/V of a ragged cache. A row without text has states of zeros, which is none.

    Attributes:
        prompt, is_step: what the present forward feeds, see :meth:`feeds`. With neither it holds.
    """

    has_states = True
    prompt: Sequence[int] | None = None
    is_step = False

    def __init__(self, layers: int, rows: int, columns: int) -> None:
        super().__init__(layers, rows, columns)
        self._windows: dict[tuple[int, int], Tensor] = {}  # [rows, channels, kernel] by layer and index
        self._recurrent: dict[int, Tensor] = {}  # [rows, ...] by layer
        # By key of a window [B, channels, kernel + q], or by layer of a scan.
        self.held: dict[Any, Any] = {}

    def feeds(self, prompt: Sequence[int] | None = None, is_step: bool = False) -> None:
        self.prompt, self.is_step = prompt, is_step

    def like(self, network: PreTrainedModel) -> RaggedCache:
        return cache_for(network, self.rows, self.columns)

    def for_drafts(self) -> "DraftStates":
        """A cache with the same K/V, and states that follow drafts."""
        draft = object.__new__(DraftStates)
        mine: dict[str, Any] = {"_windows": {}, "_recurrent": {}, "committed": self, "prompt": None, "is_step": True}
        draft.__dict__ = self.__dict__ | mine
        return draft

    def commit(self, lengths: Sequence[int]) -> None:
        """Takes the first `lengths[b]` tokens of each row, of those that the last forward held, into the states."""
        held, self.held = self.held, {}  # a captured forward keeps the dictionary
        if held:
            free = self._span.stop - self._span.start - len(lengths)
            lengths = [*lengths, *[0] * free]  # rows that pad a captured forward
        for key, value in held.items():
            if isinstance(key, tuple):
                self._write_window(key, value, lengths)
            else:
                scanner, mixer, given = value
                state = self._recurrent[key][self._span]
                state.copy_(scanner.replay(mixer, given, state, lengths))

    def hold(self, layer: int, scanner: _Scanner, mixer: _Mixer, given: Arguments) -> None:
        """Holds what the present forward feeds into a scan."""
        self.held[layer] = scanner, mixer, given

    def recurrent_state(self, layer: int) -> Tensor | None:
        """`[B, ...]` of the rows of the present forward."""
        state = self._recurrent.get(layer)
        return None if state is None else state[self._span]

    def forget(self, first: int, end: int) -> None:
        """Rows `first..end` begin with new texts."""
        for state in self.states:
            state[first:end] = 0

    @property
    def holds(self) -> bool:
        """Whether the last forward held what it fed."""
        return bool(self.held)

    @property
    def state_bytes(self) -> int:  # type: ignore[override]
        return sum(state.nbytes for state in self.states)

    def bytes_of(self, lengths: Sequence[int]) -> int:
        return super().bytes_of(lengths) + self.state_bytes

    # ---- What mixers call -------------------------------------------------------------------------------------------

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        window = self._windows.get((layer_idx, state_idx))
        return None if window is None else window[self._span]

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0, **_: Any
    ) -> Tensor:
        key = layer_idx, state_idx
        if key not in self._windows:
            self._windows[key] = self._zeros(conv_states.shape[1:-1] + (conv_kernel_size,), conv_states)
        window = torch.cat([self._windows[key][self._span], conv_states], dim=-1)  # [B, channels, kernel + q]
        if self.prompt is None and not self.is_step:
            self.held[key] = window
        elif self.prompt is None:  # nothing comes from the host, where a draft is captured
            state = self._windows[key][self._span]
            state.copy_(window[..., -state.shape[-1] :])
        else:
            self._write_window(key, window, self.prompt)
        return window

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        # With a state and one token a mixer takes a step, some of which write to it.
        return self.recurrent_state(layer_idx) if self.is_step else None

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        if layer_idx not in self._recurrent:
            self._recurrent[layer_idx] = self._zeros(recurrent_states.shape[1:], recurrent_states)
        state = self._recurrent[layer_idx][self._span]
        if (self.prompt is not None or self.is_step) and recurrent_states.data_ptr() != state.data_ptr():
            state.copy_(recurrent_states)
        return state

    def is_recording_past(self, layer_idx: int) -> bool:
        return not self.is_step

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True

    # ---- What the engine calls --------------------------------------------------------------------------------------

    def copy_rows(self, source: list[int], destination: list[int], columns: list[int], differing: int = 0) -> None:
        super().copy_rows(source, destination, columns, differing)
        copy_rows_of(self.states, source, destination)

    @property
    def states(self) -> list[Tensor]:
        """`[rows, ...]` each, in one order."""
        return [*self._windows.values(), *self._recurrent.values()]

    @property
    def _span(self) -> slice:
        to_rows = self._window.to_rows
        assert to_rows is not None
        return slice(self.first_row, self.first_row + len(to_rows))

    @torch.inference_mode(False)
    def _zeros(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return torch.zeros(self.rows, *shape, dtype=like.dtype, device=like.device)

    def _write_window(self, key: tuple[int, int], window: Tensor, lengths: Sequence[int]) -> None:
        state = self._windows[key][self._span]  # [B, channels, kernel]
        columns = torch.tensor(lengths)[:, None] + torch.arange(state.shape[-1])  # [B, kernel], up to the last token
        state.copy_(window.gather(-1, columns.to(window.device)[:, None].expand(-1, state.shape[1], -1)))


class DraftStates(States):
    """The target's K/V, and states that begin at the committed ones in each round, and follow what is drafted."""

    committed: States
    is_repeatable = False  # a draft is, from its first step on

    def feeds(self, prompt: Sequence[int] | None = None, is_step: bool = False) -> None:
        """Every forward of a draft is a step."""

    def begin_drafts(self, rows: int) -> None:
        if len(self._windows) < len(self.committed._windows):
            self._windows = {key: torch.zeros_like(state) for key, state in self.committed._windows.items()}
            self._recurrent = {key: torch.zeros_like(state) for key, state in self.committed._recurrent.items()}
        for mine, committed in zip(self.states, self.committed.states, strict=True):
            mine[:rows] = committed[:rows]
