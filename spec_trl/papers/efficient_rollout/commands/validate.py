"""Runs `spec-trl validate`: compares a profile with measured times, or fits a sweep anew."""

import argparse
import json
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from ....cli.arguments import table
from ....generation.engine.forwards.model_costs import model_constants
from ....generation.planner.model_constants import ModelConstants, ProfileKey
from ..fit import BANDWIDTH_SHARE, Diagnostics, Form, evaluate, fit
from ..profile import Profile
from ..sweep import read_sweep


_FORMS: tuple[Form, ...] = ("paper", "improved")


def run(arguments: argparse.Namespace) -> None:
    name, config = arguments.profile.name, read_config(arguments.profile)
    profile = Profile.load(arguments.profile) if config is None else None
    if arguments.csv is not None:
        samples = read_sweep(arguments.csv)
    elif profile is not None and profile.samples:
        samples = profile.samples
    else:
        raise ValueError(f"{arguments.profile} holds no measured times; give a sweep with --csv.")
    profiles: dict[str, Profile] = {}
    results: dict[str, Diagnostics] = {}
    if profile is not None:
        profiles[name], results[name] = profile, evaluate(profile.roofline, samples)
    elif not arguments.refit:
        raise ValueError(f"{arguments.profile} is a model's config, which has no fit; give --refit to fit the sweep.")
    if arguments.refit:
        constants = config or profiles[name].roofline.constants
        flops, bounds = _peaks(arguments, profile)
        key, limit = ProfileKey("unknown", constants.name, "unknown", "unknown", "unknown"), None
        if profile is not None:
            key, limit = profile.key, profile.draft_max_rows
        for form in tqdm(_FORMS, desc="fitting", unit="form"):
            name = f"fit, {form}"
            roofline, results[name] = fit(samples, constants, flops, bounds, form)
            profiles[name] = Profile(key, roofline, limit, {}, date.today().isoformat())
    print(diagnostics_table(results))
    if arguments.output is not None:
        replace(profiles[name], diagnostics=asdict(results[name]), samples=samples).save(arguments.output)
        print(f"written: {arguments.output} ({name})")


def read_config(path: Path) -> ModelConstants | None:
    """Constants of the 16-bit model that the `config.json` at `path` describes, with a drafter whose projections take
    a quarter of the bytes, as ER counts it; None: it is no config."""
    try:
        content = json.loads(path.read_text())
    except ValueError:  # the profile's own reader says what is wrong with it
        return None
    if not isinstance(content, dict) or "model_type" not in content:
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
    constants = model_constants(model)
    linear = [module.weight for module in model.get_decoder().modules() if isinstance(module, nn.Linear)]
    saved = 0.75 * (sum(weight.numel() * weight.element_size() for weight in linear) + constants.expert_bytes)
    draft_bytes = constants.weight_bytes - saved
    return replace(constants, draft_weight_bytes=draft_bytes, draft_expert_bytes=0.25 * constants.expert_bytes)


def _peaks(arguments: argparse.Namespace, profile: Profile | None) -> tuple[float, tuple[float, float]]:
    """Effective FLOP/s, and bounds of the bandwidth in B/s: as given, or by the profile's fit."""
    flops, peak = arguments.flops, arguments.bandwidth
    bounds = None if peak is None else (BANDWIDTH_SHARE[0] * peak, BANDWIDTH_SHARE[1] * peak)
    if flops is not None and bounds is not None:
        return flops, bounds
    if profile is None:
        raise ValueError(f"{arguments.profile} says nothing about the hardware; give --flops and --bandwidth.")
    fitted = profile.roofline.coefficients
    return flops or fitted.F_eff, bounds or (fitted.BW_eff / 4, fitted.BW_eff * 4)  # the data must decide


def diagnostics_table(results: dict[str, Diagnostics]) -> str:
    """A table of results of `evaluate` for several rooflines, by name, on the same samples."""
    signs = next(iter(results.values())).signs
    header = ["", "T_T", "T_D", "T_V", "round", *(f"sign at {sign.threshold:g}" for sign in signs), "points"]
    rows = []
    for name, found in results.items():
        errors = (found.target_mape, found.draft_mape, found.verify_mape, found.cycle_mape)
        accuracies = (sign.accuracy for sign in found.signs)
        rows.append([name, *(f"{share:.1%}" for share in (*errors, *accuracies)), str(found.points)])
    rows.append(["always the majority", "", "", "", "", *(f"{sign.majority:.1%}" for sign in signs), ""])
    return f"mean absolute error of the times, and sign accuracy of the speedup at τ = γ:\n{table(header, rows)}"
