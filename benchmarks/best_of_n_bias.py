"""Best-of-N does not change what is sampled: lengths and rewards of raced rollouts against those of `none`.

With the same seeds the two are the same tokens, as the tests show. Here seeds differ, as from run to run, and many
rollouts of each are compared by the two-sample Kolmogorov-Smirnov test: a race that preferred what is easy to draft
would shift the distributions. Rows end by themselves, half of the prompts being the middle of a story that is about to
end and half copy-heavy; the reward is the share of words that the completion has for the first time. The control races
as on an A100 (see best_of_n_tail). That the test would notice is shown by a biased sample: of two rollouts of `none`
for each prompt, the one of which prompt lookup would have predicted more.

    python -m benchmarks.best_of_n_bias --model copier --assistant ../shared/models/stories260K
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import torch
from scipy.stats import ks_2samp
from tqdm import trange
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_trl import SpeculativeConfig
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.drafters.small_model import SmallModelDrafter, load_assistant

from .best_of_n_subject import BEGUN, PASSAGE
from .best_of_n_tail import control_on_a100
from .calls import way
from .copying import copy_heavy
from .measure import Finding, add_machine_arguments, begin, shown, write_result
from .workload import STORIES, Workload


POOL = ("ngram", "model")
BEFORE_END = 120  # tokens that a story still has after its prompt
SIGNIFICANT = 0.05
WAYS = {"best_of_n": "best_of_n", "none": "none", "none, other seeds": "none"}


@dataclass
class Sample:
    """Rollouts of one way, in the order of prompts.

    Args:
        lengths: generated tokens.
        rewards: of each.
        predictable: share of tokens that prompt lookup would have predicted.
        rounds, raced: decoding rounds, and those with a race.
        wins: of races, by drafter.
    """

    lengths: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    predictable: list[float] = field(default_factory=list)
    rounds: int = 0
    raced: int = 0
    wins: dict[str, int] = field(default_factory=dict)


def first_words(text: str) -> float:
    """Reward: share of words that the text has for the first time."""
    words = text.lower().split()
    return len(set(words)) / len(words) if words else 0.0


def predictable(prompt: Sequence[int], completion: Sequence[int]) -> float:
    """Share of `completion` that followed its three preceding tokens when they last stood in the text."""
    text, hits = [*prompt, *completion], 0
    seen: dict[tuple[int, ...], int] = {}
    for place in range(3, len(text)):
        key = tuple(text[place - 3 : place])
        hits += place >= len(prompt) and seen.get(key) == text[place]
        seen[key] = text[place]
    return hits / len(completion)


def more_predictable(one: Sample, other: Sample) -> Sample:
    """Of each prompt's two rollouts the more predictable one."""
    better = [a >= b for a, b in zip(one.predictable, other.predictable, strict=True)]

    def choose(name: str) -> list[Any]:
        pairs = zip(better, getattr(one, name), getattr(other, name), strict=True)
        return [mine if first else theirs for first, mine, theirs in pairs]

    return Sample(choose("lengths"), choose("rewards"), choose("predictable"))


def compare(one: Sample, other: Sample) -> dict[str, float]:
    """p-values of the two-sample test."""
    return {
        "lengths": float(ks_2samp(one.lengths, other.lengths).pvalue),
        "rewards": float(ks_2samp(one.rewards, other.rewards).pvalue),
    }


def prompts_of(tokenizer: Any, count: int) -> list[list[int]]:
    """Middles of stories and copy-heavy ones in turn."""
    stories = [ids for ids in tokenizer(json.loads(STORIES.read_text()))["input_ids"] if len(ids) > 2 * BEFORE_END]
    chosen = [stories[number % len(stories)] for number in range(count)]
    return [
        copy_heavy(ids, PASSAGE, BEGUN) if number % 2 else ids[:1] + ids[-BEFORE_END - 2 * PASSAGE : -BEFORE_END]
        for number, ids in enumerate(chosen)
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="folder of a story model that copies")
    add("--assistant", required=True, help="folder of a small LM")
    add("--rollouts", type=int, default=2000, help="of each way (default: %(default)s)")
    add("--batch", type=int, default=16, help="rows (default: %(default)s)")
    add("--new-tokens", type=int, default=200, help="at most, per row (default: %(default)s)")
    add("--workers", type=int, default=2, help="processes of one thread each (default: %(default)s)")
    add_machine_arguments(parser, "best_of_n_bias")
    parser.set_defaults(device="cpu")
    return parser.parse_args()


def roll_out(name: str, strategy: str, seed: int, options: argparse.Namespace) -> Sample:
    """All rollouts of one way."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*max_new_tokens.*")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompts, end = prompts_of(tokenizer, options.rollouts), model.generation_config.eos_token_id
    call = way(model, strategy, SpeculativeConfig(sd_toggle="always"))
    if strategy != "none":
        members = [NgramDrafter(3), SmallModelDrafter(load_assistant(options.assistant, model), model)]
        control = control_on_a100(POOL, (5, 10), options.batch, race=True)
        call = way(model, strategy, SpeculativeConfig(sd_toggle="always"), lambda: members, control=control)
    sample = Sample()
    for first in trange(0, options.rollouts, options.batch, desc=name):
        own = prompts[first : first + options.batch]
        made = call(Workload(own, options.new_tokens, 1.0, (end,), tokenizer.pad_token_id), seed + first)
        rows, facts = made.completions, made.statistics
        sample.lengths += map(len, rows)
        sample.rewards += map(first_words, tokenizer.batch_decode(rows, skip_special_tokens=True))
        sample.predictable += map(predictable, own, rows)
        sample.rounds += facts.rounds
        if (racing := facts.racing) is not None:
            sample.raced += racing.rounds
            for drafter, count in racing.wins.items():
                sample.wins[drafter] = sample.wins.get(drafter, 0) + count
    return sample


def facts_of(sample: Sample, new_tokens: int) -> dict[str, Any]:
    """What a result keeps of a sample: no row by row values."""
    return {
        "mean_length": statistics.fmean(sample.lengths),
        "at_the_limit": sum(length == new_tokens for length in sample.lengths) / len(sample.lengths),
        "mean_reward": statistics.fmean(sample.rewards),
        "rounds": sample.rounds,
        "raced": sample.raced,
        "wins": sample.wins,
    }


def findings(result: dict[str, Any]) -> list[Finding]:
    """p-values of the test."""
    return [
        Finding(f"{name}: p-value of the {what}", value, "", "none")
        for name, values in result["p_values"].items()
        for what, value in values.items()
    ]


def setup(result: dict[str, Any]) -> str:
    """How it was measured."""
    options, raced = result["options"], result["samples"]["best_of_n"]
    wins = ", ".join(f"{name} {count}" for name, count in raced["wins"].items())
    return (
        f"{options['rollouts']} rollouts of each way in batches of {options['batch']}, other seeds in each, at most "
        f"{options['new_tokens']} tokens, temperature 1. {raced['raced']} of {raced['rounds']} rounds of `best_of_n` "
        f"had races; won by {wins}. p-values of two-sample Kolmogorov-Smirnov tests against `none`; a difference is "
        f"seen below {SIGNIFICANT}. Biased: of each prompt's two rollouts of `none` the one that prompt lookup would "
        "have predicted better."
    )


def main() -> None:
    options = parse_arguments()
    machine, started = begin(options), time.perf_counter()
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        jobs = {
            name: pool.submit(roll_out, name, strategy, seed * 10**6, options)
            for seed, (name, strategy) in enumerate(WAYS.items())
        }
        samples = {name: job.result() for name, job in jobs.items()}
    ours, none, again = samples.values()
    result = {
        "options": shown(options),
        "p_values": {
            "best_of_n": compare(ours, none),
            "none, other seeds": compare(again, none),
            "biased": compare(more_predictable(none, again), none),
        },
        "samples": {name: facts_of(sample, options.new_tokens) for name, sample in samples.items()},
        "seconds": time.perf_counter() - started,
    }
    title = "Best-of-N does not change what is sampled"
    write_result(options.output, "best_of_n", title, setup(result), machine, findings(result), result)


if __name__ == "__main__":
    main()
