"""Profiles the draft ladder in real rounds with drafts accepted at random (SA §4.2)."""

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from ...generation.drafters.history import HistoryDrafter
from ...generation.engine.drafter import Drafter
from ...generation.engine.requirements import position_limit
from ...generation.engine.rollout import Rollout
from ...generation.engine.sampling.accept import Proposal
from ...generation.engine.sampling.noise import Draw, RoundNoise
from ...generation.measuring import ladder_folder, profile_key
from ...generation.options import SpeculativeConfig
from ...generation.planner.control import Chain
from ...generation.planner.model_constants import ProfileKey
from ...generation.session import Session
from ...user_cache import read_cached, save_cached
from ..efficient_rollout.calibration import RoundBench, bar_text, warm_up_rounds
from ..test_time_speculation.distilled_drafter import DistilledDrafter
from .ladder import Ladder, Rung, ladder_path


ACCEPTANCE = 0.6  # one p is enough: the work of a round does not depend on acceptance
BATCHES = (1, 4, 16, 64, 256)
PROMPT = 32  # tokens of the random prompts
FEWEST_ROUNDS = 3
STABLE = 0.03  # share: rounds of a cell end once half of its slowdowns are this close to their median
LEAST_SECONDS = 0.5  # per batch: a short disturbance would slow all of a few rounds
QUIET = 2.0  # seconds of profiling without a progress bar


def build_ladder(
    model: PreTrainedModel,
    drafters: Sequence[Drafter],
    batches: Sequence[int],
    draft_lengths: Sequence[int],
    rounds: int = 9,
    budget_seconds: float = 60.0,
    progress: bool = True,
    config: SpeculativeConfig | None = None,
    kept_in: Path | None = None,
) -> Ladder:
    """Times rounds of every drafter, batch and γ, each next to an autoregressive round; returns medians.

    Three rounds of a cell are enough if they agree, as on a quiet machine; a busy machine or short rounds take up to
    `rounds`. Rounds are real, on random prompts, but draft tokens are marked as accepted with probability p: weights
    do not matter. A drafter that learns does not learn here; the history is empty.

    Args:
        drafters: of different strategies.
        batches: numbers of rows; a drafter that serves fewer rows is timed at its most rows.
        draft_lengths: γ, ascending.
        budget_seconds: for all cells; every cell is timed at least once, after its warm-up.
        kept_in: folder that the progress bar names.

    Raises:
        RuntimeError: a drafter failed.
    """
    config = config or SpeculativeConfig()
    deadline = time.perf_counter() + budget_seconds
    cells = [  # with more rows a drafter never drafts
        (drafter, batch)
        for drafter in drafters
        for batch in sorted({min(batch, drafter.max_rows) for batch in batches})
    ]
    rungs: list[Rung] = []
    text = bar_text("profiling the drafters of", model, kept_in)
    with torch.no_grad(), tqdm(cells, text, disable=not progress, delay=QUIET) as bar:
        for number, (drafter, batch) in enumerate(bar):
            share = max(deadline - time.perf_counter(), 0.0) / (len(cells) - number)
            rungs += _Bench(model, drafter, batch, draft_lengths, rounds, config).measure(share)
    # In a short context some γ fit into few rounds; a choice must not change with the batch.
    timed = Counter((rung.method, rung.draft_length) for rung in rungs)
    batches_of = Counter(drafter.strategy for drafter, _ in cells)
    everywhere = tuple(each for each in rungs if timed[each.method, each.draft_length] == batches_of[each.method])
    return Ladder(everywhere, _fingerprint(profile_key(model, config), drafters, draft_lengths))


def find_ladder(
    model: PreTrainedModel,
    drafters: Sequence[Drafter],
    config: SpeculativeConfig,
    max_batch_size: int,
    draft_lengths: Sequence[int],
) -> Ladder | None:
    """Returns the ladder of these drafters: from memory, from a file, or else profiled and saved under
    `sd_toggle="roofline"`; None: there is none.

    The file is next to the profile of `config`, or in the user's cache. `sd_toggle="roofline"` replaces a ladder
    profiled for less than half of `max_batch_size`, the most rows in flight.

    Raises:
        RuntimeError: a drafter failed.
    """
    key = profile_key(model, config, measures=config.sd_toggle == "roofline")
    shape = _fingerprint(key, drafters, draft_lengths)
    path = _path(key, config, shape)
    session = Session.of(model)
    ladder = session.ladder
    if ladder is None or ladder.shape != shape:
        ladder = read_cached(path, Ladder.load, ", and the drafters are profiled again")
        if ladder is not None and ladder.shape != shape:
            ladder = None
    most = 2 * max(drafter.max_rows for drafter in drafters)  # more rows are not profiled
    if config.sd_toggle == "roofline" and (ladder is None or 2 * ladder.batches[-1] < min(max_batch_size, most)):
        # A batch close to the largest adds no information.
        batches = [batch for batch in BATCHES if 2 * batch <= max_batch_size] + [max_batch_size]
        ladder = build_ladder(model, drafters, batches, draft_lengths, config=config, kept_in=path.parent)
        save_cached(ladder.save, path, "draft ladder")
    session.ladder = ladder
    return ladder


def _path(key: ProfileKey, config: SpeculativeConfig, shape: str) -> Path:
    if config.efficient_rollout.profile is not None:
        return ladder_path(config.efficient_rollout.profile)
    name = key.file_name.removesuffix(".json")
    # The ladder depends on the set of drafters.
    return ladder_path(ladder_folder(config) / f"{name}_{hashlib.sha256(shape.encode()).hexdigest()[:8]}.json")


def _fingerprint(key: ProfileKey, drafters: Sequence[Drafter], draft_lengths: Sequence[int]) -> str:
    """Fingerprint of a ladder's scope: hardware, shapes, dtype and kernels, but not weights."""
    target = f"{key.hardware}; {key.shape}; {key.dtype}; {key.runner}"
    packing = f"{key.quantization}, {key.kernel}"
    members = [f"{drafter.strategy} ({type(_stand_in(drafter)).__name__}, {drafter.cost})" for drafter in drafters]
    return f"{target}; {packing}; {', '.join(members)}; γ {list(draft_lengths)}"


def _stand_in(drafter: Drafter) -> Drafter:
    """Returns a stand-in for `drafter`: it must not learn from random tokens."""
    if isinstance(drafter, DistilledDrafter):
        return drafter.student
    if isinstance(drafter, HistoryDrafter):
        return HistoryDrafter(1 << 20)
    return drafter


class _MarkedRollout(Rollout):
    """Accepts draft tokens with probability `ACCEPTANCE` each, whatever they are."""

    generator: torch.Generator

    def _draw(self, proposal: Proposal, logits: Tensor, noise: RoundNoise | None) -> Draw:
        drawn = super()._draw(proposal, logits, noise)
        # A separate generator: later samples must not depend on whether a ladder was profiled.
        coins = torch.rand(proposal.tokens.shape, generator=self.generator, device=logits.device)  # [B, γ]
        accepted = (coins < ACCEPTANCE).long().cumprod(1).sum(1)  # [B]
        step = torch.arange(proposal.tokens.shape[1], device=logits.device)  # [γ]
        # Commits the drafts, since a network continues from their K/V.
        drafted = step < torch.minimum(accepted, proposal.drafted())[:, None]  # [B, γ]
        tokens = drawn.tokens.clone()  # [B, γ + 1]
        tokens[:, :-1] = proposal.tokens.where(drafted, tokens[:, :-1])
        return replace(drawn, tokens=tokens, most=accepted)


class _Bench(RoundBench):
    """An engine that decodes `batch` random prompts, in rounds of every γ in turn; γ = 0: autoregressive rounds."""

    _rollout: _MarkedRollout

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter,
        batch: int,
        draft_lengths: Sequence[int],
        rounds: int,
        config: SpeculativeConfig,
    ) -> None:
        self._drafter, self._batch, self._visits = drafter, batch, rounds
        self._gammas = [0, *draft_lengths]
        self._warm_ups = warm_up_rounds(model, config)
        # Rows only grow, as the drafter's cache does.
        visit = sum(gamma + 1 for gamma in self._gammas)  # most tokens that it adds
        columns = PROMPT + (self._warm_ups + rounds) * visit + max(draft_lengths) + 1
        limit = position_limit(model)
        self._columns = columns if limit is None else min(columns, limit)
        generator = torch.Generator().manual_seed(0)
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        prompt = max(min(PROMPT, self._columns // 4), 1)
        prompts = torch.randint(vocabulary, (batch, prompt), generator=generator).to(model.device)  # [B, n]
        super().__init__(model, [_stand_in(drafter)], prompts, self._columns, config, _MarkedRollout)
        self._rollout.generator = torch.Generator(model.device).manual_seed(0)

    def measure(self, seconds: float) -> list[Rung]:
        """Visits every γ in turn until the times agree, for at most about `seconds`."""
        times: dict[int, list[float]] = {gamma: [] for gamma in self._gammas}
        plain = times[0]
        started_at = time.perf_counter()
        for visit in range(self._warm_ups + self._visits):
            spent = time.perf_counter() - started_at
            if visit > self._warm_ups and spent > seconds:
                break
            is_enough = visit >= self._warm_ups + FEWEST_ROUNDS and spent >= LEAST_SECONDS
            if is_enough and all(_agree(_slowdowns(rounds, plain)) for rounds in times.values() if rounds):
                break
            for gamma, rounds in times.items():
                if self._rows.longest + gamma + 1 > self._columns:
                    break  # a short context is full before the visits end
                took = self.round([Chain(0, gamma)] if gamma else [])
                if visit >= self._warm_ups or not rounds:
                    rounds.append(took)
                if visit == self._warm_ups:
                    del rounds[:-1]  # warm-up rounds count only if no others fit
        self.close()
        rungs = []
        for gamma, rounds in times.items():
            if gamma and rounds:
                seconds = median(rounds)
                plain_seconds = seconds / median(_slowdowns(rounds, plain))
                rungs.append(Rung(self._drafter.strategy, self._batch, gamma, ACCEPTANCE, seconds, plain_seconds))
        return rungs


def _slowdowns(times: list[float], plain: list[float]) -> list[float]:
    """Seconds of rounds over those of the autoregressive round of the same visit, slowed equally by other work."""
    return [seconds / plain_seconds for seconds, plain_seconds in zip(times, plain, strict=False)]


def _agree(values: list[float]) -> bool:
    """Whether half of the values are so close to their median that further values would hardly move it."""
    middle = median(values)
    return median(abs(value - middle) for value in values) <= STABLE * middle
