#!/usr/bin/env bash
# transformers 5.23.0 and TRL 1.16.0: model_init_kwargs={"use_cache": False}, which scripts set under gradient checkpointing.
# LlamaForCausalLM.from_pretrained(folder, use_cache=False) writes False into model.generation_config as well, where the folder
# has a generation_config.json; AutoModelForCausalLM.from_pretrained does not. TRL loads by the class, so GRPOTrainer's
# rollouts run without a K/V cache: each new token reads the whole text again. What it saves says use_cache: false, and the
# model's later users generate so too, even after model.config.use_cache = True.
# Seen: tokens that the decoder read in a rollout of 8 rows, prompts of 6 and 32 new tokens: 296 with the cache, 5,504 without.
. "$(dirname "$0")/environment.bash"
"$PYTHON" -m pip install -q torch==2.13.0 transformers==5.23.0 trl==1.16.0
"$PYTHON" - <<'P'
import json
import tempfile
from pathlib import Path

import tiny
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

folder = tempfile.mkdtemp()
tokenizer = tiny.tokenizer()
tiny.llama(len(tokenizer)).save_pretrained(folder)
tokenizer.save_pretrained(folder)
found = {}
for kind in (AutoModelForCausalLM, LlamaForCausalLM):
    model = kind.from_pretrained(folder, use_cache=False)
    found[kind.__name__] = (model.config.use_cache, model.generation_config.use_cache)
print("(config, generation_config):", found)
assert found == {"AutoModelForCausalLM": (False, True), "LlamaForCausalLM": (False, False)}, "changed"

read, saved = {}, {}
for use_cache in (True, False):
    out = tempfile.mkdtemp()
    trainer = GRPOTrainer(
        model=folder,
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        train_dataset=Dataset.from_dict({"prompt": ["abc de"] * 8}),
        args=GRPOConfig(
            out, max_steps=1, max_completion_length=32, per_device_train_batch_size=8, report_to="none", use_cpu=True,
            bf16=False, disable_tqdm=True, model_init_kwargs={"use_cache": use_cache}, save_strategy="no",
            generation_kwargs={"min_new_tokens": 32}, logging_steps=99,
        ),
    )
    count = []
    trainer.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: count.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    trainer.train()
    read[use_cache] = sum(count[:32])  # the rollout, before the loss
    trainer.save_model(out)
    saved[use_cache] = json.loads((Path(out) / "generation_config.json").read_text()).get("use_cache")
print("tokens read:", read, "| saved use_cache:", saved)
assert read == {True: 8 * (6 + 31), False: 8 * sum(range(6, 38))}, "changed"
assert saved == {True: True, False: False}, "changed"
P
