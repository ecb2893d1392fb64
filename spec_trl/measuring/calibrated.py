"""Looks for what was calibrated for a model: the roofline profile and the draft ladder. Where there can be neither,
the rooms that know them are not loaded, and the model's key, which takes milliseconds of every call, is not made."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from ..generation.configuration import SpeculativeConfig
from ..generation.engine.drafter import Drafter
from ..papers import load
from ..user_cache import cache_directory


if TYPE_CHECKING:
    from ..efficient_rollout.profile import Profile
    from ..specactor.ladder import Ladder


def find_profile(
    model: PreTrainedModel,
    config: SpeculativeConfig,
    max_batch_size: int = 64,
    max_length: int = 4096,
    extra_copy: Path | None = None,
) -> "Profile | None":
    """The profile that :func:`~spec_trl.efficient_rollout.profile_cache.find_profile` finds or makes."""
    if config.sd_toggle == "measured" and config.roofline_profile is None:
        files = [path.name for path in cache_directory("profiles").glob("*.json")]
        if all(name.endswith((".rounds.json", ".ladder.json")) for name in files):
            return None
    found: Profile | None = load("efficient_rollout.profile_cache").find_profile(
        model, config, max_batch_size, max_length, extra_copy
    )
    return found


def find_ladder(
    model: PreTrainedModel,
    drafters: Sequence[Drafter],
    config: SpeculativeConfig,
    max_batch_size: int,
    draft_lengths: Sequence[int],
) -> "Ladder | None":
    """The ladder that :func:`~spec_trl.specactor.fill_ladder.find_ladder` finds or profiles."""
    if config.sd_toggle != "roofline" and not any(ladder_folder(config).glob("*.ladder.json")):
        return None
    found: Ladder | None = load("specactor.fill_ladder").find_ladder(
        model, drafters, config, max_batch_size, draft_lengths
    )
    return found


def ladder_folder(config: SpeculativeConfig) -> Path:
    """Where ladders lie: next to the named profile, else in the user's cache."""
    named = config.roofline_profile
    return cache_directory("profiles") if named is None else Path(named).parent
