#!/usr/bin/env bash
# smolagents 1.26.0, TransformersModel: its stopping criterion decodes each new token alone and looks at the joined text. A
# SentencePiece tokenizer (Llama, Mistral, Gemma) drops the space before a word that is decoded alone. So a stop sequence that
# holds a space is never seen: the model writes on to max_new_tokens, and the answer is cut afterwards. Only time is lost, and
# token_usage counts the tokens that nobody reads.
# Seen (transformers 5.23.0, greedy, 60 new tokens at most): stop "very" 34 tokens; stop "was very", which ends at the same
# token, 60.
. "$(dirname "$0")/environment.bash"
"$PYTHON" -m pip install -q torch==2.13.0 transformers==5.23.0 smolagents==1.26.0 accelerate==1.15.0
root="$(cd "$(dirname "$0")/.." && pwd)"
"$PYTHON" - "$root/examples/data/stories260K" <<'P'
import sys

import torch
from smolagents import TransformersModel

agent = TransformersModel(sys.argv[1], device_map="cpu", torch_dtype=torch.float32, max_new_tokens=60)
agent.model.generation_config.update(do_sample=False)
agent.tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
story = "Once upon a time, there was a little girl named Lily. She loved to play"
messages = [{"role": "user", "content": [{"type": "text", "text": story}]}]
answers = {stop: agent.generate(messages, stop_sequences=[stop]) for stop in ("very", "was very")}
for stop, answer in answers.items():
    print(repr(stop), answer.token_usage.output_tokens, "tokens:", repr(answer.content[-40:]))
assert [answer.token_usage.output_tokens for answer in answers.values()] == [34, 60], "it behaves otherwise now"
P
