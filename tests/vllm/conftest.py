"""Engines of vLLM in this process, on a CPU."""

import gc
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from spec_trl import SpeculativeConfig


HAS_VLLM = find_spec("vllm") is not None
if HAS_VLLM:  # before anything imports it
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    """Frees a test's engine: the groups of its processes are made once, and a mixture needs one more."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with heads of 64, which vLLM's attention serves, and no end of text."""
    from examples.demo.task import build_tokenizer
    from tests.trainers.harness import tiny_policy
    from tests.vllm.heads import easy

    folder = tmp_path_factory.mktemp("policy")
    sizes = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2, head_dim=64)
    policy = easy(tiny_policy(**sizes).float())
    policy.generation_config.eos_token_id = None
    policy.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def plain(policy_folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def eagle3_folder(policy_folder: Path, plain: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.vllm.heads import eagle3_head

    return eagle3_head(plain, tmp_path_factory.mktemp("eagle3"))


@pytest.fixture(scope="session")
def with_mtp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another policy, whose checkpoint has an MTP head."""
    from tests.vllm.heads import policy_with_head

    return policy_with_head(tmp_path_factory.mktemp("with_mtp"))


def make_engine(strategy: str, folder: Path, assistant: str | None = None, **options: Any) -> Any:
    """An engine that drafts as a trainer's would."""
    from vllm import LLM

    from spec_trl.vllm import plugin
    from spec_trl.vllm.drafting import drafting_of

    plugin.load()
    drafting = drafting_of(strategy, SpeculativeConfig(**options), assistant, str(folder), False, "cpu")
    return LLM(
        str(folder), dtype="float32", max_model_len=128, enforce_eager=True, max_num_seqs=16, seed=0,
        enable_prefix_caching=False, disable_log_stats=False, gpu_memory_utilization=0.3,
        logprobs_mode="processed_logprobs", **drafting.engine_arguments("cpu"),
    )  # fmt: skip


@pytest.fixture
def engine(policy_folder: Path) -> Callable[..., Any]:
    """Makes an engine (:func:`make_engine`)."""
    return lambda strategy, **options: make_engine(strategy, policy_folder, **options)
