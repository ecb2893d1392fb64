"""``spec-trl certify``: what it compares, and what it says of models that are exact, are not, or are not served."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM

from spec_trl.cli import certify as cli_certify
from spec_trl.cli.certify import ROWS, certify, situations
from spec_trl.cli.loading import random_ids
from spec_trl.cli.main import main
from spec_trl.cli.plain_bits import forced_logprobs
from spec_trl.hardware import instruction_set
from spec_trl.native.native_code import compiler
from tests.conftest import tiny_llama
from tests.generation.drafters.mtp.heads import write_heads


needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
ROOT = Path(__file__).parents[2]
PROMPTS = random_ids(ROWS, 9, 64, seed=0)


@needs_compiler
def test_a_page_and_a_file(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    sets = {"AVX2": ("avx2", instruction_set().split()[0])}  # a process for whatever set this CPU has
    monkeypatch.setattr(cli_certify, "SMALLER", sets)
    output = tmp_path / "certificate.json"
    assert main(["certify", str(model), "--dtype", "float32", "--length", "6", "--output", str(output)]) == 0
    page, certificate = capsys.readouterr().out, json.loads(output.read_text())
    found = certificate["dtypes"]["float32"]
    assert found["exact"] is True and f"float32: exact, hash {found['hash'][:16]}" in page
    lines = [*found["lines"], *found["instructions"]["AVX2"]["lines"]]
    assert len(lines) > 14 and all(line["equal"] == line["tokens"] > 0 and not line["worst"] for line in lines)
    assert next(line for line in lines if "read again" in line["situation"])["note"] == "", "rows left"
    drafting = [line for line in lines if line["situation"].startswith('"')]
    assert all(line["drafted"] > 0 for line in drafting if not line["note"])
    assert [line["situation"] for line in drafting if line["note"]] == ['"auto"'], "six tokens are too few for it"
    assert f"{lines[0]['equal']} of {lines[0]['tokens']}" in page and "AVX2: rows alone" in page
    assert "transformers: a batch of 4" in page and {"on", "torch", "transformers"} <= set(certificate["machine"])
    again = certify(tiny_llama().float(), PROMPTS, 6, situations(short=True))
    assert again["hash"] != found["hash"] and not again["transformers"], "of other prompts"


@needs_compiler
def test_the_installed_command(model: Path, tmp_path: Path) -> None:
    """It runs without `import spec_trl`, which teaches `generate` the strategies."""
    command = [sys.executable, "-m", "spec_trl_command", "certify", str(model), "--dtype", "float32", "--length", "6"]
    output = tmp_path / "certificate.json"
    subprocess.run([*command, "--short", "--output", str(output)], check=True, cwd=ROOT, timeout=300)
    found = json.loads(output.read_text())["dtypes"]["float32"]
    assert found["exact"] is True and all(line["equal"] == line["tokens"] > 0 for line in found["lines"])


@needs_compiler
def test_the_head_of_a_checkpoint_drafts(tmp_path: Path) -> None:
    write_heads(tmp_path / "model", "llama")
    arguments = ["--dtype", "float32", "--length", "6", "--output", str(tmp_path / "certificate.json")]
    assert main(["certify", str(tmp_path / "model"), *arguments]) == 0
    lines = json.loads((tmp_path / "certificate.json").read_text())["dtypes"]["float32"]["lines"]
    (line,) = (each for each in lines if each["situation"].startswith('"mtp"'))
    assert line["drafted"] > 0 and line["equal"] == line["tokens"] == 6 * ROWS


class _Odd(nn.Module):
    """Gives a token something else beside many tokens than beside few."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 if x[..., 0].numel() < 3 else 1.001)


@pytest.mark.filterwarnings("ignore:.*exact on this machine")
def test_what_is_not_exact_shows() -> None:
    model = tiny_llama().float()
    model.model.layers[1].mlp.act_fn = _Odd()
    found = certify(model, PROMPTS, 6, situations(short=False), plain=True)
    alone, (batch, several) = found["lines"][0], found["transformers"]
    assert "act_fn" in found["exact"][0] and "not exact: " in cli_certify.page("float32", found)
    assert alone["situation"] == "rows alone" and alone["equal"] < alone["tokens"] and alone["worst"] > 1e-5
    assert batch["equal"] < batch["tokens"] and several["equal"] < several["tokens"]
    assert several["note"].startswith("first other bits: model.layers.")


def test_transformers_texts_have_the_numbers_of_one_forward() -> None:
    """Each release names the argument of the cache as it likes: a call that ignores it gives other numbers."""
    model, texts = tiny_llama().float(), random_ids(3, 7, 64, seed=1)
    prompts = [prompt[: 3 + 2 * row] for row, prompt in enumerate(PROMPTS[:3])]
    for count in (1, 3):
        found = forced_logprobs(model, prompts, texts, count)
        for own, prompt, text in zip(found, prompts, texts, strict=True):
            scores = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            torch.testing.assert_close(own, scores.gather(1, torch.tensor(text)[:, None])[:, 0])


def test_not_a_number_is_no_equal_bit() -> None:
    line, nan = cli_certify.Line("x"), torch.tensor([torch.nan, 1.0])
    cli_certify.compare(line, {0: cli_certify.Text([5, 6], nan)}, {0: cli_certify.Text([5, 6], nan)})
    assert (line.equal, line.tokens, line.worst) == (1, 2, torch.inf)


@pytest.mark.parametrize("kind", ["bloom", "mamba"])
def test_models_as_transformers_runs_them(kind: str) -> None:
    """The engine refuses one; the other keeps states in the place of K/V."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32}
    made: dict[str, Callable[[], Any]] = {
        "bloom": lambda: BloomForCausalLM(BloomConfig(n_layer=2, n_head=2, **sizes)),
        "mamba": lambda: MambaForCausalLM(MambaConfig(num_hidden_layers=2, state_size=4, **sizes)),
    }
    found = certify(made[kind]().eval(), PROMPTS, 6, situations(short=False), plain=True)
    batch, several = found["transformers"]
    assert batch["tokens"] == 4 * 6 >= batch["equal"] > 0
    if kind == "mamba":  # its own forward takes one token after another
        assert found["exact"] is True and several["note"].startswith("RuntimeError: ")
    else:
        assert several["tokens"] == 4 * 6
        assert found["exact"].startswith("not served: ") and "ALiBi" in found["exact"]
        assert found["hash"] is None and not found["lines"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output", "missing/certificate.json"], "there is no folder"),
        (["--output", "."], "it is a folder; name a file"),
        (["--length", "5"], "--length 5 must be at least 6"),
    ],
)
def test_bad_input_is_refused_before_any_work(model: Path, options: list[str], message: str, capsys: Any) -> None:
    assert main(["certify", str(model), *options]) == 2
    assert message in capsys.readouterr().err
