"""Best-of-N in the tail: target forwards until the last row of a mixed batch has finished (SA §4.2, §5.5).

Half of the prompts are stories; half are passages, of stories or of the articles that Spec-Bench has for
summarisation, twice and begun again, which the target goes on to copy. Each drafter runs by itself, always on, at each
γ; the one with the fewest target forwards is the best single method. Against it the same drafters race.

On a small CPU hardly any verified token is free, and races rightly do not happen. So that what is measured is what
races do where they pay, the control is told how long each round would have taken on an A100 with a 7B
target, by the roofline that the EfficientRollout authors published; a small LM's forward is taken to cost a tenth of
the target's. Forwards and tokens are real, and so are the seconds of this machine; those of the A100 are modelled.

    python -m benchmarks.best_of_n_tail --models copier,float32 --assistant ../shared/models/stories260K \\
        --articles ../shared/data/spec_bench/question.jsonl
"""

import argparse
import itertools
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from spec_trl import SpeculativeConfig
from spec_trl.efficient_rollout.roofline import Coefficients, Roofline
from spec_trl.scheduling.control import Candidate, Chain
from spec_trl.scheduling.ledger import CELL_ERROR, Drafts, Times
from spec_trl.scheduling.model_constants import ModelConstants
from spec_trl.scheduling.planner import Planner

from .best_of_n_subject import COPY, NONE, PASSAGE, STORY, Subject, add_arguments, make_subject
from .calls import Call, Way, identical_rows, in_turns, ratios
from .measure import Finding, begin, shown, write_result
from .models import model_line
from .workload import Workload, prompt_source


A100 = Roofline(  # ER App. E.3: Qwen2.5-7B, bfloat16, with a 4-bit copy as drafter
    ModelConstants("qwen2.5-7b", 15.231e9, 5.443e9, 14.14e9, 401408, 57344),
    Coefficients(F_eff=233.5e12, BW_eff=1.617e12, rho_kappa=0.457, eta_D=1.334, c_T=39e-6, c_D=69e-6, c_V=152e-6),
)
SMALL = 0.1  # of the target's forward, a small LM's: a 0.5B's weights are a fourteenth of a 7B's
NETWORKS = ("self", "model")
RACES = {"best_of_n, one drafter per row": False, "best_of_n": True}


def seconds_on_a100(batch: int, length: float, width: int, drafted: Mapping[str, int]) -> float:
    """Of a round that verifies `width` draft tokens of each row, `drafted` of them by which drafter."""
    verify = A100.verify_seconds(batch, length, width) if width else A100.target_seconds(batch, length)
    small = SMALL * A100.target_seconds(batch, length) * drafted.get("model", 0)
    own = drafted.get("self", 0)
    return verify + small + (A100.cycle_seconds(batch, length, own) - A100.verify_seconds(batch, length, own))


class PlannerOnA100(Planner):
    """Decides as it would there: each round takes the seconds of the roofline."""

    def begin(self, capacity: int, prompts: Sequence[str]) -> None:
        super().begin(capacity, prompts)
        self.seconds = 0.0

    def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
        self.now = len(requests), length
        self.planned = super().plan(requests, length, waiting)
        return self.planned

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        drafted: dict[str, int] = {}
        for chain in self.planned if draft_length else ():
            name = self.candidates[chain.which].name
            drafted[name] = max(drafted.get(name, 0), min(chain.draft_length, draft_length))
        seconds = seconds_on_a100(*self.now, draft_length, drafted)
        self.seconds += seconds
        super().record(draft_length, seconds, tokens, is_typical)


def control_on_a100(pool: Sequence[str], lengths: Sequence[int], rows: int, race: bool) -> PlannerOnA100:
    """The planner over `pool` on that machine, which it has calibrated."""
    candidates = [Candidate(name, lengths[0], 1.0, rows, name in NETWORKS) for name in pool]

    def seconds(drafted: Mapping[str, int], width: int, batch: int, length: float) -> float:
        return seconds_on_a100(batch, length, width, drafted)

    drafts = Drafts(pool, [name not in NETWORKS for name in pool])
    return PlannerOnA100(candidates, lengths, seconds, Times(CELL_ERROR), drafts, race=race)


@dataclass
class Result:
    """One way to generate; medians over repeats.

    Args:
        name: drafter and γ, or the race.
        forwards: decoding rounds, one target forward each, until the last row had finished.
        tail_forwards: from when half of the rows had.
        fewer: forwards of the best single method over these, within a repeat.
        seconds: of the whole call on this machine.
        tail_seconds: from when half of the rows had finished.
        a100_seconds: of the rounds, modelled.
        block_efficiency: τ.
        raced: rounds with a race, all repeats together.
        wins: of races, by drafter.
        wasted: by drafter, draft tokens of races that were verified and not committed.
        control_share: of decisions in the seconds.
        identical_rows, rows: completions equal to `none`'s.
    """

    name: str
    forwards: float
    tail_forwards: float
    fewer: float
    seconds: float
    tail_seconds: float
    a100_seconds: float
    block_efficiency: float
    raced: int
    wins: dict[str, int]
    wasted: dict[str, int]
    control_share: float
    identical_rows: int
    rows: int


def measure_pool(subject: Subject, pool: Sequence[str], rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """All ways with the drafters of one pool."""
    tokens, lengths, count = options.new_tokens[0], options.lengths, options.repeats + options.rollouts
    prompts = prompt_source(subject.loaded, None, rows * count, options.seed)
    if options.articles is not None:
        others = articles(subject, options.articles)
        prompts = [own for pair in zip(prompts, others, strict=False) for own in pair]
    kinds = [(STORY, COPY)[row % 2] for row in range(rows)]
    works = [subject.work(prompts[i : i + rows], kinds, tokens) for i in range(0, rows * count, rows)]
    singles: dict[str, Way] = {
        f"{name}, γ = {length}": subject.way(name, [name], SpeculativeConfig(draft_length=length, sd_toggle="always"))
        for name in pool
        for length in lengths
    }
    controls = {title: control_on_a100(pool, lengths, rows, race) for title, race in RACES.items()}
    modelled: dict[str, list[float]] = {title: [] for title in controls}
    for control in controls.values():
        for number, work in enumerate(works[: options.rollouts]):
            subject.way("best_of_n", pool, control=control)(work, options.seed - 1 - number)
    ways = {NONE: subject.way(NONE)} | singles
    ways |= {title: _timed(subject, pool, control, modelled[title]) for title, control in controls.items()}
    calls = in_turns(ways, works[options.rollouts :], options.seed)
    for title in (NONE, *singles):
        modelled[title] = [_a100_seconds(call) for call in calls[title]]
    best = min(singles, key=lambda name: statistics.median(call.statistics.rounds for call in calls[name]))
    results = [summarise(name, made, calls[best], calls[NONE], modelled[name]) for name, made in calls.items()]
    return {"pool": list(pool), "rows": rows, "best_single": best, "results": [asdict(result) for result in results]}


def articles(subject: Subject, file: Path) -> Iterator[list[int]]:
    """Token ids of Spec-Bench's articles to summarise, over and over; of random tokens for a shape."""
    if subject.loaded.tokenizer is None:
        vocabulary, rng = subject.loaded.model.config.vocab_size, random.Random(0)
        while True:
            yield [rng.randrange(vocabulary) for _ in range(PASSAGE)]
    questions = [json.loads(line) for line in file.read_text().splitlines()]
    texts = [own["turns"][0].removeprefix("Summarize: ") for own in questions if own["category"] == "summarization"]
    yield from itertools.cycle(subject.loaded.tokenizer(texts)["input_ids"])


def _timed(subject: Subject, pool: Sequence[str], control: PlannerOnA100, modelled: list[float]) -> Way:
    """Best-of-N, which notes its seconds on the A100."""
    way = subject.way("best_of_n", pool, control=control)

    def call(work: Workload, seed: int) -> Call:
        made = way(work, seed)
        modelled.append(control.seconds)
        return made

    return call


def _a100_seconds(call: Call) -> float:
    """Of a rollout with one drafter, or none."""
    return sum(
        point.rounds
        * seconds_on_a100(
            point.batch, point.length, point.draft_length, {point.drafter: point.draft_length} if point.drafter else {}
        )
        for point in call.statistics.points
    )


def summarise(
    name: str, calls: Sequence[Call], best: Sequence[Call], none: Sequence[Call], modelled: Sequence[float]
) -> Result:
    """Medians of one way's calls, and sums over its races."""
    everything = [call.statistics for call in calls]
    tails = [own.tail() for own in everything]
    races = [own.racing for own in everything if own.racing is not None]
    wins: Counter[str] = Counter()
    wasted: Counter[str] = Counter()
    for race in races:
        wins.update(race.wins)
        wasted.update(race.wasted)
    median = statistics.median
    return Result(
        name,
        median(own.rounds for own in everything),
        median(tail.rounds for tail in tails),
        median(ratios([call.statistics.rounds for call in best], [own.rounds for own in everything])),
        median(call.seconds for call in calls),
        median(tail.seconds for tail in tails),
        median(modelled),
        median(own.block_efficiency for own in everything),
        sum(race.rounds for race in races),
        dict(wins),
        dict(wasted),
        median(own.phase_seconds["control"] / call.seconds for own, call in zip(everything, calls, strict=True)),
        *identical_rows(calls, none),
    )


def findings(result: dict[str, Any]) -> list[Finding]:
    """Forwards and time of the races, over the best single method and over no drafter."""
    found = []
    for pool in result["pools"]:
        by_name = {each["name"]: each for each in pool["results"]}
        best, none = by_name[pool["best_single"]], by_name[NONE]
        fastest = min((by_name[name] for name in by_name if name not in RACES), key=lambda own: own["a100_seconds"])
        for name in RACES:
            own = by_name[name]
            what = f"{model_line(pool)}, {pool['rows']} rows, {', '.join(pool['pool'])}: {name}"
            found += [
                Finding(f"{what}, fewer target forwards", own["fewer"], "×", f"best single method: {best['name']}"),
                Finding(f"{what}, modelled A100 seconds", own["a100_seconds"] / none["a100_seconds"], "×", NONE),
                Finding(f"{what}, modelled A100 seconds", own["a100_seconds"] / fastest["a100_seconds"], "×",
                        f"fastest single method: {fastest['name']}"),
                Finding(f"{what}, seconds here", own["seconds"] / none["seconds"], "×", NONE),
            ]  # fmt: skip
    return found


def setup(result: dict[str, Any]) -> str:
    """How it was measured."""
    options = result["options"]
    return (
        f"Half stories, half {options['copied_texts']} to copy, {options['new_tokens'][0]} new tokens each, "
        f"temperature 1; {options['rollouts']} rollouts fill the history; {options['repeats']} repeats in turns, "
        "medians. Forwards are decoding rounds until the last row had finished. The control of `best_of_n` decides as "
        "on an A100 with a 7B target, whose seconds are modelled by a roofline; all others were measured."
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ["copier,float32"], "best_of_n_tail")
    add = parser.add_argument
    add("--pools", nargs="+", default=["ngram,model", "self,ngram,model"], metavar="NAME,NAME",
        help="drafters that race (default: %(default)s)")  # fmt: skip
    add("--articles", type=Path, help="question.jsonl of Spec-Bench, whose articles give the passages to copy; "
        "default: the stories")  # fmt: skip
    add("--lengths", type=int, nargs="+", default=[5, 10], help="γ of each drafter (default: %(default)s)")
    add("--batch", type=int, nargs="+", default=[8, 16], help="rows (default: %(default)s)")
    add("--new-tokens", type=int, nargs=1, default=[256], help="per row (default: %(default)s)")
    add("--rollouts", type=int, default=4, help="that fill the history (default: %(default)s)")
    add("--repeats", type=int, default=5, help="of each way (default: %(default)s)")
    options = parser.parse_args()
    options.copied_texts = "stories" if options.articles is None else "articles"
    return options


def main() -> None:
    options = parse_arguments()
    machine, started = begin(options), time.perf_counter()
    pools = []
    for target in options.models:
        subject = make_subject(target, options)
        for rows in options.batch:
            for pool in tqdm(options.pools, desc=f"{subject.loaded.facts['model']}, {rows} rows"):
                pools.append(subject.loaded.facts | measure_pool(subject, pool.split(","), rows, options))
    result = {"options": shown(options), "pools": pools, "seconds": time.perf_counter() - started}
    title = "Best-of-N: the tail of a mixed batch"
    write_result(options.output, "best_of_n", title, setup(result), machine, findings(result), result)


if __name__ == "__main__":
    main()
