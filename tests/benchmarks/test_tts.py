"""The TTS benchmark: bins, intervals, resuming, what it sees of p and q, and tiny runs. No test looks at a time."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import tts
from benchmarks.measure import Result, read_result
from benchmarks.tts_distributions import observe_position
from benchmarks.tts_drafters import FROZEN, NONE, TTS, make_kind
from benchmarks.tts_numbers import BINS, Record, acceptance_length, by_depth, gain_interval, speed_ratio, third
from benchmarks.tts_parts import last_quarter, summarise
from benchmarks.tts_runs import Bench
from benchmarks.tts_store import Store
from examples.demo.widen import widen
from spec_trl.drafter_training.untrained import write_eagle3
from tests.benchmarks.conftest import set_arguments
from tests.conftest import STORY_MODEL, tiny_llama


def record(blocks: int, committed: int, seconds: float = 1.0, where: int = 0) -> Record:
    counts = [[0] * BINS, [0] * BINS]
    counts[0][where], counts[1][where] = blocks, committed
    facts = {"ties": 0, "unexplained": 0, "same": committed, "tokens": committed, "load": 1.0, "drafted": 9 * blocks}
    return {"blocks": counts[0], "committed": counts[1], "seconds": seconds, "accepted": committed - blocks} | facts


def test_rounds_are_counted_where_they_began() -> None:
    rounds = [2, 1, 5, 2, 9, 1]  # begin at 1, 3, 4, 9, 11, 20
    blocks, committed = by_depth(rounds, 21)
    assert {i: count for i, count in enumerate(blocks) if count} == {1: 1, 3: 1, 4: 1, 9: 1, 11: 1}
    assert {i: count for i, count in enumerate(committed) if count} == {1: 2, 3: 1, 4: 5, 9: 2, 11: 9}
    blocks, committed = by_depth(rounds, 420)
    assert (blocks[0], committed[0], blocks[1], committed[1]) == (5, 19, 1, 1)  # bins of 20, and room after 20
    assert sum(by_depth([1] * 41, 42)[0]) == 40  # the last token alone is no block


def test_acceptance_length_is_pooled() -> None:
    records = [record(1, 4), record(3, 4), record(1, 9, where=20)]
    assert acceptance_length(records) == 17 / 5
    assert acceptance_length(records, third(0)) == 2.0
    assert acceptance_length(records, third(2)) == 9.0
    assert acceptance_length(records, third(1)) is None
    assert [third(i) for i in range(3)] == [slice(0, 7), slice(7, 14), slice(14, 21)]


def test_gain_and_speed_are_compared_within_requests() -> None:
    # Requests differ a lot, the gain is 20 % in each: an unpaired bootstrap would be wide.
    frozen = [record(100 * i, 200 * i) for i in range(1, 9)]
    other = [record(100 * i, 240 * i) for i in range(1, 9)]
    assert gain_interval(frozen, other) == pytest.approx((0.2, 0.2)) and gain_interval(frozen[:1], other[:1]) is None
    mixed = [record(100, 300 if i % 2 else 200) for i in range(8)]
    low, high = gain_interval([record(100, 200)] * 8, mixed)  # type: ignore[misc]
    assert 0.0 <= low < 0.1 and 0.4 < high <= 0.5
    frozen = [record(1, 1, seconds) for seconds in (1.0, 10.0, 4.0)]
    for first, ratio in ((2.0, 1.0), (0.5, 2.0)):
        assert speed_ratio(frozen, [record(1, 1, seconds) for seconds in (first, 5.0, 4.0)]) == ratio


def test_a_killed_run_keeps_its_cells(tmp_path: Path) -> None:
    path = tmp_path / "tts.json"
    store = Store(path, {"seed": 0})
    assert store.cell("a", "ways", lambda: [1, 2]) == [1, 2]

    def killed() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.cell("b", "ways", killed)
    again = Store(path, {"seed": 0})
    assert again.cell("a", "ways", killed) == [1, 2]
    assert again.cell("b", "ways", lambda: 3) == 3
    assert again.cell("a", "other ways", lambda: 4) == 4  # what it was made with has changed
    assert set(json.loads(path.read_text())["cells"]) == {"a", "b"}
    assert Store(path, {"seed": 0}).cell("a", "other ways", killed) == 4
    assert Store(path, {"seed": 0}, fresh=True).cells == {}
    with pytest.raises(ValueError, match="'seed': 0.*--fresh"):
        Store(path, {"seed": 1})


def test_what_a_position_shows_of_p_and_q() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.7, 0.2])
    facts = observe_position(p.log() + 3, q.log() - 2, torch.tensor([2, 0]))
    assert facts["entropy"] == pytest.approx(-sum(x * math.log(x) for x in (0.5, 0.3, 0.2)))
    assert facts["cross_entropy"] == facts["seen_cross_entropy"] == pytest.approx(-math.log(0.1))
    assert (facts["count"], facts["seen"], facts["agreed"]) == (1, 1, 0)
    facts = observe_position(p.log(), p.log(), torch.tensor([2, 1]))
    assert (facts["seen"], facts["seen_cross_entropy"], facts["agreed"]) == (0, 0, 1)
    pruned = torch.tensor([-torch.inf, 1.0, 2.0])
    assert observe_position(p.log(), pruned, torch.tensor([0])) == {"unknown": 1.0}


def test_the_last_quarter_of_a_run() -> None:
    cells = [{FROZEN: record(10, 20), TTS: record(10, 20 + i) | {"updates": 7}} for i in range(8)]
    row = last_quarter(cells, 0)
    assert (row["requests"], row["updates"], row["last"]) == (8, 56, 2)
    assert (row["frozen"], row["tau"]) == (2.0, 2.65)
    assert row["gain"] == pytest.approx(0.325) and row["speed_ratio"] == 1.0
    assert row["quarters"] == [[2.0] * 4, [2.05, 2.25, 2.45, 2.65]]


def test_requests_of_a_batch_are_resampled_one_by_one() -> None:
    def batch(committed: list[int]) -> Record:
        depth = {"0": [20, sum(committed)]}
        return record(0, sum(committed)) | {"blocks": [10] * len(committed), "committed": committed, "depth": depth}

    cells = [{NONE: record(0, 1), FROZEN: batch([20, 20]), TTS: batch([20, 40])}]
    row = summarise({("eagle3", 1.0): cells}, 0)[-1]
    assert row["gain"] == 0.5 and row["interval"] == (0.0, 1.0)
    assert row["by_edge"] == {"0": 3.0}


# ---- runs ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained drafters for stories260K."""
    place = tmp_path_factory.mktemp("drafters")
    write_eagle3(place / "eagle3", AutoModelForCausalLM.from_pretrained(STORY_MODEL))
    tiny_llama(vocab_size=512, hidden_size=32, num_hidden_layers=1).float().save_pretrained(place / "small_lm")
    return place


def run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, output: Path, arguments: str, requests: int = 1, tokens: int = 22
) -> Result:
    """One part on stories260K in float64, with few tokens."""
    given = f"{arguments} --target {STORY_MODEL} --drafters {folder} --dtype float64 --new-tokens {tokens} --requests "
    given += f"{requests} --prompt-tokens 4 --output {output} --cells {output}/cells --rates eagle3=1e-3 model=1e-2"
    set_arguments(monkeypatch, tts, given.split())
    tts.main()
    part = arguments.split()[0]
    return read_result(output / f"tts_{part}.json")


@pytest.mark.slow
def test_drafters_end_to_end_and_again_from_what_is_kept(monkeypatch, folder: Path, tmp_path: Path) -> None:
    result = run(monkeypatch, folder, tmp_path, "drafters --kinds model", requests=2)
    details = result.details
    assert [(row["temperature"], row["way"]) for row in details["summary"]] == [
        (t, way) for t in (0.0, 1.0) for way in (NONE, FROZEN, TTS)
    ]
    assert details["identity"] == {"calls": 8, "tokens": 176, "same": 176, "ties": 0, "unexplained": 0}
    assert details["target_unchanged"]
    for row in details["summary"]:
        assert ("tau" in row, "updates_per_call" in row) == (row["way"] != NONE, row["way"] == TTS)
    cells = json.loads((tmp_path / "cells/tts_drafters.json").read_text())["cells"]
    assert len(cells) == 4
    for cell in cells.values():
        learned = cell["data"][TTS]
        assert learned["updates"] == sum(learned["blocks"])  # S = 1: after every block
        assert learned["committed"][0] >= learned["blocks"][0] > 0
        assert sum(learned["committed"]) in (21, 22)
    assert any(row["gain"] != 0 for row in details["summary"] if row["way"] == TTS)
    assert "176 of 176 tokens" in result.setup and str(tmp_path) not in (tmp_path / "tts_drafters.json").read_text()

    def generate(*_: object) -> None:
        raise AssertionError("a finished cell was made again")

    monkeypatch.setattr(Bench, "generate", generate)
    again = run(monkeypatch, folder, tmp_path, "drafters --kinds model", requests=2)
    assert again.details["summary"] == details["summary"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param("strides --strides 1 10 --temperatures 1", "S=10 async", marks=pytest.mark.slow),
        pytest.param("rates --learning-rates 1e-3 --temperatures 1", "η=0.001", marks=pytest.mark.slow),
        pytest.param("steps --steps 1 2 --temperatures 0", "K=2", marks=pytest.mark.slow),
        pytest.param("anchors --anchor-weights 0.5 --temperatures 0", "K=2, λ=0.5, q_t", marks=pytest.mark.slow),
        pytest.param("distributions --temperatures 1", "cross-entropy", marks=pytest.mark.slow),
        ("run --updates 9 --run-stride 2 --run-asynchronous --temperatures 1", "last 1 of"),
        ("defaults --batch 1 --temperatures 1 --scope run", "0 updates in 1 calls"),
        pytest.param("batch --batch 2 --temperatures 1", "TTS, per rollout", marks=pytest.mark.slow),
    ],
    ids=lambda value: value.split()[0],
)
def test_each_part_is_lossless_and_reports(arguments, expected, monkeypatch, folder: Path, tmp_path: Path) -> None:
    part = arguments.split()[0]
    kind = "eagle3" if part in ("distributions", "batch") else "model"
    tokens = 42 if part == "distributions" else 22
    result = run(monkeypatch, folder, tmp_path, f"{arguments} --kinds {kind}", tokens=tokens)
    same, summary = result.details["identity"], result.details["summary"]
    assert same["same"] == same["tokens"] > 0 and same["ties"] == same["unexplained"] == 0
    assert result.details["target_unchanged"]
    assert any(expected in finding.what for finding in result.findings)
    if part == "distributions":
        frozen, learned = (row["distributions"][-1] for row in summary[1:])
        assert frozen["positions"] > learned["unseen_positions"] > 0
        assert learned["cross_entropy"] < frozen["cross_entropy"] - 1  # untrained, it has much to learn
    if part == "run":
        assert 9 <= summary[0]["updates"] < 9 + 11
    if part == "batch":
        (cell,) = json.loads((tmp_path / "cells/tts_batch.json").read_text())["cells"].values()
        assert all(len(cell["data"][way]["blocks"]) == 2 for way in cell["data"] if way != NONE)


def test_a_wide_target_has_the_drafters_of_its_checkpoint(tmp_path: Path) -> None:
    narrow = tiny_llama().float()
    narrow.save_pretrained(tmp_path / "narrow")
    write_eagle3(tmp_path / "eagle3", narrow)
    wide = widen(narrow, 3, seed=0)
    states = torch.randn(5, 2, narrow.config.hidden_size)  # [positions, layers, H]
    found = []
    for target, by in ((narrow, 1), (wide, 3)):
        spec = str(tmp_path / "narrow") if by == 1 else f"wide:{tmp_path / 'narrow'}*3"
        network = make_kind("eagle3", tmp_path, spec, Path(), 16, None, "rtn-w4-g32").student(target).network
        projected = network.project(states.repeat(1, 1, by).flatten(1))  # [positions, drafter's H]
        found.append((projected, network.embed(torch.arange(64), target.get_input_embeddings())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
