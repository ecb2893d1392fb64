"""Drafts token by token with a network: base of the self-drafter and of a small model."""

import functools
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...quantization.linear import QuantizedLinear
from ..engine.drafter import DraftSession, NetworkDraft
from ..engine.forwards.runner import EagerRunner
from ..engine.kv.base import RowKV
from ..engine.kv.cache import autocast_dtype
from ..engine.kv.memory import sent
from ..engine.kv.row_memory import kv_bytes
from ..engine.network.family import Family
from ..engine.network.products import lend_copies, take_copies_back
from ..engine.network.shadow import decoder_layers
from ..engine.rows import Admission, Integers
from ..engine.sampling.accept import Proposal
from ..engine.sampling.noise import RoundNoise
from .trainable_drafter import Canvas, TrainableDrafter


CATCH_UP = 16
"""Most tokens per row in a forward over text that was committed without the drafter."""


class NetworkDrafter(TrainableDrafter):
    """Drafts with a causal language model over a ragged cache.

    Args:
        network: the drafting network, as :func:`~.make_shadow` makes it.
        shares_target_cache: whether it reads the target's K/V. K/V of drafts is then written into the target's cache,
            and overwritten by verification (ER §E.2), or into a tail if it runs ahead (SA §4.1).
        made_of: networks with an equal tuple share captured forwards; None: only this network.
    """

    has_probabilities = True
    uses_pool = True
    network: PreTrainedModel

    def __init__(
        self, network: PreTrainedModel, shares_target_cache: bool, made_of: tuple[object, ...] | None = None
    ) -> None:
        self.network = network
        self._made_of = made_of or (id(network),)
        self._shares_target_cache = shares_target_cache
        config = network.config.get_text_config(decoder=True)
        self._vocabulary, self.width = config.vocab_size, config.hidden_size
        self._family = Family.of(network)
        self.drafts_ahead = self._family.drafts_ahead

    def begin(self, session: DraftSession) -> None:
        super().begin(session)
        rows = session.rows
        # In host memory: drafts read in this round, valid after waiting for the device, `[B, γ - 1]`.
        self._fed: Integers | None = None
        self.cached = None
        tail = session.tail if self._shares_target_cache else None
        self._owns_cache = not self._shares_target_cache or session.target is None
        if self._owns_cache and tail is None:
            self.cached = np.zeros(rows.capacity, np.int64)
        if session.target is not None:
            if autocast_dtype(self.network.device) is not None:
                lend_copies(session.target.network, self.network)
            self._runner = session.target.for_drafter(self.network, self._shares_target_cache, self._made_of)
        else:
            own = self._family.cache.for_network(self.network, rows.capacity, rows.columns) if tail is None else tail
            self._runner = EagerRunner(self.network, own)
        self.cache = self._runner.cache
        # Drafts advance a copy of the recurrent states, since drafts may be rejected.
        with_text = self.drafts_ahead or not self._owns_cache
        self._drafting = self._runner if with_text else self._runner.for_drafter(self.network, True, self._made_of)

    def end(self) -> None:
        super().end()
        if autocast_dtype(self.network.device) is not None:
            take_copies_back(self.network)
        del self._runner, self._drafting, self.cache, self.cached, self._fed

    def admit(self, admission: Admission) -> None:
        if self.cached is not None:
            if not self._family.shares_prompts and any(source < admission.first for source in admission.sources):
                # Rows in flight have advanced beyond the prompt: their copies read it again.
                admission = replace(admission, leaders=len(admission.lengths), followers=[], sources=[])
            rows, known = self.session.rows, admission.restore(self.strategy, self.cache)
            self._runner.read(rows, admission, [length - 1 for length in admission.lengths], known)
            self.cached[admission.first : rows.active] = rows.host_lengths[admission.first :] - 1

    def save_row(self, row: int) -> dict[str, tuple[int, RowKV]]:
        if self.cached is None:
            return {}
        columns = self.computed(row)
        return {self.strategy: (columns, self.cache.export_row(row, 0, columns))}

    def move(self, source: list[int], destination: list[int], columns: list[int]) -> None:
        if self._owns_cache:
            self.cache.move_rows(source, destination, columns, self.session.rows.active)
        if self.cached is not None:
            super().move(source, destination, columns)

    def observe(self, tokens: Integers, counts: Integers) -> None:
        if self.cached is None:
            return
        rows, cached = self.session.rows, self.cached[: self.session.rows.active]  # [B]
        if self._fed is not None:
            # Read drafts count as far as they were committed: they may be rejected, or another drafter's may win.
            fed, self._fed = self._fed, None
            count = min(fed.shape[1], tokens.shape[1])
            cached += np.logical_and.accumulate(fed[:, :count] == tokens[:, :count], axis=1).sum(1)
        np.minimum(cached, rows.host_lengths - 1, out=cached)  # also if a drafter that ran ahead goes back

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        session, rows = self.session, self.session.rows
        if self._owns_cache:
            self.cache.reserve((rows.host_lengths + draft_length).tolist())
        is_apart = self._drafting is not self._runner
        known = 1 if is_apart else self._catch_up()
        columns = rows.columns_after(-known, known + draft_length).clamp(min=0)  # [B, known + γ]
        tokens = rows.tokens[: rows.active].gather(1, columns)  # [B, known + γ]
        columns = columns[:, :-1]  # of all that are fed
        draft = NetworkDraft(tokens, columns, known, noise, session.draw, rows.write, session.drawn_by, session.text)
        proposal = draft.run(self._step) if is_apart else self._runner.draft(draft, rows.longest)
        if self.cached is not None:
            self.cached[: rows.active] = rows.host_lengths
            if not is_apart:
                self._fed = proposal.tokens[:, :-1].to("cpu", non_blocking=True).numpy()
        return proposal

    @property
    def forwards(self) -> int:  # type: ignore[override]
        drafting = 0 if self._drafting is self._runner else self._drafting.forwards
        return self._runner.forwards + drafting

    @property
    def cache_bytes(self) -> int:
        of_text = self.cache.bytes_of(self.session.most_columns) if self._owns_cache else 0
        return of_text + self._drafting.cache.fixed_bytes

    @property
    def column_bytes(self) -> float:
        return 0.0 if self._shares_target_cache else kv_bytes(self.network)

    @functools.cached_property
    def row_bytes(self) -> int:
        return 2 * self._family.row_bytes(self.network)  # of the text, and of drafts

    def replay(self, network: PreTrainedModel, canvas: Canvas) -> Tensor:
        # One forward instead of γ: the drafts are known.
        count = canvas.tokens.shape[1] - 1
        return self._runner.replay(network, canvas.tokens[:, :count], canvas.columns_after(-1, count), canvas.cache())

    def trained(self, network: PreTrainedModel) -> list[nn.Parameter]:
        return list(network.parameters())

    def projections(self, network: PreTrainedModel) -> dict[str, nn.Module]:
        return {
            name: module
            for name, module in decoder_layers(network).named_modules()
            if isinstance(module, nn.Linear | Conv1D | QuantizedLinear)
        }

    def _catch_up(self) -> int:
        """Reads the tokens that the cache lacks, except the newest; returns the number of these, at least 1."""
        if self.cached is None:
            return 1
        rows = self.session.rows
        # Usually 1, or 2 after a fully accepted block; more after rounds without drafting. Rows that lack fewer read
        # some tokens again and write the same K/V.
        missing = int((rows.host_lengths - self.cached[: rows.active]).max())
        while missing > CATCH_UP:  # in pieces, and without the large logits of a long prompt
            columns = rows.columns_after(-missing, CATCH_UP).clamp(min=0)  # [B, CATCH_UP]
            self._runner.prefill(rows.tokens[: rows.active].gather(1, columns), columns, rows.longest)
            missing -= CATCH_UP
        return missing

    def _step(self, tokens: Tensor, columns: Tensor, step: int) -> Tensor:
        if step == 0:
            return self._read_committed()
        return self._drafting.forward(tokens, columns, self.session.rows.longest + step)

    def _read_committed(self) -> Tensor:
        """Advances the states by the tokens committed since the last draft, a different number per row; returns the
        logits `[B, 1, V]` after them. Drafts continue in the other set of states."""
        rows, cache, cached = self.session.rows, self.cache, self.cached
        assert cached is not None
        cached = cached[: rows.active].copy()  # [B]
        most = min(CATCH_UP, self.session.most_drafted + 1)  # columns left after the texts of rows
        logits = None
        while logits is None:
            missing = rows.host_lengths - cached  # [B]
            is_last = missing.max() <= most
            counts = missing if is_last else np.minimum(missing - 1, most)  # [B]
            fed = cached[:, None] + np.arange(counts.max())  # [B, n]
            columns = sent(torch.from_numpy(fed), rows.tokens.device)
            places = [(row, count - 1) for row, count in enumerate(counts.tolist())] if is_last else []
            cache.feeds(None if cache.fixed_bytes else counts.tolist())  # before a first text there are no states
            tokens = rows.tokens[: rows.active].gather(1, columns)  # [B, n]
            logits = self._runner.prefill(tokens, columns, int(fed.max()) + 1, 0, places)
            cache.commit(counts.tolist())
            cached += counts
        self._drafting.cache.begin_drafts(rows.active)
        return logits
