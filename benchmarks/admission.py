"""When a freed row is given to a waiting request: at once, several at a time, or its prompt chunk by chunk.

A row that is refilled costs a forward over its prompt, for which all rows in flight wait. Several short prompts share
most of that forward, but rows stay empty until there are several. Chunks of a prompt beside the tokens of a decoding
round need no forward of their own; the engine has no such forward, whose rows have one query or many.

Simulated on a roofline, in plain Python; rounds between two events are one step. With --models also run: the
engine with its rule and without, in turns, processor time of one thread.

    python -m benchmarks.admission --threads 1 --models ../shared/models/bit-stories3M
"""

import argparse
import heapq
import math
import random
import time
from collections import Counter, deque
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import torch

from spec_trl import SpeculativeConfig
from spec_trl.efficient_rollout.roofline import Coefficients, Roofline
from spec_trl.generation.engine.request_queue import RequestQueue
from spec_trl.generation.engine.rows import Request
from spec_trl.scheduling import admission
from spec_trl.scheduling.admission import PATIENCE
from spec_trl.scheduling.model_constants import ModelConstants
from spec_trl.specactor.cluster import Lengths

from .measure import Finding, add_machine_arguments, begin, shown, write_result
from .models import load_model


@dataclass(frozen=True)
class Machine:
    """A roofline; the least seconds of an eager forward, its launches; and the host's seconds for an admission."""

    name: str
    roofline: Roofline
    least_eager: float
    host: float

    def forward(self, tokens: int, rows: int, length: float, eager: bool) -> float:
        """Seconds of a forward over `tokens` tokens that reads the K/V of `rows` rows of `length` tokens."""
        constants, own = self.roofline.constants, self.roofline.coefficients
        memory = (constants.weight_bytes + own.rho_kappa * constants.kv_bytes * rows * length) / own.BW_eff
        seconds = self.roofline.smooth_maximum(memory, tokens * constants.dense_flops / own.F_eff, own.overlap_loss)
        return max(seconds, self.least_eager if eager else 0.0) + own.c_T * rows


QWEN_05B = ModelConstants("Qwen2.5-0.5B", 1.976e9, 0.0, 0.988e9, 0.0, 24576)  # float32, 494 M weights
QWEN_7B = ModelConstants("Qwen2.5-7B", 15.231e9, 0.0, 14.141e9, 0.0, 57344)  # bfloat16, EfficientRollout's constants
CPU = Machine(
    "CPU, 0.5 B",
    # cpu_kernels.json: dense layers and head take 60.3 ms with 1 row and 87.8 ms with 16: 58.4 ms, and 1.83 ms a row.
    Roofline(QWEN_05B, Coefficients(0.988e9 / 1.83e-3, 1.976e9 / 58.4e-3, 1, 1, 0, 0, 0, overlap_loss=1)),
    0.0, 1e-3,
)  # fmt: skip
H100 = Machine(
    "H100 (estimate), 7 B",
    # The published fit for an A100, times data sheet over data sheet: 989 / 312 TFLOP/s, 3.35 / 2.04 TB/s.
    Roofline(QWEN_7B, Coefficients(233.5e12 * 989 / 312, 1617e9 * 3.35 / 2.04, 0.457, 1, 39e-6, 0, 0)),
    28 * 41 * 8e-6, 1e-3,  # 28 layers of 41 operations, 8 µs to launch each
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """`requests` requests of `prompt` tokens, of which `copies` in a row share one, for `rows` rows."""

    machine: Machine
    rows: int
    requests: int
    lengths: Lengths
    prompt: int
    copies: int

    def __str__(self) -> str:
        return (
            f"{self.machine.name}, {self.rows} rows, {self.requests} requests of {self.lengths.median} tokens, "
            f"prompts of {self.prompt}, {'each its own' if self.copies == 1 else f'{self.copies} requests of each'}"
        )


CASES = (
    Case(CPU, 4, 32, Lengths(64, 0.8, 512), 40, 1),
    *(Case(CPU, 16, 128, Lengths(64, 0.8, 512), 40, copies) for copies in (1, 8)),
    Case(CPU, 16, 128, Lengths(200, 0.8, 1024), 150, 1),
    Case(H100, 16, 128, Lengths(250, 0.8, 2048), 150, 1),
    *(Case(H100, 64, 512, Lengths(250, 0.8, 2048), 150, copies) for copies in (1, 8)),
    Case(H100, 64, 512, Lengths(250, 0.8, 2048), 1500, 1),
    *(Case(H100, 64, 512, Lengths(1500, 0.8, 8192), 200, copies) for copies in (1, 8)),
    Case(H100, 256, 1024, Lengths(1500, 0.8, 8192), 200, 1),
)


@dataclass(frozen=True)
class Policy:
    """Free rows wait until there are `free` of them, for `rounds` rounds at most; or with `share` until they have cost
    that share of a round, empty. With `chunk`, so many prompt tokens a round are read beside the decoding rows."""

    name: str
    free: int = 1
    rounds: float = math.inf
    share: float = 0.0
    chunk: int = 0
    eager: bool = False

    def rounds_left(self, rows: int, free: int, empty: int, waited: int) -> float:
        """Rounds that `free` of `rows` rows will wait yet, after `waited` rounds and `empty` empty rows in them."""
        if self.share:
            return max(math.ceil((self.share * rows - empty) / free) - 1, 0)
        return 0 if free >= self.free else max(self.rounds - waited, 0)


AT_ONCE = Policy("at once")
POLICIES = (
    Policy("4 free rows", free=4),
    Policy("4 free rows or 8 rounds", free=4, rounds=8),
    Policy("an eighth of a round", share=0.125),
    Policy("a quarter of a round", share=0.25),
    Policy("half a round", share=0.5),
    Policy("chunks of 256 beside, captured", chunk=256),
    Policy("chunks of 256 beside, eager", chunk=256, eager=True),
)


def simulate(case: Case, policy: Policy, seed: int) -> tuple[float, float]:
    """Seconds until the last request has ended, and until one has on average."""
    chance, machine = random.Random(seed), case.machine
    lengths = [case.lengths.draw(chance) for _ in range(case.requests)]
    waiting, reading = deque(range(case.requests)), deque[list[int]]()  # requests; [request, prompt tokens left]
    ends: list[tuple[int, int]] = []  # of rows that decode: the round in which it ends, request
    in_flight: Counter[int] = Counter()  # rows by prompt
    now, done = 0.0, list[float]()
    at = cached = empty = waited = 0  # round; tokens of the rows that decode; row-rounds and rounds since an admission
    while waiting or ends or reading:
        free, left = case.rows - len(ends) - len(reading), math.inf
        if waiting and free:
            shares = in_flight[waiting[0] // case.copies] > 0
            idle = not ends and not reading
            left = 0 if shares or idle else policy.rounds_left(case.rows, free, empty, waited)
        if left == 0:
            tokens = empty = waited = 0
            for request in [waiting.popleft() for _ in range(min(free, len(waiting)))]:
                is_new = not in_flight[request // case.copies]
                in_flight[request // case.copies] += 1
                if is_new and policy.chunk and not idle:
                    reading.append([request, case.prompt])
                else:
                    tokens += case.prompt * is_new
                    cached += case.prompt
                    heapq.heappush(ends, (at + lengths[request], request))
            now += machine.host + (machine.forward(tokens, 0, 0, eager=True) if tokens else 0.0)
            continue
        active, beside = len(ends), min(policy.chunk, sum(tokens for _, tokens in reading))
        until_end = ends[0][0] - at if ends else math.inf
        until_read = math.ceil(reading[0][1] / policy.chunk) if reading else math.inf
        steps = int(min(until_end, until_read, left))
        length = (cached + active * steps / 2) / max(active, 1)
        now += steps * machine.forward(active + beside, active, length, policy.eager and beside > 0)
        at, cached = at + steps, cached + active * steps
        if waiting and free:
            empty, waited = empty + steps * free, waited + steps
        budget = steps * policy.chunk
        while reading and budget:
            part = min(budget, reading[0][1])
            budget, reading[0][1] = budget - part, reading[0][1] - part
            if not reading[0][1]:
                request, _ = reading.popleft()
                cached += case.prompt
                heapq.heappush(ends, (at + lengths[request], request))
        while ends and ends[0][0] <= at:
            _, request = heapq.heappop(ends)
            cached -= case.prompt + lengths[request]
            in_flight[request // case.copies] -= 1
            done.append(now)
    return now, fmean(done)


def decode(model: Any, case: Case, patience: float, seed: int) -> tuple[float, torch.Tensor]:
    """One rollout by the engine, without drafts: seconds of the processor, and the tokens."""
    chance = random.Random(seed)
    lengths = [case.lengths.draw(chance) for _ in range(case.requests)]
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, model.config.vocab_size, (case.requests, case.prompt), generator=generator)

    def make_queue(requests: list[Request]) -> RequestQueue:
        return RequestQueue([replace(each, limit=case.prompt + lengths[each.index]) for each in requests])

    admission.PATIENCE = patience
    started = time.process_time()
    output = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_new_tokens=case.lengths.maximum,
        pad_token_id=0, return_dict_in_generate=True, assistant_strategy="none", make_queue=make_queue,
        speculative_config=SpeculativeConfig(seed=seed, max_batch_size=case.rows),
    )  # fmt: skip
    return time.process_time() - started, output.sequences


def measured(name: str, options: argparse.Namespace) -> list[Finding]:
    """What the engine's rule changes, on a model that runs."""
    loaded = load_model(name, torch.float32, "cpu", seed=options.seed, measured=False)
    loaded.model.generation_config.eos_token_id = None
    found = []
    for batch in options.batches:
        rows, requests = map(int, batch.split(":"))
        case = Case(CPU, rows, requests, Lengths(options.median, 0.8, 8 * options.median), 24, 1)
        changes = []
        for turn in range(-1, options.turns):  # the first warms up
            order = (0.0, PATIENCE) if turn % 2 else (PATIENCE, 0.0)
            ways = {patience: decode(loaded.model, case, patience, options.seed + turn) for patience in order}
            if not torch.equal(ways[0.0][1], ways[PATIENCE][1]):
                raise RuntimeError("tokens differ")  # of a small model in float32 they may, at a near-tie
            changes.append(ways[PATIENCE][0] / ways[0.0][0] - 1)
        text = str(case).replace(CPU.name, f"measured: {loaded.facts['model']}")
        spread = (min(changes[1:]), max(changes[1:]))
        found.append(Finding(f"{text}: {PATIENCE:g} of a round", median(changes[1:]), "±%", "at once", spread))
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="draws of the lengths (default: %(default)s)")
    parser.add_argument("--models", nargs="*", default=[], help="folders of models to run")
    parser.add_argument("--batches", nargs="+", default=["16:96", "64:256"], help="ROWS:REQUESTS that are run")
    parser.add_argument("--median", type=int, default=60, help="new tokens where it is run (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="of each way that is run (default: %(default)s)")
    add_machine_arguments(parser, "admission")
    options = parser.parse_args(arguments)
    machine = begin(options)
    findings, details = [], []
    for case in CASES:
        base = [simulate(case, AT_ONCE, options.seed + draw) for draw in range(options.seeds)]
        for policy in POLICIES:
            if policy.eager and not case.machine.least_eager:
                continue  # it is the same as captured
            runs = [simulate(case, policy, options.seed + draw) for draw in range(options.seeds)]
            pairs = list(zip(runs, base, strict=True))
            total, mean = ([run[part] / other[part] - 1 for run, other in pairs] for part in (0, 1))
            details.append({"case": str(case), "policy": policy.name, "total": fmean(total), "mean": fmean(mean)})
            if policy.share in (0, PATIENCE) and policy.rounds == math.inf:
                spread = (min(total), max(total))
                findings.append(Finding(f"{case}: {policy.name}", fmean(total), "±%", AT_ONCE.name, spread))
    for name in options.models:
        findings += measured(name, options)
    write_result(
        options.output, "rollouts", "When freed rows are given to waiting requests",
        "Change of the time until the last request has ended; less is better. Simulated unless it says measured: "
        f"mean, lowest and highest of {options.seeds} draws of log-normal lengths (σ = 0.8, medians as given), no "
        "drafts. Measured: processor time of one thread, median, lowest and highest of "
        f"{options.turns} turns, same tokens both ways.",
        machine, findings, {"options": shown(options), "policies": details},
    )  # fmt: skip


if __name__ == "__main__":
    main()
