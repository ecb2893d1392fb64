"""``spec-trl validate``: a profile against measured times, or a sweep fitted anew (ER App. E.3, E.4)."""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from ..generation.engine.model_costs import model_constants
from ..scheduling.fit import BANDWIDTH_SHARE, Diagnostics, Form, evaluate, fit
from ..scheduling.profile import Profile, ProfileKey
from ..scheduling.roofline import ModelConstants
from ..scheduling.sweep import Sample, read_sweep
from .options import table
from .published import is_published, read_published


_FORMS: tuple[Form, ...] = ("paper", "improved")


@dataclass(frozen=True)
class _Source:
    """What the file given as PROFILE says; a fit and a bandwidth only where there are some."""

    constants: ModelConstants
    profile: Profile | None
    peak_bandwidth: float | None


def run(arguments: argparse.Namespace) -> None:
    source = _read(arguments.profile)
    samples = _samples(arguments, source)
    profiles: dict[str, Profile] = {}
    results: dict[str, Diagnostics] = {}
    if source.profile is not None:
        results[arguments.profile.name] = evaluate(source.profile.roofline, samples)
        profiles[arguments.profile.name] = source.profile
    elif not arguments.refit:
        raise ValueError(f"{arguments.profile} holds constants and no fit; give --refit to fit the sweep.")
    if arguments.refit:
        flops, bounds = _flops(arguments, source), _bandwidth_bounds(arguments, source)
        for form in tqdm(_FORMS, desc="fitting", unit="form"):
            roofline, results[f"fit, {form}"] = fit(samples, source.constants, flops, bounds, form)
            key = source.profile.key if source.profile is not None else _key_of(source.constants)
            limit = source.profile.draft_max_rows if source.profile is not None else None
            profiles[f"fit, {form}"] = Profile(key, roofline, limit, {}, date.today().isoformat())
    print(diagnostics_table(results))
    if arguments.output is not None:
        name = list(profiles)[-1]
        replace(profiles[name], diagnostics=asdict(results[name]), samples=samples).save(arguments.output)
        print(f"written: {arguments.output} ({name})")


def _read(path: Path) -> _Source:
    try:
        content = json.loads(path.read_text())
    except ValueError:  # the profile's own reader says what is wrong with it
        content = None
    if isinstance(content, dict) and is_published(content):
        return _Source(*read_published(content, path.name))
    if isinstance(content, dict) and "model_type" in content:
        return _Source(_constants_of_config(path), None, None)
    profile = Profile.load(path)
    return _Source(profile.roofline.constants, profile, None)


def _constants_of_config(path: Path) -> ModelConstants:
    """Constants of a 16-bit model that exists as a config alone; W_D as ER counts it: a quarter of the projections."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
    constants = model_constants(model)
    linear = [module.weight for module in model.get_decoder().modules() if isinstance(module, nn.Linear)]
    saved = 0.75 * (sum(weight.numel() * weight.element_size() for weight in linear) + constants.expert_bytes)
    return replace(
        constants,
        draft_weight_bytes=constants.weight_bytes - saved,
        draft_expert_bytes=0.25 * constants.expert_bytes,
    )


def _samples(arguments: argparse.Namespace, source: _Source) -> list[Sample]:
    if arguments.csv is not None:
        return read_sweep(arguments.csv)
    if source.profile is None or not source.profile.samples:
        raise ValueError(f"{arguments.profile} holds no measured times; give a sweep with --csv.")
    return source.profile.samples


def _flops(arguments: argparse.Namespace, source: _Source) -> float:
    if arguments.flops is not None:
        return float(arguments.flops)
    if source.profile is None:
        raise ValueError(f"{arguments.profile} says nothing about the hardware; give --flops and --bandwidth.")
    return source.profile.roofline.coefficients.F_eff


def _bandwidth_bounds(arguments: argparse.Namespace, source: _Source) -> tuple[float, float]:
    peak = arguments.bandwidth or source.peak_bandwidth
    if peak is not None:
        return BANDWIDTH_SHARE[0] * peak, BANDWIDTH_SHARE[1] * peak
    if source.profile is None:
        raise ValueError(f"{arguments.profile} says nothing about the hardware; give --flops and --bandwidth.")
    fitted = source.profile.roofline.coefficients.BW_eff
    return fitted / 4, fitted * 4  # without a peak the data must decide


def _key_of(constants: ModelConstants) -> ProfileKey:
    return ProfileKey("unknown", constants.name, "unknown", "unknown", "unknown")


def diagnostics_table(results: dict[str, Diagnostics]) -> str:
    """What `evaluate` found of several rooflines on the same samples, by name."""
    thresholds = [sign.threshold for sign in next(iter(results.values())).signs]
    header = ["", "T_T", "T_D", "T_V", "round", *(f"sign at {t:g}" for t in thresholds), "points"]
    rows = []
    for name, found in results.items():
        errors = (found.target_mape, found.draft_mape, found.verify_mape, found.cycle_mape)
        signs = [f"{sign.accuracy:.1%}" for sign in found.signs]
        rows.append([name, *(f"{error:.1%}" for error in errors), *signs, str(found.points)])
    majority = [f"{sign.majority:.1%}" for sign in next(iter(results.values())).signs]
    rows.append(["always the majority", "", "", "", "", *majority, ""])
    return f"mean absolute error of the times, and sign accuracy of the speedup at τ = γ:\n{table(header, rows)}"
