"""What a config.json says about a drafter that reads its target's hidden states: the parts that all formats share."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN

from ..engine.attention import FULL, SLIDING
from .vocabulary import is_padded


DECODER_KEYS = {
    "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
    "max_position_embeddings", "max_window_layers", "model_type", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window",
    "use_sliding_window", "vocab_size",
}  # fmt: skip
"""What the forward of a drafter's layers is made of."""
_CHANGED = re.compile(r"multiplier|soft_?cap|scal(e|ing|ar)|parallel|partial_rotary|quantization_config|qkv_bias")
"""Keys of networks that are not built here, by parts of their names."""
_UNCHANGED = (None, False, 0, 1)
"""Values of such keys that ask for nothing."""
_OTHER_METHODS = re.compile(r"p-?eagle|d-?spark|domino|dflare", re.IGNORECASE)
_MODEL_TYPES = ("llama", "qwen3")
_ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """What the config.json of every such drafter says.

    Args:
        decoder: sizes, activation, RoPE and types of its layers, as a config of transformers.
        feature_layers: the target's hidden states that it reads, in transformers' count (0: embeddings).
        draft_vocabulary: number of tokens that its head scores.
        target_hidden_size: width of the target's hidden states; None: not said.
    """

    decoder: PreTrainedConfig
    feature_layers: tuple[int, ...]
    draft_vocabulary: int
    target_hidden_size: int | None = None

    @property
    def position_limit(self) -> int | None:
        """Number of positions that its scaled RoPE was made for; None: RoPE is not scaled and has no end."""
        is_scaled = self.decoder.rope_parameters["rope_type"] != "default"
        return int(self.decoder.max_position_embeddings) if is_scaled else None

    def check_target(self, target: PreTrainedConfig, tensors: Collection[str]) -> None:
        """Raises ValueError where the drafter was made for another target than that of this text config, or where its
        checkpoint, with tensors of these names, lacks what it cannot borrow from the target."""
        depth, wide, vocabulary = target.num_hidden_layers, target.hidden_size, target.vocab_size
        if beyond := [index for index in self.feature_layers if not 0 <= index <= depth]:
            raise ValueError(
                f"it reads the target's hidden states {list(self.feature_layers)}, and the target has {depth} layers "
                f"and so no {beyond}. Use a drafter that was made for this target."
            )
        own = self.decoder.vocab_size
        if not is_padded(own, vocabulary):
            raise ValueError(
                f"vocab_size={own}, and the target's vocabulary has {vocabulary} tokens. A "
                "drafter must use the target's tokenizer."
            )
        if self.draft_vocabulary > own:
            raise ValueError(f"draft_vocab_size={self.draft_vocabulary} is more than the vocabulary, {own}.")
        if self.target_hidden_size not in (None, wide):
            raise ValueError(
                f"target_hidden_size={self.target_hidden_size}, and the target's hidden states are {wide} wide. Use a "
                "drafter that was made for this target."
            )
        for name, role in (("embed_tokens.weight", "embedding"), ("lm_head.weight", "head")):
            if self.decoder.hidden_size != wide and name not in tensors:
                raise ValueError(
                    f"hidden_size={self.decoder.hidden_size}, and the target's is {wide}: the target's {role} cannot "
                    f"serve this drafter, and the checkpoint has no {name}."
                )
        if self.draft_vocabulary != own and not {"lm_head.weight", "d2t"} <= set(tensors):
            raise ValueError(
                f"draft_vocab_size={self.draft_vocabulary} of {own} tokens needs a head of its own "
                "(lm_head.weight), and d2t to say which tokens these are. The checkpoint was not saved whole."
            )


def check_keys(
    where: str, settings: Mapping[str, Any], served: Collection[str], fixed: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raises ValueError where `settings` ask for a network that is not built here: by another value than the `fixed`
    ones, by a key that scales or replaces something and is not `served`, or by their architecture. Other keys are not
    looked at: whatever they say, a drafter changes no token. `where` names the part of config.json in messages."""
    for key, value in settings.items():
        if key in fixed and value not in fixed[key]:
            raise ValueError(f"{where} has {key}={value!r}; of this, only {fixed[key][0]!r} is served.")
        is_changed = _CHANGED.search(key) and key not in served and (value is True or value not in _UNCHANGED)
        if is_changed or (key == "architectures" and _OTHER_METHODS.search(str(value))):
            raise ValueError(
                f"{where} has {key}={value!r}, which asks for a network that is not built here. Use a drafter without "
                "it."
            )


def read_decoder(settings: Mapping[str, Any], default_type: str, **fixed: Any) -> PreTrainedConfig:
    """The drafter's layers as a config of transformers, which fills in what is left out.

    Args:
        settings: keys of config.json; others than `DECODER_KEYS` are ignored.
        default_type: the model type where they name none.
        fixed: values that replace those of the file.

    Raises:
        ValueError: transformers refuses the settings, or they ask for something that is not served.
    """
    given = {key: value for key, value in settings.items() if key in DECODER_KEYS} | fixed
    model_type = given.pop("model_type", default_type)
    if model_type not in _MODEL_TYPES:
        raise ValueError(f"model_type={model_type!r} is not served; layers are of {_MODEL_TYPES}.")
    rope = given.get("rope_parameters") or given.get("rope_scaling")
    if isinstance(rope, dict):
        check_keys("its RoPE", rope, ("mscale", "mscale_all_dim"), {"alpha": (None,)})
        # On text the three positions of a multimodal RoPE are one.
        rope = {key: "default" if value == "mrope" else value for key, value in rope.items() if key[:5] != "mrope"}
        given["rope_parameters" if given.get("rope_parameters") else "rope_scaling"] = rope
    if not given.get("rope_parameters"):
        given.pop("rope_parameters", None)
        given.setdefault("rope_theta", 10000.0)  # defaults differ between versions of transformers
    try:
        # `mlp_bias`: Qwen3 does not have it, and the layers of both families are built alike. Heads whose width is
        # given need not divide the hidden size, as transformers demands: it gets to see one.
        heads, shared = given.get("num_attention_heads"), given.get("num_key_value_heads")
        is_free = given.get("head_dim") and heads and given.get("hidden_size", heads) % heads
        seen = {"num_attention_heads": 1, "num_key_value_heads": 1} if is_free else {}
        config = AutoConfig.for_model(model_type, **{"mlp_bias": False} | given | seen)
        if is_free:
            config.num_attention_heads, config.num_key_value_heads = heads, shared or heads
        config.layer_types = list(config.to_dict().get("layer_types") or [FULL] * config.num_hidden_layers)
    except Exception as error:  # transformers has its own classes of error, which differ between versions
        raise ValueError(f"its decoder settings do not fit together: {error}") from error
    if set(config.layer_types) - {FULL, SLIDING}:
        raise ValueError(f"layer_types={config.layer_types}; layers are {FULL} or {SLIDING}.")
    if SLIDING in config.layer_types and not config.to_dict().get("sliding_window"):
        raise ValueError(
            f"layer_types={config.layer_types}, and sliding_window is {settings.get('sliding_window')!r} "
            f"(use_sliding_window={settings.get('use_sliding_window')!r}). Set a window."
        )
    if config.hidden_act not in ACT2FN:
        raise ValueError(f"hidden_act={config.hidden_act!r} is not an activation of transformers.")
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in _ROPE_TYPES:
        raise ValueError(
            f"RoPE of type {rope_type!r} is not served: its angles may depend on other rows. Use one of {_ROPE_TYPES}."
        )
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    if heads % shared:
        raise ValueError(f"num_key_value_heads={shared} must divide num_attention_heads={heads}.")
    return config


def integer(name: str, value: Any, least: int) -> int:
    """Returns `value`; raises ValueError, which calls it `name`, unless it is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} in config.json; it must be an integer of at least {least}.")
    return value


def layer_list(name: str, ids: Any, least: int = 0) -> tuple[int, ...]:
    """Returns `ids`; raises ValueError, which calls them `name`, unless they are integers of at least `least`."""
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"{name}={ids!r} in config.json; it must be a list of the target's layers.")
    return tuple(integer(name, index, least) for index in ids)
