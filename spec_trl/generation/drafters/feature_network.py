"""Builds networks that read their target's hidden states: base of EAGLE-3 and DFlash."""

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from ..engine.network.attention import FULL, SLIDING, ragged_attention
from .target_parts import is_padded


Store = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Takes new keys and values `[B, kv_heads, n, d]` of a layer, by its index, and returns all that the queries may see.
`update` of transformers' caches is one."""
Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, `[B, 1, n, d]` each."""

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
    """The config.json of a drafter that reads hidden states.

    Args:
        decoder: sizes, activation, RoPE and types of its layers, as a config of transformers.
        feature_layers: the target's hidden states that it reads, in transformers' count (0: embeddings).
        draft_vocabulary: number of tokens that its head scores.
        target_hidden_size: width of the target's hidden states; None: unknown.
    """

    decoder: PreTrainedConfig
    feature_layers: tuple[int, ...]
    draft_vocabulary: int
    target_hidden_size: int | None = None

    @property
    def position_limit(self) -> int | None:
        """Number of positions of its scaled RoPE; None: RoPE is not scaled and has no end."""
        is_scaled = self.decoder.rope_parameters["rope_type"] != "default"
        return int(self.decoder.max_position_embeddings) if is_scaled else None

    def check_target(self, target: PreTrainedConfig, tensors: Collection[str]) -> None:
        """Raises ValueError where the drafter was made for another target than that of this text config, or where its
        checkpoint, with the names `tensors`, lacks a part that the target cannot lend."""
        depth, wide, vocabulary = target.num_hidden_layers, target.hidden_size, target.vocab_size
        if beyond := [index for index in self.feature_layers if not 0 <= index <= depth]:
            raise ValueError(
                f"it reads the target's hidden states {list(self.feature_layers)}, and the target has {depth} layers "
                f"and so no {beyond}. Use a drafter that was made for this target."
            )
        size = self.decoder.vocab_size
        if not is_padded(size, vocabulary):
            raise ValueError(
                f"vocab_size={size}, and the target's vocabulary has {vocabulary} tokens. A "
                "drafter must use the target's tokenizer."
            )
        if self.draft_vocabulary > size:
            raise ValueError(f"draft_vocab_size={self.draft_vocabulary} is more than the vocabulary, {size}.")
        if self.target_hidden_size not in (None, wide):
            raise ValueError(
                f"target_hidden_size={self.target_hidden_size}, and the target's hidden states are {wide} wide. Use a "
                "drafter that was made for this target."
            )
        if self.draft_vocabulary != size and not {"lm_head.weight", "d2t"} <= set(tensors):
            raise ValueError(
                f"draft_vocab_size={self.draft_vocabulary} of {size} tokens needs a head of its own "
                "(lm_head.weight), and d2t to say which tokens these are. The checkpoint was not saved whole."
            )


def check_keys(
    where: str, settings: Mapping[str, Any], served: Collection[str], fixed: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raises ValueError where `settings` ask for another network: by another value than the `fixed` ones, by an
    architecture, or by a key that scales or replaces something and is not `served`. Other keys are ignored: a drafter
    changes no token. `where` names the part of config.json in messages."""
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
    """The drafter's layers as a config of transformers, with its defaults.

    Args:
        settings: keys of config.json; others than `DECODER_KEYS` are ignored.
        default_type: the model type where they name none.
        fixed: values that replace those of the file.

    Raises:
        ValueError: transformers refuses the settings, or they ask for an unserved network.
    """
    options = {key: value for key, value in settings.items() if key in DECODER_KEYS} | fixed
    model_type = options.pop("model_type", default_type)
    if model_type not in _MODEL_TYPES:
        raise ValueError(f"model_type={model_type!r} is not served; layers are of {_MODEL_TYPES}.")
    rope = options.get("rope_parameters") or options.get("rope_scaling")
    if isinstance(rope, dict):
        check_keys("its RoPE", rope, ("mscale", "mscale_all_dim"), {"alpha": (None,)})
        # On text the three positions of a multimodal RoPE are one.
        rope = {key: "default" if value == "mrope" else value for key, value in rope.items() if key[:5] != "mrope"}
        options["rope_parameters" if options.get("rope_parameters") else "rope_scaling"] = rope
    if not options.get("rope_parameters"):
        options.pop("rope_parameters", None)
        options.setdefault("rope_theta", 10000.0)  # defaults differ between versions of transformers
    try:
        # `mlp_bias`: Qwen3 does not have it, and the layers of both families are built alike. Heads with a
        # `head_dim` need not divide the hidden size, as transformers demands: it gets to see one.
        heads, shared = options.get("num_attention_heads"), options.get("num_key_value_heads")
        is_free = options.get("head_dim") and heads and options.get("hidden_size", heads) % heads
        seen = {"num_attention_heads": 1, "num_key_value_heads": 1} if is_free else {}
        config = AutoConfig.for_model(model_type, **{"mlp_bias": False} | options | seen)
        if is_free:
            config.num_attention_heads, config.num_key_value_heads = heads, shared or heads
        config.layer_types = list(config.to_dict().get("layer_types") or [FULL] * config.num_hidden_layers)
    except Exception as error:  # the classes of error differ between versions
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
    """Returns `value`, named `name` in errors; raises ValueError unless it is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} in config.json; it must be an integer of at least {least}.")
    return value


def layer_list(name: str, ids: Any, least: int = 0) -> tuple[int, ...]:
    """Returns `ids`, named `name` in errors; raises ValueError unless they are integers of at least `least`."""
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"{name}={ids!r} in config.json; it must be a list of the target's layers.")
    return tuple(integer(name, index, least) for index in ids)


class FeatureNetwork(nn.Module):
    """A network that reads its target's features. Parameters have the names of the checkpoints.

    Args:
        feature_width: of the target's features at one position, all its hidden states side by side.
        tensors: names in the checkpoint; embedding, head and vocabulary maps are made only if named.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self, config: FeatureConfig, feature_width: int, layers: Iterable[nn.Module], tensors: Collection[str]
    ) -> None:
        super().__init__()
        self.config = config
        hidden, vocabulary = config.decoder.hidden_size, config.decoder.vocab_size
        self.fc = nn.Linear(feature_width, hidden, bias="fc.bias" in tensors)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(hidden, config.decoder.rms_norm_eps)
        self.embed_tokens = nn.Embedding(vocabulary, hidden) if "embed_tokens.weight" in tensors else None
        has_head = "lm_head.weight" in tensors
        self.lm_head = nn.Linear(hidden, config.draft_vocabulary, bias=False) if has_head else None
        if "d2t" in tensors:
            self.register_buffer("d2t", torch.zeros(config.draft_vocabulary, dtype=torch.int64))
        if "t2d" in tensors:
            self.register_buffer("t2d", torch.zeros(vocabulary, dtype=torch.bool))
        self._scored: Tensor | None = None  # places of its tokens that the target has; None: all

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @torch.no_grad()
    def embed(self, tokens: Tensor, target: nn.Module) -> Tensor:
        """Embeddings `[B, n, hidden]` of `tokens` `[B, n]`, without gradients: its own, or those of the `target`
        (:func:`~.plain_embedding`)."""
        if self.embed_tokens is not None:
            # The target's vocabulary may have more rows of padding.
            target, tokens = self.embed_tokens, tokens.clamp(max=self.embed_tokens.num_embeddings - 1)
        rows: Tensor = target(tokens)  # [B, n, hidden]
        return rows.to(self.dtype)

    def target_ids(self, rows: int) -> Tensor | None:
        """`[draft vocabulary]` int64: the target's token of each drafted one; None: the same.

        The network then scores no token beyond the `rows` of the target's vocabulary, which may have less padding than
        in the drafter's training.

        Raises:
            ValueError: d2t leads out of the vocabulary or twice to one token, or t2d marks other tokens.
        """
        maps, vocabulary = dict(self.named_buffers()), self.config.decoder.vocab_size
        ids = torch.arange(self.config.draft_vocabulary, device=self.fc.weight.device)  # [draft vocabulary]
        if "d2t" in maps:
            ids = ids + self.d2t
            if "t2d" not in maps and len(ids) < vocabulary and not self.d2t.any():
                warnings.warn(
                    f"d2t is 0 throughout, and t2d is missing: the {len(ids)} tokens that the drafter scores are "
                    f"then the first of the target's {vocabulary}. If it was trained with others, all drafts are "
                    "wrong, which costs speed and changes no token: take d2t from its training run.",
                    stacklevel=2,
                )
        elif "t2d" in maps:
            raise ValueError("it has t2d and no d2t. The checkpoint was not saved whole.")
        elif self.lm_head is None or vocabulary == rows:  # a borrowed head has the target's rows
            return None
        lowest, highest, count = int(ids.min()), int(ids.max()), ids.unique().numel()
        if lowest < 0 or highest >= vocabulary or count < len(ids):
            raise ValueError(
                f"d2t must lead each of the drafter's {len(ids)} tokens to another one of the target's {vocabulary}; "
                f"it leads to {count} different ones from {lowest} to {highest}."
            )
        if "t2d" in maps and not torch.equal(self.t2d.nonzero().flatten(), ids.sort().values):
            raise ValueError("t2d marks other tokens than d2t leads to. Take both from the same training run.")
        if highest >= rows:
            self._scored = (ids < rows).nonzero().flatten()
            ids = ids[self._scored]
        return ids

    def _of_target(self, logits: Tensor) -> Tensor:
        """`logits` `[..., draft vocabulary]` of the tokens that the target has."""
        return logits if self._scored is None else logits[..., self._scored]


class Rotary:
    """Rotary positions with transformers' frequencies. No module: a buffer would stay on the meta device while a
    checkpoint is loaded, and be cast with the weights."""

    def __init__(self, decoder: PreTrainedConfig) -> None:
        with torch.device("cpu"):
            embedding = LlamaRotaryEmbedding(decoder)
        self._frequencies: Tensor = embedding.inv_freq.detach()  # [d / 2]
        self._scale: float = embedding.attention_scaling

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """cos and sin in `dtype` at `positions` (`[B, n]` int64)."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        wide = torch.promote_types(dtype, torch.float32)
        angles = positions[:, None, :, None].to(wide) * self._frequencies.to(wide)  # [B, 1, n, d / 2]
        angles = torch.cat([angles, angles], dim=-1)  # [B, 1, n, d]
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)


class Attention(nn.Module):
    """Attention with grouped heads and rotary positions, over keys and values in a :data:`Store` by `layer`.
    Projections read `inputs` numbers; with `has_norms` queries and keys are normed per head."""

    def __init__(self, decoder: PreTrainedConfig, inputs: int, layer: int, has_norms: bool) -> None:
        super().__init__()
        self.head_dim, self.layer, bias = decoder.head_dim, layer, decoder.attention_bias
        queries, shared = decoder.num_attention_heads * self.head_dim, decoder.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(inputs, queries, bias=bias)
        self.k_proj = nn.Linear(inputs, shared, bias=bias)
        self.v_proj = nn.Linear(inputs, shared, bias=bias)
        self.o_proj = nn.Linear(queries, decoder.hidden_size, bias=bias)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.head_dim, decoder.rms_norm_eps) if has_norms else nn.Identity() for _ in range(2)
        )

    def remember(self, x: Tensor, rotation: Rotation, store: Store) -> tuple[Tensor, Tensor]:
        """Stores keys and values of `x` `[B, n, inputs]`; returns the result of `store`."""
        keys = _rotated(self.k_norm(self._split(self.k_proj(x))), rotation)  # [B, kv_heads, n, d]
        return store(keys, self._split(self.v_proj(x)).transpose(1, 2), self.layer)

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor, store: Store) -> Tensor:
        """`[B, n, hidden]` of `x` `[B, n, inputs]`, over the result of `store`; additive mask `[B, 1, n, columns]`."""
        keys, values = self.remember(x, rotation, store)  # [B, kv_heads, columns, d] each
        queries = _rotated(self.q_norm(self._split(self.q_proj(x))), rotation)  # [B, heads, n, d]
        attended, _ = ragged_attention(self, queries, keys, values, mask)  # [B, n, heads, d]
        return self.o_proj(attended.flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))  # [B, n, heads, d]


def _rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """`x` `[B, n, heads, d]` as `[B, heads, n, d]`, rotated."""
    cos, sin = rotation
    x = x.transpose(1, 2)
    return x * cos + rotate_half(x) * sin
