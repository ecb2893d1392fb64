"""Where the time of one decoded token goes, by simulation (ER App. C.1: Tab. 3, Fig. 2b; App. C.3: Tab. 4)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .roofline import require_number


BYTES = 2  # of a 16-bit weight or activation


@dataclass(frozen=True)
class Hardware:
    """Peaks of one device: FLOP/s in 16 bit, and B/s of its memory."""

    flops_per_second: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        require_number(self, "flops_per_second", above=0.0)
        require_number(self, "bytes_per_second", above=0.0)

    def seconds(self, flops: float, moved: float) -> float:
        """The longer of computing `flops` and of moving `moved` bytes."""
        return max(flops / self.flops_per_second, moved / self.bytes_per_second)


A100_80GB = Hardware(312e12, 2.039e12)
"""What ER simulates: one A100-80GB SXM, 16-bit dense peak."""


@dataclass(frozen=True)
class Shape:
    """A dense decoder with gated FFNs and 16-bit weights.

    Args:
        hidden, intermediate: widths of the residual stream and of the FFN.
        layers, heads, kv_heads, head_dim: of attention.
        vocabulary: rows of the embedding.
        tied: whether the output head is the embedding.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "tied":
                require_number(self, field.name, above=0)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Shape":
        """Reads a transformers config (its `config.json`) of a Llama-like model.

        Raises:
            ValueError: a size is missing; the message names it.
        """
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        missing = [name for name in names if config.get(name) is None]
        if missing:
            raise ValueError(f"config lacks {missing}; give the config.json of a dense decoder.")
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def ffn_weights(self) -> int:
        """Gate, up and down projections of all layers."""
        return self.layers * 3 * self.hidden * self.intermediate

    @property
    def qkvo_weights(self) -> int:
        """Query, key, value and output projections of all layers."""
        return self.layers * 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def head_weights(self) -> int:
        """The output head."""
        return self.vocabulary * self.hidden

    @property
    def kv_bytes(self) -> int:
        """κ_theoretical, bytes per cached token (ER App. E.3)."""
        return self.layers * 2 * self.kv_heads * self.head_dim * BYTES

    def weight_bytes(self, bits: int = 16) -> float:
        """W_T, or W_D with `bits` per weight of FFN and QKVO; embedding, head and norms stay at 16."""
        norms = (2 * self.layers + 1) * self.hidden
        dense = (1 if self.tied else 2) * self.head_weights + norms
        return (self.ffn_weights + self.qkvo_weights) * bits / 8 + dense * BYTES


def component_seconds(shape: Shape, hardware: Hardware, batch: int, length: float) -> dict[str, float]:
    """Seconds of each part of one decoding step of `batch` rows with `length` cached tokens each.

    Each part takes the longer of its arithmetic and its memory traffic; the embedding lookup is left out.
    """
    # Norms and residual additions of two blocks, the gate's product, the rotation of queries and keys, one pass over
    # the attention scores: read and written once per token and layer.
    elements = 2 * (2 + 3) * shape.hidden + 3 * shape.intermediate
    elements += 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    nonlinear = batch * shape.layers * (elements + shape.heads * length)

    def projection(weights: int) -> float:
        return hardware.seconds(2.0 * batch * weights, weights * BYTES)

    attention = 4.0 * batch * length * shape.layers * shape.heads * shape.head_dim
    return {
        "ffn": projection(shape.ffn_weights),
        "qkvo": projection(shape.qkvo_weights),
        "attention": hardware.seconds(attention, batch * length * shape.kv_bytes),
        "lm_head": projection(shape.head_weights),
        "nonlinear": hardware.seconds(nonlinear, nonlinear * BYTES),
    }


def component_shares(shape: Shape, hardware: Hardware, batch: int, length: float) -> dict[str, float]:
    """`component_seconds` as shares of their sum: a row of ER Tab. 3."""
    seconds = component_seconds(shape, hardware, batch, length)
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()}


def idealized_draft_ratio(shape: Shape, bits: int, batch: int, length: float, rho_kappa: float = 1.0) -> float:
    """T̂_q/T̂_p where memory alone counts and nothing has overhead (ER Tab. 4), `rho_kappa` κ_eff over κ_theoretical."""
    cached = rho_kappa * shape.kv_bytes * batch * length
    return (shape.weight_bytes(bits) + cached) / (shape.weight_bytes() + cached)
