"""The two formats of an EAGLE-3 checkpoint's config.json: SafeAILab's (AngelSlim, SpecForge) and speculators'."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...engine.attention import FULL
from ..feature_config import DECODER_KEYS, FeatureConfig, check_keys, integer, layer_list, read_decoder


_IDS = "eagle_aux_hidden_state_layer_ids"
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_OF_LAYERS: dict[str, tuple[Any, ...]] = {"num_hidden_layers": (1,)}  # elsewhere the tensors tell: one `midlayer`
_OF_EAGLE_CONFIG: dict[str, tuple[Any, ...]] = {
    "next_layer_regular": (True, None),
    "use_aux_hidden_state": (True, None),
    "use_input_layernorm_in_first_layer": (True, None),
    "use_last_layernorm": (True, None),
    "use_mtp_layernorm": (False, None),
}


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(FeatureConfig):
    """What an EAGLE-3 checkpoint computes, read from either format's config.json.

    Args:
        norm_before_residual: whether the residual stream starts from the normed state.
        norm_before_fc: whether one norm over all features comes before their projection.
        fc_norm: whether a norm for each of the features comes before their projection.
        norm_output: whether the state that is fed back is the one after the final norm.
    """

    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @classmethod
    def parse(cls, settings: Mapping[str, Any], target_layers: int) -> "Eagle3Config":
        """Reads a config.json of either format. Without layer ids they are 2, L // 2 and L - 3 of L `target_layers`.

        Raises:
            ValueError: a key asks for something that is not served.
        """
        kind = settings.get("speculators_model_type", "eagle3")
        if kind != "eagle3":
            raise ValueError(f"speculators_model_type={kind!r}; choose the assistant_strategy of that name.")
        is_nested = "speculators_model_type" in settings
        layer: Mapping[str, Any] = settings.get("transformer_layer_config") or {} if is_nested else settings
        if is_nested:
            check_keys("transformer_layer_config", layer, DECODER_KEYS, _OF_LAYERS)
        elif "LlamaForCausalLM" in str(settings.get("architectures")):  # whatever model the config was copied from
            layer = {**layer, "model_type": "llama"}
        check_keys("config.json", settings, DECODER_KEYS, {})
        slides = layer.get("sliding_window") is not None and layer.get("use_sliding_window") is not False
        if slides or set(layer.get("layer_types") or []) - {FULL}:
            raise ValueError(
                f"sliding_window={layer.get('sliding_window')}, layer_types={layer.get('layer_types')}: the attention "
                "of an EAGLE-3 layer must be full. Set use_sliding_window to false if it is."
            )
        fixed = {"num_hidden_layers": 1, "layer_types": None, "sliding_window": None}
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
