"""One engine in a process of its own: loads a model, warms up, generates one batch and writes its tokens per second.

    python benchmarks/rivals/worker.py JOB OUTPUT

JOB is a JSON file with "engine" ("vllm", or a strategy of ours), "model" (folder), "prompts" (token ids),
"new_tokens", "max_length", "threads" and "seed". What an engine needs is imported where it is used, so that this file
runs in either environment.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


KV_CACHE_GIB = 4  # of vLLM


def vllm(job: dict[str, Any]) -> Callable[[int], int]:
    """A function that generates with a seed and returns the number of tokens."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_CACHE_GIB)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{job['threads'] - 1}"
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=job["model"], dtype="float32", max_model_len=job["max_length"], max_num_seqs=len(job["prompts"]),
        skip_tokenizer_init=True, enable_prefix_caching=False,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]

    def generate(_: int) -> int:  # a seed per request would make vLLM draw row by row
        sampling = SamplingParams(temperature=1.0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False)
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def ours(job: dict[str, Any]) -> Callable[[int], int]:
    """The same with the strategy that the engine's name is."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.calls import way
    from benchmarks.workload import Workload
    from spec_trl import SpeculativeConfig

    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    work = Workload(job["prompts"], job["new_tokens"], 1.0, (), model.generation_config.pad_token_id or 0)
    call = way(model, job["engine"], SpeculativeConfig())
    return lambda seed: sum(map(len, call(work, seed).completions))


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    generate = (vllm if job["engine"] == "vllm" else ours)(job)
    generate(job["seed"] + 1)
    started = time.perf_counter()
    tokens = generate(job["seed"])
    Path(sys.argv[2]).write_text(json.dumps(tokens / (time.perf_counter() - started)))


if __name__ == "__main__":
    main()
