"""Files that commands read, made once."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from transformers import CLIPConfig, LlamaConfig, LlamaForCausalLM

from spec_trl.cli.main import main
from spec_trl.papers.efficient_rollout.sweep import write_sweep
from spec_trl.papers.specactor.ladder import Ladder, Rung
from tests.cli.sample_run import make_profile, write_run
from tests.conftest import tiny_llama


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="session")
def profile(folder: Path) -> Path:
    make_profile().save(folder / "profile.json")
    return folder / "profile.json"


@pytest.fixture(scope="session")
def model(folder: Path, tiny: LlamaForCausalLM) -> Path:
    tiny.save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture(scope="session")
def report(folder: Path, profile: Path) -> tuple[Path, str]:
    """The folder of a run with its profile, of which a report was made, and what that printed."""
    write_run(folder / "run", profile="profile.json")
    (folder / "run" / "profile.json").write_bytes(profile.read_bytes())
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["report", str(folder / "run")]) == 0
    return folder / "run", printed.getvalue()


@pytest.fixture(scope="session")
def files(folder: Path, profile: Path, model: Path) -> dict[str, Path]:
    """Good and bad files by name."""
    made = {"folder": folder, "profile": profile, "model": model, "run": folder / "short", "out": folder / "out.png"}
    made |= {name: folder / f"{name}.json" for name in ("cut", "bare", "old", "none")}
    made |= {"sweep": folder / "sweep.csv", "ladder": folder / "ladder.json", "prompts": folder / "prompts.txt"}
    made |= {"edited": folder / "edited", "other": folder / "other"}
    content = json.loads(profile.read_text())
    made["cut"].write_text(profile.read_text()[:100])
    made["bare"].write_text(json.dumps(content | {"samples": []}))
    LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2).save_pretrained(folder / "hidden")
    made |= {"hidden": folder / "hidden" / "config.json", "times": folder / "times.csv"}
    write_sweep(made["times"], "shape", make_profile().samples)
    made["sweep"].write_text("model,batch,length,draft_length,mode,seconds\nm,1,128,0,target,0\n")
    Ladder((Rung("ngram", 1, 1, 0.5, 1.0, 1.0),), "shape").save(made["ladder"])
    made["old"].write_text(json.dumps(json.loads(made["ladder"].read_text()) | {"version": 0}))
    made["prompts"].write_text("one")
    write_run(made["run"], rollouts=2)
    log = write_run(made["edited"], rollouts=2)
    log.write_text(log.read_text().replace('"tokens"', '"tokns"', 1))
    tiny_llama(vocab_size=100).save_pretrained(made["other"])
    made |= {"encoder": folder / "encoder", "shell": folder / "shell"}
    CLIPConfig().save_pretrained(made["encoder"])
    LlamaConfig().save_pretrained(made["shell"])
    return made
