#!/usr/bin/env bash
# transformers 5.24.0: stops of one's own under generate's own drafts (prompt_lookup_num_tokens, assistant_model).
# Stopping criteria are asked once per round, after all accepted tokens of the round were added, and look at the end of the
# text alone. A stop string or stop token inside an accepted run is not seen: the text goes on past it, mostly to
# max_new_tokens. Only EOS and the length are cut at. Prompt lookup copies from the prompt, so a stop string that stands in
# the prompt (few-shot evaluations, chats) is the likeliest to be copied and missed. stop_strings= with assistant_model= is
# an error that asks for the tokenizer that was given. A streamer is handed several tokens at once, of shape [1, n].
# Seen, greedy, float32, the same tokens throughout: plain 6 new tokens; prompt lookup 40; assistant 40, once stop_strings= is
# given as a StopStringCriteria.
. "$(dirname "$0")/environment.bash"
"$PYTHON" -m pip install -q torch==2.13.0 transformers==5.24.0
"$PYTHON" - <<'P'
import copy

import tiny
import torch
from transformers import StoppingCriteria
from transformers.generation.stopping_criteria import StopStringCriteria

tokenizer = tiny.tokenizer()
model = tiny.llama(len(tokenizer), seed=12, spread=0.02)
model.generation_config.eos_token_id = None
start = tokenizer("abc, the ab", return_tensors="pt").input_ids
prompt = model.generate(start, max_new_tokens=100, do_sample=False)  # a text that repeats itself, and goes on so
plain = model.generate(prompt, max_new_tokens=40, do_sample=False)
new = tokenizer.decode(plain[0, prompt.shape[1]:])
same = copy.deepcopy(model)  # an assistant whose every draft is accepted
same.generation_config.assistant_confidence_threshold, same.generation_config.num_assistant_tokens = 0, 8


class StopOnTokens(StoppingCriteria):
    """The class of many chat loops."""

    def __init__(self, stop):
        self.stop = stop

    def __call__(self, input_ids, scores, **keywords):
        return input_ids[:, -1] == self.stop


class Shapes:
    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.append(tuple(value.shape))

    def end(self):
        pass


def length(**keywords):
    out = model.generate(prompt, max_new_tokens=40, do_sample=False, **keywords)
    assert torch.equal(out, plain[:, : out.shape[1]]), "other tokens"
    return out.shape[1] - prompt.shape[1]


drafts = {"plain": {}, "lookup": {"prompt_lookup_num_tokens": 8}, "assistant": {"assistant_model": same}}
print("text:", repr(new))
missed = {"lookup": 0, "assistant": 0}
for end in range(3, 10):  # stops that end after 3 to 9 new tokens
    stop = new[end - 3 : end]
    criteria = {name: length(stopping_criteria=[StopStringCriteria(tokenizer, [stop])], **use) for name, use in drafts.items()}
    token = int(plain[0, prompt.shape[1] + end - 1])
    tokens = {name: length(stopping_criteria=[StopOnTokens(token)], **use) for name, use in drafts.items()}
    print(repr(stop), criteria, "| token", tokens)
    assert criteria["plain"] <= end, "changed: plain"
    for name in missed:
        missed[name] += criteria[name] > criteria["plain"]
print("stop strings run past, of 7:", missed)
assert min(missed.values()) >= 4, "changed"
streamer = Shapes()
length(streamer=streamer, assistant_model=same)
print("streamed", streamer.seen)
assert (1, 9) in streamer.seen, "changed"
try:
    length(stop_strings=[new[:3]], tokenizer=tokenizer, assistant_model=same)
except ValueError as error:
    print("ValueError:", error)
    assert "could not locate a tokenizer" in str(error), "changed"
else:
    raise SystemExit("changed: stop_strings with an assistant is taken")
P
