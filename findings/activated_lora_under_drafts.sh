#!/usr/bin/env bash
# PEFT 0.21.2 aLoRA (LoraConfig(alora_invocation_tokens=...)) with transformers 5.24.0.
# Where the adapter begins is found once, in the prompt, and kept as a distance from the END of what a forward is given. A
# forward over prompt and drafts (prompt_lookup_num_tokens, assistant_model), or over the grown text (use_cache=False, which
# training scripts often set with gradient checkpointing), therefore begins it too late: generate writes other tokens, mostly
# from the first one on, greedy and in float32, without an error or a warning. Ordinary cached generate is right, in batches too.
# Seen: plain generate = 40 of 40 tokens of full forwards; prompt lookup, assistant and use_cache=False: others.
. "$(dirname "$0")/environment.bash"
"$PYTHON" -m pip install -q torch==2.13.0 transformers==5.24.0 peft==0.21.2
"$PYTHON" - <<'P' 2>&1 | grep -v "^Failed to load\|^W[0-9]"
import copy

import tiny
import torch
from peft import LoraConfig, get_peft_model

model = tiny.llama(64, spread=0.02, seed=12)
model.generation_config.eos_token_id = None
targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
config = LoraConfig(r=4, lora_alpha=16, target_modules=targets, alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM")
assistant = copy.deepcopy(model)
assistant.generation_config.assistant_confidence_threshold = 0
policy = get_peft_model(model, config).eval()
torch.manual_seed(1)
with torch.no_grad():
    for name, weight in policy.named_parameters():
        if "lora_" in name:
            weight.copy_(torch.randn_like(weight) * 0.05)


def generate(prompt, **settings):
    mask = torch.ones_like(prompt)
    return policy.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=40, do_sample=False, **settings)


@torch.no_grad()
def full_forwards(prompt):
    for _ in range(40):
        prompt = torch.cat([prompt, policy(input_ids=prompt).logits[:, -1:].argmax(-1)], 1)
    return prompt


invoked = torch.tensor([[7, 8, 9, 7, 8, 9, 10, 5, 6, 7, 8, 9, 7]])
not_invoked = torch.tensor([[7, 8, 9, 7, 8, 9, 10, 5, 11, 7, 8, 9, 7]])
ways = {"plain": {}, "lookup": {"prompt_lookup_num_tokens": 5}, "assistant": {"assistant_model": assistant}}
ways["no cache"] = {"use_cache": False}
for prompt, wrong in (invoked, ["lookup", "assistant", "no cache"]), (not_invoked, []):
    wanted = full_forwards(prompt)
    made = {name: generate(prompt, **settings) for name, settings in ways.items()}
    differs = {name: (out != wanted).int() for name, out in made.items()}
    other = {name: int(where.argmax()) - prompt.shape[1] for name, where in differs.items() if where.any()}
    print("invoked" if wrong else "not invoked", "| first other new token:", other)
    assert list(other) == wrong, "changed"
P
