"""What logits processors add to a round: the repetition penalty and top-p against a round without processors.

All kinds of rounds run in turns, each in an engine of its own over one model, and a ratio is of two rounds next to
each other. Drafts come from lookups, which cost nothing: where a network drafts, its draws are processed too.
"""

from collections.abc import Sequence
from statistics import median

import torch
from transformers import LogitsProcessor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TopPLogitsWarper

from spec_trl.generation.configuration import SpeculativeConfig
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.measuring.round_bench import RoundBench
from spec_trl.scheduling.control import Chain

from .measure import Finding, Options, begin, shown, spread, write_result
from .models import load_model, model_line


BATCH, DRAFT_LENGTH, PENALTY, TOP_P = 16, 5, 1.1, 0.95


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Options(__doc__, "processors", "--model shape:tiny --prompt 16 --turns 1")
    parser.add_argument("--model", default="shape:qwen2.5-0.5b", help="folder or shape:NAME")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--turns", type=int, default=15, help="rounds of each kind")
    options = parser.read(arguments, "prompt", "turns")
    machine = begin(options)
    loaded = load_model(options.model, torch.float32, options.device, seed=options.seed, measured=False)
    model = loaded.model
    generator = torch.Generator().manual_seed(options.seed)
    prompt = torch.randint(model.config.vocab_size, (1, options.prompt), generator=generator).to(model.device)
    columns = options.prompt + (options.turns + 2) * (DRAFT_LENGTH + 1)
    kinds: dict[str, list[LogitsProcessor]] = {
        "without": [],
        "repetition penalty": [RepetitionPenaltyLogitsProcessor(PENALTY)],
        "top-p": [TopPLogitsWarper(TOP_P)],
        "both": [RepetitionPenaltyLogitsProcessor(PENALTY), TopPLogitsWarper(TOP_P)],
    }
    plan = [Chain(0, DRAFT_LENGTH)]
    with torch.inference_mode():
        benches = {
            name: RoundBench(
                model, [NgramDrafter(2)], prompt.expand(BATCH, -1), columns, SpeculativeConfig(), processors=own
            )
            for name, own in kinds.items()
        }  # fmt: skip
        turns = [{name: bench.round(plan) for name, bench in benches.items()} for _ in range(options.turns + 1)]
    turns = turns[1:]  # the first warms up
    findings = []
    for name in kinds:
        if name != "without":
            ratios = [turn[name] / turn["without"] for turn in turns]
            what = f"cost of a round with {name}"
            findings.append(Finding(what, median(ratios), "×", "without processors", spread(ratios)))
    seconds = {name: median(turn[name] for turn in turns) for name in kinds}
    findings.append(Finding("a round without processors", seconds["without"], "s"))
    write_result(
        options.output, "rollouts", "Logits processors",
        f"{model_line(loaded.facts)}; batch {BATCH}, copies of a prompt of {options.prompt} tokens; "
        f"γ = {DRAFT_LENGTH} by lookups, temperature 1, repetition_penalty={PENALTY}, top_p={TOP_P}. Medians of "
        f"{options.turns} rounds of each kind in turns, ratios of neighbours, with the lowest and the highest.",
        machine, findings, {"options": shown(options), "model": loaded.facts, "seconds": seconds},
    )  # fmt: skip


if __name__ == "__main__":
    main()
