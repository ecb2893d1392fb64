"""ER's simulated tables from the models' configs alone."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.paper.breakdown import A100_80GB, Hardware, Shape, component_seconds, idealized_draft_ratio, main


# (length, batch) -> FFN, QKVO, attention, LM head, nonlinear in percent: ER Tab. 3
TABLE_3 = {
    "Qwen2.5-7B-Instruct": {
        (2048, 8): (75.2, 10.9, 6.2, 7.2, 0.5),
        (2048, 4): (77.8, 11.2, 3.2, 7.4, 0.3),
        (4096, 2): (77.9, 11.2, 3.2, 7.4, 0.2),
        (8192, 1): (78.0, 11.2, 3.2, 7.5, 0.1),
    },
    "Llama-3.1-8B-Instruct": {
        (2048, 8): (65.4, 15.6, 12.4, 6.1, 0.5),
        (2048, 4): (69.9, 16.7, 6.7, 6.5, 0.3),
        (4096, 2): (70.0, 16.7, 6.7, 6.5, 0.2),
        (8192, 1): (70.0, 16.7, 6.7, 6.5, 0.1),
    },
}
SMALL = Shape(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocabulary=1000, tied=True)


def shape_of(shared: Callable[[str], Path], model: str) -> Shape:
    return Shape.from_config(json.loads(shared(f"configs/target/{model}/config.json").read_text()))


@pytest.mark.parametrize("model", TABLE_3)
def test_table_3_within_a_tenth_of_a_percentage_point(shared: Callable[[str], Path], model: str) -> None:
    shape = shape_of(shared, model)
    for (length, batch), printed in TABLE_3[model].items():
        seconds = component_seconds(shape, A100_80GB, batch, length)
        found = [100 * part / sum(seconds.values()) for part in seconds.values()]
        # The paper prints one decimal, so half of it is rounding.
        assert found == pytest.approx(printed, abs=0.1 + 0.05), (length, batch)


def test_table_4(shared: Callable[[str], Path]) -> None:
    shape = shape_of(shared, "Qwen2.5-7B-Instruct")
    rho_kappa = 26205 / 57344  # the published fit's
    assert shape.kv_bytes == 57344
    assert round(idealized_draft_ratio(shape, 4, batch=1, length=2048, rho_kappa=rho_kappa), 3) == 0.360
    assert round(idealized_draft_ratio(shape, 8, batch=1, length=2048, rho_kappa=rho_kappa), 3) == 0.573


def test_a_tied_head_counts_once_in_memory_and_large_batches_are_bound_by_arithmetic() -> None:
    untied = Shape(**(vars(SMALL) | {"tied": False}))
    assert untied.weight_bytes() - SMALL.weight_bytes() == 1000 * 64 * 2
    assert component_seconds(untied, A100_80GB, 4, 100) == component_seconds(SMALL, A100_80GB, 4, 100)
    hardware = Hardware(flops_per_second=1e12, bytes_per_second=1e12)  # balanced at one row
    one, many = (component_seconds(SMALL, hardware, batch, 10) for batch in (1, 64))
    assert one["ffn"] == pytest.approx(SMALL.ffn_weights * 2 / 1e12)
    assert many["ffn"] == pytest.approx(64 * one["ffn"])


def test_config_defaults_and_errors() -> None:
    config = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 9
    }  # fmt: skip
    shape = Shape.from_config(config)
    assert (shape.kv_heads, shape.head_dim, shape.tied) == (4, 16, False)
    with pytest.raises(ValueError, match=r"config lacks \['intermediate_size'\]"):
        Shape.from_config(config | {"intermediate_size": None})
    with pytest.raises(ValueError, match="hidden=0 is out of range"):
        Shape(**(vars(SMALL) | {"hidden": 0}))
    with pytest.raises(ValueError, match="bytes_per_second=0 is out of range"):
        Hardware(1e12, 0)


def test_the_command(shared: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    config = str(shared("configs/target/Qwen2.5-7B-Instruct/config.json"))
    main([config, "--flops", "312e12", "--bandwidth", "2.039e12", "--batch", "8", "--length", "2048"])
    header, row = (re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines())
    found = {name: float(cell.rstrip("%")) for name, cell in zip(header, row, strict=True)}
    paper = {"FFN": 75.2, "QKVO": 10.9, "attention": 6.2, "LM head": 7.2, "nonlinear": 0.5}  # ER Tab. 3, first row
    assert {name: found[name] for name in paper} == pytest.approx(paper, abs=0.35)
    assert found["T_p ms"] > 14.1e9 / 2.039e12 * 1e3  # it reads all weights but the embedding


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "config.json is not JSON"), ("[]", "holds no JSON object"), ('{"hidden_size": 64}', "config lacks")],
)
def test_the_command_refuses(tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(SystemExit):
        main([str(tmp_path / "config.json"), "--flops", "1e12", "--bandwidth", "1e11"])
    assert message in capsys.readouterr().err
