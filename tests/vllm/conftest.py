"""Engines of vLLM in this process, on a CPU."""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


HAS_VLLM = find_spec("vllm") is not None
if HAS_VLLM:  # before anything imports it
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with heads of 64, which vLLM's attention serves, and no end of text."""
    from examples.demo.task import build_tokenizer
    from tests.trainers.harness import tiny_policy

    folder = tmp_path_factory.mktemp("policy")
    policy = tiny_policy(hidden_size=128, num_attention_heads=2, num_key_value_heads=2, head_dim=64).float()
    policy.generation_config.eos_token_id = None
    policy.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def engine(policy_folder: Path) -> Iterator[Callable[..., Any]]:
    """Makes an engine that drafts as a trainer's would, by strategy, assistant and options."""
    import gc

    from vllm import LLM

    from spec_trl import SpeculativeConfig
    from spec_trl.vllm import plugin
    from spec_trl.vllm.drafting import drafting_of

    plugin.load()
    made = []

    def make(strategy: str, assistant: str | None = None, folder: Path = policy_folder, **options: Any) -> Any:
        drafting = drafting_of(strategy, SpeculativeConfig(**options), assistant, str(folder), False, "cpu")
        made[:] = [
            LLM(
                str(folder), dtype="float32", max_model_len=128, enforce_eager=True, max_num_seqs=16, seed=0,
                enable_prefix_caching=False, disable_log_stats=False, gpu_memory_utilization=0.3,
                logprobs_mode="processed_logprobs", **drafting.engine_arguments("cpu"),
            )
        ]  # fmt: skip
        return made[0]

    yield make
    made.clear()
    gc.collect()
