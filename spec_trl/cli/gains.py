"""Measures what each drafter gains for a model: tokens per second against transformers' generate and "none"."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, geometric_mean, median

import torch
from transformers import PreTrainedModel

from ..generation.configuration import SpeculativeConfig
from ..generation.engine.drafter import Drafter
from ..generation.engine.statistics import SpeculationStatistics
from ..generation.strategies import make_drafters, roofline_rounds
from ..scheduling.profile import Profile
from ..scheduling.toggle import predicted_speedup
from .near_ties import NOISE_PROMPT, distance, measure_logit_noise, reference_scores
from .options import MARGIN
from .prompts import pad_left


GENERATE = "generate"
OWN_DRAFTERS = ("self", "ngram", "history")
"""Drafters that every model can have."""
PROBE = 8
"""Tokens per row of the calls that tell how long a visit will take."""
PLANNED_VISITS, MOST_VISITS = 4, 8
"""A visit calls all ways once. Of several visits the first does not count: in it a GPU's forwards are captured."""
NOISE_TEXTS, NOISE_LENGTH = 2, 64
"""Number of texts, and tokens of each, on which the logit noise is measured."""


@dataclass(frozen=True)
class Work:
    """Prompts to continue: one row each, by up to `new_tokens`."""

    prompts: list[list[int]]
    new_tokens: int
    temperature: float


@dataclass(frozen=True)
class Call:
    """One call of generate; `statistics` where the engine ran."""

    seconds: float
    completions: list[list[int]]
    statistics: SpeculationStatistics | None

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.completions)) / self.seconds


@dataclass(frozen=True, eq=False)
class Way:
    """One way to continue prompts.

    Args:
        strategy: GENERATE, transformers' own; or an `assistant_strategy`.
        draft_length: γ; 0 without a drafter.
        drafter: of this strategy.
        assistant: what the drafter was loaded from, if it needs an assistant.
    """

    strategy: str
    draft_length: int = 0
    drafter: Drafter | None = None
    assistant: str | None = None

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.strategy}, γ {self.draft_length}" if self.draft_length else self.strategy

    @property
    def config(self) -> SpeculativeConfig:
        """Drafts in every round, so that its gain is seen."""
        return SpeculativeConfig(draft_length=self.draft_length or 1, sd_toggle="always")

    def __call__(self, model: PreTrainedModel, work: Work, seed: int, clock: Callable[[], float]) -> Call:
        """Continues the prompts once."""
        inputs = pad_left(work.prompts, model.device)
        # Models come with top_k, top_p and penalties of their own: the comparison is of temperature sampling alone.
        options: dict[str, object] = dict(do_sample=False, repetition_penalty=1.0)
        if work.temperature > 0:
            options |= dict(do_sample=True, temperature=work.temperature, top_k=0, top_p=1.0)
        if self.strategy != GENERATE:
            options |= dict(assistant_strategy=self.strategy, speculative_config=replace(self.config, seed=seed))
        if self.assistant is not None:  # loaded once; the other drafters are kept per model, or begin anew
            options["drafter"] = self.drafter
        end, pad = model.generation_config.eos_token_id, model.generation_config.pad_token_id
        torch.manual_seed(seed)
        _synchronize(model.device)
        started = clock()
        output = model.generate(
            **inputs, **options, max_new_tokens=work.new_tokens, pad_token_id=0 if pad is None else pad,
            return_dict_in_generate=True,
        )  # fmt: skip
        _synchronize(model.device)
        seconds = clock() - started
        ends = {end} if isinstance(end, int) else set(end or ())
        completions = []
        for row in output.sequences[:, inputs["input_ids"].shape[1] :].tolist():
            length = next((at for at, token in enumerate(row, 1) if token in ends), len(row))  # its end token counts
            completions.append(row[:length])
        return Call(seconds, completions, None if self.strategy == GENERATE else output.statistics)


def make_ways(
    model: PreTrainedModel, draft_lengths: Sequence[int], assistants: Mapping[str, str]
) -> tuple[list[Way], dict[str, str]]:
    """All ways to continue prompts with `model`, and, by strategy, why a drafter of its own is not possible.

    Args:
        model: the target.
        draft_lengths: γ to try.
        assistants: path or hub id, by strategy.

    Raises:
        ValueError: an assistant does not fit.
    """
    ways, missing = [Way(GENERATE), Way("none")], {}
    for strategy in (*OWN_DRAFTERS, *assistants):
        assistant = assistants.get(strategy)
        try:
            (drafter,) = make_drafters(strategy, model, assistant, SpeculativeConfig())
            ways += [Way(strategy, gamma, drafter, assistant) for gamma in draft_lengths]
        except ValueError as error:
            if assistant is not None:
                raise
            missing[strategy] = str(error)
    return ways, missing


def measure(
    model: PreTrainedModel,
    ways: Sequence[Way],
    work: Work,
    seed: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    begin: Callable[[Way], object] = lambda way: None,
) -> tuple[Work, dict[Way, list[Call]]]:
    """The calls of all ways, for about `seconds`, and the work that they did: as much of `work` as the time allows.

    Two visits of `PROBE` tokens load, pack and tell how many tokens fit into `PLANNED_VISITS`. If no more fit, the
    probes themselves are returned. Visit i has the seed `seed` + i and begins with another way than the one before;
    `begin` is told of each call.
    """
    deadline = clock() + seconds

    def visit_all(work: Work, most: int, until: float) -> dict[Way, list[Call]]:
        """Visits: one, and up to `most` while the next one would end before `until`."""
        calls: dict[Way, list[Call]] = {way: [] for way in ways}
        for visit in range(most):
            started, shift = clock(), visit % len(ways)
            for way in [*ways[shift:], *ways[:shift]]:
                begin(way)
                calls[way].append(way(model, work, seed + visit, clock))
            if 2 * clock() - started > until:
                break
        return calls

    probe = replace(work, new_tokens=min(PROBE, work.new_tokens))
    calls = visit_all(probe, 2, math.inf)
    none = next(made[-1].statistics for way, made in calls.items() if way.strategy == "none")
    assert none is not None
    last = [made[-1].seconds for made in calls.values()]
    reading = sum(min(none.phase_seconds["prefill"], each) for each in last)
    per_token = max((sum(last) - reading) / probe.new_tokens, 1e-9)
    fitting = int(((deadline - clock()) / PLANNED_VISITS - reading) / per_token)
    if min(fitting, work.new_tokens) <= probe.new_tokens:
        return probe, calls
    work = replace(work, new_tokens=min(fitting, work.new_tokens))
    return work, visit_all(work, MOST_VISITS, deadline)


@dataclass
class Identity:
    """How the rows of a way compare with those of "none" with the same seed; `unexplained` ones differ by no
    near-tie."""

    rows: int = 0
    identical: int = 0
    near_ties: int = 0
    unexplained: int = 0


def compare(
    model: PreTrainedModel, work: Work, seed: int, plain: Sequence[Call], calls: Sequence[Call], draft_length: int
) -> Identity:
    """The calls of one way against those of "none", visit by visit."""
    found, noise = Identity(), None
    for visit, (reference, call) in enumerate(zip(plain, calls, strict=True)):
        for row, (theirs, ours) in enumerate(zip(reference.completions, call.completions, strict=True)):
            found.rows += 1
            found.identical += ours == theirs
            same = next((at for at, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), None)
            if same is None:  # where a row only ends early there is no token to tie with
                found.unexplained += ours != theirs
                continue
            noise = logit_noise(model, work, reference, draft_length) if noise is None else noise
            prefix = work.prompts[row] + theirs[:same]
            scores = reference_scores(model, prefix, work.temperature, seed + visit, row, same)  # [vocab]
            is_near_tie = distance(scores, (theirs[same], ours[same])) < noise / (work.temperature or 1.0)
            found.near_ties += is_near_tie
            found.unexplained += not is_near_tie
    return found


def logit_noise(model: PreTrainedModel, work: Work, call: Call, draft_length: int) -> float:
    """The largest difference of one logit between forward shapes; 0 where no text is long enough to measure it."""
    texts = sorted((p + c for p, c in zip(work.prompts, call.completions, strict=True)), key=len)[-NOISE_TEXTS:]
    length = min(len(texts[0]), NOISE_LENGTH)
    if length < NOISE_PROMPT + draft_length + 1:
        return 0.0
    cut = torch.tensor([text[:length] for text in texts], device=model.device)  # [texts, length]
    return measure_logit_noise(model, cut, draft_length).largest


@dataclass(frozen=True)
class Gain:
    """One way at one batch size. None stands for what is not known or does not apply.

    Args:
        tokens_per_second: median over the visits that count.
        of_generate, of_none: medians of the speedup over these within a visit.
        predicted: speedup over "none" by the roofline in the cache, at the measured block efficiency.
        drafting: share of the decoding rounds that drafted.
        acceptance_rate, block_efficiency: of those rounds.
        identity: for ways with a drafter.
        failure: why the drafter was dropped.
    """

    way: Way
    tokens_per_second: float
    of_generate: float
    of_none: float
    predicted: float | None
    drafting: float | None
    acceptance_rate: float | None
    block_efficiency: float | None
    identity: Identity | None
    failure: str | None


def summarise(
    model: PreTrainedModel, work: Work, seed: int, calls: Mapping[Way, Sequence[Call]], profile: Profile | None
) -> list[Gain]:
    """A gain for each way. Of several visits the first counts for identity alone."""
    generate, none = (next(made for way, made in calls.items() if way.strategy == name) for name in (GENERATE, "none"))
    timed = slice(1, None) if len(none) > 1 else slice(None)

    def speedup(ours: Sequence[Call], theirs: Sequence[Call]) -> float:
        pairs = zip(ours[timed], theirs[timed], strict=True)
        return median(own.tokens_per_second / other.tokens_per_second for own, other in pairs)

    def gain(way: Way, made: Sequence[Call]) -> Gain:
        found = [call.statistics for call in made if call.statistics is not None]
        drafted = [statistics for statistics in found if statistics.total.blocks]
        tau = median(statistics.block_efficiency for statistics in drafted) if drafted else None
        return Gain(
            way=way,
            tokens_per_second=median(call.tokens_per_second for call in made[timed]),
            of_generate=speedup(made, generate),
            of_none=speedup(made, none),
            predicted=None if tau is None or profile is None else _predicted(way, work, made, tau, profile),
            drafting=median(own.drafted_rounds / (own.rounds or 1) for own in found) if found else None,
            acceptance_rate=median(own.acceptance_rate for own in drafted) if drafted else None,
            block_efficiency=tau,
            identity=compare(model, work, seed, none, made, way.draft_length) if way.drafter is not None else None,
            failure=next((own.drafter_failure for own in found if own.drafter_failure is not None), None),
        )

    return [gain(way, made) for way, made in calls.items()]


def _predicted(way: Way, work: Work, calls: Sequence[Call], tau: float, profile: Profile) -> float | None:
    assert way.drafter is not None  # it drafted
    if profile is None:
        return None
    batch, name = len(work.prompts), way.drafter.strategy
    # Halfway through its completion a row has about its mean length over the rounds.
    length = fmean(len(p) + len(c) / 2 for call in calls for p, c in zip(work.prompts, call.completions, strict=True))
    seconds = roofline_rounds([way.drafter], profile)
    cycle = seconds({name: way.draft_length}, way.draft_length, batch, length)
    return predicted_speedup(tau, seconds({}, 0, batch, length), cycle)


def choose(gains: Sequence[Gain]) -> tuple[Way, float]:
    """The way to recommend, and its speedup over GENERATE: the geometric mean over the batches.

    GENERATE is kept unless "none" gains MARGIN over it, and these unless a drafter does. A way whose drafter failed,
    or whose tokens differ from those of "none" by more than near-ties, is out.
    """
    by_way: dict[Way, list[Gain]] = {}
    for gain in gains:
        by_way.setdefault(gain.way, []).append(gain)
    scores = {
        way: geometric_mean(gain.of_generate for gain in own)
        for way, own in by_way.items()
        if all(gain.failure is None and not (gain.identity and gain.identity.unexplained) for gain in own)
    }
    chosen = next(way for way in scores if way.strategy == GENERATE)
    plain = [way for way in scores if way.strategy == "none"]
    drafting = sorted((way for way in scores if way.draft_length), key=scores.__getitem__)[-1:]
    for way in (*plain, *drafting):
        if scores[way] >= (1 + MARGIN) * scores[chosen]:
            chosen = way
    return chosen, scores[chosen]


def config_to_paste(way: Way, draft_lengths: Sequence[int]) -> tuple[str, str]:
    """Arguments of generate, and a config of the trainer, as Python text."""
    named = f"assistant_strategy={way.strategy!r}"
    if way.assistant is not None:
        named += f", assistant_model={way.assistant!r}"
    if not way.draft_length:
        return named, f"SpecGRPOConfig({named})"
    lengths = f"draft_lengths={sorted(set(draft_lengths))}, initial_draft_length={way.draft_length}"
    config = f"speculative_config=SpeculativeConfig(draft_length={way.draft_length})"
    return f"{named}, {config}", f"SpecGRPOConfig({named}, {lengths})"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
