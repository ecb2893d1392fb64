"""What is known of rounds is kept in the user's cache, and found by the next process."""

import json
from pathlib import Path

import pytest

from spec_trl import SpeculativeConfig
from spec_trl.generation import measuring
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.measuring import find_clock
from spec_trl.generation.planner.clock import FEWEST_ROUNDS, Clock, ForwardSeconds, ProbedRounds
from spec_trl.generation.planner.plan import PLAIN, Plan
from tests.conftest import tiny_llama


MODEL = tiny_llama()
DRAFTED = Plan(("ngram",), (5,))


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Probes take no time; the list has an entry for each."""
    asked: list[int] = []

    def probe(*_: object) -> ProbedRounds:
        asked.append(1)
        return ProbedRounds(ForwardSeconds((1, 4), (1.0, 2.0)), {})

    monkeypatch.setattr(measuring, "probe", probe)
    return asked


def known(drafters: list[Drafter] | None = None, **config: object) -> Clock:
    found = find_clock(MODEL, drafters or [NgramDrafter(3)], SpeculativeConfig(**config))
    assert found is not None
    return found


def watched(rounds: Clock, count: int) -> Clock:
    """After so many rounds, of which those with drafts took twice what was predicted."""
    for _ in range(count // 2):
        rounds.observe(PLAIN, 1, rounds.predicted(PLAIN)[0])
        rounds.observe(DRAFTED, 1, 2 * rounds.predicted(DRAFTED)[0])
    rounds.keep()
    return rounds


def test_the_next_process_knows_what_this_one_measured(probed: list[int], cache: Path) -> None:
    watched(known(), FEWEST_ROUNDS)
    assert len(probed) == 1
    again = known()
    assert again.rounds == FEWEST_ROUNDS and again.predict({}, 0, 4, 9.0) == 2.0
    drafted, plain = (again.seconds(plan, 1) / again.predicted(plan)[0] for plan in (DRAFTED, PLAIN))
    assert drafted / plain == pytest.approx(2.0, rel=0.05)
    assert len(probed) == 1
    ahead = known(specactor=dict(decoupled_execution="auto"))
    for other in (known([NgramDrafter(3), NgramDrafter(2)]), ahead, known(runner="eager")):
        assert other.rounds == 0
    elsewhere = find_clock(MODEL, [NgramDrafter(3)], SpeculativeConfig(specactor=dict(draft_ranks=1)))
    assert elsewhere is not None and elsewhere.rounds == 0
    for toggle in ("always", "never"):
        assert find_clock(MODEL, [NgramDrafter(3)], SpeculativeConfig(sd_toggle=toggle)) is None
    assert find_clock(MODEL, [], SpeculativeConfig()) is None


def test_it_is_written_when_rounds_have_doubled(probed: list[int], cache: Path) -> None:
    rounds = watched(known(), FEWEST_ROUNDS - 2)
    assert not list(cache.glob("*"))
    watched(rounds, 2)
    (path,) = cache.glob("*.rounds.json")
    before = path.read_text()
    watched(rounds, FEWEST_ROUNDS - 2)
    assert path.read_text() == before
    watched(rounds, 2)
    assert path.read_text() != before
    assert len(probed) == 1


def test_times_of_an_earlier_release_are_measured_anew(
    probed: list[int], cache: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """The probe of that file stays. No warning: nothing is broken."""
    watched(known(), FEWEST_ROUNDS)
    (path,) = cache.glob("*.rounds.json")
    earlier = json.loads(path.read_text())
    del earlier["times"]["version"]
    path.write_text(json.dumps(earlier))
    again = known()
    assert again.rounds == again.saved == 0 and len(probed) == 1 and not recwarn.list
    assert watched(again, FEWEST_ROUNDS).saved == FEWEST_ROUNDS and known().rounds == FEWEST_ROUNDS


def test_a_file_of_an_earlier_probe_is_left_aside(
    probed: list[int], cache: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Its predictions were of another kind, and its times are their errors. The next file takes its place."""
    watched(known(), FEWEST_ROUNDS)
    (path,) = cache.glob("*.rounds.json")
    file = json.loads(path.read_text())
    path.write_text(json.dumps(file | {"version": file["version"] - 1}))
    again = known()
    assert again.rounds == again.saved == 0 and len(probed) == 2 and not recwarn.list
    watched(again, FEWEST_ROUNDS)
    assert known().rounds == FEWEST_ROUNDS and len(probed) == 2 and [*cache.glob("*.rounds.json")] == [path]


def test_two_writers_of_one_file(probed: list[int], cache: Path) -> None:
    """As of two processes: both began with nothing, and what was written last is read."""
    one, other = known(), known()
    watched(one, FEWEST_ROUNDS)
    watched(other, 2 * FEWEST_ROUNDS)
    assert known().rounds == 2 * FEWEST_ROUNDS and len(probed) == 2


def test_a_broken_file_is_left_aside(probed: list[int], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched(known(), FEWEST_ROUNDS)
    (path,) = cache.glob("*.rounds.json")
    broken = json.loads(path.read_text())
    broken["times"]["mean"][0] = None
    short = path.read_text().replace('"covariance": [', '"covariance": [[1.0], ')
    for text in ("{", path.read_text().replace('"mean"', '"means"'), json.dumps(broken), short):
        path.write_text(text)
        with pytest.warns(UserWarning, match="rounds.json is left aside, and rounds are measured anew"):
            assert known().rounds == 0
    monkeypatch.setenv("SPEC_TRL_CACHE", "/proc/nowhere")  # it cannot be written
    watched(known(), FEWEST_ROUNDS)
