"""Drafts of EAGLE-3 and DFlash that are captured whole, with a tape in the place of CUDA graphs."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from spec_trl import release
from spec_trl.generation.drafters.dflash.dflash_network import DFlashConfig
from spec_trl.generation.drafters.feature_drafter import FeatureDrafter
from spec_trl.generation.engine.cuda import graph_runner
from spec_trl.generation.engine.cuda.graph_capture import Outputs, Recording
from spec_trl.generation.engine.cuda.graph_drafts import CapturedFeatures
from spec_trl.generation.engine.network.attention import RAGGED_ATTENTION, ragged_attention
from spec_trl.generation.planner.control import Chain
from spec_trl.papers.test_time_speculation.distilled_drafter import DistilledDrafter
from spec_trl.papers.test_time_speculation.options import TTSOptions
from tests.conftest import tiny_llama
from tests.generation.calls import Alternate, generate, outputs, pad_left, random_rows
from tests.generation.drafters.dflash import reference
from tests.generation.drafters.watching import KINDS, before
from tests.generation.engine.tape import check_drafts as check
from tests.generation.engine.tape import no_memory, spoil_pool
from tests.generation.races import Plans, random_plans


PROMPTS = pad_left(random_rows([5, 9, 1, 12, 7, 7, 3]))
each_kind = pytest.mark.parametrize("kind", KINDS)
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all in flight": ({}, dict(temperature=0.8, top_k=12, top_p=0.9, min_p=0.01)),  # 7 rows of a bucket of 8
    "rows retire": ({}, dict(eos_token_id=[1, 2], max_new_tokens=30, do_sample=False)),
    "rows are refilled": ({"max_batch_size": 3}, dict(eos_token_id=[1, 2, 3, 4, 5, 6])),
}


@pytest.fixture(autouse=True)
def released(tiny: PreTrainedModel) -> Iterator[None]:
    yield
    release(tiny)


@pytest.fixture
def drafter(kind: str, checkpoints: dict[str, str], tiny: PreTrainedModel) -> FeatureDrafter:
    return KINDS[kind](checkpoints[kind], tiny)


def run(model: PreTrainedModel, drafter: Any, runner: str = "graph", config: Any = None, **options: Any) -> Any:
    given = {"runner": runner, "draft_length": 3} | (config or {})
    return generate(model, PROMPTS, config=given, drafter=drafter, **({"max_new_tokens": 16} | options))


# ---- what they compute ----------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("way", WAYS)
def test_drafts_are_those_of_eager_rounds(kind: str, way: str, drafter, tiny, tape, replays) -> None:
    config, options = WAYS[way]
    expected = run(tiny, drafter, "eager", config, **options)
    assert not replays
    for _ in range(2):  # captured, then kept
        found = run(tiny, drafter, config=config, **options)
        check(found, expected)
    assert len(replays) > 4
    if way == "rows retire":
        # So few drafts of "mtp" are accepted that all rows end at once.
        assert len({rows for rows, _ in replays}) > 1 or kind == "mtp"


@each_kind
def test_nothing_of_a_round_runs_eagerly(kind: str, drafter, tiny, tape, replays) -> None:
    """Neither the network nor what it takes in of the target, once both are captured."""
    ran: list[str] = []
    rounds: list[tuple[bool, list[str]]] = []

    def begin_round(draft_length: int, *_: Any) -> None:
        rounds.append((draft_length == 3 and drafter.session.rows.active == 7, ran.copy()))
        ran.clear()

    run(tiny, drafter)
    before(drafter.network, "refine" if kind == "dflash" else "forward", lambda *_: ran.append("drafts"))
    before(drafter, "take_features", lambda *_: ran.append("takes in"))
    before(drafter, "propose", begin_round)
    replays.clear()
    run(tiny, drafter)
    # What ran between the beginnings of two rounds: one drafts, and takes in what the next one drafts from.
    alike = [after for (is_steady, _), (_, after) in zip(rounds, rounds[1:], strict=False) if is_steady]
    assert len(alike) > 4 and not any(alike) and len(replays) >= len(alike)


@each_kind
def test_rounds_without_it_and_other_lengths(kind: str, drafter, tiny, tape, replays) -> None:
    """Some rounds draft nothing, others fewer tokens than were verified before."""
    plans = [[Chain(0, length)] * bool(length) for length in (4, 4, 0, 2, 4, 0, 0, 2)]
    options = dict(max_new_tokens=36)
    found, expected = (
        generate(tiny, PROMPTS, config={"runner": runner}, drafter=drafter, control=Plans(1, plans), **options)
        for runner in ("graph", "eager")
    )
    check(found, expected)
    assert {length for _, length in replays} >= {2, 4}


def test_two_at_once_with_others(tiny, checkpoints, drafters, tape, replays) -> None:
    """Rounds of any of four drafters and races of several; what each was captured for serves the next call."""
    own = [KINDS[kind](checkpoints[kind], tiny) for kind in KINDS]
    members = [*own, *drafters("model", "ngram")]
    runs = [
        generate(tiny, PROMPTS, config={"runner": runner}, drafter=members, control=random_plans(4, 5))
        for runner in ("eager", "graph", "graph")
    ]
    for result in runs:
        assert outputs(result) == outputs(runs[0]) and result.statistics.drafter_failure is None
        assert result.statistics.per_drafter == runs[0].statistics.per_drafter
    assert len(replays) > 4 and tape.recorded == runs[2].statistics.graphs


@each_kind
def test_captures_share_a_pool(kind: str, drafter, tiny, tape, monkeypatch) -> None:
    """Nobody reads there what has not been written in the same replay."""
    taken = spoil_pool(monkeypatch, tape)
    check(run(tiny, drafter), run(tiny, drafter, "eager"))
    assert len(taken) > 2


@pytest.mark.parametrize(
    ("kind", "config", "options"),
    [("eagle3", {"verification": "rejection"}, {}), ("dflash", {}, dict(logits_processor=[Alternate()]))],
)
def test_what_needs_the_text_or_the_logits_drafts_eagerly(kind, config, options, drafter, tiny, tape, replays) -> None:
    check(run(tiny, drafter, config=config, **options), run(tiny, drafter, "eager", config=config, **options))
    assert not replays and tape.replayed > 10


# ---- weights that change, and what is kept --------------------------------------------------------------------------


@each_kind
@torch.no_grad()
def test_weights_that_change_in_place(kind: str, drafter, tiny, tape, replays) -> None:
    run(tiny, drafter)
    recorded = tape.recorded
    torch.manual_seed(0)
    for parameter in drafter.network.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    replays.clear()
    found = run(tiny, drafter)
    check(found, run(tiny, drafter, "eager"))
    assert len(replays) > found.statistics.rounds // 2 and tape.recorded == recorded


@pytest.mark.parametrize(("kind", "scope"), [("eagle3", "request"), ("dflash", "rollout")])
def test_what_is_learned_meanwhile(kind: str, scope: str, checkpoints, tiny, tape, replays) -> None:
    """By Test-Time Speculation: weights, or corrections of each row."""
    found = []
    for runner in ("eager", "graph"):
        student = KINDS[kind](checkpoints[kind], tiny)
        drafter = DistilledDrafter(student, TTSOptions(learning_rate=1e-2, scope=scope, stride=2))
        found.append([run(tiny, drafter, runner, max_new_tokens=16) for _ in range(2)])
    for graph, eager in zip(*reversed(found), strict=True):
        check(graph, eager)
        assert graph.statistics.learning.updates == eager.statistics.learning.updates > 2
    # It drafts otherwise than what has learned nothing.
    assert found[0][1].statistics.total != run(tiny, student, "eager", max_new_tokens=16).statistics.total
    assert len(replays) > 4


@pytest.mark.parametrize("kind", ["eagle3"])
def test_learners_that_come_and_go(kind: str, drafter, tiny, tape, replays) -> None:
    """Corrections hang in hooks: a draft that was captured with them, or before them, is not taken."""
    expected = run(tiny, drafter, "eager", max_new_tokens=16)
    check(run(tiny, drafter, max_new_tokens=16), expected)
    learning = DistilledDrafter(drafter, TTSOptions(learning_rate=1e-2, scope="request", stride=1))
    learned = run(tiny, learning, max_new_tokens=16)
    assert learned.statistics.total != expected.statistics.total
    assert learning.learner is not None
    learning.learner.release()
    check(run(tiny, drafter, max_new_tokens=16), expected)


@pytest.mark.parametrize(("kind", "keeps"), [("eagle3", True), ("dflash", False)])
def test_graphs_are_kept_or_freed(kind: str, keeps: bool, drafter, tiny, tape) -> None:
    config = {"keep_graphs": keeps}
    first = run(tiny, drafter, config=config)
    recorded = tape.recorded
    assert recorded == first.statistics.graphs
    second = run(tiny, drafter, config=config)
    assert (tape.recorded == recorded) == keeps and second.statistics.graphs == recorded
    check(second, first)


@pytest.mark.parametrize("kind", ["eagle3"])
def test_another_drafter_takes_the_place(kind: str, checkpoints, tiny, tape) -> None:
    """Drafters that come and go do not pile up, nor does what was captured for them."""
    graphs = [run(tiny, KINDS[kind](checkpoints[kind], tiny)).statistics.graphs for _ in range(3)]
    assert tape.recorded - graphs[2] >= 4  # two drafts and two intakes are gone
    gc.collect()
    assert sum(isinstance(thing, CapturedFeatures) for thing in gc.get_objects()) == 1


@pytest.mark.parametrize("kind", ["eagle3"])
@torch.no_grad()
def test_nan_does_not_outlive_the_weights(kind: str, drafter, tiny, tape) -> None:
    expected = run(tiny, drafter)
    weight = drafter.network.layers[0].self_attn.v_proj.weight
    good = weight.clone()
    weight.fill_(torch.nan)
    with pytest.warns(UserWarning, match="NaN logits"):
        assert outputs(run(tiny, drafter)) == outputs(expected)
    weight.copy_(good)
    check(run(tiny, drafter), expected)


@each_kind
def test_its_cache_lies_in_pages(kind: str, drafter, tiny, tape, replays) -> None:
    """Rows of several pages, of a prompt that they share; pages come back as rows leave."""
    rows = random_rows([120, 61, 3])
    prompts = pad_left([rows[0], *rows, rows[0]])
    config, options = {"draft_length": 3, "max_batch_size": 4}, dict(max_new_tokens=16, eos_token_id=[7, 8])
    eager, graph = (
        generate(tiny, prompts, config=config | {"runner": runner}, drafter=drafter, **options)
        for runner in ("eager", "graph")
    )
    check(graph, eager)
    assert len(replays) > 2 and graph.statistics.cache_bytes < eager.statistics.cache_bytes


# ---- what fails -----------------------------------------------------------------------------------------------------


def shifted(recording: Recording) -> Recording:
    def replay() -> None:
        recording.replay()
        recording.logits.add_(1)

    return recording._replace(replay=replay)


@pytest.mark.parametrize(
    ("kind", "change", "work"),
    [
        ("eagle3", no_memory, "draft"), ("dflash", shifted, "draft"),
        ("eagle3", shifted, "intake"), ("dflash", no_memory, "intake"),
    ],
)  # fmt: skip
def test_without_its_graph_it_goes_on_eagerly(kind, change, work: str, drafter, tiny, tape, monkeypatch) -> None:
    expected, record, changed = run(tiny, drafter, "eager"), tape.record, []

    def watch(forward: Callable[[], Outputs], apart: bool) -> Recording:
        recording = record(forward, apart)
        shape = recording.logits.shape  # scores [rows, γ], or what the last layer of the drafter's cache holds
        is_draft, is_intake = len(shape) == 2, len(shape) == 3 and recording.features is None
        if not (is_draft if work == "draft" else is_intake):
            return recording
        changed.append(shape)
        return change(recording)

    monkeypatch.setattr(tape, "record", watch)
    reason = "not now" if change is no_memory else "logits differ"
    said = {"draft": "the draft loop of .* goes step by step", "intake": "what .* takes in of its target"}[work]
    with pytest.warns(UserWarning, match=f"{said}.* for 8 rows x .*{reason}") as seen:
        found = run(tiny, drafter)
    check(found, expected)
    assert len(seen) == len(changed) == 1 and found.statistics.graphs == tape.recorded - 1


@each_kind
def test_under_autocast(kind: str, checkpoints, replays, tape) -> None:
    """The target's head has copies, which a replay does not cast."""
    model = tiny_llama().float()
    drafter = KINDS[kind](checkpoints[kind], model)
    with torch.autocast("cpu", torch.bfloat16):
        result = run(model, drafter)
        assert outputs(result) == outputs(run(model, drafter, "eager"))
    assert replays and result.statistics.total.drafted > 0 and result.statistics.copied_bytes > 0


@pytest.mark.parametrize("kind", ["dflash"])
def test_the_memory_bound_counts_it(kind: str, drafter, tiny, tape, replays) -> None:
    """Captured with the target's, in the same budget: beyond it what it takes in is not."""
    with pytest.warns(UserWarning, match="reaches what they may take"):
        found = run(tiny, drafter, config={"max_graph_memory": 1.5 / 2**10})
    check(found, run(tiny, drafter, "eager"))
    assert tape.recorded == found.statistics.graphs == 2 and replays


@pytest.mark.parametrize("kind", ["dflash"])
def test_an_attention_kernel_that_fails_gives_way_to_masks(kind: str, drafter, tiny, tape, monkeypatch) -> None:
    monkeypatch.setattr(graph_runner, "CapturedFeatures", WithSpans)
    monkeypatch.setattr("spec_trl.generation.drafters.feature_network.ragged_attention", refuse_spans)
    with pytest.warns(UserWarning, match="attention kernel failed under .*Network.*under masks") as seen:
        found = run(tiny, drafter)
    assert len(seen) == 1
    check(found, run(tiny, drafter, "eager"))


class WithSpans(CapturedFeatures):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.uses_spans = True


def refuse_spans(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Any:
    if not mask.is_floating_point():
        raise RuntimeError("no kernel here")
    return ragged_attention(module, query, key, value, mask)


# ---- under spans, as on a GPU ---------------------------------------------------------------------------------------


def over_pages(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **more: Any) -> Any:
    """What the kernel does: reads the pages of a table, up to the last column that each query sees."""
    if not mask.is_floating_point():
        queries = query.shape[2]
        table = mask[:, 0, queries:].flatten(1)  # [B, pages]
        key, value = (pool[table].transpose(1, 2).flatten(2, 3) for pool in (key, value))  # [B, kv, columns, d]
        column = torch.arange(key.shape[2])
        first, last = mask[:, :, :queries].unsqueeze(3).unbind(-1)  # [B, 1, q, 1] each
        hidden = (column < first) | (column > last)  # [B, 1, q, columns]
        mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden, torch.finfo(query.dtype).min)
    return ragged_attention(module, query, key, value, mask, **more)


@each_kind
def test_spans_over_pages_give_the_same_drafts(kind: str, drafter, tiny, tape, replays, monkeypatch) -> None:
    masked = []

    def watched(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Any:
        masked.append(mask.is_floating_point())
        return over_pages(module, query, key, value, mask)

    monkeypatch.setattr(graph_runner, "CapturedFeatures", WithSpans)
    monkeypatch.setattr("spec_trl.generation.drafters.feature_network.ragged_attention", watched)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, RAGGED_ATTENTION, over_pages)  # of a layer of the target's class
    found = run(tiny, drafter)
    assert len(replays) > 4 and not any(masked), "texts are read without masks too"
    check(found, run(tiny, drafter, "eager"))


@pytest.mark.parametrize("name", reference.VARIANTS)
def test_spans_of_blocks_are_their_masks(name: str) -> None:
    config = DFlashConfig.parse(reference.VARIANTS[name])
    anchors, keys = torch.tensor([0, 3, 40]), torch.arange(60)[None]
    masks = config.masks(anchors, keys, keys >= anchors[:, None], torch.float64)
    for mask, span in zip(masks, config.spans(anchors, None), strict=True):
        first, last = span[..., :1], span[..., 1:]  # [B, 1, n, 1] each
        assert ((keys >= first) & (keys <= last)).equal(mask == 0)
