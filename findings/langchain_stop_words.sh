#!/usr/bin/env bash
# langchain-huggingface 0.3.1 (1.2.3 has the same code), HuggingFacePipeline: `stop=` is accepted everywhere and acts almost
# nowhere. `.invoke(prompt, stop=[...])` ignores it: nothing stops and nothing is cut. `.stream(prompt, stop=[...])` looks each
# stop string up as one entry of the vocabulary: a word within a text has another entry ("▁too"), and a string of several
# tokens becomes the id of the unknown token. Neither stops, and nothing says so. Only a string that is a whole token as it
# stands in the text ends the stream, and it is left in the text.
# Seen (transformers 5.23.0, greedy; "yes": the text ends at the stop): "." invoke no, stream yes; "too" no, no; "was too"
# no, no.
. "$(dirname "$0")/environment.bash"
"$PYTHON" -m pip install -q torch==2.13.0 transformers==5.23.0 langchain-huggingface==0.3.1 langchain-core==0.3.76
root="$(cd "$(dirname "$0")/.." && pwd)"
"$PYTHON" - "$root/examples/data/stories260K" <<'P'
import sys

import torch
from langchain_huggingface import HuggingFacePipeline
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
model.generation_config.update(do_sample=False)
chain = HuggingFacePipeline(pipeline=pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu"))
story, options = "Once upon a time, there was a little girl named Lily. She loved to play", dict(max_new_tokens=60)
whole = chain.invoke(story, pipeline_kwargs=options, skip_prompt=True)
seen = []
for stop in (".", "too", "was too"):
    assert stop in whole
    invoked = chain.invoke(story, stop=[stop], pipeline_kwargs=options, skip_prompt=True)
    streamed = "".join(chain.stream(story, stop=[stop], pipeline_kwargs=options))
    seen.append((invoked != whole, len(streamed) < len(whole.strip())))
    print(repr(stop), "ends invoke, stream:", seen[-1])
assert seen == [(False, True), (False, False), (False, False)], "it behaves otherwise now"
P
