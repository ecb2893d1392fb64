"""What a DFlash checkpoint's config.json says: the z-lab and the speculators format, every key accounted for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.activations import ACT2FN

from ...engine.attention import FULL, SLIDING


# What the decoder's forward is made of, and what says nothing about it.
_DECODER = {
    "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
    "max_position_embeddings", "max_window_layers", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "use_sliding_window",
    "vocab_size",
}  # fmt: skip
_INERT = {
    "_attn_implementation", "_name_or_path", "architectures", "attention_dropout", "auto_map", "base_model_ep_plan",
    "base_model_pp_plan", "base_model_tp_plan", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
    "has_no_defaults_at_init", "id2label", "initializer_range", "is_encoder_decoder", "label2id", "model_type",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type", "return_dict",
    "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
_ZLAB_EITHER = {  # at the top, or in dflash_config
    "block_size", "final_logit_softcapping", "input_embedding_scale", "mask_token_id", "output_multiplier",
    "target_layer_ids",
}  # fmt: skip
_ZLAB = {"dflash_config", "is_causal", "num_target_layers"}
_SPECULATORS = {
    "aux_hidden_state_layer_ids", "block_size", "draft_vocab_size", "mask_token_id", "sample_from_anchor",
    "sliding_window_non_causal", "speculators_model_type", "target_hidden_size", "transformer_layer_config",
}  # fmt: skip
# Of the training, and of the correction head that projector_type="domino" would add.
_SPECULATORS_INERT = {
    "auf", "emb_dim", "gru_hidden_dim", "lambda_base_decay_ratio", "lambda_base_start", "max_anchors",
    "pure_draft_prefix_len", "speculators_config", "speculators_version",
}  # fmt: skip
# Keys that may be there with these values alone: another one is another network.
_FIXED: dict[str, tuple[Any, ...]] = {
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "projector_type": ("dflash", None),
    "shift_label": (False, None),
    "use_aux_hidden_state": (True, None),
}
# Their frequencies do not depend on how long the rows are.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class DFlashConfig:
    """What a checkpoint's config.json says about the network.

    Args:
        decoder: sizes, RoPE and layer types.
        block_size: slots of a block, anchor included.
        mask_token: what fills the slots behind the anchor.
        target_layers: hidden states of the target that make the features, in transformers' count (0: embeddings).
        is_causal: for each layer, whether a slot sees those before it only.
        draft_vocabulary: tokens that the head scores.
        sample_from_anchor: whether the anchor's slot drafts too, and each slot the token behind its own position.
        window_from_anchor: whether windowed layers reach back from the anchor, the same for all slots (speculators
            trains so), or from each slot (z-lab).
        num_target_layers: of the target it was made for, if told.
        target_hidden_size: of the target it was made for, if told.
        embedding_scale: factor on the token embeddings.
        output_multiplier: factor on the logits.
        softcap: of the logits, behind the factor.
    """

    decoder: PreTrainedConfig
    block_size: int
    mask_token: int
    target_layers: tuple[int, ...]
    is_causal: tuple[bool, ...]
    draft_vocabulary: int
    sample_from_anchor: bool = False
    window_from_anchor: bool = False
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float | None = None

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> "DFlashConfig":
        """Reads a config.json of the z-lab or the speculators format.

        Raises:
            ValueError: it is neither, or a key is missing, not known, or asks for another network than this one.
        """
        if "speculators_model_type" in settings:
            return cls._parse_speculators(settings)
        if "dflash_config" not in settings and "block_size" not in settings:
            raise ValueError(
                "its config.json has neither dflash_config nor block_size nor speculators_model_type: it is no DFlash "
                "drafter."
            )
        inner: Mapping[str, Any] = settings.get("dflash_config") or {}
        _check_keys("dflash_config", inner, _ZLAB_EITHER)
        _check_keys("config.json", settings, _DECODER | _INERT | _ZLAB | _ZLAB_EITHER)
        given = {key: inner.get(key, settings.get(key)) for key in _ZLAB_EITHER}
        decoder = _decoder_config(Qwen3Config, settings)
        depth, ids = settings.get("num_target_layers"), given["target_layer_ids"]
        if ids is None:
            ids = _spaced(
                _whole("num_target_layers (target_layer_ids is missing)", depth, 4), decoder.num_hidden_layers
            )
        causal = settings.get("is_causal")
        return cls(
            decoder,
            _whole("block_size", given["block_size"], 2),
            _whole("mask_token_id", given["mask_token_id"], 0),
            # Counted from the first layer's output.
            tuple(index + 1 for index in _layers("target_layer_ids", ids)),
            tuple(kind == SLIDING if causal is None else bool(causal) for kind in decoder.layer_types),
            decoder.vocab_size,
            num_target_layers=depth,
            embedding_scale=float(given["input_embedding_scale"] or 1.0),
            output_multiplier=float(given["output_multiplier"] or 1.0),
            softcap=given["final_logit_softcapping"] or None,
        )

    @classmethod
    def _parse_speculators(cls, settings: Mapping[str, Any]) -> "DFlashConfig":
        kind = settings["speculators_model_type"]
        if kind != "dflash":
            raise ValueError(f'speculators_model_type={kind!r} is not served here; it must be "dflash".')
        _check_keys("config.json", settings, _INERT | _SPECULATORS | _SPECULATORS_INERT)
        inner: Mapping[str, Any] = settings.get("transformer_layer_config") or {}
        _check_keys("transformer_layer_config", inner, _DECODER | _INERT)
        families: dict[str, type[PreTrainedConfig]] = {"qwen3": Qwen3Config, "llama": LlamaConfig}
        family = inner.get("model_type", "qwen3")
        if family not in families:
            raise ValueError(f"transformer_layer_config.model_type={family!r} is not one of {sorted(families)}.")
        decoder = _decoder_config(families[family], inner)
        non_causal = bool(settings.get("sliding_window_non_causal", False))
        return cls(
            decoder,
            _whole("block_size", settings.get("block_size", 8), 2),
            _whole("mask_token_id", settings.get("mask_token_id"), 0),
            _layers("aux_hidden_state_layer_ids", settings.get("aux_hidden_state_layer_ids")),
            tuple(kind == SLIDING and not non_causal for kind in decoder.layer_types),
            _whole("draft_vocab_size", settings.get("draft_vocab_size", 32000), 1),
            sample_from_anchor=bool(settings.get("sample_from_anchor", False)),
            window_from_anchor=True,
            target_hidden_size=settings.get("target_hidden_size"),
        )

    @property
    def is_pruned(self) -> bool:
        """Whether the head scores a part of the target's vocabulary."""
        return self.draft_vocabulary != self.decoder.vocab_size

    @property
    def drafts(self) -> int:
        """Tokens that one block drafts."""
        return self.block_size - (0 if self.sample_from_anchor else 1)

    @property
    def position_limit(self) -> int | None:
        """Positions that scaled RoPE is made for; None: plain RoPE, which goes on."""
        is_plain = self.decoder.rope_parameters["rope_type"] == "default"
        return None if is_plain else int(self.decoder.max_position_embeddings)

    def masks(self, anchors: Tensor, keys: Tensor, is_block: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Additive masks for the queries of a block, one per layer.

        Args:
            anchors: `[B]` int64 positions.
            keys: `[B or 1, K]` int64 position of every key.
            is_block: `[B, K]` bool, whether a key is one of the block rather than of the context.
            dtype: of the queries.

        Returns:
            For each layer `[B, 1, block_size, K]` of 0 and the dtype's minimum.
        """
        first = anchors[:, None, None]  # [B, 1, 1]
        query = first + torch.arange(self.block_size, device=anchors.device)[:, None]  # [B, n, 1]
        keys = keys[:, None]  # [B or 1, 1, K]
        beyond = torch.where(is_block[:, None], first + self.block_size, first)  # [B, 1, K]
        masks: dict[tuple[bool, bool], Tensor] = {}
        for kind, causal in zip(self.decoder.layer_types, self.is_causal, strict=True):
            if (kind == SLIDING, causal) in masks:
                continue
            seen = (keys < beyond).expand(-1, self.block_size, -1)  # [B, n, K]
            if causal:
                seen = seen & (keys <= query)
            if kind == SLIDING:
                window = self.decoder.sliding_window
                if self.window_from_anchor:
                    seen = seen & (keys >= first - window)
                else:
                    seen = seen & ((query - keys).abs() < window)
            additive = torch.zeros(seen.shape, dtype=dtype, device=seen.device)  # [B, n, K]
            masks[kind == SLIDING, causal] = additive.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
        kinds = zip(self.decoder.layer_types, self.is_causal, strict=True)
        return [masks[kind == SLIDING, causal] for kind, causal in kinds]


def _decoder_config(family: type[PreTrainedConfig], settings: Mapping[str, Any]) -> PreTrainedConfig:
    """The decoder's settings under `family`'s defaults: checkpoints leave out what equals them."""
    try:
        config = family(**{key: value for key, value in settings.items() if key in _DECODER})
        kinds = config.to_dict().get("layer_types") or [FULL] * config.num_hidden_layers
    except (StrictDataclassError, TypeError, ValueError, KeyError) as error:
        raise ValueError(f"its decoder settings do not fit together: {error}") from error
    config.layer_types = list(kinds)
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown:
        raise ValueError(f"layer_types={kinds}: {unknown} are not served; layers are {FULL} or {SLIDING}.")
    window = config.to_dict().get("sliding_window")
    if SLIDING in kinds and not window:
        raise ValueError(
            f"layer_types={kinds} names sliding layers and sliding_window is {settings.get('sliding_window')!r} (with "
            f"use_sliding_window={settings.get('use_sliding_window')!r}); a window must be set."
        )
    if config.hidden_act not in ACT2FN:
        raise ValueError(f"hidden_act={config.hidden_act!r} is no activation that transformers knows.")
    kind = config.rope_parameters["rope_type"]
    if kind not in _ROPE_TYPES:
        raise ValueError(
            f"RoPE of type {kind!r} is not served: its angles may depend on the longest row. Served are {_ROPE_TYPES}."
        )
    return config


def _check_keys(where: str, settings: Mapping[str, Any], known: set[str]) -> None:
    for key, allowed in _FIXED.items():
        if key in settings and settings[key] not in allowed:
            raise ValueError(f"{where} has {key}={settings[key]!r}, another network; only {allowed[0]!r} is served.")
    unknown = sorted(settings.keys() - known - _FIXED.keys())
    if unknown:
        raise ValueError(
            f"{where} has keys that are not known here and may change what is computed: "
            f"{ {key: settings[key] for key in unknown} }. Remove them from config.json if they do not."
        )


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} in config.json; it must be an integer of at least {least}.")
    return value


def _layers(name: str, ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"{name}={ids!r} in config.json; it must list layers of the target.")
    return tuple(_whole(name, index, 0) for index in ids)


def _spaced(depth: int, count: int) -> list[int]:
    """The reference's choice of `count` of the target's layers, its rounding (half to even) included."""
    if count == 1:
        return [depth // 2]
    return [round(1 + i * (depth - 4) / (count - 1)) for i in range(count)]
