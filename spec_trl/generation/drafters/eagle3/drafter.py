"""EAGLE-3 as drafter (Li et al. 2025, arXiv 2503.01840): one layer that reads what the target thought."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...engine.attention import FULL, MaskPlan
from ...engine.cache import RaggedCache, check_memory
from ...engine.drafter import DraftSession
from ...engine.noise import RoundNoise
from ...engine.rows import Admission
from ...engine.runner import COLUMN_BUCKET
from ...engine.verification import Proposal
from ..autoregressive import CATCH_UP
from ..canvas import Canvas
from ..checkpoints import load_exactly, read_checkpoint, tensors_to_store, write_checkpoint
from ..feature_drafter import LearnedDrafter, network_cost
from .network import Eagle3Config, Eagle3Network


RENAMES = {"midlayer.": "layers.0."}
# Buffers and training-time copies of the target's weights that some files hold; drafting has no use for them.
_UNUSED = (
    "rotary_emb.inv_freq",
    "midlayer.self_attn.rotary_emb.inv_freq",
    "layers.0.self_attn.rotary_emb.inv_freq",
    "verifier_norm.weight",
    "verifier_lm_head.weight",
)
_PROMPT_PAIRS = 8192  # fed at once, padding included: bounds activations and masks
_CAUSAL = MaskPlan((FULL,), per_type=False, sliding_window=0, chunk_size=0)


class Eagle3Drafter(LearnedDrafter):
    """Drafts with an EAGLE-3 checkpoint, from the hidden states that the target has had anyway.

    Column i of its K/V cache holds the pair of token i + 1 and the target's features at column i, and its output
    drafts token i + 2. The features of a row of n tokens end at column n - 2 (the newest token is fed to the target by
    the next verification), so the pair n - 2 drafts the first token, and further pairs live on the network's own
    output:

        column        0     1     2     3 = n - 2    4           5
        token         x1    x2    x3    x4           d1          d2
        state         r0    r1    r2    r3           h3          h4          r: projected features, h: fed back
        drafts                          d1           d2          d3

    What was fed back is overwritten with real pairs once their features are told: the cache then holds what it would
    hold if the accepted tokens had been fed in order.

    Args:
        checkpoint: a folder or hub id, in the format of SafeAILab, AngelSlim and SpecForge or in that of speculators.
        target: what it drafts for; its embedding is used live, unless the checkpoint brings one.
        dtype: to run in; None: the target's.

    Attributes:
        network: parameters under the names of the speculators format.

    Raises:
        ValueError: the checkpoint is not one, or was not made for this target.
    """

    strategy = "eagle3"
    network: Eagle3Network

    def __init__(self, checkpoint: str | Path, target: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
        self._config_file, self._stored = read_checkpoint(checkpoint)
        source = str(checkpoint)
        target_config = target.config.get_text_config(decoder=True)
        config = Eagle3Config.parse(self._config_file, target_config.num_hidden_layers, source)
        _check_sizes(config, target_config, "embed_tokens.weight" in self._stored, source)
        with torch.device("meta"):
            network = Eagle3Network(config, set(self._stored)).to(dtype or target.dtype)
        load_exactly(network, self._stored, RENAMES, _UNUSED, source, target.device)
        self.network = network.eval()
        self.target_ids = _target_ids(network, set(self._stored), source)
        self.position_limit = config.position_limit
        self.feature_layers = config.layer_ids
        self.cost = network_cost(network, None)
        self._vocabulary = config.vocab_size
        self._dtype = dtype or target.dtype

    def save(self, folder: str | Path) -> None:
        """Writes the checkpoint in the format it came in: names, dtypes and config; what did not change, bit for bit.

        Weights that came from a `.bin` file are written as safetensors.
        """
        write_checkpoint(folder, self._config_file, tensors_to_store(self.network, self._stored, RENAMES))

    def begin(self, session: DraftSession) -> None:
        super().begin(session)
        rows, config = session.rows, self.network.config
        self.forwards = 0
        shape, device = (rows.capacity, rows.columns, config.layer.hidden_size), rows.tokens.device
        what = f"the EAGLE-3 drafter's features of {shape[0]} rows x {shape[1]} columns"
        check_memory(what, torch.Size(shape).numel() * self._dtype.itemsize, device)
        self._projected = torch.zeros(shape, dtype=self._dtype, device=device)  # [capacity, columns, H]
        self._cache = RaggedCache(1, rows.capacity, rows.columns)
        # Pairs of each row whose K/V was computed from the target's features: [capacity]
        self._cached = torch.zeros(rows.capacity, dtype=torch.int64, device=device)
        self._behind = 0  # at least as many pairs as any row lacks, known without asking the device
        self._heard = 0  # width of the target's last forward
        self._failure: Exception | None = None
        assert session.target is not None
        session.target.listen(config.layer_ids, self._hear)

    def end(self) -> None:
        assert self.session.target is not None
        self.session.target.stop_listening(self._hear)
        super().end()
        del self._projected, self._cache, self._cached, self._failure

    def admit(self, admission: Admission) -> None:
        rows = self.session.rows
        pairs = (rows.lengths[admission.first :] - 1).tolist()
        leaders, followers = pairs[: admission.leaders], pairs[admission.leaders :]
        if leaders:
            width = max(_PROMPT_PAIRS // len(leaders), CATCH_UP)
            for start in range(0, max(leaders), width):
                stop = min(start + width, max(leaders))
                columns = torch.arange(start, stop, device=rows.tokens.device).expand(len(leaders), -1)  # [n, q]
                # Shorter rows feed scratch behind their prompt: masked now, overwritten later.
                self._feed(columns, stop, first_row=admission.first)
        if followers:
            self._copy(admission.sources, admission.followers, max(followers))
        self._cached[admission.first : rows.active] = rows.lengths[admission.first :] - 1
        self._admit_recent(admission)

    def move(self, source: list[int], destination: list[int], columns: int) -> None:
        super().move(source, destination, columns)
        self._copy(source, destination, columns)
        self._cached[destination] = self._cached[source]

    def observe(self, tokens: int) -> None:
        if self._failure is not None:
            raise self._failure
        self._behind += self._heard  # no row gained more than was verified

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        session, rows = self.session, self.session.rows
        h = self._catch_up()  # [B, 1, H]
        kept, scores, drawn = [], [], None
        for step in range(draft_length):
            logits = self._over_target(self._apply(self.network.logits, h))  # [B, 1, V]
            drawn, processed = session.draw(logits, noise, step, drawn)
            rows.write(step, drawn.tokens)
            scores.append(drawn.scores)
            if processed is not None:
                kept.append(processed)
            if step + 1 < draft_length:
                columns = rows.columns_behind(step - 1, 1)  # [B, 1]
                h = self._feed(columns, rows.longest + step, states=self._apply(self.network.fed_back, h))
        found = torch.cat(scores, dim=1)  # [B, γ]
        # -inf: processors left no token of a pruned vocabulary, or refused the draft. A row drafts up to there.
        drafted = (found > -torch.inf).long().cumprod(dim=1).sum(dim=1)  # [B]
        # A row of one token has no features yet.
        lengths = drafted.masked_fill(rows.lengths < 2, 0)  # [B]
        draft_logits = torch.cat(kept, dim=1) if kept else None  # [B, γ, V]
        return Proposal(rows.window(0, draft_length), lengths, draft_logits, found.isnan().any())

    @property
    def cache(self) -> RaggedCache:
        return self._cache

    @property
    def width(self) -> int:
        return self.network.config.layer.hidden_size

    def replay(self, network: Eagle3Network, canvas: Canvas) -> Tensor:
        assert canvas.features is not None
        cache, table, dtype = canvas.cache(), self._embedding(), network.fc.weight.dtype

        def feed(columns: Tensor, tokens: Tensor, states: Tensor) -> Tensor:
            cache.point_at(columns)
            mask = _CAUSAL.build(columns, canvas.columns, dtype)  # [B, 1, q, columns]
            return network(F.embedding(tokens, table).to(dtype), states, columns, mask, cache.layers[0])

        context = canvas.context
        states = network.project(canvas.features.to(dtype))  # [B, context, H]
        h = feed(canvas.behind(-1 - context, context), canvas.tokens_behind(-context, context), states)[:, -1:]
        logits = [network.logits(h)]  # [B, 1, draft vocabulary] each
        for step in range(canvas.draft_length - 1):
            h = feed(canvas.behind(step - 1, 1), canvas.tokens_behind(step, 1), network.fed_back(h))  # [B, 1, H]
            logits.append(network.logits(h))
        return torch.cat(logits, dim=1)

    def trained(self, network: Eagle3Network) -> list[nn.Parameter]:
        return [p for name, p in network.named_parameters() if name != "embed_tokens.weight"]

    def projections(self, network: Eagle3Network) -> dict[str, nn.Module]:
        return {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}

    @property
    def cache_bytes(self) -> int:
        return super().cache_bytes + self._projected.nbytes

    def _hear(self, features: Tensor, positions: Tensor, first_row: int) -> None:
        """Keeps the target's features `[B, q, layers * H_t]` of `positions` (`[B, q]`), projected."""
        self._heard = positions.shape[1]
        if self._failure is not None:
            return
        try:
            self._cache.point_at(positions, 0, first_row)  # adapters of `fc` are the rows' own
            projected = self._apply(self.network.project, features.to(self._dtype))  # [B, q, H]
            rows = torch.arange(first_row, first_row + len(positions), device=positions.device)[:, None]  # [B, 1]
            self._projected[rows, positions] = projected
            self._keep_recent(features, positions, first_row)
        except Exception as error:  # raised where the engine expects drafters to fail, not out of the target's forward
            self._failure = error

    def _catch_up(self) -> Tensor:
        """Feeds the pairs that the cache lacks, up to the newest; returns its output h `[B, 1, H]`."""
        rows = self.session.rows
        if self._failure is not None:
            raise self._failure
        if self._behind > CATCH_UP:  # after rounds in which it did not draft the bound is loose
            self._behind = int((rows.lengths - 1 - self._cached[: rows.active]).max())
        # Rows that lack fewer feed some pairs again, which rewrites the same K/V.
        missing, self._behind = max(self._behind, 1), 0
        self._cached[: rows.active] = rows.lengths - 1
        while missing > CATCH_UP:
            self._feed(rows.columns_behind(-1 - missing, CATCH_UP).clamp(min=0), rows.longest - 1)
            missing -= CATCH_UP
        return self._feed(rows.columns_behind(-1 - missing, missing).clamp(min=0), max(rows.longest - 1, 1))[:, -1:]

    def _feed(self, columns: Tensor, visible: int, first_row: int = 0, states: Tensor | None = None) -> Tensor:
        """Runs the pairs of `columns` (`[B, q]`) over the cache's columns 0..visible; returns h `[B, q, H]`.

        Their states are the projected features, unless `states` (`[B, q, H]`) are given.
        """
        self.forwards += 1
        rows = torch.arange(first_row, first_row + len(columns), device=columns.device)[:, None]  # [B, 1]
        tokens = self.session.rows.tokens[rows, columns + 1]  # [B, q]
        embedded = F.embedding(tokens, self._embedding()).to(self._dtype)  # [B, q, H]
        if states is None:
            states = self._projected[rows, columns]  # [B, q, H]
        visible = min(-(-visible // COLUMN_BUCKET) * COLUMN_BUCKET, self._cache.columns)
        self._cache.point_at(columns, visible, first_row)
        mask = _CAUSAL.build(columns, visible, self._dtype)  # [B, 1, q, visible]
        return self._apply(self.network, embedded, states, columns, mask, self._cache.layers[0])

    def _apply(self, function: Any, *arguments: Any) -> Tensor:
        """A part of the network in the network's own dtype, whatever autocast the policy trains under."""
        with torch.autocast(self.session.rows.tokens.device.type, enabled=False):
            return function(*arguments)

    def _embedding(self) -> Tensor:
        """`[V, H]`, the target's of this moment, unless the checkpoint brought one."""
        if self.network.embed_tokens is not None:
            return self.network.embed_tokens.weight
        assert self.session.target is not None
        return self.session.target.network.get_input_embeddings().weight

    def _copy(self, source: list[int], destination: list[int], columns: int) -> None:
        self._projected[destination, :columns] = self._projected[source, :columns]
        self._cache.copy_rows(source, destination, columns)


def _check_sizes(config: Eagle3Config, target: Any, has_embedding: bool, source: str) -> None:
    where = f"assistant_model={source!r}"
    if config.vocab_size != target.vocab_size:
        raise ValueError(
            f"{where} has a vocabulary of {config.vocab_size} tokens (vocab_size) and the target one of "
            f"{target.vocab_size}; choose a drafter that was made for this target."
        )
    if config.draft_vocab_size > config.vocab_size:
        raise ValueError(
            f"{where} has draft_vocab_size={config.draft_vocab_size}, more than its vocab_size={config.vocab_size}."
        )
    if config.target_hidden_size != target.hidden_size:
        raise ValueError(
            f"{where} reads hidden states of width {config.target_hidden_size} (target_hidden_size, or else "
            f"hidden_size) and the target's have {target.hidden_size}; choose a drafter that was made for this target."
        )
    if config.layer.hidden_size != target.hidden_size and not has_embedding:
        raise ValueError(
            f"{where} has hidden_size={config.layer.hidden_size} and no embed_tokens, and the target's embedding has "
            f"width {target.hidden_size}; such a drafter must bring an embedding of its own."
        )


def _target_ids(network: Eagle3Network, tensors: set[str], source: str) -> Tensor | None:
    """The target's token for each of the drafter's, `[draft_vocab_size]`; None: the same."""
    where, config = f"assistant_model={source!r}", network.config
    if "d2t" not in tensors:
        if "t2d" in tensors or config.draft_vocab_size != config.vocab_size:
            raise ValueError(
                f"{where} has a vocabulary of {config.draft_vocab_size} of the target's {config.vocab_size} tokens, "
                "and no d2t that says which; it was not saved whole."
            )
        return None
    ids = network.d2t + torch.arange(len(network.d2t), device=network.d2t.device)  # [draft_vocab_size], d2t: offsets
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(ids.unique()) != len(ids):
        raise ValueError(
            f"{where}: d2t must give each token of the drafter an offset to another token of the target's; its tokens "
            f"run from {int(ids.min())} to {int(ids.max())}, {len(ids.unique())} different ones of {len(ids)}."
        )
    if "t2d" in tensors and not torch.equal(network.t2d.nonzero().flatten(), ids.sort().values):
        raise ValueError(f"{where}: t2d marks other tokens than d2t leads to; the file is broken.")
    return ids
