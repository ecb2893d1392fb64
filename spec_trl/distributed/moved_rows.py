"""Rows on their way from one rank to another: their tokens, and the tail of their K/V; the head is computed again."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from ..generation.engine.cache import RowStates
from ..generation.engine.rows import Request
from ..scheduling.migration import measured_send_seconds
from .link import Link


class Sending:
    """Begins to send rows, as :meth:`Rollout.hand_over` returns them, to `rank`, which reads in `note` what comes."""

    def __init__(self, moved: Sequence[Request], link: Link, rank: int, note: str) -> None:
        tokens = [request.generated for request in moved if request.generated is not None]
        states = [request.tail() for request in moved]
        parts = [torch.cat(tokens)]  # [Σ tokens]
        logprobs = [request.logprobs for request in moved if request.logprobs is not None]
        if logprobs:
            parts.append(torch.cat(logprobs))  # [Σ tokens]
        layers = {}
        for layer, (keys, values) in max(states, key=len).items():  # of short rows nothing may be sent
            layers[layer] = (keys.shape[0], keys.shape[2], values.shape[2], str(keys.dtype).removeprefix("torch."))
            own = [row[layer] for row in states if row]
            parts.append(torch.cat([keys.flatten() for keys, _ in own] + [values.flatten() for _, values in own]))
        rows = [
            (request.index, len(text), request.head, request.length - 1)
            for request, text in zip(moved, tokens, strict=True)
        ]
        header = {"from": link.rank, "rows": rows, "logprobs": bool(logprobs), "layers": layers}
        # First of all the note: over NCCL the first tensor between two ranks waits until the other one receives it.
        link.post(note, json.dumps(header | {"method": moved[0].method}))
        self._parts = parts  # until they have been sent
        self._works = [link.send(part, rank) for part in parts]

    def wait(self) -> None:
        """Waits until the other rank has everything."""
        for work in self._works:
            work.wait()
        self._parts, self._works = [], []


class MovedRows:
    """Rows that another rank sends. Their K/V arrives while the head of it is computed.

    Args:
        header: the note of :class:`Sending`.
        link: to that rank.
        requests: all of the pool, by index.

    Attributes:
        requests: those that come, with what was generated.
        is_race: whether the other rank goes on with them too.
        send_seconds: of the K/V, per token; None: not all of it is here yet, or none was sent.
    """

    def __init__(self, header: str, link: Link, requests: Sequence[Request]) -> None:
        note = json.loads(header)
        rank, rows = note["from"], [tuple(row) for row in note["rows"]]
        self._device = device = requests[0].prompt.device
        tokens = torch.empty(sum(count for _, count, _, _ in rows), dtype=torch.int64, device=device)
        logprobs = torch.empty(len(tokens), dtype=torch.float32, device=device) if note["logprobs"] else None
        for part in (tokens,) if logprobs is None else (tokens, logprobs):
            link.receive(part, rank).wait()
        self._tails = [columns - head for _, _, head, columns in rows]
        self._layers = {int(layer): tuple(shape) for layer, shape in note["layers"].items()}
        self._parts = [
            torch.empty(heads * (d_k + d_v) * sum(self._tails), dtype=getattr(torch, dtype), device=device)
            for heads, d_k, d_v, dtype in self._layers.values()
        ]
        self._works = [link.receive(part, rank) for part in self._parts]
        self._begun = time.perf_counter()
        self._states: dict[int, RowStates] = {}
        self.send_seconds: float | None = None
        counts = [count for _, count, _, _ in rows]
        own = zip(
            tokens.split(counts), [None] * len(rows) if logprobs is None else logprobs.split(counts), strict=True
        )
        self.is_race = note["method"] is not None
        self.requests = []
        for place, ((index, _, head, _), (text, scores)) in enumerate(zip(rows, own, strict=True)):
            more = dict(generated=text, logprobs=scores, head=head, tail=partial(self._tail, place))
            self.requests.append(replace(requests[index], **more, method=note["method"]))

    def _tail(self, place: int) -> RowStates:
        """Waits for the K/V of the row at `place` and returns it. The pool outlives the rollout, so it drops its
        reference."""
        if self._works:
            self._synchronize()
            computed = time.perf_counter()
            for work in self._works:
                work.wait()
            self._synchronize()
            waited = time.perf_counter() - computed
            self.send_seconds = measured_send_seconds(sum(self._tails), computed - self._begun, waited)
            self._works = []
            self._states = dict(enumerate(self._split()))
            self._parts = []
        return self._states.pop(place, {})

    def _split(self) -> Iterator[RowStates]:
        """The states of each row."""
        for place, tail in enumerate(self._tails):
            states: RowStates = {}
            for (layer, (heads, d_k, d_v, _)), part in zip(self._layers.items(), self._parts, strict=True):
                keys, values = part.split([heads * d_k * sum(self._tails), heads * d_v * sum(self._tails)])
                own = [
                    flat.split([heads * d * each for each in self._tails])[place]
                    for flat, d in ((keys, d_k), (values, d_v))
                ]
                states[layer] = own[0].view(heads, tail, d_k), own[1].view(heads, tail, d_v)
            yield states

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # not the streams on which K/V arrives
