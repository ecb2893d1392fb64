"""Runs drafters that were trained on a target's hidden states (its features)."""

import sys
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...value_checks import require_folder_or_id
from ..engine.drafter import DraftCost, DraftSession, Forward, NetworkDraft
from ..engine.forwards.runner import COLUMN_BUCKET
from ..engine.kv.base import RowKV
from ..engine.kv.cache import autocast_dtype
from ..engine.network.products import Product
from ..engine.rows import Admission
from ..engine.sampling.accept import Proposal
from ..engine.sampling.noise import RoundNoise
from ..options import SpeculativeConfig
from ..planner.acceptance import MAX_DRAFT_LENGTH
from .checkpoints import (
    ConfigFile,
    load_exactly,
    read_checkpoint,
    read_config,
    renamed,
    state_of,
    tensors_to_store,
    write_checkpoint,
)
from .feature_network import FeatureConfig, FeatureNetwork
from .target_parts import check_sizes, plain_embedding
from .trainable_drafter import TrainableDrafter


class FeatureDrafter(TrainableDrafter):
    """Drafts with a checkpoint, from the hidden states that the target's runner reports (`EagerRunner.listen`).

    Where the target's forwards are captured, the intake of hidden states and the drafts are captured too, and the
    drafter's cache lies in pages. Prompts, processors that read the text, and rejection verification run eagerly.

    Args:
        checkpoint: a folder or hub id.
        target: the model to draft for. Without embedding or head in the checkpoint the target's are used, live.
        dtype: of the network; None: the target's.

    Raises:
        ValueError: the checkpoint is broken, or was made for another target.
    """

    assistant = "required"
    has_probabilities = True
    uses_pool = True
    drafts_ahead = False
    learned_context = 16
    network: FeatureNetwork
    network_type: type[Any]
    config: FeatureConfig
    """The checkpoint's config.json."""
    argument = "assistant_model"
    """Name of the argument with the checkpoint, for errors."""
    renames: Mapping[str, str] = {}
    """Stored prefix -> prefix in the network."""
    borrowed: tuple[str, ...] = ("embed_tokens.weight",)
    """Parameters that do not learn, since a drafter without them uses the target's."""
    lag: int = 0
    """Columns by which a token's K/V lies before its position; a row with no more tokens is not drafted for."""

    @classmethod
    def make(cls, model: PreTrainedModel, assistant: Any, config: SpeculativeConfig) -> "FeatureDrafter":
        return cls(cls._named("assistant_model", assistant), model)

    @classmethod
    def kept_for(cls, model: PreTrainedModel, assistant: Any, config: SpeculativeConfig) -> tuple[object, ...] | None:
        return (*state_of(assistant), model.dtype, model.device) if isinstance(assistant, str) else None

    @classmethod
    def check_assistant(
        cls, argument: str, assistant: Any, target: PreTrainedModel, config: SpeculativeConfig
    ) -> None:
        require_folder_or_id(argument, cls._named(argument, assistant))
        vocabulary = target.config.get_text_config(decoder=True).vocab_size
        settings: Any = read_config(assistant, argument)
        size = settings.get("transformer_layer_config", settings).get("vocab_size", vocabulary)
        check_sizes(f"{argument}={assistant!r}", size, vocabulary)

    @classmethod
    def _named(cls, argument: str, assistant: Any) -> Any:
        if isinstance(assistant, str) or (assistant is None and cls.assistant == "optional"):
            return assistant
        shown = type(assistant).__name__ if isinstance(assistant, nn.Module) else repr(assistant)
        remedy = "give the folder or hub id of a drafter's checkpoint"
        raise ValueError(f"{argument}={shown} with a drafter of kind {cls.strategy!r}: {remedy}.")

    def __init__(self, checkpoint: str | Path, target: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
        self._settings, self._stored = self.read(checkpoint, target)
        text = target.config.get_text_config(decoder=True)
        try:
            self.config = config = self.parse(self._settings, text)
            config.check_target(text, self.stored_names)
            self._check_borrowed(target)
            with torch.device("meta"):
                network = self.build(target)
            network = network.to(dtype or target.dtype).requires_grad_(False).eval()
            load_exactly(network, self._stored, self.renames, target.device)
            self.network, self.target_ids = network, network.target_ids(text.vocab_size)
        except ValueError as error:
            raise ValueError(f"{self.argument}={str(checkpoint)!r}: {error}") from error
        self.feature_layers = config.feature_layers
        self._vocabulary, self.width = text.vocab_size, config.decoder.hidden_size
        # Weights that a forward reads and multiplies with: a borrowed head, but no looked-up embeddings.
        weights = [p for name, p in network.named_parameters() if name != "embed_tokens.weight"]
        if network.lm_head is None:
            weights += list(target.get_output_embeddings().parameters())
        positions, drafts = self.forward_size
        size = sum(weight.numel() for weight in weights)
        self.cost = DraftCost(float(sum(weight.nbytes for weight in weights)), 2.0 * positions * size, drafts)

    def read(self, checkpoint: str | Path, target: PreTrainedModel) -> tuple[ConfigFile, Mapping[str, Tensor]]:
        """The config.json and the tensors of a checkpoint, under their stored names."""
        return read_checkpoint(checkpoint)

    def build(self, target: PreTrainedModel) -> FeatureNetwork:
        """The network of `config`, without weights."""
        width = len(self.config.feature_layers) * target.config.get_text_config(decoder=True).hidden_size
        network: FeatureNetwork = self.network_type(self.config, width, self.stored_names)
        return network

    @property
    def stored_names(self) -> set[str]:
        """The network's names of the stored tensors."""
        return {renamed(stored, self.renames) for stored in self._stored}

    def _check_borrowed(self, target: PreTrainedModel) -> None:
        """Raises ValueError where the checkpoint lacks the embedding or the head, and the target's has another width
        (such as OPT's)."""
        wide = target.config.get_text_config(decoder=True).hidden_size
        parts = {
            "embed_tokens.weight": ("embedding", target.get_input_embeddings(), "embedding_dim"),
            "lm_head.weight": ("head", target.get_output_embeddings(), "in_features"),
        }
        for name, (role, part, size) in parts.items():
            width, wanted = getattr(part, size, wide), self.config.decoder.hidden_size
            if name not in self.stored_names and width != wanted:
                raise ValueError(
                    f"hidden_size={wanted}, and the target's {role} is {width} wide: it cannot serve this drafter, "
                    f"and the checkpoint has no {name}."
                )

    @abstractmethod
    def parse(self, settings: Mapping[str, Any], target: PreTrainedConfig) -> FeatureConfig:
        """Reads a checkpoint's config.json for a target, given by its text config."""

    forward_size: tuple[int, int] = (1, 1)
    """Number of a row's positions that one forward runs over, and of draft tokens that come out of it."""
    most_drafts: int = sys.maxsize
    """Number of tokens that it can draft in one round."""

    @abstractmethod
    def reach(self, count: int) -> int:
        """Last column, after a row's committed tokens, that `count` drafts read or write; it may be negative."""

    def catch_up(self, count: int) -> int:
        """Prepares to draft `count` tokens; returns how many of a row's newest tokens the draft reads, at least 1."""
        return 1

    @abstractmethod
    def forward_over(self, columns: int, count: int) -> Forward:
        """The forwards of one draft of `count` tokens, over the first `columns` of the cache, with logits over the
        draft vocabulary."""

    @abstractmethod
    def take_features(self, features: Tensor, positions: Tensor) -> None:
        """Stores the target's features `[B, q, feature width]`, in the network's dtype, at `positions` `[B, q]` of the
        drafter's cache."""

    def save(self, folder: str | Path) -> None:
        """Writes the checkpoint in its own format: unchanged parts bit for bit, tensors as safetensors."""
        write_checkpoint(folder, self._settings, self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of :meth:`save`, by name."""
        return tensors_to_store(self.network, self._stored, self.renames)

    def check_length(self, columns: int) -> None:
        limit = self.config.position_limit
        if limit is not None and columns > limit:
            raise ValueError(
                f"rows can reach {columns} tokens, drafts included, and the {self.strategy} drafter's positions reach "
                f"{limit} (max_position_embeddings). Lower max_new_tokens, or use another drafter."
            )

    def prepare_assisted_decoding(self, *_: Any, **__: Any) -> NoReturn:
        """Raises ValueError: transformers' loop does not pass the target's hidden states."""
        raise ValueError(
            f"a {type(self).__name__} needs the target's hidden states, which transformers' assisted loop does not "
            f'hand over. Generate with assistant_strategy="{self.strategy}".'
        )

    # ---- a generation ---------------------------------------------------------------------------------------------

    def begin(self, session: DraftSession) -> None:
        super().begin(session)
        assert session.target is not None
        self.forwards = 0
        self._admitted = 0  # rows that have been admitted here
        self.failure: Exception | None = None
        self._recent: Tensor | None = None  # [capacity, ring + 1, F]
        self._prompt_ends: Tensor | None = None  # [capacity, context + 1, F]
        stored = self.stored_states()
        # A draft starts at a row's newest token.
        self._runner = session.target.for_features(self.network, len(stored), self.columns_of_replay(0))
        self.cache = self._runner.cache
        # Now, where a lack of memory is reported; first the last layer, possibly the widest.
        for layer, like in reversed([*zip(self.cache.layers, stored, strict=True)]):
            if not layer.is_initialized:
                layer.lazy_initialization(*like)
        self.embeddings = plain_embedding(session.target.network)
        session.target.listen(self.feature_layers, self._take_in)

    def end(self) -> None:
        assert self.session.target is not None
        self.session.target.stop_listening(self._take_in)
        super().end()
        del self.cache, self._runner, self.embeddings, self.failure, self._recent, self._prompt_ends

    def admit(self, admission: Admission) -> None:
        with self.own_dtype():
            self.feed_texts(admission, admission.restore(self.strategy, self.cache))
        known = admission.cached
        self.cache.trim(admission.first, known[: admission.leaders])
        if admission.followers:  # a pair of a prompt's last column, where it keeps pairs, has a token that differs
            self.cache.copy_rows(admission.sources, admission.followers, known[admission.leaders :], self.lag)
        self._admit_recent(admission)
        self._admitted = self.session.rows.active

    def feed_texts(self, admission: Admission, known: Mapping[int, int]) -> None:
        """Computes K/V of admitted texts that no features give, except the `known` first columns by row."""

    def save_row(self, row: int) -> dict[str, tuple[int, RowKV]] | None:
        if self.context or self.failure is not None:  # features of the newest columns are not in the cache
            return None
        columns = int(self.session.rows.host_lengths[row]) - 1
        return {self.strategy: (self.computed(row), self.cache.export_row(row, 0, columns))}

    def move(self, source: list[int], destination: list[int], columns: list[int]) -> None:
        super().move(source, destination, columns)
        self._admitted = self.session.rows.active
        self.cache.move_rows(source, destination, columns, self.session.rows.active)
        if self._recent is not None and self._prompt_ends is not None:
            self._recent[destination] = self._recent[source]
            self._prompt_ends[destination] = self._prompt_ends[source]

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        if self.failure is not None:
            raise self.failure
        session, rows, steps = self.session, self.session.rows, min(draft_length, self.most_drafts)
        self.cache.reserve((rows.host_lengths + self.reach(steps)).tolist())
        known = self.catch_up(steps)
        where = rows.columns_after(-known, known + steps).clamp(min=self.lag)  # [B, known + steps]
        tokens = rows.tokens[: rows.active].gather(1, where)  # [B, known + steps]
        drawn_by = None if self.casts_weights else session.drawn_by
        places = where[:, :-1] - self.lag
        draft = NetworkDraft(tokens, places, known, noise, session.draw, rows.write, drawn_by, session.text)
        columns = max(rows.longest + self.reach(steps), 1)
        drafted = self._runner.draft(draft, lambda columns: self._over_target(columns, steps), columns)
        self.forwards += -(-steps // self.forward_size[1])
        lengths = None
        if steps < draft_length or rows.host_lengths.min() <= self.lag:
            lengths = torch.full_like(rows.lengths, steps).masked_fill(rows.lengths <= self.lag, 0)  # [B]
        if missing := draft_length - steps:
            tokens = nn.functional.pad(drafted.tokens, (0, missing))  # [B, γ]
            logits = None if drafted.logits is None else nn.functional.pad(drafted.logits, (0, 0, 0, missing))
            scores = None if drafted.scores is None else nn.functional.pad(drafted.scores, (0, missing))  # [B, γ]
            return Proposal(tokens, lengths, logits, scores)
        return replace(drafted, lengths=lengths)

    @property
    def _head(self) -> nn.Module:
        if self.network.lm_head is not None:
            return self.network.lm_head
        assert self.session.target is not None
        return self.session.target.network.get_output_embeddings()

    @property
    def casts_weights(self) -> bool:
        """Whether autocast casts weights of a draft: once while it lasts, but in every replay of a graph."""
        if isinstance(self._head, Product) and self._head.copies is not None:
            return False
        weight = next(self._head.parameters(), None)
        narrow = autocast_dtype(self.network.fc.weight.device)
        return narrow is not None and weight is not None and weight.is_floating_point() and weight.dtype != narrow

    def no_column(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[1, kv_heads, 0, d]` of no column, as its layers store them."""
        decoder = self.config.decoder
        like = self.network.fc.weight.new_empty(1, decoder.num_key_value_heads, 0, decoder.head_dim)
        return like, like

    def stored_states(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of no column, by layer of the cache."""
        return [self.no_column()] * self.config.decoder.num_hidden_layers

    @property
    def cache_bytes(self) -> int:
        features = sum(tensor.nbytes for tensor in (self._recent, self._prompt_ends) if tensor is not None)
        return features + self.cache.bytes_of(self.session.most_columns)

    @property
    def column_bytes(self) -> float:
        size = sum(part.shape[1] * part.shape[3] * part.element_size() for part in self.no_column())
        return float(self.config.decoder.num_hidden_layers * size)

    def trained(self, network: Any) -> list[nn.Parameter]:
        return [p for name, p in network.named_parameters() if name not in self.borrowed]

    def projections(self, network: Any) -> dict[str, nn.Module]:
        linear = ((name, module) for name, module in network.named_modules() if isinstance(module, nn.Linear))
        return {name: module for name, module in linear if f"{name}.weight" not in self.borrowed}

    def point_at(self, columns: Tensor, visible: int, first_row: int = 0) -> int:
        """Makes the next forward write to `columns` `[B, q]` of the rows from `first_row` on, and read at least the
        `visible` first ones, so that there are few sizes; returns how many."""
        visible = min(-(-visible // COLUMN_BUCKET) * COLUMN_BUCKET, self.cache.columns)
        self.cache.point_at(columns, visible, first_row)
        return visible

    def own_dtype(self) -> torch.autocast:
        """A context of the network's own dtype, without the policy's autocast."""
        return torch.autocast(self.network.fc.weight.device.type, enabled=False)

    def _take_in(self, features: Tensor, positions: Tensor, first_row: int) -> None:
        # An exception within the target's forward would end the generation and not the drafter alone.
        if self.failure is not None:
            return
        try:
            self._keep_recent(features, positions, first_row)
            lengths = self.session.rows.host_lengths[first_row : first_row + len(positions)]
            if first_row < self._admitted:  # a round; else prompts, admitted here later
                self.cache.reserve((lengths + positions.shape[1] - 1).tolist())
                self._runner.take_in_round(features, positions, self._take)
            else:
                self.cache.reserve(lengths.tolist(), first_row)
                self._runner.take_in(features, positions, first_row, self._take)
        except Exception as error:
            self.failure = error

    def _take(self, features: Tensor, positions: Tensor) -> None:
        with self.own_dtype():
            self.take_features(features.to(self.network.dtype), positions)

    def _over_target(self, columns: int, count: int) -> Forward:
        """:meth:`forward_over` with logits `[B, q, V]` over the target's vocabulary: -inf for missing tokens."""
        forward = self.forward_over(columns, count)

        def over_target(tokens: Tensor, places: Tensor, step: int) -> Tensor:
            logits = forward(tokens, places, step)  # [B, q, draft vocabulary]
            if self.target_ids is None:
                return logits
            whole = logits.new_full((*logits.shape[:-1], self._vocabulary), -torch.inf)  # [B, q, V]
            return whole.index_copy_(-1, self.target_ids, logits)

        return over_target

    # ---- the newest features by row, for replays ------------------------------------------------------------------

    def _keep_recent(self, features: Tensor, positions: Tensor, first_row: int) -> None:
        """Stores the target's features `[B, q, F]` of a row's newest columns, in a ring:

        column    n-1-context .. n-2 | n-1 .. n-1+γ       of a row of n tokens: what a replay reads, and
                  context            | verified now       what the next one may read, of these
        """
        if not self.context:
            return
        rows, size = self.session.rows, self.context + 1 + MAX_DRAFT_LENGTH
        if self._recent is None:
            self._recent = features.new_zeros(rows.capacity, size + 1, features.shape[-1])
        first = rows.lengths[first_row : first_row + len(positions), None] - 1 - self.context  # [B, 1]
        is_near = (positions >= first) & (positions < first + size)  # [B, q]; others go to a slot that is not read
        row = torch.arange(first_row, first_row + len(positions), device=positions.device)[:, None]  # [B, 1]
        self._recent[row, (positions % size).masked_fill(~is_near, size)] = features

    def _admit_recent(self, admission: Admission) -> None:
        """Copies the last features of a prompt to rows that share it, from a separate store, because the first row's
        ring may have lost them."""
        if self._recent is None:
            return
        rows, size = self.session.rows, self._recent.shape[1] - 1
        if self._prompt_ends is None:
            self._prompt_ends = self._recent.new_zeros(rows.capacity, self.context + 1, self._recent.shape[-1])
        before = torch.arange(-self.context - 1, 0, device=rows.tokens.device)  # [context + 1]
        where = (rows.prompt_lengths[:, None] + before).clamp(min=0) % size  # [active, context + 1]
        leaders = torch.arange(admission.first, admission.first + admission.leaders, device=where.device)
        self._prompt_ends[leaders] = self._recent[leaders[:, None], where[leaders]]
        if admission.followers:
            followers = torch.tensor(admission.followers, device=where.device)
            self._prompt_ends[followers] = self._prompt_ends[admission.sources]
            self._recent[followers[:, None], where[followers]] = self._prompt_ends[followers]

    def context_features(self) -> Tensor | None:
        if self._recent is None:
            return None
        rows, size = self.session.rows, self._recent.shape[1] - 1
        row = torch.arange(rows.active, device=rows.tokens.device)[:, None]  # [B, 1]
        return self._recent[row, rows.columns_after(-1 - self.context, self.context).clamp(min=0) % size]
