"""Runs `spec-trl calibrate`: measures this machine with a model and its quantized copy."""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ....cli.loading import find_device, load_model
from ....generation.options import SpeculativeConfig
from ..calibration import calibrate
from ..fit import evaluate
from ..options import EfficientRolloutOptions
from ..sweep import write_sweep
from .validate import diagnostics_table


def run(arguments: argparse.Namespace) -> None:
    config = SpeculativeConfig(
        draft_quantization=arguments.quantization, draft_kernel=arguments.kernel,
        efficient_rollout=EfficientRolloutOptions(lm_head=arguments.lm_head),
    )  # fmt: skip
    for path in (arguments.output, arguments.csv):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.absolute().parent}; make it first.")
    device = find_device(arguments.device)
    model = _load(arguments.model, arguments.dtype, device, arguments.random_weights)
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


def _load(name: str, dtype: str, device: torch.device, random_weights: bool) -> PreTrainedModel:
    """Loads the model in evaluation mode, with random weights if requested or if the folder has none."""
    path = Path(name)
    if not random_weights and (path.is_dir() or (path.suffix == ".json" and path.parent.is_dir())):
        random_weights = not any(path.glob("*.safetensors")) and not any(path.glob("*.bin"))
        if random_weights:
            print(f"{name} holds no weights: random ones are measured in their place.")
    if not random_weights:
        return load_model(name, dtype, device)
    with device:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name), dtype=getattr(torch, dtype)).eval()
