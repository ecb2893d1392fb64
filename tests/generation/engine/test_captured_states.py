"""Families with states where forwards are captured: replays and sends of a round, prompts of several lengths."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_trl import release
from spec_trl.generation.engine.kv import memory, states
from spec_trl.generation.engine.network import scans
from spec_trl.generation.engine.rollout import Rollout
from tests.conftest import TRANSFORMERS
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.drafters.mtp.heads import write_heads
from tests.generation.engine.tape import Tape, spoil_pool
from tests.tiny_families import make


if TRANSFORMERS < (5, 21):
    pytest.skip("before 5.21 mixers read their states elsewhere, and are refused", allow_module_level=True)

CAPTURED = [pytest.param(family, marks=pytest.mark.slow) for family in ("lfm2", "falcon_h1", "mamba2")]
ROWS = random_rows([5, 9, 1, 12, 7, 3])
PROMPTS = pad_left([*ROWS, ROWS[3]])  # a prompt of one token, and two copies
NEW = 16


@pytest.mark.parametrize("family", ["qwen3_5_text", *CAPTURED])
@pytest.mark.parametrize(
    ("strategy", "options", "captures", "sends"),
    # A step writes its states; a verification has a commit. The last one's drafts go by single steps.
    [("none", {}, 1, 0), ("self", {}, 3, 1), ("self", {"no_repeat_ngram_size": 9}, 2, 1)],
    ids=["none", "self", "steps"],
)
def test_captured_forwards(
    family: str,
    strategy: str,
    options: dict[str, Any],
    captures: int,
    sends: int,
    tape: Tape,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replay holds what it feeds anew, and one more commits it, in all layers; a draft captured whole begins at the
    committed states each time, and single steps, which advance them, run once."""
    network, config = make(family), {"draft_length": 3}
    options = options | {"max_new_tokens": NEW}
    expected = generate(network, PROMPTS, strategy, config | {"runner": "eager"}, **options)
    assert not tape.recorded
    rounds = rounds_of(tape, monkeypatch)
    for _ in range(2):  # captured, then kept
        rounds.clear()
        result = generate(network, PROMPTS, strategy, config | {"runner": "graph"}, **options)
        assert outputs(result) == outputs(expected) and result.statistics.total == expected.statistics.total
    assert tape.recorded == captures and max(rounds) == (captures, sends)
    assert rounds.count((captures, sends)) >= len(rounds) - 2 > 2  # the last ones have other shapes
    assert strategy == "none" or expected.statistics.total.accepted > 20
    release(network)


def test_no_replay_writes_to_what_a_commit_reads(tape: Tape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head takes in the target's features between a verification and its commit."""
    network, config = write_heads(tmp_path, "qwen3_5_text")[0], {"draft_length": 3}
    expected = generate(network, PROMPTS, "mtp", config | {"runner": "eager"}, max_new_tokens=NEW)
    taken = spoil_pool(monkeypatch, tape)
    for _ in range(2):
        result = generate(network, PROMPTS, "mtp", config | {"runner": "graph"}, max_new_tokens=NEW)
        assert outputs(result) == outputs(expected) and result.statistics.total == expected.statistics.total
    assert len(taken) > 3 and result.statistics.total.drafted > 50


def test_what_cannot_be_compiled_is_captured(tape: Tape, recwarn: pytest.WarningsRecorder) -> None:
    """torch.compile does not trace mixers; the draft loop ran step by step for ever, uncaptured."""
    network = make("qwen3_5_text")
    result = generate(network, PROMPTS, "self", {"runner": "compiled", "draft_length": 3}, max_new_tokens=NEW)
    assert tape.recorded == 3 and result.statistics.graphs == 2 and result.statistics.total.accepted > 20
    assert not [each for each in recwarn if "captured" in str(each.message)]
    release(network)


def rounds_of(tape: Tape, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Numbers of replays, and of tensors sent for states, of each round from now on."""
    rounds, sends, sent, decode_round = list[tuple[int, int]](), list[Tensor](), memory.sent, Rollout.decode_round

    def send(values: Tensor, device: torch.device) -> Tensor:
        sends.append(values)
        return sent(values, device)

    def watched(rollout: Rollout, plan: Any) -> None:
        before = tape.replayed, len(sends)
        decode_round(rollout, plan)
        rounds.append((tape.replayed - before[0], len(sends) - before[1]))

    monkeypatch.setattr(scans, "sent", send)
    monkeypatch.setattr(states, "sent", send)
    monkeypatch.setattr(Rollout, "decode_round", watched)
    return rounds


@pytest.mark.parametrize(
    "family", ["qwen3_5_text", "mamba", "falcon_h1", "nemotron_h", pytest.param("kimi_linear", marks=pytest.mark.slow)]
)
def test_prompts_of_several_lengths_are_read_together(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; on a CPU each one alone. Padding would move states whose time steps are at least 1."""
    network, found, is_limited = make(family), set[int](), family == "nemotron_h"
    for module in network.modules():
        if is_limited and hasattr(module, "time_step_limit"):
            module.time_step_limit = (1.0, math.inf)
    together, prompts = scans.prompt_groups, pad_left(random_rows([5, 9, 1, 12, 7, 3, 20, 2]))

    def grouped(lengths: Sequence[int], alone: bool, pads: bool) -> list[tuple[int, list[int]]]:
        done = together(lengths, False, pads)
        found.add(len(done))
        return done

    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=4)
    alone = generate(network, prompts, **options)
    monkeypatch.setattr(scans, "prompt_groups", grouped)
    result = generate(network, prompts, **options)
    assert outputs(result) == outputs(alone)
    torch.testing.assert_close(result.logprobs, alone.logprobs, rtol=1e-5, atol=1e-6)
    assert max(found) >= 7 if is_limited else found == {1}
