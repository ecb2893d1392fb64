"""The never-slower benchmark: turns, shares and ratios. No test looks at a time."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import never_slower
from benchmarks.bookkeeping import Bookkeeping
from benchmarks.never_slower import ALWAYS, NONE, TOGGLE, Call, in_turns, summarise, tokens_for
from benchmarks.workload import Workload
from spec_trl.generation.engine.statistics import DraftCounts, SpeculationStatistics


WORK = Workload([[1, 2], [3]], 10, 1.0, (), 0)


def call(
    seconds: float, rows: list[list[int]], spans: list[tuple[int, int]], prefill: float = 0.0, drafts: int = 0
) -> Call:
    total = DraftCounts(blocks=drafts, committed=3 * drafts)
    phases = {"prefill": prefill, "control": 0.1}
    rows = [list(row) for row in rows]
    return Call(
        seconds, rows, SpeculationStatistics("self", total, rounds=10, speculating=spans, phase_seconds=phases)
    )


def test_each_repeat_starts_with_the_next_way() -> None:
    order: list[tuple[str, int]] = []

    def way(name: str) -> never_slower.Way:
        def run(work: Workload, seed: int) -> Call:
            order.append((name, seed))
            return call(1.0, [[1]], [(0, 0)])

        return run

    in_turns({name: way(name) for name in "abc"}, WORK, 4, 7)
    assert ["".join(name for name, seed in order if seed == s) for s in (7, 8, 9, 10)] == ["abc", "bca", "cab", "abc"]


def test_share_of_rounds_that_speculated() -> None:
    assert call(1.0, [], [(0, 0)]).speculative_share == 0
    assert call(1.0, [], [(0, 0), (3, 5), (8, 0)]).speculative_share == 0.5
    assert call(1.0, [], [(0, 0), (3, 5), (4, 7)]).speculative_share == 0.7


def test_ratios_are_paired_within_repeats_and_taken_to_the_better() -> None:
    texts = [[1, 2], [3, 4]]
    calls = {
        NONE: [call(s, texts, [(0, 0)], prefill=p) for s, p in ((1.0, 0.5), (10.0, 5.0), (4.0, 2.0))],
        ALWAYS: [call(s, texts, [(0, 5)], drafts=4) for s in (0.5, 5.0, 4.0)],
        TOGGLE: [call(s, texts, [(0, 0), (5, 5)], prefill=p) for s, p in ((1.0, 0.0), (5.0, 3.0), (2.0, 1.0))],
    }
    calls[TOGGLE][0].completions[1] = [3, 9]
    cell = summarise(WORK, calls, Bookkeeping(control=0.01, log=0.02, counter=0.04, clocks=0.03))
    assert cell.toggle_to_none_by_repeat == [1.0, 2.0, 2.0] and cell.toggle_to_none == 2.0
    # Medians of tokens/s: none of 4, 0.4 and 1, always of 8, 0.8 and 1. Equal, so none counts as the better.
    assert (cell.better, cell.toggle_to_better) == (NONE, 2.0)
    assert cell.decoding_toggle_to_none == 2.0  # of 0.5, 2.5 and 2
    assert cell.speculative_share == {NONE: 0.0, ALWAYS: 1.0, TOGGLE: 0.5}
    assert cell.block_efficiency == 3.0
    assert cell.control_share == pytest.approx(0.05)
    assert cell.bookkeeping_share == pytest.approx((0.01 + 0.02 + 0.03 + 0.5 * 0.04) / 0.2)
    assert (cell.identical_rows, cell.rows) == (5, 6)
    assert cell.passes
    calls[ALWAYS] = [call(s / 4, texts, [(0, 5)], drafts=4) for s in (0.5, 5.0, 4.0)]
    cell = summarise(WORK, calls, cell.bookkeeping)
    assert (cell.better, cell.toggle_to_better) == (ALWAYS, 0.25)
    assert not cell.passes


def test_tokens_follow_the_time_within_bounds() -> None:
    def way(work: Workload, seed: int) -> Call:
        return call(1.5, [[1]], [(0, 0)], prefill=0.5)  # ten rounds in a second behind half a second of reading

    assert tokens_for(way, WORK, 6.5, 1000) == 60
    assert tokens_for(way, WORK, 6.5, 40) == 40
    assert tokens_for(way, WORK, 0.6, 1000) == never_slower.FEWEST_TOKENS


@pytest.mark.slow
def test_the_command_writes_json_and_markdown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    output = tmp_path / "never_slower.json"
    arguments = ["--models", "shape:tiny,float64", "--batch", "1", "3", "--repeats", "2", "--seconds", "0.01"]
    arguments += ["--most-tokens", "32", "--calibration-seconds", "1", "--threads", str(threads)]
    monkeypatch.setattr(sys, "argv", ["never_slower", *arguments, "--output", str(output)])
    never_slower.main()
    (model,) = json.loads(output.read_text())["models"]
    assert [cell["batch"] for cell in model["cells"]] == [1, 3]
    for cell in model["cells"]:
        assert cell["new_tokens"] == 32
        assert cell["identical_rows"] == cell["rows"] == 2 * cell["batch"]
        assert cell["speculative_share"][NONE] == 0 < cell["speculative_share"][ALWAYS]
        assert set(cell["tokens_per_second"]) == {NONE, ALWAYS, TOGGLE}
        assert min(cell["bookkeeping"].values()) > 0
        assert cell["block_efficiency"] > 1
    assert model["calibration_seconds"] > 0
    text = output.with_suffix(".md").read_text()
    assert "toggle/none" in text and "of 2 cells reach both ratios" in text
    assert str(tmp_path) not in output.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "shape:tiny"], "name a dtype behind a comma"),
        (["--models", "nowhere,float32"], "--models nowhere: no such folder"),
        (["--models", "shape:tiny,int3"], "name a dtype behind a comma"),
        (["--batch", "0"], "must be 1 or more"),
        (["--most-tokens", "8"], "too few rounds to judge by"),
    ],
)
def test_wrong_options_are_named(arguments, message, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["never_slower", *arguments])
    with pytest.raises(SystemExit):
        never_slower.main()
    assert message in capsys.readouterr().err
