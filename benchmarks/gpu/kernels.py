"""4-bit kernels over the dense layer, for the projections of one decoder layer and the head, by rows of x, as "auto"
measures them; and the dense product whose rows do not depend on each other ("exact"), also for a prompt.

Weights lie in copies that no cache holds, and calls are replayed from a CUDA graph. A kernel whose product is wrong is
left out, with a warning in the log.
"""

import itertools
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedConfig

from spec_trl.quantization.kernels import LayerSpec, fitting_kernels, make_packed
from spec_trl.quantization.kernels.kernel_times import kernel_table, time_replays

from .part import Part
from .shapes import config_of
from .timing import compare, copies_for, relative_error, seconds_of


GROUP, ROWS, PROMPT = 128, (1, 4, 16, 64), 1024
TOLERANCE = 0.02
"""Relative error from which on a product is called wrong: bfloat16 rounding gives a few thousandths."""


def layer_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of the distinct matrices, by the names of the layers that have them."""
    head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    layers = {  # where most of the bytes are comes first: time may run out
        "gate_proj, up_proj": (config.intermediate_size, config.hidden_size),
        "down_proj": (config.hidden_size, config.intermediate_size),
        "q_proj": (config.num_attention_heads * head_dim, config.hidden_size),
        "o_proj": (config.hidden_size, config.num_attention_heads * head_dim),
        "lm_head": (config.vocab_size, config.hidden_size),
        "k_proj, v_proj": (config.num_key_value_heads * head_dim, config.hidden_size),
    }
    shapes: dict[tuple[int, int], list[str]] = {}
    for name, shape in layers.items():
        shapes.setdefault(shape, []).append(name)
    return {", ".join(names): shape for shape, names in shapes.items()}


def time_kernels(part: Part, shape: tuple[int, int]) -> dict[str, Any]:
    """Seconds of the dense layer and of each kernel by rows, and what "auto" takes; or as the cache has them."""
    layer = LayerSpec(*shape, 4, GROUP, torch.bfloat16, torch.bfloat16, part.device)
    fitting = fitting_kernels("auto", layer)
    if isinstance(fitting, str):
        return {"none": fitting}
    started = time.perf_counter()
    timer = time_replays if part.device.type == "cuda" else lambda name, rows, calls: median(map(seconds_of, calls))
    table = kernel_table(layer, fitting, timer)
    seconds, packed = time.perf_counter() - started, make_packed("auto", layer)
    chosen = {"none": packed} if isinstance(packed, str) else {"kernel": packed.name, "max_rows": packed.max_rows}
    return {"dense": table.dense, "kernels": table.kernels, "measuring_seconds": seconds, "auto": chosen}


def time_exact(part: Part, shape: tuple[int, int]) -> dict[int, Any]:
    """The exact product over torch's, by rows; a row's bits must be those that it has alone."""
    from spec_trl.generation.engine.kernels.dense_product import dense_product

    # Triton's interpreter multiplies bfloat16 wrongly, so float16 where this is only tried out.
    dtype = torch.bfloat16 if part.device.type == "cuda" else torch.float16
    generator = torch.Generator(part.device).manual_seed(part.seed)
    weight = torch.randn(shape, device=part.device, generator=generator).mul_(0.02).to(dtype)  # [out, in]
    dense = [weight, *(weight.clone() for _ in range(1, copies_for(weight.nbytes, part.device)))]
    by_rows: dict[int, Any] = {}
    for m in (1, 4) if part.is_smoke else (*ROWS, PROMPT):
        x = torch.randn(m, shape[1], device=part.device, generator=generator).to(dtype)  # [m, in]
        found = dense_product(x, weight)  # [m, out]
        error = relative_error(found, F.linear(x.float(), weight.float()))
        if not error < TOLERANCE or not torch.equal(found[-1:], dense_product(x[-1:], weight)):
            by_rows[m] = {"relative_error": error, "wrong": True}
            continue
        products = {"exact": dense_product, "dense": F.linear}
        works = {name: [partial(product, x, each) for each in dense] for name, product in products.items()}
        seconds = {name: timing.seconds for name, timing in compare(works, part.device).items()}
        by_rows[m] = {"relative_error": error, "exact over dense": seconds["exact"] / seconds["dense"], **seconds}
    return by_rows


def main(arguments: Sequence[str] | None = None) -> int:
    part = Part("kernels", __doc__, arguments)
    shapes = layer_shapes(config_of(part.shape))
    part.state(dtype="bfloat16", group=GROUP, shapes={name: list(shape) for name, shape in shapes.items()})
    for (name, shape), (kind, work) in itertools.product(
        shapes.items(), {"4 bits": time_kernels, "exact": time_exact}.items()
    ):
        if kind == "exact" and part.triton_absent is not None:
            part.skip(f"{name} | exact", part.triton_absent)
        else:
            part.measure(f"{name} | {kind}", partial(work, part, shape))
    return part.finish()


if __name__ == "__main__":
    raise SystemExit(main())
