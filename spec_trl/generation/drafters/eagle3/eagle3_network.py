"""Builds the EAGLE-3 draft network (arXiv 2503.01840) from either format of its config.json."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from ...engine.network.attention import FULL
from ..feature_network import (
    DECODER_KEYS,
    Attention,
    FeatureConfig,
    FeatureNetwork,
    Rotary,
    Rotation,
    Store,
    check_keys,
    integer,
    layer_list,
    read_decoder,
)


_IDS = "eagle_aux_hidden_state_layer_ids"
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_OF_EAGLE_CONFIG: dict[str, tuple[Any, ...]] = {
    "next_layer_regular": (True, None),
    "use_aux_hidden_state": (True, None),
    "use_input_layernorm_in_first_layer": (True, None),
    "use_last_layernorm": (True, None),
    "use_mtp_layernorm": (False, None),
}


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(FeatureConfig):
    """An EAGLE-3 checkpoint's config.json.

    Args:
        norm_before_residual: whether the residual stream starts from the normed state.
        norm_before_fc: whether one norm over all features comes before their projection.
        fc_norm: whether a norm for each of the features comes before their projection.
        norm_output: whether the fed-back state is taken after the final norm.
    """

    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @classmethod
    def parse(cls, settings: Mapping[str, Any], target_layers: int, layers: int = 1) -> "Eagle3Config":
        """Reads a config.json of either format, of a checkpoint with tensors of so many `layers`. Default layer ids
        are 2, L // 2 and L - 3 of L `target_layers`.

        Raises:
            ValueError: a key asks for an unserved network.
        """
        kind = settings.get("speculators_model_type", "eagle3")
        if kind != "eagle3":
            raise ValueError(f"speculators_model_type={kind!r}; choose the assistant_strategy of that name.")
        is_nested = "speculators_model_type" in settings
        layer: Mapping[str, Any] = settings.get("transformer_layer_config") or {} if is_nested else settings
        if is_nested:
            check_keys("transformer_layer_config", layer, DECODER_KEYS, {})
            if (said := layer.get("num_hidden_layers", layers)) != layers:  # the target's in the other format
                raise ValueError(f"num_hidden_layers={said!r}, and its tensors are of {layers}. Fetch them again.")
        elif "LlamaForCausalLM" in str(settings.get("architectures")):  # whatever model the config was copied from
            layer = {**layer, "model_type": "llama"}
        check_keys("config.json", settings, DECODER_KEYS, {})
        slides = layer.get("sliding_window") is not None and layer.get("use_sliding_window") is not False
        if slides or set(layer.get("layer_types") or []) - {FULL}:
            raise ValueError(
                f"sliding_window={layer.get('sliding_window')}, layer_types={layer.get('layer_types')}: the attention "
                "of an EAGLE-3 layer must be full. Set use_sliding_window to false if it is."
            )
        fixed = {"num_hidden_layers": layers, "layer_types": None, "sliding_window": None}
        decoder = read_decoder(layer, "llama", mlp_bias=bool(layer.get("mlp_bias")), **fixed)
        flags = {name: settings.get(name) for name in _FLAGS}
        for name, flag in flags.items():
            if not isinstance(flag, bool | None):
                raise ValueError(f"{name}={flag!r} in config.json; it must be true or false.")

        def size(name: str, default: int) -> int:
            return integer(name, default if settings.get(name) is None else settings[name], 1)

        return cls(
            decoder=decoder,
            feature_layers=_feature_layers(settings, target_layers),
            # 32000: the class default of speculators. Without a number the other format means the whole vocabulary.
            draft_vocabulary=size("draft_vocab_size", 32000 if is_nested else decoder.vocab_size),
            target_hidden_size=size("target_hidden_size", decoder.hidden_size),
            **{name: bool(flag) for name, flag in flags.items()},
        )


def _feature_layers(settings: Mapping[str, Any], target_layers: int) -> tuple[int, ...]:
    nested: Mapping[str, Any] = settings.get("eagle_config") or {}
    check_keys("eagle_config", nested, (), _OF_EAGLE_CONFIG)
    if settings.get(_IDS) is not None:
        return layer_list(_IDS, settings[_IDS])
    if nested.get(_IDS) is not None:  # SpecForge and SGLang name the layer whose output it is, others whose input
        return tuple(index + 1 for index in layer_list(_IDS, nested[_IDS], least=-1))
    ids = [2, target_layers // 2, target_layers - 3]
    if ids[-1] < 0:
        raise ValueError(f"{_IDS} is missing, and the default {ids} does not fit a target of {target_layers} layers.")
    return tuple(ids)


class Eagle3Network(FeatureNetwork):
    """A decoder layer over pairs of a token and the target's features at the token before it, projected: r. In some
    checkpoints of speculators plain decoder layers follow it.

    It predicts the token after the pair's. Beyond the target's last forward the last layer's output replaces r
    (`fed_back`). :class:`~.Eagle3Drafter` shows the pairs.

    Parameters have the names of the speculators format, in which `midlayer` is `layers.0`. Arguments are those of
    :class:`FeatureNetwork`, and the layers.
    """

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, feature_width: int, tensors: Collection[str]) -> None:
        layers = [_Layer(config, index) for index in range(config.decoder.num_hidden_layers)]
        super().__init__(config, feature_width, layers, {*tensors, "lm_head.weight"})
        self.rotary = Rotary(config.decoder)
        count, eps = len(config.feature_layers), config.decoder.rms_norm_eps
        self.input_norm = nn.RMSNorm(feature_width, eps) if config.norm_before_fc else None
        norms = (nn.RMSNorm(feature_width // count, eps) for _ in range(count))
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None

    def project(self, features: Tensor) -> Tensor:
        """r `[..., H]` of the target's features `[..., feature_width]`."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)  # of [..., H_t] each
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, mask: Tensor, store: Store) -> Tensor:
        """The last layer's output h `[B, q, H]`, before the final norm.

        Args:
            embedded: `[B, q, H]` embeddings of the pairs' tokens.
            states: `[B, q, H]` r, or fed-back states in its place.
            positions: `[B, q]` int64; only differences between them matter.
            mask: additive `[B, 1, q, columns]`.
            store: K/V of this forward and earlier ones.
        """
        rotation = self.rotary(positions, embedded.dtype)
        for layer in self.layers:
            states = layer(embedded, states, rotation, mask, store)
        return states

    def fed_back(self, h: Tensor) -> Tensor:
        """The state that replaces r in the next pair, `[..., H]`."""
        return self.norm(h) if self.config.norm_output else h

    def logits(self, h: Tensor, target: nn.Module) -> Tensor:
        """Scores `[..., draft vocabulary]` of h `[..., H]`, by its own head, or the `target`'s."""
        assert self.lm_head is not None
        return self._of_target(self.lm_head(self.norm(h)))


class _Layer(nn.Module):
    def __init__(self, config: Eagle3Config, index: int) -> None:
        super().__init__()
        decoder, is_first = config.decoder, index == 0
        hidden, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps) if is_first else None
        self.self_attn = Attention(decoder, (1 + is_first) * hidden, index, has_norms=decoder.model_type == "qwen3")
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = LlamaMLP(decoder)

    def forward(self, embedded: Tensor, h: Tensor, rotation: Rotation, mask: Tensor, store: Store) -> Tensor:
        if self.hidden_norm is None:
            x = self.input_layernorm(h)  # [B, q, H]
        else:
            normed = self.hidden_norm(h)  # [B, q, H]
            x = torch.cat([self.input_layernorm(embedded), normed], dim=-1)  # [B, q, 2H]
            h = normed if self.norm_before_residual else h
        h = h + self.self_attn(x, rotation, mask, store)  # [B, q, H]
        return h + self.mlp(self.post_attention_layernorm(h))
