"""DFlash: a trained network drafts a block in one forward, conditioned on the target's hidden states."""

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...engine.cache import RaggedCache
from ...engine.drafter import DraftSession
from ...engine.noise import RoundNoise
from ...engine.rows import Admission
from ...engine.runner import COLUMN_BUCKET
from ...engine.verification import Proposal
from ..canvas import Canvas
from ..checkpoints import load_exactly, read_checkpoint, tensors_to_store, write_checkpoint
from ..feature_drafter import LearnedDrafter, network_cost
from .config import DFlashConfig
from .network import DFlashNetwork, Store


# What training leaves in a checkpoint besides the network: the target's head for the loss, a rotary table.
_SPARE_TENSORS = ("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")


class DFlashDrafter(LearnedDrafter):
    """Drafts blocks with a DFlash checkpoint of the z-lab or the speculators format (arXiv 2602.06036).

    The target's features become K/V of the drafter's layers as they are told: column i of its own ragged cache holds
    the context at position i of the row. A block's K/V is written behind the context, where the features of the tokens
    that come to stand there overwrite it.

    Args:
        checkpoint: a folder or hub id.
        target: what it drafts for. Its embedding and head are used as they are, live, unless the checkpoint has its
            own; nothing of it is copied.
        dtype: the network runs in; None: the target's.

    Raises:
        ValueError: the checkpoint is broken, or made for another target.
    """

    strategy = "dflash"
    weight_rate = 0.25  # measured: benchmarks/results/tts_rates.md
    network: DFlashNetwork

    def __init__(self, checkpoint: str | Path, target: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
        self._settings, self._stored = read_checkpoint(checkpoint)
        try:
            self.config = DFlashConfig.parse(self._settings)
            has_embedding, has_head = (f"{name}.weight" in self._stored for name in ("embed_tokens", "lm_head"))
            _check_target(self.config, target, has_embedding, has_head)
        except ValueError as error:
            raise ValueError(f"assistant_model={str(checkpoint)!r}: {error}") from error
        width = target.config.get_text_config(decoder=True).hidden_size * len(self.config.target_layers)
        self.network = DFlashNetwork(
            self.config, width, has_embedding, has_head, dtype=dtype or target.dtype, device="meta"
        )
        load_exactly(self.network, self._stored, {}, _SPARE_TENSORS, checkpoint, target.device)
        self.network.requires_grad_(False).eval()
        self.target_ids, self._vocabulary = None, self.config.decoder.vocab_size
        if self.config.is_pruned:
            _check_vocabulary_maps(self.network, checkpoint)
            self.target_ids = self.network.target_ids  # [draft vocabulary]
        self.position_limit = self.config.position_limit
        self.feature_layers = self.config.target_layers
        head = None if has_head else target.get_output_embeddings()
        self.cost = network_cost(self.network, head, self.config.block_size, self.config.drafts)

    def save(self, folder: str | Path) -> None:
        """Writes the drafter in the format it came in: config.json as it was, tensors by the same names and dtypes."""
        write_checkpoint(folder, self._settings, tensors_to_store(self.network, self._stored, {}))

    def begin(self, session: DraftSession) -> None:
        assert session.target is not None
        super().begin(session)
        rows = session.rows
        self.forwards = 0
        decoder, weight = self.config.decoder, self.network.fc.weight
        # A block starts at a row's last token.
        self._cache = RaggedCache(decoder.num_hidden_layers, rows.capacity, rows.columns + self.config.block_size)
        like = weight.new_empty(1, decoder.num_key_value_heads, 0, decoder.head_dim)
        for layer in self._cache.layers:  # now, where a lack of memory is reported
            layer.lazy_initialization(like, like)
        self._broken_off: Exception | None = None
        session.target.listen(self.config.target_layers, self._hear)

    def end(self) -> None:
        assert self.session.target is not None
        self.session.target.stop_listening(self._hear)
        super().end()
        del self._cache, self._broken_off

    def admit(self, admission: Admission) -> None:
        if admission.followers:
            self._cache.copy_rows(admission.sources, admission.followers, self.session.rows.longest)
        self._admit_recent(admission)

    def move(self, source: list[int], destination: list[int], columns: int) -> None:
        super().move(source, destination, columns)
        self._cache.copy_rows(source, destination, columns)

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        if self._broken_off is not None:
            raise self._broken_off
        session, rows = self.session, self.session.rows
        steps = min(draft_length, self.config.drafts)
        self.forwards += 1
        slots = rows.columns_behind(-1, self.config.block_size)  # [B, n]
        columns = rows.longest - 1 + self.config.block_size
        columns = min(-(-columns // COLUMN_BUCKET) * COLUMN_BUCKET, self._cache.columns)
        self._cache.point_at(slots, columns, 0)
        logits = self._block_logits(
            self.network, rows.window(-1, 1), slots, columns, self._store, steps
        )  # [B, steps, draft vocabulary]
        kept, scores, drawn = [], [], None
        for step in range(steps):
            drawn, processed = session.draw(self._over_target(logits[:, step : step + 1]), noise, step, drawn)
            rows.write(step, drawn.tokens)
            scores.append(drawn.scores)
            if processed is not None:
                kept.append(processed)
        won = torch.cat(scores, dim=1)  # [B, steps]
        broken = won.isnan().any(dim=1)  # [B]
        # -inf: the processors left no token of the draft vocabulary, or refused the draft. A row drafts up to there.
        lengths = (won > -torch.inf).long().cumprod(dim=1).sum(dim=1).masked_fill(broken, 0)  # [B]
        missing = draft_length - steps
        tokens = nn.functional.pad(rows.window(0, steps), (0, missing))  # [B, γ]
        draft_logits = nn.functional.pad(torch.cat(kept, dim=1), (0, 0, 0, missing)) if kept else None  # [B, γ, V]
        return Proposal(tokens, lengths, draft_logits, broken.any())

    @property
    def cache(self) -> RaggedCache:
        return self._cache

    def columns_of_replay(self, draft_length: int) -> int:
        return self.config.block_size

    @property
    def width(self) -> int:
        return self.config.decoder.hidden_size

    def replay(self, network: DFlashNetwork, canvas: Canvas) -> Tensor:
        count = min(canvas.draft_length, self.config.drafts)
        cache = canvas.cache()

        def store(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            return cache.layers[layer].update(keys, values)

        if canvas.features is not None:
            context = canvas.behind(-1 - canvas.context, canvas.context)  # [B, context]
            cache.point_at(context)
            network.remember(canvas.features.to(network.fc.weight.dtype), context, store)
        slots = canvas.behind(-1, self.config.block_size)  # [B, n]
        cache.point_at(slots)
        return self._block_logits(network, canvas.tokens_behind(-1, 1), slots, canvas.columns, store, count)

    def trained(self, network: DFlashNetwork) -> list[nn.Parameter]:
        return [p for name, p in network.named_parameters() if name not in ("embed_tokens.weight", "lm_head.weight")]

    def projections(self, network: DFlashNetwork) -> dict[str, nn.Module]:
        return {name: m for name, m in network.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"}

    def position_weights(self, count: int) -> list[float]:
        """exp(-(k - 1) / γ_w), with γ_w 7 for blocks of 16 and 4 for blocks of 8 (published), and a straight line
        through both, not below 1, for others."""
        decay = max(4 + (self.config.block_size - 8) * (7 - 4) / (16 - 8), 1.0)
        return [math.exp(-k / decay) for k in range(count)]

    def _hear(self, features: Tensor, positions: Tensor, first_row: int) -> None:
        # It runs within the target's forward, where an exception would end the generation instead of the drafter.
        if self._broken_off is not None:
            return
        try:
            self._keep_recent(features, positions, first_row)
            weight = self.network.fc.weight
            self._cache.point_at(positions, 0, first_row)
            with torch.autocast(weight.device.type, enabled=False):
                self.network.remember(features.to(weight.dtype), positions, self._store)
        except Exception as error:
            self._broken_off = error

    def _store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self._cache.update(keys, values, layer)
        return found

    def _block_logits(
        self, network: DFlashNetwork, newest: Tensor, slots: Tensor, columns: int, store: Store, count: int
    ) -> Tensor:
        """Logits `[B, count, draft vocabulary]` of the first drafted slots of one block per row.

        Args:
            network: this drafter's, or a copy of it.
            newest: `[B, 1]` int64, the last committed tokens, which the target has not read yet.
            slots: `[B, n]` int64, the block's columns.
            columns: that `store` returns.
            store: of K/V, pointed at the slots.
            count: of slots.
        """
        config, session = self.config, self.session
        assert session.target is not None
        target = session.target.network
        anchors = slots[:, :1]  # [B, 1]
        tokens = torch.full_like(slots, config.mask_token)  # [B, n]
        tokens[:, :1] = newest
        embedded = network.embed(tokens, target.get_input_embeddings())  # [B, n, H]
        keys = torch.arange(columns, device=slots.device)[None]  # [1, columns]
        masks = config.masks(anchors[:, 0], keys, keys >= anchors, embedded.dtype)
        with torch.autocast(slots.device.type, enabled=False):
            states = network.refine(embedded, slots, masks, store)  # [B, n, H]
        first = config.block_size - config.drafts
        return network.logits(states[:, first : first + count], target.get_output_embeddings())


def _check_target(config: DFlashConfig, target: PreTrainedModel, has_embedding: bool, has_head: bool) -> None:
    """Raises ValueError where the drafter was made for another target."""
    decoder, own = config.decoder, target.config.get_text_config(decoder=True)
    depth = own.num_hidden_layers
    beyond = [index for index in config.target_layers if index > depth]
    if config.num_target_layers not in (None, depth) or beyond:
        # z-lab's target_layer_ids count from 0 behind the first layer, speculators' aux_hidden_state_layer_ids from 1.
        wanted = f"hidden states {list(config.target_layers)}"
        if config.num_target_layers is not None:
            wanted += f" of a target with num_target_layers={config.num_target_layers}"
        raise ValueError(
            f"it reads {wanted}, and {type(target).__name__} has {depth} layers. Use the drafter made for this target."
        )
    if decoder.vocab_size != own.vocab_size:
        raise ValueError(
            f"vocab_size={decoder.vocab_size}, and the target's vocabulary has {own.vocab_size} tokens; a drafter "
            "must use the target's tokenizer."
        )
    if config.mask_token >= own.vocab_size:
        raise ValueError(
            f"mask_token_id={config.mask_token} lies outside the target's vocabulary of {own.vocab_size} tokens. Give "
            "the target the embedding that the drafter was trained with."
        )
    if config.draft_vocabulary > own.vocab_size:
        raise ValueError(
            f"draft_vocab_size={config.draft_vocabulary} is more than the target's vocabulary of {own.vocab_size} "
            "tokens."
        )
    if config.target_hidden_size not in (None, own.hidden_size):
        raise ValueError(
            f"target_hidden_size={config.target_hidden_size}, and the target's is {own.hidden_size}. Use the drafter "
            "made for this target."
        )
    if decoder.hidden_size != own.hidden_size and not (has_embedding and has_head):
        raise ValueError(
            f"hidden_size={decoder.hidden_size}, and the target's is {own.hidden_size}: the target's embedding and "
            "head cannot serve it, and the checkpoint does not bring both of its own."
        )
    if config.is_pruned and not has_head:
        raise ValueError(
            f"draft_vocab_size={config.draft_vocabulary} of {own.vocab_size} tokens needs a head of its own, and "
            "lm_head.weight is missing."
        )


def _check_vocabulary_maps(network: DFlashNetwork, checkpoint: str | Path) -> None:
    """Raises ValueError where d2t and t2d do not describe one and the same part of the vocabulary."""
    ids, size = network.target_ids, len(network.t2d)
    told = network.t2d.nonzero().flatten()  # [draft vocabulary] if they agree, in ascending order
    if bool(((ids < 0) | (ids >= size)).any()):
        problem = f"d2t reaches token ids from {int(ids.min())} to {int(ids.max())}, and there are {size} tokens"
    elif not torch.equal(ids.sort().values, told):
        problem = f"d2t names {ids.unique().numel()} tokens and t2d {told.numel()}, which are not the same"
    else:
        return
    raise ValueError(
        f"assistant_model={str(checkpoint)!r}: {problem}. d2t holds offsets (token = i + d2t[i]) and t2d marks the "
        "tokens that are reached; take both from the training run that made the drafter."
    )
