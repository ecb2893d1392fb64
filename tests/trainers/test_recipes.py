"""Scripts that people have for TRL, with TRL's class names and with ours in their place."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from spec_trl import SpecGRPOTrainer
from spec_trl.generation import keyword
from spec_trl.trainers.run_log import read_run
from tests.trainers.harness import tiny_policy
from tests.trainers.script_of_recipes import OurConfig, StockConfig, main
from tests.trainers.tool_task import make_chat_tokenizer


RECIPE = dict(
    dtype="float32", do_eval=True, eval_strategy="steps", eval_steps=1, gradient_accumulation_steps=1,
    gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, learning_rate=1e-3,
    log_completions=False, logging_first_step=True, logging_steps=1, logging_strategy="steps",
    lr_scheduler_type="cosine", max_completion_length=16, max_steps=2, num_generations=4,
    per_device_eval_batch_size=4, per_device_train_batch_size=8, report_to=["none"], save_strategy="steps",
    save_steps=1, seed=42, warmup_steps=0.1, use_cpu=True, bf16=False, disable_tqdm=True,
    system_prompt="a", reward_funcs=["digits"], cache_implementation="static",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["theirs", "ours"])
def test_a_script_trains_evaluates_saves_and_resumes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyword, "_said", set())
    model, output = tmp_path / "model", tmp_path / "out"
    tiny_policy().float().save_pretrained(model)
    make_chat_tokenizer().save_pretrained(model)
    names = (GRPOTrainer, StockConfig) if kind == "theirs" else (SpecGRPOTrainer, OurConfig)
    recipe = RECIPE | {"model_name_or_path": str(model), "output_dir": str(output)}
    if kind == "ours":
        recipe |= {"assistant_strategy": "self", "speculative_config": {"sd_toggle": "always"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    def run(*more: str) -> Any:
        return main(*names, ["--config", str(tmp_path / "recipe.yaml"), *more])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = run()
        again = run("--max_steps", "3")
    said = [str(each.message) for each in caught]
    overridden = sorted(one.partition(" ")[0] for one in said if "overridden, which changes no token" in one)
    assert overridden == (["cache_implementation='static'", "use_cache=False"] if kind == "ours" else [])
    assert not any("reads none of its options" in one for one in said)
    assert first.state.global_step == 2 and again.state.global_step == 3
    steps = [entry["step"] for entry in again.state.log_history if "loss" in entry]
    assert steps == [1, 2, 3], "it goes on from the newest checkpoint"
    assert {"eval_reward", "eval_loss"} <= json.loads((output / "eval_results.json").read_text()).keys()
    saved = AutoModelForCausalLM.from_pretrained(output)
    assert saved.config.use_cache and saved.generation_config.eos_token_id == 2
    assert all(map(torch.equal, saved.parameters(), again.model.parameters()))
    if kind == "ours":
        log = read_run(output)
        assert [record.step for record in log.of("train")] == [0, 1, 2] and len(log.headers) == 2
        assert len(log.of("eval")) >= 4 and all(record.block_efficiency for record in log.rollouts)
