"""Running the requests of the TTS benchmark: one way after the other on the same request, in turns, against "none"."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from spec_trl import SpeculativeConfig
from spec_trl.cli.near_ties import measure_logit_noise, reference_scores
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.engine.statistics import SpeculationStatistics

from .identity import NOISE_LENGTH
from .measure import stopwatch
from .models import LoadedModel
from .tts_drafters import FROZEN, HELD_OUT, NONE
from .tts_numbers import Record, by_depth
from .workload import common_prefix


WARM_UP_TOKENS = 8


class RoundLengths(BaseStreamer):
    """Notes how many tokens each decoding round of one request committed; the first entries are the prompt
    and the first token."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def put(self, value: Tensor) -> None:
        self.counts.append(value.numel())

    def end(self) -> None:
        """Nothing to flush."""


@dataclass(frozen=True)
class Generated:
    """One call of `generate`: tokens of each row, tokens per round (batch 1 only), statistics, seconds."""

    completions: list[list[int]]
    rounds: list[int]
    statistics: SpeculationStatistics
    seconds: float


@dataclass(frozen=True)
class Bench:
    """What all runs share.

    Args:
        loaded: target and tokenizer.
        prompts: of the requests, in order.
        new_tokens: of each request; an earlier end of sequence is suppressed.
        seed: of the noise, together with the number of the request.
    """

    loaded: LoadedModel
    prompts: list[list[int]]
    new_tokens: int
    seed: int

    @property
    def target(self) -> PreTrainedModel:
        return self.loaded.model

    def generate(
        self, drafter: Drafter | None, draft_length: int, requests: Sequence[int], temperature: float,
        new_tokens: int | None = None,
    ) -> Generated:  # fmt: skip
        """Generates `requests` as one batch.

        Raises:
            RuntimeError: the drafter failed, which the engine survives and a measurement does not.
        """
        model, count = self.target, new_tokens or self.new_tokens
        chosen = [self.prompts[request] for request in requests]
        ids = torch.tensor(chosen, device=model.device)  # [B, prompt]
        streamer = RoundLengths() if len(requests) == 1 else None
        sampling: dict[str, object] = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        with stopwatch(model.device) as watch:
            output = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), **sampling, min_new_tokens=count,
                max_new_tokens=count, pad_token_id=model.generation_config.pad_token_id or 0, streamer=streamer,
                assistant_strategy="none" if drafter is None else drafter.strategy,
                drafter=[] if drafter is None else drafter, request_ids=list(requests), return_dict_in_generate=True,
                speculative_config=SpeculativeConfig(
                    draft_length=draft_length, seed=self.seed, sd_toggle="always"
                ),
            )  # fmt: skip
        facts: SpeculationStatistics = output.statistics
        if facts.drafter_failure is not None:
            raise RuntimeError(f"the drafter failed: {facts.drafter_failure}")
        rounds = streamer.counts[2:] if streamer is not None else []
        return Generated(output.sequences[:, ids.shape[1] :].tolist(), rounds, facts, watch.value)

    def record(self, made: Generated) -> Record:
        """What a result keeps of one call, as plain data."""
        facts = made.statistics
        total = facts.total
        record: Record = {
            "seconds": round(made.seconds, 4), "tokens": facts.tokens, "accepted": total.accepted,
            "drafted": total.drafted, "load": round(os.getloadavg()[0], 2),
        }  # fmt: skip
        if len(made.completions) == 1:
            record["blocks"], record["committed"] = by_depth(made.rounds, self.new_tokens)
            if total.blocks not in (0, sum(record["blocks"])):
                raise RuntimeError(f"rounds {made.rounds} do not add up to the engine's {total}")
        else:
            record["blocks"] = [counts.blocks for counts in facts.per_request]
            record["committed"] = [counts.committed for counts in facts.per_request]
            record["depth"] = {str(edge): [c.blocks, c.committed] for edge, c in facts.per_depth.items()}
        if facts.learning is not None:
            learned = facts.learning
            record |= {
                "updates": learned.updates, "update_seconds": round(learned.seconds, 4),
                "waited": round(learned.waited, 4), "bytes": learned.bytes,
            }  # fmt: skip
        return record

    def compared(self, record: Record, made: Generated, plain: Generated, requests: Sequence[int], t: float) -> Record:
        """`record` with "same", tokens up to the first that differs from "none"'s, and the distances of those that do.

        "ties" and "unexplained" count mismatches inside and outside of the logit noise between forward shapes.
        """
        record |= {"same": 0, "ties": 0, "unexplained": 0}
        for row, (ours, theirs) in enumerate(zip(made.completions, plain.completions, strict=True)):
            same = common_prefix(ours, theirs)
            record["same"] += same
            if ours == theirs:
                continue
            tie = same < min(len(ours), len(theirs)) and self._is_tie(requests[row], theirs, ours[same], same, t)
            record["ties" if tie else "unexplained"] += 1
        return record

    def _is_tie(self, request: int, plain: list[int], other: int, at: int, temperature: float) -> bool:
        """Whether `other` scores as high as "none"'s token at generated position `at`, within the logit noise."""
        model, text = self.target, self.prompts[request] + plain
        prefix = text[: len(self.prompts[request]) + at]
        if temperature:
            scores = reference_scores(model, prefix, temperature, self.seed, request, at)  # [V]
        else:
            with torch.no_grad():
                scores = model(torch.tensor([prefix], device=model.device)).logits[0, -1].double()  # [V]
        gap = (scores[[plain[at], other]].max() - scores[[plain[at], other]].min()).item()
        texts = torch.tensor([text[:NOISE_LENGTH]], device=model.device)  # [1, n]
        return gap < measure_logit_noise(model, texts, 7).largest / (temperature or 1)


def held_out_prompts(loaded: LoadedModel, stories: Path, tokens: int) -> list[list[int]]:
    """Beginnings, `tokens` long, of the stories that no drafter is trained on; the last story first.

    Raises:
        ValueError: there is no story, or none is long enough.
    """
    if not stories.exists():
        raise ValueError(f"--stories {stories.name} does not exist: pass a JSON list of strings")
    texts = json.loads(stories.read_text())[-HELD_OUT:][::-1]
    assert loaded.tokenizer is not None
    found = [ids[:tokens] for ids in loaded.tokenizer(texts)["input_ids"] if len(ids) >= tokens]
    if not found:
        raise ValueError(f"--prompt-tokens {tokens}: no story is that long")
    return found


def fingerprint(model: PreTrainedModel) -> str:
    """Of all parameters, bit for bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def warm_up(bench: Bench, drafters: Mapping[str, Drafter | None], draft_length: int, requests: Sequence[int]) -> None:
    """A short call of each way, which makes what is kept from call to call."""
    count = min(WARM_UP_TOKENS, bench.new_tokens)
    for drafter in drafters.values():
        bench.generate(drafter, draft_length, requests, 1.0, count)


def in_turns(
    bench: Bench, drafters: Mapping[str, Drafter | None], draft_length: int, requests: Sequence[int],
    temperature: float, shift: int, advance: Callable[[], object], beside_frozen: bool = False,
) -> dict[str, Record]:  # fmt: skip
    """Every way once on the same requests as one batch, a different one first each time (`shift`).

    A slow minute of the machine then hits all of them alike. "none" must be among them.

    Args:
        bench: see there.
        drafters: by way.
        draft_length: γ.
        requests: of the batch.
        temperature: of the sampling.
        shift: which way is the first.
        advance: called after each way.
        beside_frozen: run the frozen drafter once more right before each way that learns, or in every other cell
            right after it: "frozen_seconds". Many ways take minutes, in which a machine's load changes.
    """
    names = list(drafters)
    made: dict[str, Generated] = {}
    paired: dict[str, float] = {}
    for name in names[shift % len(names) :] + names[: shift % len(names)]:
        order = [name]
        if beside_frozen and name not in (NONE, FROZEN):
            order = [name, FROZEN] if shift % 2 else [FROZEN, name]
        for each in order:
            run = bench.generate(drafters[each], draft_length, requests, temperature)
            if each == name:
                made[name] = run
            else:
                paired[name] = run.seconds
        advance()
    records = {
        name: bench.compared(bench.record(made[name]), made[name], made[NONE], requests, temperature) for name in names
    }
    for name, seconds in paired.items():
        records[name]["frozen_seconds"] = round(seconds, 4)
    return records


def identity(cells: Sequence[Mapping[str, Record]]) -> dict[str, int]:
    """How many tokens, and requests, of all ways but "none" are the ones of "none"."""
    records = [record for cell in cells for name, record in cell.items() if name != NONE]
    return {
        "calls": len(records),
        "tokens": sum(record["tokens"] for record in records),
        "same": sum(record["same"] for record in records),
        "ties": sum(record["ties"] for record in records),
        "unexplained": sum(record["unexplained"] for record in records),
    }


def loads(cells: Sequence[Mapping[str, Record]]) -> tuple[float, float]:
    """Lowest and highest load average (1 min) at the end of a call."""
    values = [record["load"] for cell in cells for record in cell.values()] or [math.nan]
    return min(values), max(values)
