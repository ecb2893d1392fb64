"""Tokens per second of vLLM with the drafts that our trainers give it, and after a push of policy and drafter.

vLLM is no part of the wheels that travel (its own weigh 320 MiB): where the machine lacks it, the stage says so.
"""

import gc
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from spec_trl import SpeculativeConfig
from spec_trl.papers import load

from . import shapes
from .stage import Stage


SHAPE = "qwen2.5-0.5b"
NOISE = 0.004  # grid steps of a weight
BATCHES = (8, 64)
PROMPT, NEW, REPEATS = 256, 256, 3
WAYS = {
    "none": ("none", "always"), "self, γ 4": ("self", "always"), "self, planned": ("self", "measured"),
    "history, planned": ("history", "measured"),
}  # fmt: skip


def vllm(stage: Stage) -> None:
    """Each way by an engine of its own: no two fit beside each other."""
    stage.record("installed", find_spec("vllm") is not None)
    if not stage.found["installed"]:
        return
    name = stage.shape if stage.is_smoke else SHAPE
    with tempfile.TemporaryDirectory() as folder:
        model = shapes.grid_model(shapes.config_of(name), NOISE, stage.device, torch.bfloat16, stage.seed)
        model.save_pretrained(folder)
        for what, (strategy, toggle) in WAYS.items():
            stage.measure(f"{name}, {what}", partial(way, stage, model, Path(folder), strategy, toggle), needs=40.0)
            gc.collect()


def way(stage: Stage, model: PreTrainedModel, folder: Path, strategy: str, toggle: Any) -> dict[str, Any]:
    """Tokens per second by batch, and acceptance; after a push, the seconds that it took and acceptance again."""
    from vllm import LLM, SamplingParams

    drafting, plugin = load("vllm.drafting"), load("vllm.plugin")
    plugin.load()
    config = SpeculativeConfig(draft_length=4 if toggle == "always" else [2, 4, 8], sd_toggle=toggle)
    drafts = drafting.drafting_of(strategy, config, None, str(folder), False, stage.device.type)
    prompt, new = (16, 8) if stage.is_smoke else (PROMPT, NEW)
    llm = LLM(
        str(folder), skip_tokenizer_init=True, max_model_len=2 * (prompt + new), gpu_memory_utilization=0.5,
        disable_log_stats=False, enable_prefix_caching=False, enforce_eager=stage.is_smoke, seed=stage.seed,
        **drafts.engine_arguments(stage.device.type),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(stage.seed)

    def rollout(rows: int) -> tuple[float, float | None]:
        ids = torch.randint(1, model.config.vocab_size, (rows, prompt), generator=generator).tolist()
        how = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False)
        before, started = counts(llm), time.perf_counter()
        llm.generate([{"prompt_token_ids": row} for row in ids], how, use_tqdm=False)
        seconds, now = time.perf_counter() - started, counts(llm) - before
        return rows * new / seconds, now.accepted / now.drafted if now.drafted else None

    found: dict[str, Any] = {}
    for rows in (1, 2) if stage.is_smoke else BATCHES:
        rollout(rows)  # captures
        speeds, rates = zip(*(rollout(rows) for _ in range(REPEATS)), strict=True)
        found[f"B {rows}"] = {"tokens_per_second": median(speeds), "acceptance": rates[-1]}
    if drafts.is_copy:
        transport, started = load("vllm.transport"), time.perf_counter()
        for session in ("start_weight_update", "start_draft_weight_update"):
            llm.collective_rpc(session)
            llm.collective_rpc("update_weights", args=(transport.hand_over(model.named_parameters()),))
            llm.collective_rpc("finish_weight_update")
        found["push"] = {"seconds": time.perf_counter() - started, "acceptance": rollout(2)[1]}
    may_not_draft = strategy == "none" or toggle == "measured"
    return found | {"ok": may_not_draft or all(one["acceptance"] for one in found.values())}


def counts(llm: Any) -> Any:
    return load("vllm.counts").Counts.of_metrics(llm.get_metrics())
