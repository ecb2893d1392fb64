"""Profiles the draft ladder with the engine itself: real rounds, whose drafts are accepted at random (SA §4.2)."""

import gc
import hashlib
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ..generation import kept
from ..generation.configuration import SpeculativeConfig
from ..generation.drafters.history import HistoryDrafter
from ..generation.drafters.tts.drafter import DistilledDrafter
from ..generation.engine.captured import CAPTURE_AFTER, runner_for, runner_mode
from ..generation.engine.drafter import Drafter
from ..generation.engine.noise import RoundNoise
from ..generation.engine.processors import LogitsPipeline, PrefixView
from ..generation.engine.requirements import position_limit
from ..generation.engine.rollout import Rollout
from ..generation.engine.rows import Request, Rows
from ..generation.engine.stopping import Stopping
from ..generation.engine.verification import Proposal, Verdict
from ..scheduling.control import Chain, NeverSpeculate
from ..scheduling.ladder import Ladder, Rung, ladder_path
from ..scheduling.profile import ProfileKey
from .fill_profile import profile_key
from .profile_cache import cache_directory


ACCEPTANCES = (0.6,)
"""One is enough: as many tokens are drafted and verified whatever is accepted. The speedup follows from p."""
BATCHES = (1, 4, 16, 64, 256)
PROMPT = 32
"""Tokens of the random prompts."""
FEWEST_ROUNDS = 3
STABLE = 0.03
"""Half of a cell's speedups this close to their median, as a share of it, and no more rounds are timed."""
LEAST_SECONDS = 0.5
"""Of timing at one batch: where rounds are short, a moment's other work would touch all of the fewest rounds."""
QUIET = 2.0
"""Seconds of profiling from which on there is a progress bar."""


def build_ladder(
    model: PreTrainedModel,
    drafters: Sequence[Drafter],
    batches: Sequence[int],
    draft_lengths: Sequence[int],
    acceptances: Sequence[float] = ACCEPTANCES,
    rounds: int = 9,
    budget_seconds: float = 60.0,
    progress: bool = True,
    config: SpeculativeConfig | None = None,
    kept_in: Path | None = None,
) -> Ladder:
    """Times rounds of each drafter at each batch, γ and acceptance, each beside an autoregressive one; keeps medians.

    On a quiet machine three rounds of a cell agree, and no more are run; on a busy one, or where rounds are short, up
    to `rounds`.

    The target runs, its logits are computed and sampled from, and then each draft token is marked as accepted with
    probability p, whatever the target said: neither's weights matter. Prompts are random tokens. A drafter that learns
    is timed without learning, and one that remembers with an empty memory: profiling teaches neither anything.

    Args:
        model: the target, on the device it will decode on.
        drafters: of different strategies.
        batches: numbers of rows, each at least 1; a drafter that serves fewer is timed at as many as it serves.
        draft_lengths: γ, ascending.
        acceptances: p, 0 to 1.
        rounds: most timed rounds per cell, at least 1.
        budget_seconds: for all of it; cells are repeated less where it is short. Each is timed once at least, after
            rounds that do not count.
        progress: show a progress bar where it takes longer than two seconds.
        config: names the runner, and what the quantized copy is packed with.
        kept_in: the folder that the caller will keep the ladder in, so that it happens once: the bar says so.

    Returns:
        The ladder; it is not saved.

    Raises:
        RuntimeError: a drafter failed.
    """
    config = config or SpeculativeConfig()
    deadline = time.perf_counter() + budget_seconds
    # With more rows a drafter never drafts.
    cells = [
        (drafter, batch)
        for drafter in drafters
        for batch in sorted({min(batch, drafter.max_rows) for batch in batches})
    ]
    rungs: list[Rung] = []
    name = f"profiling the drafters of {type(model).__name__}"
    name += "" if kept_in is None else f" (once; kept in {kept_in})"
    with torch.no_grad(), tqdm(cells, name, disable=not progress, delay=QUIET) as bar:
        for number, (drafter, batch) in enumerate(bar):
            share = max(deadline - time.perf_counter(), 0.0) / (len(cells) - number)
            bench = _Bench(model, drafter, batch, draft_lengths, acceptances, rounds, config)
            rungs += bench.measure(share)
    # In a short context the longest drafts may fit into some rounds alone: a choice must not change with the batch.
    fitting = {
        drafter.strategy: set.intersection(
            *({rung.draft_length for rung in rungs if (rung.method, rung.batch) == (drafter.strategy, batch)}
              for member, batch in cells if member is drafter)
        )
        for drafter in drafters
    }  # fmt: skip
    kept = tuple(rung for rung in rungs if rung.draft_length in fitting[rung.method])
    return Ladder(kept, _fingerprint(profile_key(model, config), drafters, draft_lengths))


def find_ladder(
    model: PreTrainedModel,
    drafters: Sequence[Drafter],
    config: SpeculativeConfig,
    max_batch_size: int,
    draft_lengths: Sequence[int] | None = None,
) -> Ladder | None:
    """The ladder of these drafters: kept, or saved by an earlier run, or else profiled and saved; under
    `sd_toggle="measured"` nothing is profiled, and None is returned until :func:`keep_measured` has made one.

    It lies beside `config.roofline_profile`, or in the user's cache, where the roofline profiles are. One that was
    profiled for less than half the rows that are now asked for is replaced.

    Args:
        model: the target.
        drafters: of different strategies.
        config: as of :func:`build_ladder`, and `sd_toggle` and `roofline_profile`.
        max_batch_size: most rows in flight that will occur.
        draft_lengths: γ, ascending; None: those of `config`.

    Raises:
        ValueError: two drafters have the same strategy name.
        RuntimeError: a drafter failed.
    """
    names = [drafter.strategy for drafter in drafters]
    if len(set(names)) < len(names):
        raise ValueError(f"drafter has the strategies {names}; races tell drafters apart by name: pass one of each.")
    draft_lengths = config.ladder_draft_lengths() if draft_lengths is None else tuple(draft_lengths)
    key = profile_key(model, config)
    shape = _fingerprint(key, drafters, draft_lengths)
    path = _path(key, config, shape)
    found: Ladder | None = kept.look(model, _NAME)
    if config.sd_toggle == "measured":
        return found if found is not None and found.shape in (shape, shape + _MEASURED) else _load(path, shape)
    if found is None or found.shape != shape:
        found = _load(path, shape)
    most = 2 * max(drafter.max_rows for drafter in drafters)  # with more rows nothing would be profiled
    if found is None or 2 * found.batches[-1] < min(max_batch_size, most):
        # One just below the largest would say the same.
        batches = [batch for batch in BATCHES if 2 * batch <= max_batch_size] + [max_batch_size]
        found = build_ladder(model, drafters, batches, draft_lengths, config=config, kept_in=path.parent)
        try:
            found.save(path)
        except OSError as error:  # a read-only home
            warnings.warn(f"the draft ladder could not be kept in {path}: {error}", stacklevel=2)
    kept.keep(model, _NAME, found)
    return found


def keep_measured(
    model: PreTrainedModel, drafters: Sequence[Drafter], config: SpeculativeConfig, rungs: Sequence[Rung]
) -> None:
    """Keeps what rounds of these drafters took as their ladder, for later calls with `sd_toggle="measured"`.

    Not saved: it has one γ per drafter and few rounds, where profiling has three and more.
    """
    shape = _fingerprint(profile_key(model, config), drafters, config.ladder_draft_lengths())
    kept.keep(model, _NAME, Ladder(tuple(rungs), shape + _MEASURED))


_NAME, _MEASURED = "ladder", "; measured while decoding"


def _load(path: Path, shape: str) -> Ladder | None:
    """The ladder at `path`, if there is one, and for this shape."""
    if not path.exists():
        return None
    try:
        ladder = Ladder.load(path)
    except ValueError as error:  # nobody named this file: it is no reason to stop
        warnings.warn(f"{path} is left aside, and the drafters are profiled again: {error}", stacklevel=2)
        return None
    return ladder if ladder.shape == shape else None


def _path(key: ProfileKey, config: SpeculativeConfig, shape: str) -> Path:
    if config.roofline_profile is not None:
        return ladder_path(config.roofline_profile)
    name = key.file_name.removesuffix(".json")
    # Ladders of several sets of drafters lie side by side.
    return ladder_path(cache_directory() / f"{name}_{hashlib.sha256(shape.encode()).hexdigest()[:8]}.json")


def _fingerprint(key: ProfileKey, drafters: Sequence[Drafter], draft_lengths: Sequence[int]) -> str:
    """What a ladder is valid for: hardware with threads, shapes, dtype and kernels, but no weights."""
    target = f"{key.hardware}; {key.shape}; {key.dtype}; {key.runner}"
    packing = f"{key.quantization}, {key.kernel}"
    members = [f"{drafter.strategy} ({type(_stand_in(drafter)).__name__}, {drafter.cost})" for drafter in drafters]
    return f"{target}; {packing}; {', '.join(members)}; γ {list(draft_lengths)}"


def _stand_in(drafter: Drafter) -> Drafter:
    """What is timed in the place of `drafter`, which must not learn anything from random tokens."""
    if isinstance(drafter, DistilledDrafter):
        return drafter.student
    if isinstance(drafter, HistoryDrafter):
        return HistoryDrafter(1 << 20)
    return drafter


class _MarkedRollout(Rollout):
    """Draft tokens are accepted with probability `acceptance` each, whatever they are."""

    acceptance: float
    generator: torch.Generator

    def _verdict(self, proposal: Proposal, logits: Tensor, noise: RoundNoise | None) -> Verdict:
        verdict = super()._verdict(proposal, logits, noise)
        # Of a generator of its own: what is sampled after profiling must not depend on whether it was needed.
        coins = torch.rand(proposal.tokens.shape, generator=self.generator, device=logits.device)  # [B, γ]
        accepted = (coins < self.acceptance).long().cumprod(1).sum(1)  # [B]
        step = torch.arange(proposal.tokens.shape[1], device=logits.device)  # [γ]
        # The drafts themselves are committed: a network goes on from its own K/V of them.
        drafted = step < torch.minimum(accepted, proposal.lengths)[:, None]  # [B, γ]
        tokens = verdict.tokens.clone()  # [B, γ + 1]
        tokens[:, :-1] = proposal.tokens.where(drafted, tokens[:, :-1])
        return replace(verdict, tokens=tokens, accepted=accepted)


@dataclass(frozen=True)
class _Cell:
    draft_length: int
    acceptance: float


class _Bench:
    """An engine that decodes `batch` random prompts for as long as it is asked to."""

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter,
        batch: int,
        draft_lengths: Sequence[int],
        acceptances: Sequence[float],
        rounds: int,
        config: SpeculativeConfig,
    ) -> None:
        self._drafter, self._batch, self._rounds = drafter, batch, rounds
        self._cells = [_Cell(gamma, p) for gamma in draft_lengths for p in acceptances]
        self._captures = runner_mode(config, model.device) != "eager"
        self._warm_ups = CAPTURE_AFTER if self._captures else 1
        # Rows are never set back, for the drafter's own cache grows with them: most that a visit to all cells adds.
        visit = 1 + sum(cell.draft_length + 1 for cell in self._cells)
        columns = PROMPT + (self._warm_ups + rounds) * visit + max(draft_lengths) + 1
        limit = position_limit(model)
        self._columns = columns if limit is None else min(columns, limit)
        self._rows = rows = Rows(batch, self._columns, model.device)
        generator = torch.Generator().manual_seed(0)
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        prompt = max(min(PROMPT, self._columns // 4), 1)
        prompts = torch.randint(vocabulary, (batch, prompt), generator=generator).to(model.device)  # [B, n]
        view = PrefixView(rows, prompts)
        self._rollout = _MarkedRollout(
            [Request(i, prompts[i], 2**62, i) for i in range(batch)],
            runner_for(model, batch, self._columns, config),
            [_stand_in(drafter)],
            NeverSpeculate(),
            rows,
            LogitsPipeline(LogitsProcessorList(), view, batch),
            Stopping(StoppingCriteriaList(), view),
            do_sample=True,
            rejection=False,
            want_logprobs=False,
            strategy="ladder",
        )
        self._rollout.generator = torch.Generator(model.device).manual_seed(0)

    def measure(self, seconds: float) -> list[Rung]:
        """Visits all cells in turn, autoregressive decoding among them, until their times agree, for about so many
        seconds at most."""
        times: dict[_Cell | None, list[float]] = {cell: [] for cell in (None, *self._cells)}
        started_at = time.perf_counter()
        self._rollout.begin()
        self._rollout.admit()
        for visit in range(self._warm_ups + self._rounds):
            spent = time.perf_counter() - started_at
            if visit > self._warm_ups and spent > seconds:
                break
            is_enough = visit >= self._warm_ups + FEWEST_ROUNDS and spent >= LEAST_SECONDS
            if is_enough and all(_agree(_slowdowns(found, times[None])) for found in times.values() if found):
                break
            for cell, found in times.items():
                if self._rows.longest + (0 if cell is None else cell.draft_length) + 1 > self._columns:
                    break  # short contexts end before the visits do
                started = time.perf_counter()
                self._round(cell)
                if visit >= self._warm_ups or not found:
                    found.append(time.perf_counter() - started)
                if visit == self._warm_ups:
                    del found[:-1]  # what warmed up does not count any more
        self._rollout.end()
        if self._captures:
            gc.collect()  # a runner and what it captured hold each other
        return [
            self._rung(cell, median(found), median(_slowdowns(found, times[None])))
            for cell, found in times.items()
            if cell is not None and found
        ]

    def _rung(self, cell: _Cell, seconds: float, slowdown: float) -> Rung:
        return Rung(
            self._drafter.strategy, self._batch, cell.draft_length, cell.acceptance, seconds, seconds / slowdown
        )

    def _round(self, cell: _Cell | None) -> None:
        self._rollout.acceptance = 0.0 if cell is None else cell.acceptance
        self._rollout.decode_round([] if cell is None else [Chain(0, cell.draft_length)])
        if self._rollout.drafter_failure is not None:
            raise RuntimeError(f"the drafter failed while it was timed: {self._rollout.drafter_failure}")


def _slowdowns(times: list[float], plain: list[float]) -> list[float]:
    """Of a cell's rounds, each over the autoregressive one of the same visit: other work was as much for both."""
    return [seconds / beside for seconds, beside in zip(times, plain, strict=False)]


def _agree(values: list[float]) -> bool:
    """Whether half of them lie so close to their median that further ones would hardly move it."""
    middle = median(values)
    return median(abs(value - middle) for value in values) <= STABLE * middle
