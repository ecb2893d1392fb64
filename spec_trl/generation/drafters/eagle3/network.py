"""The EAGLE-3 draft network (Li et al. 2025, arXiv 2503.01840) and the two config formats it is published in."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...engine.attention import ragged_attention


# What a config may say of the drafter's one layer. Other keys are refused by name: they may change what is computed.
_MODEL_TYPES = ("llama", "qwen3")
_LAYER_KEYS = {
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "vocab_size",
    "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window",
    "use_sliding_window", "layer_types", "tie_word_embeddings", "pretraining_tp",
}  # fmt: skip
_FLAGS = {
    "draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
    "eagle_aux_hidden_state_layer_ids",
}  # fmt: skip
_INERT = {
    # Written by transformers, without a part in the forward of an already trained layer.
    "architectures", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "torch_dtype",
    "dtype", "transformers_version", "use_cache", "max_window_layers", "attention_dropout", "use_mrope",
    "_name_or_path", "chunk_size_feed_forward", "id2label", "label2id", "is_encoder_decoder", "output_attentions",
    "output_hidden_states", "problem_type", "return_dict",
    # Written by speculators: how it was trained, and what it was trained for.
    "speculators_model_type", "speculators_version", "speculators_config", "embed_requires_grad",
    "enable_sp_ulysses", "draft_attn_kernel", "has_no_defaults_at_init", "tie_word_embeddings",
}  # fmt: skip
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Eagle3Config:
    """What an EAGLE-3 checkpoint computes, read from either format's config.json.

    Attributes:
        layer: of transformers: the layer's shape, activation and RoPE.
        vocab_size: of the target.
        draft_vocab_size: of the drafter's head; smaller where the vocabulary is pruned.
        target_hidden_size: width of one of the target's hidden states.
        layer_ids: which hidden states are its features, in transformers' count.
        norm_before_residual: the residual stream starts from the normalised state.
        norm_before_fc: one norm over all features side by side, before they are projected.
        fc_norm: a norm for each of the features, before they are projected.
        norm_output: the state fed back is the one behind the final norm.
    """

    layer: PreTrainedConfig
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    layer_ids: tuple[int, ...]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @classmethod
    def parse(cls, config: Mapping[str, Any], target_layers: int, source: str) -> "Eagle3Config":
        """Reads a config.json of SafeAILab, AngelSlim and SpecForge, or of speculators (with a nested layer config).

        Args:
            config: its keys.
            target_layers: of the target, L; where no layer ids are given they are 2, L // 2 and L - 3.
            source: the checkpoint, for messages.

        Raises:
            ValueError: a key is unknown or asks for something that is not served.
        """
        where = f"assistant_model={source!r}: its config.json"
        kind = config.get("speculators_model_type", "eagle3")
        if kind != "eagle3":
            raise ValueError(f"{where} is of a {kind!r} speculator; choose the assistant_strategy of that name.")
        is_nested = "speculators_model_type" in config
        keys = config.get("transformer_layer_config", {}) if is_nested else config
        known = _FLAGS | _INERT | ({"transformer_layer_config"} if is_nested else _LAYER_KEYS | {"eagle_config"})
        unknown = sorted((set(config) - known) | (set(keys) - _LAYER_KEYS - _INERT if is_nested else set()))
        if unknown:
            raise ValueError(
                f"{where} has the keys {unknown}, which may change what is computed and are not known here. Remove "
                "them if they do not."
            )
        layer = _layer_config(keys, where)
        _refuse_unserved(keys, layer, where)
        flags = {name: config.get(name) for name in _FLAGS}
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            if not isinstance(flags[name], bool | None):
                raise ValueError(f"{where} has {name}={flags[name]!r}; it must be true or false.")
        # 32000: class default of speculators. In the other format no number means the whole vocabulary.
        defaults = {
            "draft_vocab_size": 32000 if is_nested else layer.vocab_size,
            "target_hidden_size": layer.hidden_size,
        }
        sizes: dict[str, Any] = {
            name: default if flags[name] is None else flags[name] for name, default in defaults.items()
        }
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{where} has {name}={size!r}; it must be an integer of at least 1.")
        return cls(
            layer=layer,
            vocab_size=layer.vocab_size,
            draft_vocab_size=sizes["draft_vocab_size"],
            target_hidden_size=sizes["target_hidden_size"],
            layer_ids=_layer_ids(config, target_layers, where),
            norm_before_residual=bool(flags["norm_before_residual"]),
            norm_before_fc=bool(flags["norm_before_fc"]),
            fc_norm=bool(flags["fc_norm"]),
            norm_output=bool(flags["norm_output"]),
        )

    @property
    def position_limit(self) -> int | None:
        """Positions that its RoPE was scaled for; None: it is not scaled and goes on."""
        is_scaled = self.layer.rope_parameters["rope_type"] != "default"
        return self.layer.max_position_embeddings if is_scaled else None


def _layer_config(keys: Mapping[str, Any], where: str) -> PreTrainedConfig:
    settings = {name: value for name, value in keys.items() if name in _LAYER_KEYS}
    model_type = settings.pop("model_type", "llama")
    if model_type not in _MODEL_TYPES:
        raise ValueError(f"{where} has model_type={model_type!r}; EAGLE-3 layers of {_MODEL_TYPES} are served.")
    if not settings.get("rope_parameters"):
        settings.pop("rope_parameters", None)
        settings.setdefault("rope_theta", 10000.0)  # given: defaults differ between versions of transformers
    try:
        return AutoConfig.for_model(model_type, **settings)
    except Exception as error:  # its own classes of error, which differ between versions
        raise ValueError(f"{where} is refused by transformers: {error}") from error


def _refuse_unserved(keys: Mapping[str, Any], layer: PreTrainedConfig, where: str) -> None:
    rope_type = layer.rope_parameters.get("rope_type")
    slides = keys.get("sliding_window") is not None and keys.get("use_sliding_window") is not False
    refused = {
        "num_hidden_layers": (keys.get("num_hidden_layers", 1) != 1, "EAGLE-3 has 1 layer"),
        "tie_word_embeddings": (bool(keys.get("tie_word_embeddings")), "it must have a head of its own"),
        "pretraining_tp": (keys.get("pretraining_tp", 1) != 1, "it must be 1"),
        "sliding_window": (slides, "its attention must be full: set use_sliding_window to false if it is"),
        "layer_types": (
            bool(set(keys.get("layer_types") or []) - {"full_attention"}),
            "its attention must be full",
        ),
        "hidden_act": (layer.hidden_act not in ACT2FN, "transformers has no such activation"),
        "rope_scaling": (
            rope_type not in _ROPE_TYPES,
            f"its positions must be of type {_ROPE_TYPES}: others change with the length of the batch",
        ),
        "num_key_value_heads": (
            layer.num_attention_heads % layer.num_key_value_heads != 0,
            f"it must divide num_attention_heads={layer.num_attention_heads}",
        ),
    }
    for name, (is_refused, reason) in refused.items():
        if is_refused:
            raise ValueError(f"{where} has {name}={keys.get(name)!r}, which is not served: {reason}.")


def _layer_ids(config: Mapping[str, Any], target_layers: int, where: str) -> tuple[int, ...]:
    name = "eagle_aux_hidden_state_layer_ids"
    ids, offset = config.get(name), 0
    nested = config.get("eagle_config") or {}
    unknown = sorted(set(nested) - {name, "use_aux_hidden_state"})
    if unknown or nested.get("use_aux_hidden_state", True) is not True:
        raise ValueError(
            f"{where} has eagle_config={nested}; of it, {name} and use_aux_hidden_state=true are served here."
        )
    if ids is None and nested.get(name) is not None:
        ids, offset = nested[name], 1  # SpecForge and SGLang name the layer whose output it is, not whose input
    if ids is None:
        ids = [2, target_layers // 2, target_layers - 3]
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"{where} has {name}={ids!r}; it must be a list of integers.")
    beyond = [i for i in ids if not 0 <= i + offset <= target_layers]
    if beyond:
        raise ValueError(
            f"{where} asks for the hidden states {name}={ids}, of which a target with {target_layers} layers does not "
            f"have {beyond}. Choose a drafter that was made for this target."
        )
    return tuple(i + offset for i in ids)


class KeyValueStore(Protocol):
    """Keeps K/V from forward to forward, as a layer of :class:`~spec_trl.generation.engine.cache.RaggedCache` does."""

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Takes `[B, kv_heads, q, head_dim]` of the queries and returns all that they may see."""
        ...


class Eagle3Network(nn.Module):
    """One decoder layer over pairs of a token and what the target thought before it.

        target        x0    x1    x2    x3             features of column i: hidden states of three layers
                      g0    g1    g2    g3
        pair i        x1,r0 x2,r1 x3,r2 x4,r3          r = project(g)
        predicts      x2    x3    x4    x5

    Where the target has not been yet, the layer's own output takes the place of r (`fed_back`).

    Parameters have the names of the speculators format, in which `midlayer` is `layers.0`.

    Args:
        config: what it computes.
        tensors: names of further tensors that the checkpoint brings: `embed_tokens.weight`, `d2t`, `t2d`.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, tensors: set[str]) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        count, width = len(config.layer_ids), config.target_hidden_size
        self.input_norm = _Norm(count * width, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(_Norm(width, eps) for _ in range(count)) if config.fc_norm else None
        self.fc = nn.Linear(count * width, hidden, bias=False)
        self.layers = nn.ModuleList([_Layer(config)])
        self.norm = _Norm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        has_embedding = "embed_tokens.weight" in tensors
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if has_embedding else None
        if "d2t" in tensors:
            self.register_buffer("d2t", torch.empty(config.draft_vocab_size, dtype=torch.int64))
        if "t2d" in tensors:
            self.register_buffer("t2d", torch.empty(config.vocab_size, dtype=torch.bool))

    def project(self, features: Tensor) -> Tensor:
        """r `[..., H]` of the target's features `[..., len(layer_ids) * H_t]`."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)  # of [..., H_t] each
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def forward(
        self, embedded: Tensor, states: Tensor, positions: Tensor, mask: Tensor, store: KeyValueStore | None = None
    ) -> Tensor:
        """The layer's output h, before the final norm.

        Args:
            embedded: `[B, q, H]` embeddings of the pairs' tokens.
            states: `[B, q, H]` r, or what is fed back in its place.
            positions: `[B, q]` int64; only differences between them matter.
            mask: additive `[B, 1, q, columns]`, or spans (`MaskPlan.spans`).
            store: K/V of earlier forwards; None: the q pairs see one another alone (columns = q).

        Returns:
            `[B, q, H]`.
        """
        return self.layers[0](embedded, states, positions, mask, store)

    def fed_back(self, h: Tensor) -> Tensor:
        """What takes the place of r in the next pair, `[..., H]`."""
        return self.norm(h) if self.config.norm_output else h

    def logits(self, h: Tensor) -> Tensor:
        """Over the draft vocabulary, `[..., draft_vocab_size]`, of h `[..., H]`."""
        return self.lm_head(self.norm(h))


class _Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = _Norm(hidden, eps)
        self.hidden_norm = _Norm(hidden, eps)
        self.self_attn = _Attention(config.layer)
        self.post_attention_layernorm = _Norm(hidden, eps)
        self.mlp = _FeedForward(config.layer)

    def forward(
        self, embedded: Tensor, states: Tensor, positions: Tensor, mask: Tensor, store: KeyValueStore | None
    ) -> Tensor:
        normed = self.hidden_norm(states)  # [B, q, H]
        pairs = torch.cat([self.input_layernorm(embedded), normed], dim=-1)  # [B, q, 2H]
        residual = normed if self.norm_before_residual else states
        h = residual + self.self_attn(pairs, positions, mask, store)  # [B, q, H]
        return h + self.mlp(self.post_attention_layernorm(h))


class _FeedForward(nn.Module):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        bias = bool(config.to_dict().get("mlp_bias", False))  # Qwen3 has no such key
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class _Attention(nn.Module):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        hidden, d, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(2 * hidden, self.heads * d, bias=bias)
        self.k_proj = nn.Linear(2 * hidden, self.kv_heads * d, bias=bias)
        self.v_proj = nn.Linear(2 * hidden, self.kv_heads * d, bias=bias)
        self.o_proj = nn.Linear(self.heads * d, hidden, bias=bias)
        has_norms = config.model_type == "qwen3"
        self.q_norm = _Norm(d, config.rms_norm_eps) if has_norms else None
        self.k_norm = _Norm(d, config.rms_norm_eps) if has_norms else None
        self.rotary = Rotary(config)

    def forward(self, pairs: Tensor, positions: Tensor, mask: Tensor, store: KeyValueStore | None) -> Tensor:
        batch, length, _ = pairs.shape
        query = self.q_proj(pairs).view(batch, length, self.heads, self.head_dim)  # [B, q, heads, d]
        key = self.k_proj(pairs).view(batch, length, self.kv_heads, self.head_dim)  # [B, q, kv, d]
        value = self.v_proj(pairs).view(batch, length, self.kv_heads, self.head_dim)  # [B, q, kv, d]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = self.rotary(query, key, positions)
        query, key, value = (states.transpose(1, 2) for states in (query, key, value))  # [B, heads, q, d]
        if store is not None:
            key, value = store.update(key, value)  # [B, kv, columns, d]
        attended, _ = ragged_attention(self, query, key, value, mask, self.head_dim**-0.5)  # [B, q, heads, d]
        return self.o_proj(attended.reshape(batch, length, -1))


class Rotary:
    """Rotary positions of any number: computed for the positions at hand, without a table that ends.

    Not a module: a buffer would be left on the meta device while the checkpoint is loaded, and cast with the weights.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        frequencies, self._scale = _frequencies(config)
        self._frequencies = {torch.device("cpu"): frequencies}  # of [d / 2] float64

    def __call__(self, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates `[B, q, heads, d]` and `[B, q, kv_heads, d]` to `positions` (`[B, q]` int64)."""
        device = positions.device
        if device not in self._frequencies:
            self._frequencies[device] = self._frequencies[torch.device("cpu")].to(device)
        wide = torch.promote_types(query.dtype, torch.float32)
        angles = positions[..., None].to(wide) * self._frequencies[device].to(wide)  # [B, q, d / 2]
        angles = torch.cat([angles, angles], dim=-1)[:, :, None]  # [B, q, 1, d]
        cos, sin = ((f(angles) * self._scale).to(query.dtype) for f in (torch.cos, torch.sin))
        return query * cos + _turned(query) * sin, key * cos + _turned(key) * sin


def _frequencies(config: PreTrainedConfig) -> tuple[Tensor, float]:
    """Turns per token `[d / 2]` float64, in radians, and what cosine and sine are multiplied with."""
    rope, cpu = config.rope_parameters, torch.device("cpu")
    if rope["rope_type"] == "yarn":
        frequencies, scale = ROPE_INIT_FUNCTIONS["yarn"](config, cpu)
        return frequencies.double(), scale
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=cpu) / config.head_dim  # [d / 2]
    frequencies = float(rope["rope_theta"]) ** -exponents
    if rope["rope_type"] == "linear":
        frequencies = frequencies / rope["factor"]
    if rope["rope_type"] == "llama3":  # long waves are stretched, short ones kept, those between interpolated
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = kept * frequencies + (1 - kept) * frequencies / rope["factor"]
    return frequencies, 1.0


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
