"""What the self-drafter costs: milliseconds to requantize it after an optimizer step, and bytes beside the policy."""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from spec_trl.generation.engine.shadow import make_shadow
from spec_trl.quantization import QuantizedLinear, quantize_projections

from .measure import RESULTS, describe_machine, machine_line, markdown_table, stopwatch, write_result
from .models import DTYPES, load_model


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


def report(result: dict[str, Any]) -> str:
    """`result` as Markdown."""
    header = ["model", "dtype", "quantized weights", "head", "kernel", "refresh ms", "ms per million", "packed MB"]
    rows = [
        [m["model"], m["dtype"], f"{m['quantized_weights'] / 1e6:.1f} M", "packed" if m["head_packed"] else "dense"]
        + [", ".join(m["kernels"]), f"{m['refresh_seconds'] * 1e3:.1f}", f"{m['refresh_ms_per_million']:.2f}"]
        + [f"{m['packed_bytes'] / 1e6:.1f}", f"{m['memory_ratio']:.3f}"]
        for m in result["models"]
    ]
    return "\n".join(
        [
            f"# Refresh of the self-drafter ({result['options']['scheme']})",
            "",
            machine_line(result["machine"]),
            "",
            f"Medians of {result['options']['repeats']} refreshes; memory is of the quantized layers alone: all "
            "else is the policy's own.",
            "",
            markdown_table([*header, "packed / bf16 bytes"], rows),
        ]
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=["shape:qwen2.5-0.5b"], help="folders, shape:NAME or shape:CONFIG.json"
    )
    parser.add_argument("--agreement", type=float, default=0.93, help="shape models: overlap with their 4-bit copy")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=list(DTYPES))
    parser.add_argument("--scheme", default="rtn-w4-g128", help="draft_quantization")
    parser.add_argument("--kernel", default="auto", help="draft_kernel")
    parser.add_argument("--lm-head", default="auto", choices=["auto", "dense", "packed"], help="draft_lm_head")
    parser.add_argument("--repeats", type=int, default=5, help="refreshes; the median counts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch on the CPU")
    parser.add_argument("--seed", type=int, default=0, help="of synthetic weights")
    parser.add_argument("--output", type=Path, default=RESULTS / "refresh.json", help="the .md goes beside it")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    machine = describe_machine(torch.device(options.device))
    models = [measure(spec, DTYPES[dtype], options) for spec in options.models for dtype in options.dtypes]
    shown = {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()}
    shown["models"] = [m["model"] for m in models]
    result = {"machine": machine, "options": shown, "models": models}
    write_result(options.output, result, report(result))


if __name__ == "__main__":
    main()
