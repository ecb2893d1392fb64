#!/usr/bin/env bash
# transformers 5.24.0: generate(assistant_model=..., tokenizer=..., assistant_tokenizer=..., do_sample=True).
# With two tokenizers a SAMPLED call cuts the assistant's head and wraps its embedding in place, to the tokens that both
# vocabularies have, and sets its repetition_penalty to None. Nothing is put back when the call ends: the assistant's logits
# keep fewer columns, its own generate and save_pretrained raise. A greedy call leaves it alone.
# Seen: logits 57 columns before, 48 after; generate: IndexError or RuntimeError (shapes); save_pretrained: RuntimeError (shared tensors).
. "$(dirname "$0")/environment.bash"
"$PYTHON" -m pip install -q torch==2.13.0 transformers==5.24.0
"$PYTHON" - <<'P'
import tempfile

import tiny
import torch

ours, theirs = tiny.tokenizer(), tiny.tokenizer('\n!?;ABCDEF9876543210.,:"[]{} zyxwvutsrqponmlkjihgfedcba')
model, assistant = tiny.llama(len(ours)), tiny.llama(len(theirs), seed=1)
assistant.generation_config.repetition_penalty = 1.1
prompt = ours("abc, the ab", return_tensors="pt").input_ids
probe = theirs("abc, the ab", return_tensors="pt").input_ids
use = {"assistant_model": assistant, "tokenizer": ours, "assistant_tokenizer": theirs, "max_new_tokens": 20}
before = assistant(probe).logits
model.generate(prompt, do_sample=False, **use)
assert torch.equal(before, assistant(probe).logits), "changed: greedy"
torch.manual_seed(0)
model.generate(prompt, do_sample=True, top_k=0, **use)
after = assistant.lm_head(torch.zeros(1, 64))
print("columns", before.shape[-1], after.shape[-1], "| repetition_penalty", assistant.generation_config.repetition_penalty)
assert before.shape[-1] == 57 and after.shape[-1] == 48, "changed"
assert assistant.generation_config.repetition_penalty is None, "changed"
for name, call in {
    "generate": lambda: assistant.generate(probe, max_new_tokens=5),
    "save_pretrained": lambda: assistant.save_pretrained(tempfile.mkdtemp()),
}.items():
    try:
        call()
    except (RuntimeError, IndexError) as error:
        print(name, type(error).__name__, str(error)[:90])
    else:
        raise SystemExit(f"changed: {name} works")
P
