"""The stages of quarter.sh that are no tests: whether what is generated is right, and how fast.

    python -m benchmarks.gpu.quarter STAGE [--tiny] --output FOLDER --seconds N

Every number is in FOLDER/STAGE.json as soon as it is there. Nothing is downloaded: models have the shapes of real ones
and weights made on the spot, on a 4-bit grid plus noise: the noise is all that the 4-bit copy gets wrong.
"""

import gc
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import spec_trl
from spec_trl.generation.engine.forwards.model_costs import model_constants
from spec_trl.generation.session import Session

from . import shapes
from .decode import PLAIN, Method, alternate, engine, make_prompts, summarise
from .decode import transformers_batched as batched
from .decode import transformers_generate as theirs
from .stage import Stage


NOISE = 0.004  # grid steps
DRAFT_LENGTH = 5
BATCHES, COMPARED = (1, 8, 32), (8, 32, 1)  # rows; the most telling first: what compiles may find no time for all
PROMPT, NEW = 1024, 96  # tokens
MOST_OFF, MOST_MEAN_OFF = 1.5, 0.06  # nats: logits of 32 to 64 have an ulp of 0.25 in bfloat16
SMALL = ("qwen2.5-0.5b", "qwen2.5-1.5b")


def make_model(stage: Stage, name: str) -> PreTrainedModel:
    return shapes.grid_model(shapes.config_of(name), NOISE, stage.device, torch.bfloat16, stage.seed)


def time_cells(
    stage: Stage, model: PreTrainedModel, name: str, methods: dict[str, Method], repeats: int = 2, **fields: Any
) -> None:
    """Times "none", with `fields` of SpeculativeConfig, and `methods`, batch by batch."""
    methods = {PLAIN: engine(model, new_tokens(stage), **fields)} | methods
    for batch in (1, 2) if stage.is_smoke else BATCHES if stage.name in ("headline", "small") else COMPARED:
        key = f"{name}, B {batch}"

        def prompts(index: int, batch: int = batch) -> Tensor:
            length = 24 if stage.is_smoke else PROMPT
            return make_prompts(batch, length, model.config.vocab_size, 1000 * stage.seed + index, stage.device)

        def work(key: str = key, prompts: Callable[[int], Tensor] = prompts) -> dict[str, Any]:
            torch.compiler.reset()  # else a second batch size is compiled for any size, and slower
            found = summarise(alternate(stage, key, methods, prompts, repeats))
            ours = [own["facts"] for own in found.values() if isinstance(own, dict) and "graphs" in own["facts"]]
            drafted = found.get("self", {}).get("facts", {}).get("drafted_rounds", 1)
            return found | {"ok": drafted > 0 and (stage.device.type == "cpu" or all(own["graphs"] for own in ours))}

        stage.measure(key, work, needs=10.0)


def new_tokens(stage: Stage) -> int:
    return 8 if stage.is_smoke else NEW


def against_eager(stage: Stage, model: PreTrainedModel) -> dict[str, Any]:
    """Tokens and log-probabilities of captured and of eager forwards, up to the first other token of each row."""
    prompts = make_prompts(8, 64, model.config.vocab_size, 7, stage.device)
    new, done = new_tokens(stage) // 4 + 8, []
    for runner in ("auto", "eager"):
        done.append(
            model.generate(
                prompts, attention_mask=torch.ones_like(prompts), assistant_strategy=PLAIN, do_sample=True, top_k=0,
                speculative_config=spec_trl.SpeculativeConfig(seed=7, runner=runner), max_new_tokens=new,
                pad_token_id=0, return_dict_in_generate=True,
            )
        )  # fmt: skip
    captured, eager = (each.sequences[:, 64:] for each in done)
    same = (captured == eager).long().cumprod(1).bool()  # [B, new]
    differences = (done[0].logprobs - done[1].logprobs).abs()[same]
    graphs, largest, mean = done[0].statistics.graphs, differences.max().item(), differences.mean().item()
    first = same[:, 0].float().mean().item()
    right = mean < MOST_MEAN_OFF and largest < MOST_OFF and first >= 0.5
    return {
        "ok": right and (graphs > 0 or stage.device.type == "cpu"), "graphs": graphs, "largest_off": largest,
        "mean_off": mean, "same_tokens": same.float().mean().item(),
    }  # fmt: skip


def sizes(model: PreTrainedModel) -> dict[str, float]:
    """Bytes of weights that a plain and a draft step read, of K/V per token, and the most that were allocated."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    looked_up = 0 if table is head else table.nbytes
    quantized = getattr(Session.of(model).drafters.get("self"), "quantized", None)
    costs = model_constants(model, quantized)
    return {
        "read by a plain step, GB": (costs.weight_bytes - looked_up) / 1e9,
        "read by a draft step, GB": (costs.draft_weight_bytes - looked_up) / 1e9 if quantized is not None else 0.0,
        "K/V per token, KB": costs.kv_bytes / 1e3,
        "allocated at most, GB": torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0,
    }


def speed(stage: Stage, names: Sequence[str], repeats: int) -> None:
    """Shapes by "none", `generate`, "self" that always drafts, and "auto"."""
    kernel: Any = os.environ.get("QUARTER_KERNEL", "triton") if stage.device.type == "cuda" else "reference"
    packing: dict[str, Any] = dict(draft_kernel=kernel, efficient_rollout=dict(lm_head="packed"))  # one copy
    for name in names:
        model = stage.attempt(f"{name}, made", partial(make_model, stage, name))
        if model is None:
            continue
        stage.measure(f"{name}, captured against eager", partial(against_eager, stage, model), needs=10.0)
        new = new_tokens(stage)
        methods = {
            "generate": theirs(model, new),
            "self": engine(model, new, "self", sd_toggle="always", draft_length=DRAFT_LENGTH, **packing),
            "auto": engine(model, new, "auto", **packing),
        }
        time_cells(stage, model, name, methods, repeats)
        stage.measure(f"{name}, bytes", partial(sizes, model))
        spec_trl.release(model)
        del model, methods
        gc.collect()


def beside(stage: Stage) -> None:
    """transformers' faster ways next to "none"; or what exact=True costs."""
    model, new = make_model(stage, stage.shape), new_tokens(stage)
    if stage.name == "exact":
        for exact in (False, True):  # not in turns: captured forwards of one kind are kept
            always = engine(model, new, "self", exact=exact, sd_toggle="always", draft_length=DRAFT_LENGTH)
            time_cells(stage, model, f"{stage.shape}, exact={exact}", {"self": always}, exact=exact)
    elif stage.name == "static":
        time_cells(stage, model, stage.shape, {"static, compiled": theirs(model, new, cache_implementation="static")})
    else:
        graphs = {"generate_batch, CUDA graphs": batched(model, new, True)} if stage.device.type == "cuda" else {}
        time_cells(stage, model, stage.shape, {"generate_batch": batched(model, new, None)} | graphs)


def elsewhere(stage: Stage) -> None:
    """A stage with a module of its own, whose imports no other stage waits for."""
    getattr(import_module(f"benchmarks.gpu.{stage.name}"), stage.name)(stage)


STAGES: dict[str, Callable[[Stage], None]] = {
    "headline": lambda stage: speed(stage, [stage.shape], repeats=2),
    "small": lambda stage: speed(stage, [stage.shape] if stage.is_smoke else SMALL, repeats=1),
    **dict.fromkeys(("smoke", "grpo", "vllm"), elsewhere),
    **dict.fromkeys(("static", "batched", "exact"), beside),
}


def main(arguments: Sequence[str] | None = None) -> int:
    stage = Stage(__doc__, list(STAGES), arguments)
    STAGES[stage.name](stage)
    return stage.finish()


if __name__ == "__main__":
    raise SystemExit(main())
