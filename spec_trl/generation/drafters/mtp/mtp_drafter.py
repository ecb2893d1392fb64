"""Drafts with the multi-token-prediction (MTP) head of a checkpoint."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...engine.drafter import DraftCost
from ...options import SpeculativeConfig
from ...registry import register_drafter
from ..checkpoints import ConfigFile, read_config
from ..eagle3.eagle3_drafter import Eagle3Drafter
from ..feature_drafter import FeatureDrafter
from .mtp_layouts import StoredHeads, find_heads, promises_heads
from .mtp_network import MtpConfig, MtpNetwork


OWN = "config.name_or_path"
"""Names the checkpoint if `assistant_model` is left out."""


@register_drafter
class MtpDrafter(Eagle3Drafter):
    """Drafts with the first MTP head of a checkpoint, reused for every further token, on its output.

    Pairs are arranged as in EAGLE-3. It reads one state of the target, after the final norm.

    Args:
        checkpoint: a folder or hub id with the head, of the target or by :meth:`save`; None: the target's checkpoint.
        target: the model to draft for; gives the embedding, the head and the class of the layer.
        dtype: of the network; None: the target's.

    Raises:
        ValueError: the checkpoint has no head, or an unserved one.
    """

    strategy = "mtp"
    assistant: Literal["optional"] = "optional"  # type: ignore[assignment]
    network: MtpNetwork  # type: ignore[assignment]
    config: MtpConfig
    casts_weights = FeatureDrafter.casts_weights
    outlives_changes = True  # only classes and sizes of the target count

    def __init__(
        self, checkpoint: str | Path | None, target: PreTrainedModel, dtype: torch.dtype | None = None
    ) -> None:
        if checkpoint is None:
            self.argument, checkpoint = OWN, target.config.name_or_path
        super().__init__(checkpoint, target, dtype)
        decoder = self.config.decoder
        stacks = [weight for weight in self.network.parameters() if weight.ndim == 3]  # experts, `[E, .., ..]`
        experts = len(stacks[0]) if stacks else 1
        idle = 1 - getattr(decoder, "num_experts_per_tok", experts) / experts if stacks else 0.0  # share not read
        assert self.cost is not None
        self.cost = DraftCost(
            self.cost.weight_bytes - idle * sum(weight.nbytes for weight in stacks),
            self.cost.dense_flops - idle * 2 * sum(weight.numel() for weight in stacks),
        )
        self._column = self._run_once()

    @classmethod
    def kept_for(cls, model: PreTrainedModel, assistant: Any, config: SpeculativeConfig) -> tuple[object, ...] | None:
        if assistant is None:
            return model.config.name_or_path, model.dtype, model.device
        return super().kept_for(model, assistant, config)

    @classmethod
    def check_assistant(
        cls, argument: str, assistant: Any, target: PreTrainedModel, config: SpeculativeConfig
    ) -> None:
        super().check_assistant(argument, assistant, target, config)
        served_heads(assistant, target, argument)

    def read(self, checkpoint: str | Path, target: PreTrainedModel) -> tuple[ConfigFile, Mapping[str, Tensor]]:
        heads = served_heads(None if self.argument == OWN else checkpoint, target, self.argument)
        assert heads.layout is not None
        self.renames, self._has_norm = heads.renames, heads.layout.has_norm
        return read_config(heads.folder, self.argument), heads.read(heads.first)

    def parse(self, settings: Mapping[str, Any], target: PreTrainedConfig) -> MtpConfig:  # type: ignore[override]
        with refusing("the head does not fit the target's family", target.model_type):
            return MtpConfig.parse(target, is_sparse=any(".experts." in name for name in self._stored))

    def build(self, target: PreTrainedModel) -> MtpNetwork:
        with refusing("the head does not fit the target's family", target.config.model_type):
            return MtpNetwork(self.config, target, self._stored, self._has_norm)

    def no_column(self) -> tuple[Tensor, Tensor]:
        return self._column

    def scores(self, network: MtpNetwork, h: Tensor) -> Tensor:  # type: ignore[override]
        return network.logits(h, self._head)  # under the policy's autocast, if any, like the target

    @torch.no_grad()
    def _run_once(self) -> tuple[Tensor, Tensor]:
        """Keys and values of no column, from a forward over one pair: MLA's have two widths that no config names."""
        written: list[tuple[Tensor, Tensor]] = []

        def note(keys: Tensor, values: Tensor, _: int) -> tuple[Tensor, Tensor]:
            written.append((keys[:, :, :0], values[:, :, :0]))
            return keys, values

        pair = self.network.fc.weight.new_zeros(1, 1, self.width)
        with refusing("the head's layer does not run by itself", type(self.network.layers[0]).__name__):
            with self.own_dtype():
                self.network(pair, pair, pair[..., 0].long(), pair[:, None, :, :1], note)
            (column,) = written
        return column


@contextmanager
def refusing(why: str, where: str) -> Iterator[None]:
    """Raises ValueError for any error of the block: families differ in configs and layers."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{why} ({where}): {type(error).__name__}: {error}. Use another assistant_strategy."
        ) from error


def served_heads(checkpoint: str | Path | None, target: PreTrainedModel, argument: str, **hub: Any) -> StoredHeads:
    """The heads of a checkpoint (None: the target's); raises ValueError without heads, or for an unknown layout."""
    if checkpoint is None:
        checkpoint = target.config.name_or_path
        hub["revision"] = getattr(target.config, "_commit_hash", None)
    named = f"{argument}={str(checkpoint)!r}"
    heads = find_heads(checkpoint, target, argument, **hub) if str(checkpoint) else None
    if heads is None:
        raise ValueError(
            f"{named} has no multi-token-prediction head in safetensors that fits the target's layers. Give a folder "
            "or hub id that has one as assistant_model, or use another assistant_strategy."
        )
    dedicated = getattr(target.config.get_text_config(decoder=True), "mtp_use_dedicated_embeddings", None)
    if heads.layout is None or dedicated:
        why = "mtp_use_dedicated_embeddings=True" if dedicated else f"tensors such as {min(heads.files)}"
        remedy = "Use another assistant_strategy."
        raise ValueError(f"{named} has a head of a layout that is not known here: {why}. {remedy}")
    return heads


def has_head(target: PreTrainedModel, known: dict[str, bool]) -> bool:
    """Whether the target's checkpoint has a head of a known layout, by the config and the names of the tensors.
    Nothing is fetched from the hub, and no file of a `known` checkpoint is read again."""
    name = target.config.name_or_path
    if name not in known:
        known[name] = bool(promises_heads(target.config) and name)
        try:
            if known[name]:
                served_heads(None, target, OWN, local_files_only=True)
        except ValueError:
            known[name] = False
    return known[name]
