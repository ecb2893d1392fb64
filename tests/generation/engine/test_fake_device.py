"""The engine on a device that pretends to be a GPU: a round waits for it once, a call as often for many rows as for
few, and no devices are mixed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_trl.native.native_code import compiler


pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each scenario did, by its title."""
    if (program := compiler()) is None:
        pytest.skip("no C++ compiler")
    folder, where = tmp_path_factory.mktemp("device"), Path(torch.__file__).parent
    source, library = Path(__file__).with_name("fake_device.cpp"), folder / "device.so"
    headers = (f"-I{where / 'include'}", f"-I{where / 'include/torch/csrc/api/include'}")
    libraries = (f"-L{where / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10")
    command = [program, "-std=c++20", "-fPIC", "-shared", *headers, str(source), "-o", str(library), *libraries]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"the device does not build: {built.stderr[:500]}")
    command = [sys.executable, "-m", "tests.generation.engine.fake_device_job", str(library)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return {scenario["title"]: scenario for scenario in map(json.loads, ran.stdout.splitlines())}


TITLES = ("none", "penalty, top-p", "self", "refill", "ngram", "history", "model", "auto", "best_of_n", "decoupled")
TITLES += ("states", "states, none", "states, model")


@pytest.mark.parametrize("title", TITLES)
def test_a_round_waits_once(told: dict[str, Any], title: str) -> None:
    own = told[title]
    assert own["same"] and own["failure"] is None
    assert own["drafted"] > 0 or title in ("none", "auto", "best_of_n", "states, none")
    assert own["overheard"] > 0 or title not in ("auto", "best_of_n")
    assert [len(waits) for waits in own["waits"]] == [1] * own["rounds"], own["waits"]
    assert not own["copies"] and not own["mixed"]


def test_rows_that_enter_and_end_wait_for_nothing(told: dict[str, Any]) -> None:
    """Waits and copies outside of rounds are the same for three rows and for seven, and each occurs once or twice."""
    few, many = told["fewer rows"], told["self"]
    assert few["same"] and few["drafted"] > 0 and max(many["outside"].values()) <= 2, many["outside"]
    tables = {place: count for place, count in many["outside"].items() if place not in few["outside"]}
    assert few["outside"] | tables == many["outside"] and sum(tables.values()) <= 1  # once for a session


def test_states_are_sent_one_tensor_a_round(told: dict[str, Any]) -> None:
    """The numbers of accepted tokens; none where a captured step writes them."""
    assert set(told["states"]["sends"]) == {1} and told["none"]["sends"] == [0] * told["none"]["rounds"]
    sends = told["states, none"]["sends"]
    assert set(sends[:2]) == {1} and set(sends[2:]) == {0} and len(sends) > 10  # from the first capture on
