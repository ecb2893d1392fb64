"""What the self-drafter costs: milliseconds to requantize it after an optimizer step, and bytes next to the policy."""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from spec_trl.generation.engine.shadow import make_shadow
from spec_trl.quantization import QuantizedLinear, quantize_projections

from .measure import Finding, Options, begin, shown, stopwatch, write_result
from .models import DTYPES, load_model, model_line


def measure(spec: str, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, object]:
    """Build the drafter of one model, refresh it repeatedly, and return what that took."""
    device = torch.device(options.device)
    loaded = load_model(spec, dtype, options.device, options.agreement, options.seed, measured=False)
    with stopwatch(device) as building:
        network = quantize_projections(
            make_shadow(loaded.model), scheme=options.scheme, kernel=options.kernel, lm_head=options.lm_head
        )
    weights = network.source_bytes // 2  # two bytes each in bfloat16
    times = []
    for _ in tqdm(range(options.repeats), desc=f"{loaded.facts['model']} {loaded.facts['dtype']}"):
        with stopwatch(device) as watch:
            network.refresh()
        times.append(watch.value)
    linears = [layer for layer in network.layers.values() if isinstance(layer, QuantizedLinear)]
    return loaded.facts | {
        "kernels": sorted({layer.packed.name for layer in linears}),
        "head_packed": any(name.endswith("lm_head") for name in network.layers),
        "dense_layers": network.dense_layers,
        "quantized_weights": weights,
        "build_seconds": building.value,
        "refresh_seconds": statistics.median(times),
        "refresh_ms_per_million": statistics.median(times) * 1e9 / weights,
        "packed_bytes": network.packed_bytes,
        "source_bytes": network.source_bytes,
        "memory_ratio": network.packed_bytes / network.source_bytes,
    }


def findings(result: dict[str, Any]) -> list[Finding]:
    """Time and memory of each drafter."""
    found = []
    for model in result["models"]:
        head = "packed" if model["head_packed"] else "dense"
        what = f"{model_line(model)}, {model['quantized_weights'] / 1e6:.1f} M quantized weights, {head} head"
        found += [
            Finding(f"{what}: one refresh", 1e3 * model["refresh_seconds"], "ms"),
            Finding(f"{what}: per million weights", model["refresh_ms_per_million"], "ms"),
            Finding(f"{what}: packed bytes", model["memory_ratio"], "×", "the same layers in bfloat16"),
        ]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Options(__doc__, "refresh", "--models shape:tiny --repeats 1")
    add = parser.add_argument
    add("--models", nargs="+", default=["shape:qwen2.5-0.5b"], help="folders, shape:NAME or shape:CONFIG.json")
    add("--agreement", type=float, default=0.93, help="shape models: overlap with their 4-bit copy")
    add("--dtypes", nargs="+", default=["bfloat16"], choices=list(DTYPES))
    add("--scheme", default="rtn-w4-g128", help="draft_quantization")
    add("--kernel", default="auto", help="draft_kernel")
    add("--lm-head", default="auto", choices=["auto", "dense", "packed"], help="draft_lm_head")
    add("--repeats", type=int, default=5, help="refreshes; the median counts")
    options = parser.read(arguments, "repeats")
    machine = begin(options)
    models = [measure(spec, DTYPES[dtype], options) for spec in options.models for dtype in options.dtypes]
    result = {"options": shown(options), "models": models}
    setup = (
        f"Scheme {options.scheme}, medians of {options.repeats} refreshes. Memory is of the quantized layers alone; "
        "all else is the policy's own."
    )
    title = "Refresh of the self-drafter"
    write_result(options.output, "quantization", title, setup, machine, findings(result), result)


if __name__ == "__main__":
    main()
