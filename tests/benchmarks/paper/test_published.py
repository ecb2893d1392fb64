"""The authors' published fits and sweeps as profiles of ours, and what they say of the fit's own accuracy."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.paper.published import main, read_fit, read_sweep
from spec_trl.papers.efficient_rollout.commands.validate import read_config
from spec_trl.papers.efficient_rollout.fit import evaluate
from spec_trl.papers.efficient_rollout.profile import Profile
from spec_trl.papers.efficient_rollout.sweep import Sample, points


FOLDER = "data/efficientrollout"
FIT = {
    "hardware": {"gpu": "A100", "BW_eff": 1.6e12},
    "model": {"name": "m", "W_t": 15e9, "W_d": 5e9, "C_dense": 14e9, "C_attn": 4e5, "kappa_theoretical": 5e4},
    "calibration": {"F_eff": 2.3e14, "kappa_eff": 2.5e4, "eta_d": 1.3, "c_T": 39.0, "c_D": 69.0, "c_V": 152.0},
}
HEADER = "model,batch,seq,gamma,mode,mean_ms,median_ms"


def sweep_of(folder: Path, rows: list[str], header: str = HEADER) -> list[Sample]:
    (folder / "sweep.csv").write_text("\n".join([header, *rows]) + "\n")
    return read_sweep(folder / "sweep.csv")


@pytest.mark.parametrize(
    ("name", "model", "target_mape", "signs", "majority", "count"),
    [
        ("qwen257b", "Qwen2.5-7B", 1.9, [93.8, 93.8], 78, 178),
        ("llama318binstruct", "Llama-3.1-8B-Instruct", 3.3, [95.0, 90.5], 82, 179),
    ],
)
def test_published_fits_evaluate_to_the_known_numbers(
    shared: Callable[[str], Path], tmp_path: Path,
    name: str, model: str, target_mape: float, signs: list[float], majority: int, count: int,
) -> None:  # fmt: skip
    output = tmp_path / "published.json"
    with pytest.warns(UserWarning, match="of 180 grid points lack a draft or verify row") as caught:
        main([
            str(shared(f"{FOLDER}/published_fit_{name}.json")), str(shared(f"{FOLDER}/sweep_a100_tp1_{name}.csv")),
            "-o", str(output),
        ])  # fmt: skip
    assert len(caught) == 1
    profile = Profile.load(output)
    assert (profile.key.hardware, profile.roofline.constants.name) == ("A100", model)
    found = evaluate(profile.roofline, profile.samples)
    assert found.points == count and min(s.batch for s in profile.samples) == 1
    assert round(100 * found.target_mape, 1) == target_mape
    assert [round(100 * sign.accuracy, 1) for sign in found.signs] == signs
    assert round(100 * found.signs[0].majority) == majority
    # Their timers excluded the draft: verification at batch 1 costs about one target forward.
    first = points(profile.samples)[0]
    assert first.verify == pytest.approx(first.target, rel=0.1)


@pytest.mark.parametrize(
    ("name", "folder"), [("qwen257b", "Qwen2.5-7B-Instruct"), ("llama318binstruct", "Llama-3.1-8B-Instruct")]
)
def test_constants_of_a_config_are_the_published_ones(shared: Callable[[str], Path], name: str, folder: str) -> None:
    published = json.loads(shared(f"{FOLDER}/model_constants_{name}.json").read_text())
    config = shared(f"configs/target/{folder}/config.json")
    found = read_config(config)
    assert found is not None
    assert found.weight_bytes == pytest.approx(published["W_t"], rel=1e-4)  # theirs leaves out biases
    assert found.draft_weight_bytes == pytest.approx(published["W_d"], rel=1e-4)
    assert (found.dense_flops, found.attention_flops) == (published["C_dense"], published["C_attn"])
    assert found.kv_bytes == published["kappa_theoretical"]


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("calibration", "c_V", None, "calibration.c_V is None where a float belongs"),
        ("calibration", "eta_d", "much", "calibration.eta_d is 'much'"),
        ("hardware", "gpu", 3, "hardware.gpu is 3 where a str belongs"),
        ("model", "W_t", -1.0, "weight_bytes=-1.0 is out of range"),
    ],
)
def test_an_edited_fit_is_named(tmp_path: Path, part: str, name: str, value: object, message: str) -> None:
    path = tmp_path / "fit.json"
    path.write_text(json.dumps(FIT))
    coefficients = read_fit(path).roofline.coefficients
    assert coefficients.rho_kappa == 0.5 and coefficients.c_V == pytest.approx(152e-6)
    path.write_text(json.dumps(FIT | {part: FIT[part] | {name: value}}))
    with pytest.raises(ValueError, match=message):
        read_fit(path)


@pytest.mark.parametrize("included", [True, False])
def test_an_included_draft_is_taken_off(tmp_path: Path, included: bool) -> None:
    rows = ["m,0,0,0,target_decode,0,5"]  # an aggregate
    for batch in (1, 2):
        rows.append(f"m,{batch},256,0,target_decode,0,10")
        rows.append(f"m,{batch},256,0,target_decode_sd,0,99")
        for gamma in (3, 7):
            rows.append(f"m,{batch},256,{gamma},drafter_decode,0,4")
            rows.append(f"m,{batch},256,{gamma},target_verify,0,{11 + 4 * gamma * included}")
    samples = sweep_of(tmp_path, rows)
    assert len(samples) == 10
    assert [p.verify for p in points(samples)] == pytest.approx([0.011] * 4)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("m,1,256,0,target_decode,9.5,0", "line 2: seconds=0.0 is out of range"),
        ("m,1,256,0,prefill,9.5,9.5", "line 2: 'prefill'"),
        (f"m,1,256,0,target_decode,9.5,{math.nan}", "line 2: seconds=nan"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sweep_of(tmp_path, [row])
    with pytest.raises(ValueError, match=r"lacks the columns \['seq'"):
        sweep_of(tmp_path, [], "model,batch")
