"""Measures this machine with a model and its quantized copy, and fits the roofline (ER App. E.3).

Times matrix products, then target, draft and verify forwards over batch size, cached length and draft length, and
writes a profile that `roofline_profile=` of SpecGRPOConfig takes. Speed depends on the model's shape alone, so a
folder with nothing but a config.json will do: its weights are then random.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..generation.calibrating import calibrate
from ..generation.configuration import SpeculativeConfig
from ..scheduling.calibration import evaluate
from ..scheduling.sweep import write_sweep
from .options import positive, whole_number
from .validate import diagnostics_table


HELP = "measure this machine with a model and write a profile"
EXAMPLE = "spec-trl calibrate path/to/model --dtype bf16 --output profile.json --csv sweep.csv"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DEFAULTS = SpeculativeConfig()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="hub id or folder of a model, or a config.json: then with random weights")
    add("--random-weights", action="store_true", help="do not read the weights, even where there are some")
    add("--dtype", default="bf16", choices=list(_DTYPES), help="of the target's weights (%(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default here: %(default)s")
    add("--quantization", default=_DEFAULTS.draft_quantization, help="draft_quantization (%(default)s)")
    add("--kernel", default=_DEFAULTS.draft_kernel, help="draft_kernel (%(default)s)")
    add("--lm-head", default=_DEFAULTS.draft_lm_head, help="draft_lm_head: auto, dense or packed (%(default)s)")
    add("--max-batch-size", type=whole_number, default=64, metavar="B", help="most rows in flight (%(default)s)")
    add("--max-length", type=whole_number, default=4096, metavar="S", help="longest row in tokens (%(default)s)")
    add("--budget", type=positive, default=180.0, metavar="SECONDS", help="time for the sweep (%(default)g)")
    add("--output", "-o", type=Path, default=Path("profile.json"), help="profile to write (%(default)s)")
    add("--csv", type=Path, metavar="SWEEP", help="also write the measured times here")


def run(arguments: argparse.Namespace) -> None:
    config = SpeculativeConfig(
        draft_quantization=arguments.quantization, draft_kernel=arguments.kernel, draft_lm_head=arguments.lm_head
    )
    for path in (arguments.output, arguments.csv):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.absolute().parent}; make it first.")
    model = _load(arguments.model, arguments.dtype, arguments.device, arguments.random_weights)
    profile = calibrate(
        model, config, arguments.max_batch_size, arguments.max_length, budget_seconds=arguments.budget, progress=True
    )
    profile.save(arguments.output)
    print(f"{profile.key.hardware}; {profile.key.shape}; {profile.key.dtype}; {profile.key.quantization}")
    coefficients = vars(profile.roofline.coefficients).items()
    print(", ".join(f"{name} {value:.4g}" for name, value in coefficients))
    print(diagnostics_table({"the fit": evaluate(profile.roofline, profile.samples)}))
    print(f"written: {arguments.output} ({len(profile.samples)} measured times)")
    if arguments.csv is not None:
        write_sweep(arguments.csv, profile.roofline.constants.name, profile.samples)
        print(f"written: {arguments.csv}")


def _load(name: str, dtype: str, device: str, random_weights: bool) -> PreTrainedModel:
    """The model in evaluation mode; with random weights where asked for or where there are no others."""
    folder = Path(name).parent if name.endswith(".json") else Path(name)
    if folder.is_dir() and not random_weights:
        random_weights = (
            name.endswith(".json") or not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin"))
        )
        if random_weights:
            print(f"{name} holds no weights: random ones are measured in their place.")
    if random_weights:
        config = AutoConfig.from_pretrained(name)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=_DTYPES[dtype]).eval()
    return AutoModelForCausalLM.from_pretrained(name, dtype=_DTYPES[dtype]).to(device).eval()
