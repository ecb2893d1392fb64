"""Finds the seconds of a model's rounds on this machine: calibrated, measured earlier, or probed."""

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..hardware import hardware_name
from ..papers import Calibration, load
from ..quantization.kernels import find_kernel
from ..quantization.quantized_copy import choose_scheme, layer_specs
from ..user_cache import cache_directory, read_cached
from .engine.drafter import Drafter
from .engine.forwards.runner_choice import runner_mode
from .engine.kv.cache import autocast_dtype
from .options import SpeculativeConfig
from .planner.clock import PROBE_ERROR, Clock
from .planner.model_constants import ProfileKey
from .probe import probe


NO_KERNEL = "none"


def find_clock(
    model: PreTrainedModel, drafters: Sequence[Drafter], config: SpeculativeConfig
) -> Clock | None:
    """Returns the clock of `model` with `drafters`, saved by an earlier process, else probed; None if there is nothing
    to predict (`config.sd_toggle`, no drafters)."""
    if not drafters or config.sd_toggle in ("always", "never"):
        return None
    # One file per hardware, shape, dtype, kernel, version of torch, set of drafters, and their devices.
    members = [(each.strategy, type(each).__name__, each.cost) for each in drafters]
    text = f"{members} {config.specactor.ahead} {torch.__version__}"
    stem = profile_key(model, config).file_name.removesuffix(".json")
    path = cache_directory("profiles") / f"{stem}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.rounds.json"
    found = read_cached(path, partial(Clock.read, error=PROBE_ERROR), ", and rounds are measured anew")
    return found or Clock(probe(model, drafters, config), PROBE_ERROR, path)


def find_profile(
    model: PreTrainedModel,
    config: SpeculativeConfig,
    max_batch_size: int = 64,
    max_length: int = 4096,
    extra_copy: Path | None = None,
) -> Calibration:
    """Returns the profile that :func:`~.find_profile` finds or makes."""
    if config.sd_toggle == "measured" and config.efficient_rollout.profile is None:
        paths = cache_directory("profiles").glob("*.json")
        if all(path.name.endswith((".rounds.json", ".ladder.json")) for path in paths):
            return None
    return load("papers.efficient_rollout.profile_cache").find_profile(
        model, config, max_batch_size, max_length, extra_copy
    )


def find_ladder(
    model: PreTrainedModel,
    drafters: Sequence[Drafter],
    config: SpeculativeConfig,
    max_batch_size: int,
    draft_lengths: Sequence[int],
) -> Calibration:
    """Returns the ladder that :func:`~.find_ladder` finds or profiles."""
    if config.sd_toggle != "roofline" and not any(ladder_folder(config).glob("*.ladder.json")):
        return None
    return load("papers.specactor.ladder_calibration").find_ladder(
        model, drafters, config, max_batch_size, draft_lengths
    )


def ladder_folder(config: SpeculativeConfig) -> Path:
    """Path of the ladder: next to the named profile, else in the user's cache."""
    named = config.efficient_rollout.profile
    return cache_directory("profiles") if named is None else Path(named).parent


def profile_key(model: PreTrainedModel, config: SpeculativeConfig, measures: bool = False) -> ProfileKey:
    """Key of a profile for `model` on this machine. `measures`: whether to time unknown kernels
    (:func:`~.find_kernel`)."""
    shape = model.config.get_text_config(decoder=True)
    parameters = sum(p.numel() for p in model.parameters())
    scheme = choose_scheme(config.draft_quantization, config.draft_kernel, model)
    layers = [layer for parent in model.get_decoder().modules() for layer in layer_specs(parent, scheme).values()]
    kernels = [find_kernel(config.draft_kernel, layer, measures) for layer in layers if not isinstance(layer, str)]
    names = {kernel.name for kernel in kernels if not isinstance(kernel, str)}
    return ProfileKey(
        hardware=hardware_name(model.device),
        shape=f"{type(model).__name__}, {shape.num_hidden_layers} layers, hidden {shape.hidden_size}, "
        f"vocabulary {shape.vocab_size}, {parameters} parameters",
        dtype=str(effective_dtype(model)).removeprefix("torch."),
        quantization=f"{scheme.name}, lm_head {config.efficient_rollout.lm_head}",
        kernel="+".join(sorted(names)) or NO_KERNEL,
        runner=runner_mode(config, model.device),
    )


def effective_dtype(model: PreTrainedModel) -> torch.dtype:
    """Dtype of the arithmetic of forwards."""
    return autocast_dtype(model.device) or model.dtype
