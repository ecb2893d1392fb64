"""Finds a model's roofline profile: a named file, the user's cache, or a new calibration."""

import warnings
from pathlib import Path

from transformers import PreTrainedModel

from ...generation.measuring import NO_KERNEL, profile_key
from ...generation.options import SpeculativeConfig
from ...generation.planner.model_constants import ProfileKey
from ...user_cache import cache_directory, read_cached, save_cached
from .calibration import calibrate
from .profile import Profile, ProfileMismatch


def find_profile(
    model: PreTrainedModel,
    config: SpeculativeConfig,
    max_batch_size: int = 64,
    max_length: int = 4096,
    extra_copy: Path | None = None,
) -> Profile | None:
    """The profile that `config` names, or of the user's cache; without one `sd_toggle="roofline"` calibrates this
    machine and saves a profile, also as `extra_copy`.

    `sd_toggle="roofline"` replaces a cached profile calibrated for less than half of `max_batch_size`, the most rows
    in flight, or of `max_length`, the longest total length. A run beyond the calibrated sizes warns.

    Returns:
        None: no kernel can hold the drafter's layers, calibration failed, or `sd_toggle="measured"` found no profile:
        only measured rounds then decide.

    Raises:
        ProfileMismatch: the named profile is for something else and `efficient_rollout.mismatch` is `"error"`.
        ValueError: the named profile cannot be read.
    """
    calibrates = config.sd_toggle != "measured"
    named = None if (path := config.efficient_rollout.profile) is None else Path(path)
    key = profile_key(model, config, measures=calibrates)
    is_missing = named is not None and not named.exists()
    profile = None if named is None or is_missing else _load_named(named, key, config)
    if key.kernel == NO_KERNEL:
        return None
    if profile is None and calibrates:
        if is_missing:
            warnings.warn(
                f"efficient_rollout.profile={path!r} does not exist and is written now, from "
                f"{cache_directory('profiles')} or, where that has none, by calibrating this machine, which takes "
                "minutes.",
                stacklevel=2,
            )
        profile = _cached_or_new(model, config, key, max_batch_size, max_length)
        if profile is not None and is_missing:
            profile.save(str(named))
    elif profile is None and named is None:
        profile = _load_cached(key)
    if profile is None:
        return None
    asked = {"max_batch_size": max_batch_size, "max_length": max_length}
    calibrated = {name: profile.diagnostics.get(name, value) for name, value in asked.items()}
    if larger := [name for name in asked if asked[name] > calibrated[name]]:
        reaches = ", ".join(f"{name} {asked[name]} (calibrated: {calibrated[name]})" for name in larger)
        warnings.warn(
            f"the roofline profile was calibrated for less than this run: {reaches}. Its predictions extrapolate; "
            "`spec-trl calibrate` measures a larger range.",
            stacklevel=2,
        )
    if extra_copy is not None:
        profile.save(extra_copy)
    return profile


def _load_named(path: Path, key: ProfileKey, config: SpeculativeConfig) -> Profile | None:
    """The profile at `path`; None: of something else, if `efficient_rollout.mismatch` allows that."""
    profile = Profile.load(path)
    try:
        profile.require(key, path)
    except ProfileMismatch as error:
        if config.efficient_rollout.mismatch == "error":
            raise
        again = f"Calibrating again, into {cache_directory('profiles')}."
        then = again if config.sd_toggle == "roofline" else "Rounds are measured instead."
        warnings.warn(f"{error} {then}", stacklevel=2)
        return None
    return profile


def _load_cached(key: ProfileKey) -> Profile | None:
    path = cache_directory("profiles") / key.file_name
    profile = read_cached(path, Profile.load)
    if profile is not None and profile.key != key:  # a user has edited it or put it there
        warnings.warn(f"{path} is left aside: it was calibrated for something else.", stacklevel=2)
        return None
    return profile


def _cached_or_new(
    model: PreTrainedModel, config: SpeculativeConfig, key: ProfileKey, max_batch_size: int, max_length: int
) -> Profile | None:
    """Returns the cached profile if it covers half of both sizes, else a new one for the larger sizes."""
    cached = cache_directory("profiles") / key.file_name
    if (profile := _load_cached(key)) is not None:
        most_rows, longest = (profile.diagnostics.get(name, 0) for name in ("max_batch_size", "max_length"))
        if 2 * most_rows >= max_batch_size and 2 * longest >= max_length:
            return profile
        max_batch_size, max_length = max(max_batch_size, most_rows), max(max_length, longest)
    try:
        profile = calibrate(model, config, max_batch_size, max_length, kept_in=cached.parent)
    except RuntimeError as error:  # a failing drafter or too little memory must not end a run
        message = f"the machine could not be calibrated, so measured rounds alone decide when to speculate: {error}"
        warnings.warn(message, stacklevel=2)
        return None
    save_cached(profile.save, cached, "roofline profile")
    return profile
