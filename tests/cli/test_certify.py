"""``spec-trl certify``: what it compares, and what it says of models that are exact, are not, or are not served."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM

from spec_trl.cli import certify as cli_certify
from spec_trl.cli.certify import ROWS, certify
from spec_trl.cli.loading import random_ids
from spec_trl.cli.main import main
from spec_trl.hardware import instruction_set
from spec_trl.native.native_code import compiler
from tests.conftest import tiny_llama


needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
PROMPTS = random_ids(ROWS, 9, 64, seed=0)
PLAIN = 2  # lines of transformers


def of_engine(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [line for line in found["lines"] if not line["situation"].startswith("transformers")]


@needs_compiler
def test_a_page_and_a_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = {"AVX2": ("avx2", instruction_set().split()[0])}  # a process for whatever set this CPU has
    monkeypatch.setattr(cli_certify, "SMALLER", sets)
    output = tmp_path / "certificate.json"
    assert main(["certify", str(model), "--dtype", "float32", "--length", "6", "--output", str(output)]) == 0
    page, certificate = capsys.readouterr().out, json.loads(output.read_text())
    found = certificate["dtypes"]["float32"]
    assert found["exact"] is True and "exact: True" in page and found["hash"][:16] in page
    lines = [*of_engine(found), *of_engine(found["instructions"]["AVX2"])]
    assert len(lines) > 14 and all(line["equal"] == line["tokens"] > 0 and not line["worst"] for line in lines)
    drafting = [line for line in lines if line["situation"].startswith('"')]
    assert all(line["drafted"] > 0 for line in drafting if "auto" not in line["situation"])
    assert f"{lines[0]['equal']} of {lines[0]['tokens']}" in page and "AVX2: rows alone" in page
    assert {"processor", "torch", "transformers", "spec_trl"} <= set(certificate["machine"])
    again = certify(tiny_llama().float(), 2 * PROMPTS[: ROWS // 2], 6, short=True)["hash"]
    assert again != found["hash"], "of other prompts"


class _Odd(nn.Module):
    """Gives a token something else beside many tokens than beside few."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 if x[..., 0].numel() < 3 else 1.001)


@pytest.mark.filterwarnings("ignore:.*exact on this machine")
def test_what_is_not_exact_shows() -> None:
    model = tiny_llama().float()
    model.model.layers[1].mlp.act_fn = _Odd()
    found = certify(model, PROMPTS, 6, short=False)
    alone = found["lines"][0]
    assert "act_fn" in found["exact"][0]
    assert alone["situation"] == "rows alone" and alone["equal"] < alone["tokens"] and alone["worst"] > 1e-5
    batch, several = found["lines"][-PLAIN:]
    assert batch["equal"] < batch["tokens"] and several["equal"] < several["tokens"]
    assert several["note"] == "model.layers.1.mlp.act_fn"


def test_a_model_that_the_engine_refuses_is_certified_as_transformers_runs_it() -> None:
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2)).eval()
    found = certify(model, PROMPTS, 6, short=False)
    assert found["exact"].startswith("not served: ") and "ALiBi" in found["exact"] and found["hash"] is None
    assert len(found["lines"]) == PLAIN and all(line["tokens"] == 4 * 6 for line in found["lines"])


def test_a_folder_that_is_not_there_is_refused_before_any_work(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "missing" / "certificate.json"
    assert main(["certify", str(model), "--output", str(output)]) == 2
    assert f"there is no folder {output.parent}; make it first" in capsys.readouterr().err
