"""`spec-trl grpo` and `spec-trl rloo`: TRL's scripts and YAML files with our trainers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trl
import yaml
from trl.scripts import grpo

import spec_trl
from spec_trl.cli import train as command
from spec_trl.cli.main import main
from spec_trl.generation.engine.rollout import Rollout
from spec_trl.trainers.run_log import read_run
from tests.conftest import STORY_MODEL


ROOT = Path(__file__).parents[2]
OF_TRL = dict(
    model_name_or_path=str(STORY_MODEL), reward_funcs=["short_rewards.short"], max_steps=2, num_generations=4,
    per_device_train_batch_size=4, gradient_accumulation_steps=1, max_completion_length=24, use_cpu=True, bf16=False,
    report_to="none", output_dir="out", logging_steps=1, disable_tqdm=True,
)  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A YAML file of TRL, in the current folder, with the dataset and the rewards that it names."""
    rows = [json.dumps({"prompt": f"Once upon a time {number}"}) for number in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    (tmp_path / "short_rewards.py").write_text("def short(completions, **_): return [-len(c) for c in completions]")
    dataset = {"path": "json", "data_files": str(tmp_path / "prompts.jsonl")}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(OF_TRL | {"datasets": [dataset]}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return "recipe.yaml"


@pytest.mark.parametrize("name", command.CLASSES)
def test_a_recipe_of_trl_trains_with_drafts(name: str, recipe: str) -> None:
    theirs = getattr(trl, f"{name.upper()}Trainer")
    always = ["--assistant_strategy", "self", "--speculative_config", '{"sd_toggle": "always"}']
    command.train(name, ["--config", recipe, *always])
    run = read_run("out")
    assert run.header.settings["assistant_strategy"] == "self" and len(run.rollouts) == 2
    assert all(sum(depth.accepted for depth in record.per_depth.values()) for record in run.rollouts)
    assert Path("out", "model.safetensors").exists()
    assert getattr(trl, f"{name.upper()}Trainer") is theirs


def test_what_trl_itself_can_draft_with(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generation_kwargs`, where spec_trl is imported; else they are kept in a config that nobody reads."""
    how = {"assistant_strategy": "self", "speculative_config": {"sd_toggle": "always"}}
    with Path(recipe).open("a") as file:
        file.write(yaml.safe_dump({"generation_kwargs": how}))
    run, drafted = Rollout.run, list[int]()

    def watched(rollout: Rollout) -> Any:
        completions, statistics = run(rollout)
        drafted.append(statistics.total.accepted)
        return completions, statistics

    monkeypatch.setattr(Rollout, "run", watched)
    for installed in (True, False):
        if not installed:
            spec_trl.uninstall()
        try:
            grpo.main(*grpo.make_parser().parse_args_and_config(["--config", recipe]))
        finally:
            spec_trl.install()
        assert len(drafted) == 2 and min(drafted) > 0


def test_options_are_shared_out(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between `accelerate launch` and the script; the file's are read by both."""
    with Path(recipe).open("a") as file:
        file.write("num_processes: 2\nassistant_strategy: ngram\n")
    launched: list[Any] = []
    monkeypatch.setattr(command, "launch_command", launched.append)
    own = ["--config", recipe, "--learning_rate", "1e-3"]
    assert main(["grpo", *own, "--accelerate_config", "multi_gpu", "--main_process_port", "0"]) == 0
    (asked,) = launched
    assert asked.module and asked.training_script == command.__name__
    assert asked.training_script_args == ["grpo", *own]
    assert (asked.num_processes, asked.main_process_port) == (2, 0) and asked.config_file.endswith("multi_gpu.yaml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["recipe.yaml"], "'recipe.yaml' follows no option; give a YAML file as --config recipe.yaml."),
        (["--config"], "--config takes one YAML file, and is given 1 times; write --config FILE once."),
        (["--config", "a.yaml", "--config", "b.yaml"], "is given 2 times; write --config FILE once."),
        (["--config", "none.yaml"], "none.yaml: No such file or directory"),
        (["--config", "torn.yaml"], "--config names a file that is no YAML of options: "),
        (["--config", "number.yaml"], "--config names a file that is no YAML of options: "),
        (["--config", "recipe.yaml", "--asistant_strategy", "self"], "--asistant_strategy is no option of TRL's "
            "script, SpecGRPOConfig or accelerate. Did you mean 'assistant_strategy'?"),
        (["--config", "recipe.yaml", "--num_procesess", "2"], "Did you mean 'num_processes'?"),
        (["--config", "recipe.yaml", "--max_prompt_length=9"], "TRL has it no longer: cut prompts in the dataset."),
        (["--config", "recipe.yaml", "--draft_lengths", "0"], 'Give speculative_config={"draft_length": ...}.'),
        (["--config", "recipe.yaml", "--speculative_config", '{"draft_length": 0}'], "it must be 1 to 64."),
    ],
)  # fmt: skip
def test_bad_options_end_in_one_line(
    options: list[str], message: str, recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "launch_command", lambda _: pytest.fail("processes were started"))
    Path("torn.yaml").write_text("a: [1")
    Path("number.yaml").write_text("3: 4")
    assert main(["grpo", *options]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("spec-trl grpo: error: ") and message in said


def test_help_has_the_options_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["grpo", "--help"])
    said = capsys.readouterr().out
    assert stop.value.code == 0 and {"--reward_funcs", "--num_generations", "--speculative_config"} <= {*said.split()}


@pytest.mark.slow
def test_the_script_starts_processes(recipe: str) -> None:
    """Two, which share their rows."""
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "spec_trl_command.py"), "grpo", "--config", recipe, "--accelerate_config",
            str(ROOT / "examples" / "accelerate" / "cpu_ddp.yaml"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert [record.requests for record in read_run("out").rollouts] == [8, 8] and "spec_trl verdict" in done.stdout
