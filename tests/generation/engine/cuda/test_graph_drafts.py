"""Draft loops that are captured whole, with a tape in the place of CUDA graphs."""

import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LogitsProcessorList

from spec_trl.generation.drafters.autoregressive import NetworkDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.cuda import graph_runner
from spec_trl.generation.engine.cuda.graph_capture import Outputs, Recording
from spec_trl.generation.engine.drafter import NetworkDraft
from spec_trl.generation.engine.kv import row_memory
from spec_trl.native import cpu_products
from tests.conftest import tiny_llama
from tests.generation.calls import Alternate, generate, outputs, pad_left, random_rows
from tests.generation.engine.tape import check_drafts as check
from tests.generation.engine.tape import no_memory, spoil_pool


PROMPTS = pad_left(random_rows([5, 9, 1, 12, 7, 7, 3]))
TWENTY = pad_left(random_rows([3 + row % 7 for row in range(20)]))  # which run through 24, 16 and 8
DRAWS: dict[str, dict[str, Any]] = {
    "greedy": dict(do_sample=False),
    "softmax": {},
    "filters": dict(temperature=0.8, top_k=12, top_p=0.9, min_p=0.01),
    "instruct": dict(repetition_penalty=1.2, temperature=0.7, top_k=20, top_p=0.8),  # as Qwen2.5's own settings
}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all in flight": ({}, {}),  # 7 rows of a bucket of 8
    "rows retire": ({}, dict(eos_token_id=[1, 2], max_new_tokens=40)),  # and drafts have EOS in them
    "rows are refilled": ({"max_batch_size": 3}, dict(eos_token_id=[1, 2, 3, 4])),
}


def run(
    model: nn.Module, runner: str, strategy: str = "self", config: Any = None, prompts: Any = PROMPTS, **options: Any
) -> Any:
    given = {"runner": runner, "draft_length": 3} | (config or {})
    return generate(model, prompts, strategy, given, **({"max_new_tokens": 28} | options))


def drafts_of(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """The drafts of each round from now on."""
    found: list[list[list[int]]] = []
    propose = NetworkDrafter.propose

    def watched(self: NetworkDrafter, *given: Any) -> Any:
        proposal = propose(self, *given)
        found.append(proposal.tokens.tolist())
        return proposal

    monkeypatch.setattr(NetworkDrafter, "propose", watched)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("draw", DRAWS)
def test_drafts_are_those_of_single_steps(fresh, tape, replays, monkeypatch, draw: str, way: str) -> None:
    config, options = WAYS[way]
    given = dict(config=config, **options, **DRAWS[draw])
    plain = outputs(run(fresh, "eager", "none", **given))
    drafts = drafts_of(monkeypatch)
    expected = run(fresh, "eager", **given)
    stepped = [*drafts]
    for _ in range(2):  # captured, then kept
        drafts.clear()
        found = run(fresh, "graph", **given)
        check(found, expected)
        assert outputs(found) == plain and drafts == stepped
    assert len(replays) > 4
    if way == "rows retire":
        assert len({rows for rows, _ in replays}) > 2


def test_a_cache_of_its_own(fresh, tape, replays) -> None:
    """The first forward of a loop feeds one token, or two after drafts that were all accepted."""
    twin = tiny_llama(num_hidden_layers=1)
    given = dict(strategy="model", assistant_model=twin, max_new_tokens=40)
    found = run(fresh, "graph", **given)
    check(found, run(fresh, "eager", **given))
    assert found.statistics.total.acceptance_rate == 1 and len(replays) > 2


def test_each_way_to_draw_has_a_loop_of_its_own(fresh, tape) -> None:
    """A second call with other filters must not draw by those of the first."""
    for options in (*DRAWS.values(), dict(temperature=2.5), dict(do_sample=False)):
        check(run(fresh, "graph", **options), run(fresh, "eager", **options))


PER_STEP: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "n-grams": ({}, dict(repetition_penalty=1.3, no_repeat_ngram_size=4)),
    "lengths": ({}, dict(min_new_tokens=5, eos_token_id=[5])),
    "a processor that may refuse": ({}, dict(logits_processor=LogitsProcessorList([Alternate()]))),
    "rejection": ({"verification": "rejection"}, {}),
}


@pytest.mark.parametrize("case", PER_STEP)
def test_what_needs_the_text_or_the_logits_goes_step_by_step(fresh, tape, replays, case: str) -> None:
    config, options = PER_STEP[case]
    check(run(fresh, "graph", config=config, **options), run(fresh, "eager", config=config, **options))
    assert not replays and tape.replayed > 20


def test_captures_share_a_pool(fresh, tape, monkeypatch) -> None:
    """Each may use what another took: nobody reads there what has not been written in the same replay."""
    taken = spoil_pool(monkeypatch, tape)
    given = dict(prompts=TWENTY, eos_token_id=[1], max_new_tokens=60)
    check(run(fresh, "graph", **given), run(fresh, "eager", **given))
    assert len(taken) > 3 and all(len(own) > 20 for own in taken)


def test_a_loop_keeps_nothing_of_the_call(fresh, tape, replays) -> None:
    """Beyond its buffers: a session holds the rows of its generation."""
    run(fresh, "graph")
    gc.collect()
    assert replays and not any(isinstance(thing, NetworkDraft) for thing in gc.get_objects())


# ---- what fails -----------------------------------------------------------------------------------------------------


def of_loops(monkeypatch: pytest.MonkeyPatch, tape: Any, change: Callable[[Recording], Recording]) -> None:
    """Changes the recordings of loops, which alone have tokens in the place of features."""
    record = tape.record

    def watch(work: Callable[[], Outputs], apart: bool = False) -> Recording:
        recording = record(work, apart)
        return recording if recording.features is None else change(recording)

    monkeypatch.setattr(tape, "record", watch)


def idle(recording: Recording) -> Recording:
    return recording._replace(replay=lambda: None)


def shifted(recording: Recording) -> Recording:
    def replay() -> None:
        recording.replay()
        recording.features.add_(1).remainder_(64)
        recording.logits.add_(1)

    return recording._replace(replay=replay)


@pytest.mark.parametrize(
    ("change", "said"), [(no_memory, "not now"), (idle, "logits differ"), (shifted, "logits differ")]
)
def test_without_its_loop_it_goes_step_by_step(fresh, tape, monkeypatch, change: Any, said: str) -> None:
    of_loops(monkeypatch, tape, change)
    with pytest.warns(UserWarning, match=f"draft loop .*goes step by step for 8 rows x 3 drafts.*{said}") as seen:
        found = run(fresh, "graph")
    assert len(seen) == 1  # it is not tried again
    check(found, run(fresh, "eager"))
    assert found.statistics.graphs == tape.recorded - 1


def test_a_near_tie_is_no_failure(fresh, tape, monkeypatch, replays) -> None:
    """Rounding may draw another token, and what follows it has other scores."""

    def rounded(recording: Recording) -> Recording:
        def replay() -> None:
            recording.replay()
            recording.features[:, 1:].add_(1).remainder_(64)
            recording.logits[:, 2:].add_(5)

        return recording._replace(replay=replay)

    of_loops(monkeypatch, tape, rounded)
    assert outputs(run(fresh, "graph")) == outputs(run(fresh, "eager", "none")) and len(replays) > 3


@pytest.mark.parametrize("capture_after", [1, 3])
def test_a_drafter_that_returns_nan_is_dropped(fresh, tape, monkeypatch, capture_after: int) -> None:
    """By its loop, whose capture is not at fault, and before."""
    monkeypatch.setattr(graph_runner, "CAPTURE_AFTER", capture_after)
    drafter = SelfDrafter(fresh, kernel="reference")
    drafter.network.lm_head = nn.Linear(64, 64, dtype=torch.float64)
    nn.init.constant_(drafter.network.lm_head.weight, float("nan"))
    drafter.quantized.layers.clear()  # that they run is not what is tested
    with pytest.warns(UserWarning, match="the draft network returned NaN logits") as seen:
        found = generate(fresh, PROMPTS, config={"runner": "graph"}, drafter=drafter)
    assert len(seen) == 1 and outputs(found) == outputs(generate(fresh, PROMPTS))
    assert found.statistics.drafter_failure is not None and found.statistics.total.accepted == 0


# ---- few shapes, and little memory ----------------------------------------------------------------------------------


SIXTY_FOUR = pad_left(random_rows([5 + row % 7 for row in range(64)]))
LENGTHS: dict[str, Any] = dict(max_new_tokens=240, eos_token_id=[1, 2])  # geometric


@pytest.mark.parametrize(("strategy", "most"), [("self", 8), ("none", 4)])
def test_a_rollout_of_64_rows_captures_few_shapes(tape, strategy: str, most: int) -> None:
    """While its rows finish: 21 and 11 with buckets of 1, 2, 4, 8 and then of 8 more rows."""
    model, options = tiny_llama(num_hidden_layers=1), LENGTHS | {"max_new_tokens": 120}
    result = generate(model, SIXTY_FOUR, strategy, {"runner": "graph", "seed": 1}, **options)
    assert result.statistics.rounds > 20 and tape.recorded <= most
    assert tape.replayed > 0.85 * result.statistics.rounds
    assert outputs(result) == outputs(generate(model, SIXTY_FOUR, "none", {"runner": "eager", "seed": 1}, **options))


NEEDED = 16 * 8192 * 64 * 8 + 64 * (75 * 512 + 3 * 6 * 64 * 4 + 256 * 512)  # bytes: a prefill, and 64 rows (RowNeeds)


@pytest.mark.parametrize(
    ("left", "captures", "said"),
    [
        (16 << 20, 4, r"may take 0\.02 GiB instead of max_graph_memory=4\. Tokens"),
        (6 << 20, 3, r"may take 0\.01 GiB instead of max_graph_memory=4, and 39 of 64 rows are in flight\..*Lower"),
    ],
)
def test_little_memory_makes_captured_forwards_fewer_before_rows(
    tape, monkeypatch: pytest.MonkeyPatch, left: int, captures: int, said: str
) -> None:
    """Rows were one at a time, without a word, and took 15 times as many rounds."""
    model = tiny_llama(num_hidden_layers=1)
    config = {"runner": "graph", "draft_length": 5}
    plain = generate(model, SIXTY_FOUR, "none", {"runner": "eager"}, **LENGTHS)
    monkeypatch.setattr(tape, "bytes", lambda: tape.recorded << 22)  # four captures take 16 MiB
    monkeypatch.setattr(row_memory, "LEAST_GRAPH_MEMORY", 0)
    monkeypatch.setattr(cpu_products, "seen", set())
    monkeypatch.setattr(row_memory, "free_for_cache", lambda *_: NEEDED + left)
    with pytest.warns(UserWarning) as seen:
        found = [generate(model, SIXTY_FOUR, "self", config, **LENGTHS) for _ in range(2)]
    little, reached = (str(each.message) for each in seen)  # once each
    assert "captured forwards take" in reached and re.search(said, little)
    assert all(outputs(each) == outputs(plain) for each in found) and tape.recorded == captures
    assert found[0].statistics.rounds < 60
