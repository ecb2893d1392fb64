"""What `benchmarks.rivals` makes of seconds; test_smoke runs it without the rivals, which need an environment."""

from pathlib import Path

import pytest

from benchmarks import rivals


SECONDS = {"generate": [8.0, 8.0, 16.0], "auto": [2.0, 4.0, 2.0], "llama.cpp": [1.0, 1.0, 9.0], "OpenVINO": [2.0] * 3}


def test_ours_are_set_against_generate_and_the_rival_with_the_better_median() -> None:
    cell = {"model": "M", "dtype": "float32", "rows": 4, "tokens": 16, "seconds": SECONDS}
    cell["MiB"] = {"generate": 100, "auto": 125, "llama.cpp": 50, "OpenVINO": 60}
    found = [(each.what, each.baseline, each.value) for each in rivals.findings([cell])]
    speeds = {"generate": 2.0, "auto": 8.0, "llama.cpp": 16.0, "OpenVINO": 8.0}
    assert [each for each in found if not each[1]] == [
        (f"M, float32: {way}, 4 rows", "", speed) for way, speed in speeds.items()
    ]
    assert [each[1:] for each in found if each[1]] == [
        ("generate", 4.0), ("the better of llama.cpp and OpenVINO", 0.5), ("generate", 1.25)
    ]  # fmt: skip
    alone = rivals.findings([cell | {"seconds": {way: SECONDS[way] for way in ("auto", "OpenVINO")}}])
    assert [each.baseline for each in alone] == ["", "OpenVINO", ""]


def test_rivals_without_their_environment_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rivals.main(["--tiny", "--ways", "none", "llama.cpp", "--environment", str(tmp_path)])
    assert "no environment with llama.cpp and OpenVINO" in capsys.readouterr().err
