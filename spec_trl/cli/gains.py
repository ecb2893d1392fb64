"""Measures the gain of "auto" and of each drafter over transformers' generate and "none".

A differing token is a near-tie, decided by rounding, or an error. The logits of a position differ in their last bits
between forward shapes; this logit noise is measured. An unbatched forward of the prefix computes the scores of both
tokens again: a near-tie has both closer to the best score than the noise.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..generation.engine.drafter import Drafter
from ..generation.engine.network.family_hooks import cache_argument
from ..generation.engine.sampling.noise import gumbel_noise, position_keys, stream_keys
from ..generation.engine.statistics import SpeculationStatistics
from ..generation.options import SpeculativeConfig
from ..generation.session import Session
from ..generation.strategies import make_drafters
from ..papers import Calibration, load
from .loading import pad_left


GENERATE = "generate"
BASELINES = (GENERATE, "none")
OWN_DRAFTERS = ("self", "ngram", "history")
"""Drafters that need no assistant."""
ENOUGH_TOKENS, ENOUGH_VISITS = 32, 3
"""Fewest tokens of the longest row, and counted visits, of a sufficient measurement."""
NOISE_TEXTS, NOISE_LENGTH = 2, 64
"""Number of texts, and tokens per text, for measuring the logit noise."""
NOISE_PROMPT = 8
"""Tokens at the start of a text without measured logit noise."""


@dataclass(frozen=True)
class Work:
    """Prompts to continue: one row each, by up to `new_tokens`."""

    prompts: list[list[int]]
    new_tokens: int
    temperature: float


@dataclass(frozen=True)
class Call:
    """One call of generate; `statistics` if the engine ran."""

    seconds: float
    completions: list[list[int]]
    statistics: SpeculationStatistics | None

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.completions)) / self.seconds


_DEFAULT = SpeculativeConfig()


@dataclass(frozen=True, eq=False)
class Way:
    """One strategy to measure.

    Args:
        strategy: GENERATE (transformers' generate), or an `assistant_strategy`.
        draft_length: γ of a drafter that always drafts; 0: the default of the strategy.
        drafter: of this strategy.
        assistant: source of the drafter, if it needs an assistant.
    """

    strategy: str
    draft_length: int = 0
    drafter: Drafter | None = None
    assistant: str | None = None

    @property
    def name(self) -> str:
        return f"{self.strategy}, γ {self.draft_length}" if self.draft_length else self.strategy

    @property
    def config(self) -> SpeculativeConfig:
        """Options, as in :func:`~.config_to_paste`."""
        return SpeculativeConfig(draft_length=self.draft_length, sd_toggle="always") if self.draft_length else _DEFAULT

    def __call__(
        self, model: PreTrainedModel, work: Work, seed: int, clock: Callable[[], float], until: float = math.inf
    ) -> Call | None:
        inputs = pad_left(work.prompts, model.device)
        # Models come with settings of top_k, top_p and penalties; only temperature sampling is compared.
        options: dict[str, object] = dict(do_sample=False, repetition_penalty=1.0)
        if work.temperature > 0:
            options |= dict(do_sample=True, temperature=work.temperature, top_k=0, top_p=1.0)
        if self.strategy != GENERATE:
            options |= dict(assistant_strategy=self.strategy, speculative_config=replace(self.config, seed=seed))
        if self.assistant is not None:  # loaded once; other drafters stay with the model, or are made again
            options["drafter"] = self.drafter
        end, pad = model.generation_config.eos_token_id, model.generation_config.pad_token_id
        torch.manual_seed(seed)
        _synchronize(model.device)
        Session.of(model).drafters.pop("history", None)  # what other ways have seen of these prompts
        started = clock()
        if until < math.inf:
            options["max_time"] = max(until - started, 0.0)
        output = model.generate(
            **inputs, **options, max_new_tokens=work.new_tokens, pad_token_id=0 if pad is None else pad,
            return_dict_in_generate=True,
        )  # fmt: skip
        _synchronize(model.device)
        seconds = clock() - started
        if started + seconds >= until:
            return None
        ends = {end} if isinstance(end, int) else set(end or ())
        completions = []
        for row in output.sequences[:, inputs["input_ids"].shape[1] :].tolist():
            length = next((at for at, token in enumerate(row, 1) if token in ends), len(row))  # its end token counts
            completions.append(row[:length])
        return Call(seconds, completions, None if self.strategy == GENERATE else output.statistics)


def make_ways(
    model: PreTrainedModel, draft_lengths: Sequence[int], assistants: Mapping[str, str]
) -> tuple[list[Way], dict[str, str]]:
    """Returns all strategies for `model`, and by strategy the reason why it is not possible.

    Args:
        assistants: path or hub id, by strategy.

    Raises:
        ValueError: an assistant does not fit.
    """
    ways, missing = [Way(GENERATE), Way("none")], {}
    for strategy in ("auto", *OWN_DRAFTERS, *assistants):
        assistant = assistants.get(strategy)
        try:
            drafters = make_drafters(Session(), strategy, model, assistant, _DEFAULT)
            if strategy == "auto":
                ways.append(Way(strategy))
            else:
                ways += [Way(strategy, gamma, drafters[0], assistant) for gamma in draft_lengths]
        except ValueError as error:
            if assistant is not None:
                raise
            missing[strategy] = str(error)
    return ways, missing


@dataclass
class Identity:
    """Rows of a strategy compared with those of "none" with the same seed: `unexplained` rows differ by more than a
    near-tie; `unexamined` rows were left for lack of time."""

    rows: int = 0
    identical: int = 0
    near_ties: int = 0
    unexplained: int = 0
    unexamined: int = 0


def compare(
    model: PreTrainedModel, work: Work, seed: int, plain: Sequence[Call], calls: Sequence[Call], draft_length: int,
    until: float = math.inf,
) -> Identity:  # fmt: skip
    """Compares the calls of a strategy with those of "none", visit by visit; after `until` no token is examined."""
    identity, noise = Identity(), None
    for visit, (reference, call) in enumerate(zip(plain, calls, strict=True)):
        for row, (theirs, ours) in enumerate(zip(reference.completions, call.completions, strict=True)):
            identity.rows += 1
            identity.identical += ours == theirs
            same = next((at for at, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), None)
            if same is None:  # a row that ends early has no token to compare
                identity.unexplained += ours != theirs
                continue
            if time.perf_counter() > until:
                identity.unexamined += 1
                continue
            noise = logit_noise(model, work, reference, draft_length) if noise is None else noise
            prefix = work.prompts[row] + theirs[:same]
            scores = reference_scores(model, prefix, work.temperature, seed + visit, row, same)  # [vocab]
            is_near_tie = distance(scores, (theirs[same], ours[same])) < noise / (work.temperature or 1.0)
            identity.near_ties += is_near_tie
            identity.unexplained += not is_near_tie
    return identity


def logit_noise(model: PreTrainedModel, work: Work, call: Call, draft_length: int) -> float:
    """The largest difference of one logit between forward shapes; 0 where no text is long enough to measure it."""
    texts = sorted((p + c for p, c in zip(work.prompts, call.completions, strict=True)), key=len)[-NOISE_TEXTS:]
    length = min(len(texts[0]), NOISE_LENGTH)
    if length < NOISE_PROMPT + draft_length + 1:
        return 0.0
    cut = torch.tensor([text[:length] for text in texts], device=model.device)  # [texts, length]
    return measure_logit_noise(model, cut, draft_length).largest


@dataclass(frozen=True)
class LogitNoise:
    """Largest and root mean square difference of one logit between forward shapes."""

    largest: float
    rms: float


@torch.no_grad()
def measure_logit_noise(model: PreTrainedModel, texts: Tensor, draft_length: int) -> LogitNoise:
    """Compare the logits of `texts` [batch, n] when fed by 1 token, by draft_length + 1 tokens, and all at once."""
    largest, squares, count = 0.0, 0.0, 0
    caches = DynamicCache(config=model.config), DynamicCache(config=model.config)
    name = cache_argument(model)
    for cache in caches:
        model(texts[:, :NOISE_PROMPT], **{name: cache})
    whole = torch.cat([model(text[None]).logits for text in texts])  # [batch, n, vocab], row by row
    width = draft_length + 1
    for start in range(NOISE_PROMPT, texts.shape[1] - width + 1, width):
        block = texts[:, start : start + width]  # [batch, width]
        steps = [model(token, **{name: caches[0]}).logits for token in block.split(1, dim=1)]
        singly = torch.cat(steps, dim=1).double()  # [batch, width, vocab]
        jointly = model(block, **{name: caches[1]}).logits.double()  # [batch, width, vocab]
        for other in (jointly, whole[:, start : start + width].double()):
            difference = singly - other  # [batch, width, vocab]
            largest = max(largest, difference.abs().max().item())
            squares += difference.square().sum().item()
            count += difference.numel()
    return LogitNoise(largest, math.sqrt(squares / count))


@torch.no_grad()
def reference_scores(
    model: PreTrainedModel, prefix: list[int], temperature: float, seed: int, row: int, at: int
) -> Tensor:
    """Scores [vocab] float64 of request `row` at generated position `at`, from one unbatched forward: logits over
    temperature, perturbed by the row's noise; at temperature 0 the logits themselves."""
    logits = model(torch.tensor([prefix], device=model.device)).logits[0, -1].double()  # [vocab]
    if temperature == 0:
        return logits
    streams = stream_keys(seed, torch.tensor([row], device=model.device))  # [1]
    keys = position_keys(streams, torch.tensor([[at]], device=model.device))  # [1, 1]
    noise = gumbel_noise(keys.view(-1), logits.shape[-1])[0]  # [vocab]
    return logits / temperature + noise  # [vocab]


def distance(scores: Tensor, tokens: tuple[int, int]) -> float:
    """Distance of the worse of two tokens from the best of `scores` [vocab]."""
    return (scores.max() - scores[list(tokens)].min()).item()


@dataclass(frozen=True)
class Gain:
    """Results of a strategy at one batch size. None: unknown, or not applicable.

    Args:
        tokens_per_second: median over the counted visits.
        of_generate, of_none: median speedups over these within a visit.
        spread: half the distance from the smallest to the largest speedup over "none".
        tokens: of the longest row, median.
        predicted: speedup over "none" by the roofline in the cache, at the measured block efficiency.
        drafting: share of the decoding rounds that drafted.
        acceptance_rate, block_efficiency: of those rounds.
        identity: of strategies with a drafter.
        failure: why the drafter was dropped.
    """

    way: Way
    rows: int
    tokens_per_second: float
    of_generate: float
    of_none: float
    spread: float
    visits: int
    tokens: float
    predicted: float | None
    drafting: float | None
    acceptance_rate: float | None
    block_efficiency: float | None
    identity: Identity | None
    failure: str | None

    @property
    def is_thin(self) -> bool:
        """Whether the measurement is too short to be used."""
        return self.tokens < ENOUGH_TOKENS or self.visits < ENOUGH_VISITS

    @property
    def explained(self) -> float:
        """The largest speedup over "none" that the tokens per block explain: τ tokens instead of one in drafted
        rounds. More is noise."""
        gained = (self.drafting or 0.0) * ((self.block_efficiency or 1.0) - 1)
        return min(self.of_none, 1 + gained)


def summarise(
    model: PreTrainedModel, work: Work, seed: int, calls: Mapping[Way, Sequence[Call]], profile: Calibration,
    until: float = math.inf,
) -> list[Gain]:  # fmt: skip
    """Returns the gains of all strategies; empty without calls of GENERATE and "none". The first of several visits
    counts only for identity."""
    references = [next((made for way, made in calls.items() if way.strategy == name), None) for name in BASELINES]
    generate, none = references
    if generate is None or none is None:
        return []
    timed = slice(1, None) if len(none) > 1 else slice(None)

    def speedups(ours: Sequence[Call], theirs: Sequence[Call]) -> list[float]:
        pairs = zip(ours[timed], theirs[timed], strict=True)
        return [one.tokens_per_second / other.tokens_per_second for one, other in pairs]

    def gain(way: Way, made: Sequence[Call]) -> Gain:
        known = [call.statistics for call in made if call.statistics is not None]
        drafted = [statistics for statistics in known if statistics.total.blocks]
        tau = median(statistics.block_efficiency for statistics in drafted) if drafted else None
        rates = [statistics.acceptance_rate for statistics in drafted if statistics.total.drafted]
        of_none, examined = speedups(made, none), way.strategy not in BASELINES
        longest = way.config.first_draft_length
        return Gain(
            way=way,
            rows=len(work.prompts),
            tokens_per_second=median(call.tokens_per_second for call in made[timed]),
            of_generate=median(speedups(made, generate)),
            of_none=median(of_none),
            spread=(max(of_none) - min(of_none)) / 2,
            visits=len(of_none),
            tokens=median(max(map(len, call.completions)) for call in made[timed]),
            predicted=_predicted(way, work, made, tau, profile),
            drafting=median(each.drafted_rounds / (each.rounds or 1) for each in known) if known else None,
            acceptance_rate=median(rates) if rates else None,
            block_efficiency=tau,
            identity=compare(model, work, seed, none, made, longest, until) if examined else None,
            failure=next((each.drafter_failure for each in known if each.drafter_failure is not None), None),
        )

    return [gain(way, made) for way, made in calls.items()]


def _predicted(
    way: Way, work: Work, calls: Sequence[Call], tau: float | None, profile: Calibration
) -> float | None:
    if way.drafter is None or tau is None or profile is None:
        return None
    batch, name = len(work.prompts), way.drafter.strategy
    # Halfway through its completion a row has about its mean length over the rounds.
    length = fmean(len(p) + len(c) / 2 for call in calls for p, c in zip(work.prompts, call.completions, strict=True))
    seconds = load("papers.efficient_rollout.profile").roofline_rounds([way.drafter], profile)
    cycle = seconds({name: way.draft_length}, way.draft_length, batch, length)
    return tau * seconds({}, 0, batch, length) / cycle


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
