"""A rollout of many rows whose lengths have a long tail: phases, rounds and captured forwards, in a first and a second
call, with captured forwards freed after each call, and kept.

Many tokens end a row, so lengths are about geometric. The policy's 4-bit copy agrees with it (see `speculation`), and
what drafts is decided by measured rounds. All ways share their noise, so they decode the same rows but for near-ties.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from spec_trl import SpeculativeConfig, release

from .decode import make_prompts, sampled
from .part import Part
from .shapes import config_of, grid_model


ROWS, PROMPT, NEW = 64, 256, 1024
MEAN_LENGTH = 250  # tokens of a row, if every token were drawn as often
CALLS = 2
METHODS: dict[str, tuple[str, bool]] = {  # strategy, keep_graphs
    "self, graphs freed": ("self", False),
    "self, graphs kept": ("self", True),
    "none, graphs kept": ("none", True),
}


def rollout(part: Part, model: PreTrainedModel, strategy: str, keep: bool, seed: int) -> dict[str, Any]:
    """One call."""
    rows, prompt, new = (4, 8, 12) if part.is_smoke else (ROWS, PROMPT, NEW)
    vocabulary, mean = model.config.vocab_size, 6 if part.is_smoke else MEAN_LENGTH
    prompts = make_prompts(rows, prompt, vocabulary, seed, part.device)  # [rows, prompt]
    ends = list(range(1, vocabulary, mean))
    output = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), assistant_strategy=strategy, return_dict_in_generate=True,
        speculative_config=SpeculativeConfig(seed=seed, keep_graphs=keep), eos_token_id=ends,
        **sampled(new),
    )  # fmt: skip
    facts = output.statistics
    return {
        "seconds": facts.seconds,
        "phase_seconds": dict(facts.phase_seconds),
        "rounds": facts.rounds,
        "speculative_rounds": sum(point.rounds for point in facts.points if point.draft_length),
        "block_efficiency": facts.block_efficiency,
        "tokens": facts.tokens,
        "mean_length": facts.tokens / rows,
        "half_ended_in": facts.ended_in[len(facts.ended_in) // 2],
        "graphs": facts.graphs,  # that are held at the end: those kept from the call before too
        "graph_bytes": facts.graph_bytes,
        "drafter_failure": facts.drafter_failure,
        "reason": facts.reason,
    }


def calls(part: Part, model: PreTrainedModel, strategy: str, keep: bool) -> list[dict[str, Any]]:
    """All calls of one way, from nothing kept."""
    release(model)
    found = [rollout(part, model, strategy, keep, part.seed + call) for call in range(CALLS)]
    for before, call in zip([{"graphs": 0}, *found], found, strict=False):
        call["captures"] = call["graphs"] - (before["graphs"] if keep else 0)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    part = Part("tail", __doc__, arguments)
    part.state(dtype="bfloat16", rows=ROWS, prompt=PROMPT, new_tokens=NEW, temperature=1.0)
    model = grid_model(config_of(part.shape), 0.0, part.device, torch.bfloat16, part.seed)
    found: dict[str, list[dict[str, Any]]] = {}
    longest = 0.0
    for name, (strategy, keep) in METHODS.items():
        done = part.measure(name, partial(calls, part, model, strategy, keep), needs=longest)
        if done is not None:
            found[name], longest = done, max(longest, sum(call["seconds"] for call in done))
    seconds = {name: done[-1]["seconds"] for name, done in found.items()}
    if len(seconds) == len(METHODS):
        freed, kept, plain = (seconds[name] for name in METHODS)
        part.record("ratios", {"freed over kept": freed / kept, "none over self, graphs kept": plain / kept})
    return part.finish()


if __name__ == "__main__":
    raise SystemExit(main())
