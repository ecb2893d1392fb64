"""Where the time of one decoding step goes, by simulation (EfficientRollout, ER: App. C.1, Tab. 3, Fig. 2b).

From the config of a dense model and a device's peaks: the shares of FFN, QKVO, attention, LM head and the rest of a
16-bit step, and T̂_q/T̂_p of a memory-bound 4-bit and 8-bit copy (App. C.3, Tab. 4, at the theoretical K/V traffic).

    python -m benchmarks.paper.breakdown config.json --flops 312e12 --bandwidth 2.039e12 --batch 1,8 --length 2048
"""

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from spec_trl.cli.options import positive, table, whole_numbers
from spec_trl.value_checks import require_field


BYTES = 2  # of a 16-bit weight or activation


@dataclass(frozen=True)
class Hardware:
    """Peaks of one device: FLOP/s in 16 bit, and B/s of its memory."""

    flops_per_second: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        require_field(self, "flops_per_second", above=0.0)
        require_field(self, "bytes_per_second", above=0.0)

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
                require_field(self, field.name, above=0)

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


def idealized_draft_ratio(shape: Shape, bits: int, batch: int, length: float, rho_kappa: float = 1.0) -> float:
    """T̂_q/T̂_p where memory alone counts and nothing has overhead (ER Tab. 4), `rho_kappa` κ_eff over κ_theoretical."""
    cached = rho_kappa * shape.kv_bytes * batch * length
    return (shape.weight_bytes(bits) + cached) / (shape.weight_bytes() + cached)


PARTS = {"ffn": "FFN", "qkvo": "QKVO", "attention": "attention", "lm_head": "LM head", "nonlinear": "nonlinear"}


def breakdown_table(shape: Shape, hardware: Hardware, batches: Sequence[int], lengths: Sequence[int]) -> str:
    """Shares of a decoding step's parts for each (B, S): rows of ER Tab. 3."""
    header = ["B", "S", *PARTS.values(), "T_p ms", "W4 T_q/T_p", "W8 T_q/T_p"]
    rows = []
    for batch, length in itertools.product(batches, lengths):
        seconds = component_seconds(shape, hardware, batch, length)
        total = sum(seconds.values())
        shares = [f"{seconds[part] / total:.1%}" for part in PARTS]
        ratios = [f"{idealized_draft_ratio(shape, bits, batch, length):.3f}" for bits in (4, 8)]
        rows.append([str(batch), str(length), *shares, f"{1e3 * total:.3f}", *ratios])
    return table(header, rows)


def read_shape(path: Path) -> Shape:
    """The shape that a `config.json` says.

    Raises:
        ValueError: it is no JSON object, or a size is missing.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); give a model's config.json.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; give a model's config.json.")
    return Shape.from_config(content)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("config", type=Path, help="config.json of a dense model")
    add("--flops", type=positive, required=True, help="the device's peak FLOP/s at 16 bit, e.g. 312e12")
    add("--bandwidth", type=positive, required=True, help="its peak memory bandwidth in B/s, e.g. 2.039e12")
    add("--batch", type=whole_numbers, default=[1, 8, 32], metavar="B,B", help="active rows (1,8,32)")
    add("--length", type=whole_numbers, default=[512, 2048], metavar="S,S", help="cached tokens per row (512,2048)")
    options = parser.parse_args(arguments)
    try:
        shape = read_shape(options.config)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(breakdown_table(shape, Hardware(options.flops, options.bandwidth), options.batch, options.length))


if __name__ == "__main__":
    main()
