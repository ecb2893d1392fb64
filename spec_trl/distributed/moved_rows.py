"""Moves rows from one rank to another: tokens and the tail of the K/V. The receiver computes the head again."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..generation.engine.kv.base import RowKV
from ..generation.engine.rows import Request
from ..generation.engine.saved_row import TARGET, SavedKV, SavedRow
from .link import Link
from .shared_work import measured_send_seconds


class Sending:
    """Sends the requests of :meth:`Rollout.save` to `rank`; `note` describes the tensors, with further entries
    `more`."""

    def __init__(self, requests: Sequence[Request], link: Link, rank: int, note: str, **more: Any) -> None:
        saved = [request.saved for request in requests if request.saved is not None]
        tokens = [row.tokens for row in saved if row.tokens is not None]
        parts = [torch.cat(tokens)]  # [Σ tokens]
        if logprobs := [row.logprobs for row in saved if row.logprobs is not None]:
            parts.append(torch.cat(logprobs))  # [Σ tokens]
        kv = [row.kv[TARGET] if TARGET in row.kv else (row.first, dict) for row in saved]  # to compute all again
        states = [copied() for _, copied in kv]
        layers = {}
        for layer, (keys, values) in max(states, key=len).items():
            layers[layer] = (keys.shape[0], keys.shape[2], values.shape[2], str(keys.dtype).removeprefix("torch."))
            pairs = [row[layer] for row in states if row]
            parts.append(torch.cat([keys.flatten() for keys, _ in pairs] + [values.flatten() for _, values in pairs]))
        rows = [
            (request.index, len(text), row.first, end)
            for request, text, row, (end, _) in zip(requests, tokens, saved, kv, strict=True)
        ]
        header = {"from": link.rank, "rows": rows, "logprobs": bool(logprobs), "layers": layers, **more}
        # The note first: over NCCL the first send between two ranks blocks until the other rank receives.
        link.post(note, json.dumps(header))
        self._parts = parts  # until they have been sent
        self._transfers = [link.send(part, rank) for part in parts]

    def wait(self) -> None:
        """Waits until the other rank has received all tensors."""
        for transfer in self._transfers:
            transfer.wait()
        self._parts, self._transfers = [], []


class MovedRows:
    """Rows that another rank sends. The tail of their K/V arrives while this rank computes the head.

    Args:
        header: the note of :class:`Sending`.
        requests: all requests of the pool, by index.

    Attributes:
        requests: the moved requests, with their saved rows.
        send_seconds: seconds per token of K/V; None: some K/V has not arrived, or none was sent.
    """

    def __init__(self, header: str, link: Link, requests: Sequence[Request]) -> None:
        self.note = note = json.loads(header)
        rank, rows = note["from"], note["rows"]
        self._device = device = requests[0].device or requests[0].prompt.device
        counts = [count for _, count, _, _ in rows]
        tokens = torch.empty(sum(counts), dtype=torch.int64, device=device)
        link.receive(tokens, rank).wait()
        logprobs = [None] * len(rows)
        if note["logprobs"]:
            received = torch.empty(len(tokens), dtype=torch.float32, device=device)
            link.receive(received, rank).wait()
            logprobs = received.split(counts)
        self._tails = [end - first for _, _, first, end in rows]
        self._layers = {int(layer): tuple(shape) for layer, shape in note["layers"].items()}
        self._parts = [
            torch.empty(heads * (d_k + d_v) * sum(self._tails), dtype=getattr(torch, dtype), device=device)
            for heads, d_k, d_v, dtype in self._layers.values()
        ]
        self._transfers = [link.receive(part, rank) for part in self._parts]
        self._began = time.perf_counter()
        self._states: dict[int, RowKV] = {}
        self.send_seconds: float | None = None
        texts = zip(rows, tokens.split(counts), logprobs, strict=True)
        self.requests = []
        for place, ((index, _, first, end), text, scores) in enumerate(texts):
            kv: SavedKV = {TARGET: (end, partial(self._tail, place))} if end > first else {}
            self.requests.append(replace(requests[index], saved=SavedRow(text, scores, first, kv)))

    def _tail(self, place: int) -> RowKV:
        """Waits for the K/V of the row at `place` and returns it, without a reference: the pool outlives the
        rollout."""
        if self._transfers:
            self._synchronize()
            computed = time.perf_counter()
            for transfer in self._transfers:
                transfer.wait()
            self._synchronize()
            waited = time.perf_counter() - computed
            self.send_seconds = measured_send_seconds(sum(self._tails), computed - self._began, waited)
            self._states = {place: self._split(place) for place in range(len(self._tails))}
            self._transfers, self._parts = [], []
        return self._states.pop(place, {})

    def _split(self, place: int) -> RowKV:
        states: RowKV = {}
        for (layer, (heads, d_k, d_v, _)), part in zip(self._layers.items(), self._parts, strict=True):
            keys, values = part.split([heads * d_k * sum(self._tails), heads * d_v * sum(self._tails)])
            row_keys, row_values = (
                flat.split([heads * d * tail for tail in self._tails])[place].view(heads, self._tails[place], d)
                for flat, d in ((keys, d_k), (values, d_v))
            )
            states[layer] = row_keys, row_values
        return states

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # not for the streams of arriving K/V
