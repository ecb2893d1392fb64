"""The launch configurations of examples/accelerate: accelerate reads them, and those for CPUs train the example."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser

from tests.conftest import STORY_MODEL


ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples" / "accelerate").glob("*.yaml"))
OF_CPUS = [path.stem for path in FILES if path.stem.startswith("cpu")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_knows_every_option(path: Path) -> None:
    config = ClusterConfig.from_yaml_file(path)  # raises for a key that it does not know
    assert f"accelerate launch --config_file examples/accelerate/{path.name}" in path.read_text()
    options = vars(launch_command_parser().parse_args(["script.py"]))
    assert {*config.fsdp_config, *config.deepspeed_config} <= {*options}
    assert config.fsdp_config.get("fsdp_version", 2) == 2
    assert config.use_cpu == (path.stem in OF_CPUS)
    assert config.num_processes == (2 if config.use_cpu else int(path.stem.removeprefix("gpu").partition("_")[0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_CPUS)
def test_the_example_trains(name: str, tmp_path: Path) -> None:
    if name == "cpu_zero3" and find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed")
    rows = [{"question": f"a{n}+b{n}", "answer": f"so #### {2 * n}"} for n in range(16)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = ROOT / "examples" / "accelerate" / f"{name}.yaml"
    done = subprocess.run(
        [
            sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config),
            str(ROOT / "examples" / "grpo_gsm8k.py"), "--use_cpu", "--model", str(STORY_MODEL),
            "--dataset", str(tmp_path / "questions.jsonl"), "--max_steps", "2", "--per_device_train_batch_size", "4",
            "--gradient_accumulation_steps", "1", "--num_generations", "4", "--max_completion_length", "32",
            "--output_dir", "out", "--assistant_strategy", "self",
            "--speculative_config", '{"sd_toggle": "always"}',
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "2 logged steps" in done.stdout and "of drafts accepted" in done.stdout
    rollouts = [json.loads(line) for line in (tmp_path / "out" / "rollout_log.jsonl").read_text().splitlines()]
    assert [each["requests"] for each in rollouts if "requests" in each] == [8, 8]  # of two processes
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 1e5
