"""The roofline profile and the draft ladder of a run: measured on one rank, for all of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel

from ..generation.engine.drafter import Drafter
from ..measuring.calibrated import find_ladder, find_profile
from ..measuring.machine import profile_key
from ..papers import load
from .spec_grpo_config import SpecGRPOConfig


if TYPE_CHECKING:
    from ..efficient_rollout.profile import Profile
    from ..specactor.ladder import Ladder


T = TypeVar("T")
PROFILE_FILE = "roofline_profile.json"
"""Copy in the run's `output_dir`; the ladder's lies next to it."""


def check_profile(args: SpecGRPOConfig) -> None:
    """Raises ValueError, before any work, where the file that `roofline_profile` names is broken."""
    if args.roofline_profile is not None and Path(args.roofline_profile).exists():
        load("efficient_rollout.profile").Profile.load(args.roofline_profile)


def shared_profile(
    accelerator: Accelerator, policy: PreTrainedModel, args: SpecGRPOConfig, rows: int, length: int
) -> "Profile | None":
    """The roofline profile, found or measured; None where only measured rounds can tell when to draft. All ranks must
    call it.

    Args:
        accelerator: of the run.
        policy: the target.
        args: of the run.
        rows: most rows in flight.
        length: longest row, prompt and completion, in tokens.
    """
    config, copy_to = args.speculative_config(), Path(args.output_dir) / PROFILE_FILE
    profile = _on_one_rank(accelerator, lambda: find_profile(policy, config, rows, length, copy_to))
    if profile is not None and profile.key != profile_key(policy, config):
        # Another device than rank 0's: what was named is for that one.
        profile = find_profile(policy, replace(config, roofline_profile=None), rows, length)
    return profile


def shared_ladder(
    accelerator: Accelerator, policy: PreTrainedModel, drafters: Sequence[Drafter], args: SpecGRPOConfig, rows: int
) -> "Ladder | None":
    """The draft ladder of `drafters`, found or profiled; None: there is none. Otherwise as `shared_profile`."""

    def find() -> "Ladder | None":
        ladder = find_ladder(policy, drafters, args.speculative_config(), rows, args.choice_of_draft_lengths())
        if ladder is not None:
            ladder.save(load("specactor.ladder").ladder_path(Path(args.output_dir) / PROFILE_FILE))
        return ladder

    return _on_one_rank(accelerator, find)


def _on_one_rank(accelerator: Accelerator, measure: Callable[[], T]) -> T:
    """What `measure` finds on one rank, for all: if others measured too, they would disturb its times."""
    found: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            found[0] = measure()
        except Exception as error:  # raised on all ranks, or the others would wait for ever
            found[0] = error
    broadcast_object_list(found)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]
