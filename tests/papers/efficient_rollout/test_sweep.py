"""Sweep files: both formats, and every way in which one can be broken."""

from pathlib import Path

import pytest

from spec_trl.papers.efficient_rollout.sweep import Sample, check_samples, points, read_sweep, write_sweep


def grid(batches: tuple[int, ...] = (1, 2, 4, 8), gammas: tuple[int, ...] = (3, 7, 11)) -> list[Sample]:
    samples = [Sample(b, 128.0, 0, "target", 0.01 * b) for b in batches]
    samples += [Sample(b, 128.0, g, "draft", 0.004 * b) for b in batches for g in gammas]
    samples += [Sample(b, 128.0, g, "verify", 0.011 * b + 1e-5 * g) for b in batches for g in gammas]
    return samples


def test_round_trip(tmp_path: Path) -> None:
    samples = [*grid(), Sample(3, 100.5, 0, "target", 1 / 3)]
    write_sweep(tmp_path / "sweep.csv", "some model, with a comma", samples)
    assert read_sweep(tmp_path / "sweep.csv") == samples


def test_points_pair_the_times() -> None:
    samples = grid((2,), (3, 7))
    assert [p[:3] for p in points(samples)] == [(2, 128.0, 3), (2, 128.0, 7)]
    assert points(samples)[1][3:] == pytest.approx((0.02, 0.008, 0.02207))
    assert points(samples)[1].cycle == pytest.approx(7 * 0.008 + 0.02207)
    # One draft time may stand for every draft length.
    once = [s for s in samples if s.mode != "draft"] + [Sample(2, 128.0, 0, "draft", 0.008)]
    assert points(once) == points(samples)
    assert check_samples(once, "samples") is None
    gapped = [s for s in grid() if (s.mode, s.batch, s.draft_length) != ("verify", 8, 11)]
    gap = "1 of 12 grid points lack a draft or verify row: (batch=8, length=128, draft_length=11); they are left out."
    assert check_samples(gapped, "some file") == f"some file: {gap}" and len(points(gapped)) == 11


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *(
            (f"m,16,128,3,verify,{value}", r"sweep\.csv, line 30: seconds=.*; measure the row again")
            for value in ("0", "-1", "nan", "inf", "", "fast")
        ),
        ("m,0,128,3,verify,0.01", "batch=0 is out of range"),
        ("m,1.5,128,3,verify,0.01", "batch=1.5 is a float; it must be an integer"),
        ("m,1,-1,3,verify,0.01", "length=-1.0 is out of range"),
        ("m,1,128,x,verify,0.01", "draft_length='x' is not a number"),
        ("m,1,128,3,prefill,0.01", "mode='prefill' is unknown; choose one of"),
        ("m,1,128,0,verify,0.01", "draft_length=0 of a verify sample"),
        ("m,1,128,3,verify,0.01", "a second verify row for the same point"),
        ("m,1,128,3,verify", "seconds=None is not a number"),
        ("other,16,128,0,target,0.01", r"several models, \['m', 'other'\]"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "sweep.csv"
    write_sweep(path, "m", grid())
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=message):
        read_sweep(path)
    for header in ("model,batch,length,mode\n", ""):
        path.write_text(header)
        with pytest.raises(ValueError, match=r"lacks the columns \[.*'draft_length', .*'seconds'\]"):
            read_sweep(path)


@pytest.mark.parametrize(
    ("without", "message"),
    [
        (lambda s: s.mode == "target", "some file has no target row"),
        (lambda s: s.mode == "draft", "some file has no draft row"),
        (lambda s: s.mode == "verify", "some file has no verify row"),
        (lambda s: (s.mode, s.batch) == ("target", 4), "a draft row but no target row for batch=4, length=128"),
        (lambda s: (s.mode, s.batch) == ("verify", 8), "3 of 12 grid points lack .*measure them again"),
    ],
)
def test_missing_rows(without, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        check_samples([s for s in grid() if not without(s)], "some file")
