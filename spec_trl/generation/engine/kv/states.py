"""Convolution windows and recurrent states of rows of different lengths: hold inputs, replay accepted ones.

A rejected draft cannot be removed from a state, unlike from K/V. So a forward that verifies writes no state: it HOLDS
the inputs of convolutions and scans, and :meth:`States.commit` replays a row's accepted tokens into the states,
without running the network again. Prompts, and rounds without drafts, write at once.

So a round with drafts reads the states twice and writes them once, whatever the draft length; a round without drafts
reads and writes them once. Where forwards are captured, one of one token writes the states of the rows in use; beside
a longer one its commit is captured, of all layers, and is sent the numbers of accepted tokens in one copy.

Mixers reach the states by transformers' Cache API, and by the functions of `scans.py`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..network import cpu_states
from ..network.family_hooks import CACHE_NAMES
from ..network.scans import Taken, convolves, forward_of, keeps_windows, steps_compiled
from .base import RowKV, copy_rows_of
from .cache import RaggedCache
from .memory import sent


_SCAN = -1
"""Index of a layer's recurrent state among its exported states."""


@torch.no_grad()
def state_bytes(network: PreTrainedModel) -> int:
    """Bytes of the states of one row, from a forward of one mixer per class over one token."""
    config = network.config.get_text_config(decoder=True)
    hidden = torch.zeros(1, 1, config.hidden_size, dtype=network.dtype, device=network.device)
    by_kind: dict[type, int] = {}
    total = 0
    for mixer in network.modules():
        kind: Any = type(mixer)
        forward = forward_of(kind)
        if forward is None or not keeps_windows(kind):
            continue
        if kind not in by_kind:
            cache = States.for_network(network, 1, 1)
            cache.point_at(torch.zeros(1, 1, dtype=torch.int64, device=network.device), 1, 0)
            cache.feeds([1])
            mixer(hidden, **{name: cache for name in CACHE_NAMES if name in forward.__code__.co_varnames})
            by_kind[kind] = cache.fixed_bytes
        total += by_kind[kind]
    return total


class States(RaggedCache):
    """States of rows, beside the K/V of a ragged cache. A row without text has states of zeros, the initial state.

    Attributes:
        prompt, is_step, counts: tokens of the current forward, see :meth:`feeds`. With none it holds its inputs.
    """

    has_states = True
    is_divisible = False
    prompt: Sequence[int] | None = None
    is_step = False
    counts: Tensor | None = None
    _taken: Taken | None = None

    def __init__(self, layers: int, rows: int, columns: int) -> None:
        super().__init__(layers, rows, columns)
        self._windows: dict[tuple[int, int], Tensor] = {}  # [rows, channels, kernel] by layer and index
        self._recurrent: dict[int, Tensor] = {}  # [rows, ...] by layer
        # Of the last forward, by key of a window or layer.
        self.held: dict[object, Callable[[Taken], None]] = {}
        self._fed: tuple[int, int] | None = None  # key of the window that a convolution in C++ reads next

    def feeds(self, prompt: Sequence[int] | None = None, is_step: bool = False, counts: Tensor | None = None) -> None:
        self.prompt, self.is_step, self.counts = prompt, is_step, counts

    def point_at(self, positions: Tensor, columns: int, first_row: int) -> None:
        super().point_at(positions, columns, first_row)
        self._taken = None  # a capture computes what follows from counts anew

    def taken(self, device: torch.device) -> Taken | None:
        """What states on `device` take of a forward of prompts, or with :attr:`counts`; None for others."""
        if self._taken is None and self.prompt is not None:
            self._taken = Taken.of(self.prompt, device)
        elif self._taken is None and self.counts is not None:
            self._taken = Taken(self.counts, 1)
        return self._taken

    def for_drafts(self) -> "DraftStates":
        """A cache with the same K/V, and states that follow drafts."""
        return DraftStates(self)

    def commit(self, lengths: Sequence[int]) -> None:
        """Replays the first `lengths[b]` tokens of every row, of those that the last forward held, into the states."""
        held, self.held = self.held, {}  # a captured forward keeps the dictionary
        if held:
            free = self._span.stop - self._span.start - len(lengths)  # rows that pad a captured forward
            taken = Taken.of([*lengths, *[0] * free], self.states[0].device)  # [B]
            for replay in held.values():
                replay(taken)

    def hold(self, key: object, replay: Callable[[Taken], None]) -> None:
        """Holds inputs of a window or scan of the current forward."""
        self.held[key] = replay

    def recurrent_state(self, layer: int) -> Tensor | None:
        """`[B, ...]` of the rows of the current forward."""
        state = self._recurrent.get(layer)
        return None if state is None else state[self._span]

    def first_state(self, layer: int) -> Tensor | None:
        """`[B, ...]`, at which the current forward begins instead of its own state, to be asked once."""
        return None

    def forget(self, rows: Sequence[int]) -> None:
        if states := self.states:
            at = sent(torch.tensor(rows, dtype=torch.int64), states[0].device)  # [n]
            for state in states:
                state[at] = 0

    @property
    def fixed_bytes(self) -> int:  # type: ignore[override]
        return sum(state.nbytes for state in self.states)

    def bytes_of(self, lengths: Sequence[int]) -> int:
        return super().bytes_of(lengths) + self.fixed_bytes

    # ---- What mixers call -------------------------------------------------------------------------------------------

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        # With a state and one token a mixer updates it at once; Kimi's kind does not ask whether it is recorded.
        window = None if self.is_recording_past(layer_idx) else self._windows.get((layer_idx, state_idx))
        return None if window is None else window[self._span]

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0, **_: Any
    ) -> Tensor:
        key = layer_idx, state_idx
        if key not in self._windows:
            self._windows[key] = self._zeros((conv_kernel_size, conv_states.shape[1]), conv_states).transpose(1, 2)
        if self._compiles(key) and conv_states.dtype == self._windows[key].dtype:
            self._fed = key
            return conv_states
        state = self._windows[key][self._span]
        window = torch.cat([state, conv_states], dim=-1)  # [B, channels, kernel + q]
        if (taken := self.taken(state.device)) is not None:
            _write_window(state, window, taken)
        elif self.is_step:
            state.copy_(window[..., -state.shape[-1] :])
        else:
            self.hold(key, partial(_write_window, state, window))
        return window

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        # With a state and one token a mixer takes a step of its family.
        state = self.recurrent_state(layer_idx) if self.is_step else None
        if state is None or steps_compiled(state):
            return None
        begin = self.first_state(layer_idx)
        return state if begin is None else state.copy_(begin)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        if layer_idx not in self._recurrent:
            self._recurrent[layer_idx] = self._zeros(recurrent_states.shape[1:], recurrent_states)
        state = self._recurrent[layer_idx][self._span]
        if (self.prompt is not None or self.is_step) and recurrent_states.data_ptr() != state.data_ptr():
            state.copy_(recurrent_states)
        return state

    def is_recording_past(self, layer_idx: int) -> bool:
        return not self.is_step or self._compiles((layer_idx, 0))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True

    # ---- What the engine calls --------------------------------------------------------------------------------------

    def copy_rows(self, source: list[int], destination: list[int], columns: list[int], differing: int = 0) -> None:
        super().copy_rows(source, destination, columns, differing)
        copy_rows_of(self.states, source, destination)

    def export_row(self, row: int, start: int, stop: int) -> RowKV:
        """Copies also the states, which are those after the columns of the row, if `start` is 0."""
        exported = super().export_row(row, start, stop)
        if start == 0 < stop:
            exported |= {key: (window[row].clone(),) for key, window in self._windows.items()}
            exported |= {(layer, _SCAN): (state[row].clone(),) for layer, state in self._recurrent.items()}
        return exported

    def import_row(self, row: int, start: int, states: RowKV) -> None:
        super().import_row(row, start, {layer: pair for layer, pair in states.items() if isinstance(layer, int)})
        for key, (state, *_) in states.items():
            if not isinstance(key, tuple):
                continue
            if key[1] == _SCAN:
                if key[0] not in self._recurrent:
                    self._recurrent[key[0]] = self._zeros(state.shape, state)
                self._recurrent[key[0]][row] = state
            else:
                if key not in self._windows:
                    self._windows[key] = self._zeros(state.T.shape, state).transpose(1, 2)
                self._windows[key][row] = state

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

    def _compiles(self, key: tuple[int, int]) -> bool:
        """Whether the next convolution is one in C++."""
        state = self._windows.get(key)
        return self.prompt is None and state is not None and convolves() and cpu_states.serves(state)

    def fed_window(self) -> tuple[object, Tensor] | None:
        """Key and state `[B, channels, kernel]` of what was fed last, for a convolution in C++; once."""
        key, self._fed = self._fed, None
        return None if key is None else (key, self._windows[key][self._span])


def _write_window(state: Tensor, window: Tensor, taken: Taken) -> None:
    """Takes the new columns that are `taken` of each row of `window` [B, channels, kernel + q] into `state`."""
    columns = taken.columns(state.shape[-1])[:, None].expand(-1, state.shape[1], -1)  # [B, channels, kernel]
    torch.gather(window.to(state.dtype), -1, columns, out=state)


class DraftStates(States):
    """The target's K/V, and states that begin at the committed ones in every round and advance with drafts."""

    is_repeatable = False  # a draft is, from its first step on
    is_step = True

    def __init__(self, committed: States) -> None:
        super().__init__(len(committed.layers), committed.rows, committed.columns)
        self._window, self.layers, self.offsets = committed._window, committed.layers, committed.offsets
        self._committed = committed
        self._fresh: set[int] = set()  # layers whose state is the committed one

    def feeds(self, prompt: Sequence[int] | None = None, is_step: bool = False, counts: Tensor | None = None) -> None:
        """Every forward of a draft is a step."""

    def begin_drafts(self, rows: int) -> None:
        if len(self._windows) < len(self._committed._windows):
            self._windows = {key: torch.zeros_like(state) for key, state in self._committed._windows.items()}
            self._recurrent = {key: torch.zeros_like(state) for key, state in self._committed._recurrent.items()}
        self._fresh = {*self._recurrent}  # large: the first step reads the committed ones
        for key, window in self._windows.items():
            window[:rows] = self._committed._windows[key][:rows]

    def first_state(self, layer: int) -> Tensor | None:
        if layer not in self._fresh:
            return None
        self._fresh.remove(layer)
        return self._committed._recurrent[layer][self._span]
