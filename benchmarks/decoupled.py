"""Decoupled against coupled execution (SpecActor §4.1): drafter and target on a core each, taking turns or at once.

Coupled, both run in this process, one after the other. Decoupled, the drafter runs on a thread, or in a second process
as a rank of its own. Each has the threads of --threads. The ratio is compared with what `specactor/token_speed.py`
predicts from the coupled runs: from their acceptance, and the seconds of a draft token (D) and of the rest of a round
(V). Where prediction and measurement differ, the parts say why: a period's tokens, and its seconds, max(w D, V).
"""

import argparse
import os
import statistics
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm

from spec_trl.distributed.decoupled import DraftRank, serve
from spec_trl.generation.drafters.decoupled.drafter import DecoupledDrafter
from spec_trl.generation.drafters.decoupled.thread import DraftThread
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.scheduling.acceptance import acceptance_of
from spec_trl.specactor.token_speed import busy_decoupled_speed, busy_window_tokens, coupled_speed

from .measure import Finding, add_machine_arguments, begin, shown, write_result
from .models import DTYPES, LoadedModel, load_model, model_line, weights_line
from .workload import Workload, end_tokens, prompt_source


COUPLED, THREAD, RANK = "coupled", "decoupled, thread", "decoupled, rank"
Run = dict[str, float]


def generate(loaded: LoadedModel, work: Workload, drafter: Drafter, options: argparse.Namespace, seed: int) -> Run:
    """One call, and what its rounds did."""
    result = loaded.model.generate(
        **work.padded(torch.device("cpu")), do_sample=True, top_k=0, max_new_tokens=work.max_new_tokens,
        pad_token_id=work.pad_token_id, assistant_strategy="self", return_dict_in_generate=True, drafter=drafter,
        speculative_config={"seed": seed, "draft_length": options.draft_length, "sd_toggle": "always"},
    )  # fmt: skip
    found = result.statistics
    if found.drafter_failure is not None:
        raise RuntimeError(found.drafter_failure)
    decoding = sum(point.seconds for point in found.points)
    drafting = found.phase_seconds["draft"]
    return {
        "tokens_per_second": found.tokens / decoding,
        "block_efficiency": found.total.block_efficiency,
        "round": decoding / found.rounds,
        "draft": drafting / found.rounds / options.draft_length,
        "rest": (decoding - drafting) / found.rounds,
    }


def summary(runs: dict[str, list[Run]], draft_length: int) -> dict[str, Any]:
    """Measured and predicted ratios of the ways, from runs in pairs."""
    middle = {way: {name: statistics.median(run[name] for run in own) for name in own[0]} for way, own in runs.items()}
    coupled, window = middle[COUPLED], draft_length + 1
    p = acceptance_of(coupled["block_efficiency"], draft_length)
    times = coupled["draft"], coupled["rest"]
    predicted = busy_decoupled_speed(p, window, *times) / coupled_speed(p, draft_length, *times)
    found: dict[str, Any] = {"acceptance": p, "medians": middle, "predicted": predicted, "ways": {}}
    for way in runs.keys() - {COUPLED}:
        ratios = [
            one["tokens_per_second"] / other["tokens_per_second"]
            for one, other in zip(runs[way], runs[COUPLED], strict=True)
        ]
        found["ways"][way] = {
            "ratios": ratios,
            "measured": statistics.median(ratios),
            "predicted_tokens": busy_window_tokens(p, window),
            "tokens": middle[way]["block_efficiency"],
            "predicted_period": max(window * times[0], times[1]),
            "period": middle[way]["round"],
        }
    return found


def findings(details: dict[str, Any]) -> list[Finding]:
    """Ratios, and the parts of their predictions."""
    found = []
    for gamma, cell in details["cells"].items():
        name = f"{model_line(details['model'])}, {details['options']['batch']} rows, γ = {gamma}"
        coupled = cell["medians"][COUPLED]
        found += [
            Finding(f"{name}: D over V", coupled["draft"] / coupled["rest"], ""),
            Finding(f"{name}: p", cell["acceptance"], "%"),
            Finding(f"{name}: predicted, decoupled", cell["predicted"], "×", "coupled"),
        ]
        for way, own in sorted(cell["ways"].items()):
            interval = min(own["ratios"]), max(own["ratios"])
            found += [
                Finding(f"{name}: measured, {way}", own["measured"], "×", "coupled", interval),
                Finding(
                    f"{name}: {way}, tokens of a period", own["tokens"] / own["predicted_tokens"], "×", "predicted"
                ),
                Finding(
                    f"{name}: {way}, seconds of a period", own["period"] / own["predicted_period"], "×", "predicted"
                ),
            ]
    return found


def load(options: argparse.Namespace, measured: bool) -> LoadedModel:
    return load_model(options.model, DTYPES[options.dtype], "cpu", options.agreement, options.seed, measured=measured)


def join(rank: int, options: argparse.Namespace) -> None:
    """Makes this process a rank of two."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(options.port)}
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo", rank=rank, world_size=2)


def draft(_: int, options: argparse.Namespace) -> None:
    """The second process."""
    join(1, options)
    loaded = load(options, measured=False)
    serve(SelfDrafter(loaded.model), verifier=0)
    dist.destroy_process_group()


def measure(options: argparse.Namespace, link: DraftRank | None) -> dict[str, Any]:
    """The pairs of each γ, ways alternating."""
    loaded = load(options, measured=not options.no_agreement)
    prompts = prompt_source(loaded, None, options.batch, options.seed)
    work = Workload(prompts, options.max_new_tokens, 1.0, end_tokens(loaded, ignore_eos=True), 0)
    drafter = SelfDrafter(loaded.model)
    ways: dict[str, Drafter] = {COUPLED: drafter}
    if "thread" in options.ways:
        ways[THREAD] = DecoupledDrafter(DraftThread(drafter))
    if link is not None:
        ways[RANK] = DecoupledDrafter(link)
    cells: dict[int, Any] = {}
    for gamma in options.draft_lengths:
        own = argparse.Namespace(**vars(options), draft_length=gamma)
        runs: dict[str, list[Run]] = {way: [] for way in ways}
        for repeat in tqdm(range(-1, options.repeats), desc=f"γ = {gamma}"):  # the first is a warm-up
            order = list(ways) if repeat % 2 else list(reversed(ways))
            for way in order:
                run = generate(loaded, work, ways[way], own, options.seed + max(repeat, 0))
                if repeat >= 0:
                    runs[way].append(run)
        cells[gamma] = summary(runs, gamma) | {"runs": runs}
    return {"model": loaded.facts, "options": shown(options, "port"), "cells": cells}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="shape:qwen2.5-0.5b", help="folder, wide:FOLDER*k, shape:NAME or CONFIG")
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--agreement", type=float, default=0.93, help="shape models: overlap with their 4-bit copy")
    parser.add_argument("--no-agreement", action="store_true", help="do not measure it again")
    parser.add_argument("--ways", nargs="+", default=["thread", "rank"], choices=["thread", "rank"])
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[3], help="γ; the window is γ + 1")
    parser.add_argument("--batch", type=int, default=1, help="rows")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5, help="of all ways in turns; medians count")
    parser.add_argument("--port", type=int, default=29533, help="of the two ranks")
    add_machine_arguments(parser, "decoupled")
    parser.set_defaults(threads=1, device="cpu")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    machine = begin(options)
    link, other = None, None
    if "rank" in options.ways:
        other = mp.spawn(draft, (options,), join=False, daemon=True)  # ends with this process, whatever ends it
        join(0, options)
        link = DraftRank(1, strategy="self")
    details = measure(options, link)
    if link is not None and other is not None:
        link.close()
        other.join()
        dist.destroy_process_group()
    title = "Decoupled against coupled execution"
    setup = (
        f"{options.repeats} runs of each way, in turns and in both orders; medians, and ratios within a turn from the "
        f"lowest to the highest. {options.threads} thread(s) for the target and as many for the drafter, the policy's "
        f"4-bit copy; decoding without prefill.{weights_line(details['model'])}"
    )
    write_result(options.output, "workers", title, setup, machine, findings(details), details)


if __name__ == "__main__":
    main()
