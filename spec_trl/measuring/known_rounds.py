"""Predictions of a model's rounds on this machine before the first one: calibrated, measured earlier, or probed."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ..generation.engine.drafter import Drafter
from ..generation.options import SpeculativeConfig
from ..generation.planner.ledger import ForwardSeconds, ProbedRounds, Times
from ..json_files import read_json, write_json
from ..papers import load
from ..user_cache import cache_directory, read_cached, save_cached
from .machine import profile_key
from .probe import probe


PROBE_ERROR = 0.3
"""sd of log(seconds / predicted) of a method's rounds after a probe, which leaves out long texts and work between
forwards."""
FEWEST_ROUNDS = 100  # of which a file is worth its writing
VERSION = 2  # of a file: those of others hold predictions of another kind, and times that differ from them


@dataclass
class KnownRounds:
    """Predicts rounds, and keeps the ledger of their times from process to process."""

    path: Path  # of the file
    seconds: ProbedRounds  # the prediction
    times: Times  # how rounds differ from it
    saved: int  # rounds that the file knows of

    def keep(self) -> None:
        """Writes the file if at least twice as many rounds are known as the file holds. A file that cannot be written
        (read-only home) is skipped: the next process probes again."""
        if self.times.rounds < max(2 * self.saved, FEWEST_ROUNDS):
            return
        self.saved = self.times.rounds
        file = _File(VERSION, self.seconds.target, dict(self.seconds.drafters), self.times.state_dict())
        save_cached(partial(write_json, value=file), self.path)


def find_known_rounds(
    model: PreTrainedModel, drafters: Sequence[Drafter], config: SpeculativeConfig
) -> KnownRounds | None:
    """Returns times of rounds of `model` with `drafters`, saved by an earlier process, else probed; None if
    `config.sd_toggle` or a lack of drafters leaves nothing to predict."""
    if not drafters or config.sd_toggle in ("always", "never"):
        return None
    # One file per hardware, shape, dtype, kernel, version of torch, set of drafters, and their devices.
    members = [(each.strategy, type(each).__name__, each.cost) for each in drafters]
    text = f"{members} {config.specactor.decoupled_execution} {config.specactor.draft_ranks} {torch.__version__}"
    stem = profile_key(model, config).file_name.removesuffix(".json")
    path = cache_directory("profiles") / f"{stem}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.rounds.json"
    found = read_cached(path, _read, ", and rounds are measured anew")
    return found or KnownRounds(path, probe(model, drafters, config), Times(PROBE_ERROR), 0)


def _read(path: Path) -> KnownRounds | None:
    """Reads the measurements of an earlier process; None if its version made other predictions."""
    file = read_json(path, _File, "ledger of rounds", "delete the file")
    if file.version != VERSION:
        return None
    times = Times(PROBE_ERROR)
    times.load_state_dict(file.times)
    return KnownRounds(path, ProbedRounds(file.target, file.drafters), times, times.rounds)


@dataclass(frozen=True)
class _File:
    """Known rounds as written to the file."""

    version: int
    target: ForwardSeconds
    drafters: dict[str, ForwardSeconds]
    times: dict[str, Any]


if TYPE_CHECKING:
    from ..papers.efficient_rollout.profile import Profile
    from ..papers.specactor.ladder import Ladder


def find_profile(
    model: PreTrainedModel,
    config: SpeculativeConfig,
    max_batch_size: int = 64,
    max_length: int = 4096,
    extra_copy: Path | None = None,
) -> "Profile | None":
    """Returns the profile that :func:`~.find_profile` finds or makes."""
    if config.sd_toggle == "measured" and config.efficient_rollout.profile is None:
        paths = cache_directory("profiles").glob("*.json")
        if all(path.name.endswith((".rounds.json", ".ladder.json")) for path in paths):
            return None
    found: Profile | None = load("papers.efficient_rollout.profile_cache").find_profile(
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
    """Returns the ladder that :func:`~.find_ladder` finds or profiles."""
    if config.sd_toggle != "roofline" and not any(ladder_folder(config).glob("*.ladder.json")):
        return None
    found: Ladder | None = load("papers.specactor.ladder_calibration").find_ladder(
        model, drafters, config, max_batch_size, draft_lengths
    )
    return found


def ladder_folder(config: SpeculativeConfig) -> Path:
    """Path of the ladder: next to the named profile, else in the user's cache."""
    named = config.efficient_rollout.profile
    return cache_directory("profiles") if named is None else Path(named).parent
