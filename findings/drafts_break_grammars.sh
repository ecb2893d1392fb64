#!/usr/bin/env bash
# transformers 5.24.0 with xgrammar 0.2.8 (contrib.hf), outlines 1.3.3 (outlines_core 0.2.14, llguidance 1.9.1).
# A grammar's logits processor keeps a state that it moves by the last token it is shown. generate() shows it every drafted
# token too, those it then rejects included, and with assistant_model= the same object is also called while the assistant
# drafts. So the state runs ahead of the text. Mostly an error follows (xgrammar: a bare AssertionError); where the grammar
# takes the rejected tokens, the text ends early and does NOT match the grammar, and nothing is said.
# Seen, greedy, for [a-e]{20,24}: plain 24 letters; with prompt_lookup_num_tokens=4 and with assistant_model= "dcd" (outlines_core
# and llguidance); xgrammar raises. For "[a-e]+ [a-e]+ [a-e]+\." with prompt lookup: all write "dc." without an error.
# lm-format-enforcer 0.11.3, which reads the text alone and would be safe, cannot be imported with transformers 5: it says that
# transformers is not installed.
. "$(dirname "$0")/environment.bash"
"$PYTHON" -m pip install -q torch==2.13.0 transformers==5.24.0 outlines==1.3.3 outlines_core==0.2.14 xgrammar==0.2.8 llguidance==1.9.1 lm-format-enforcer==0.11.3
"$PYTHON" - <<'P' 2>&1 | grep -v "^Warning\|^\[transformers\]"
import copy
import re

import outlines
import tiny
import torch
import xgrammar
from outlines.backends import get_regex_logits_processor
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = {"<pad>": 0, "</s>": 1} | {c: i + 2 for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
made = Tokenizer(models.BPE(words, []))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
made.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="<pad>")
model = tiny.llama(len(words))
assistant = copy.deepcopy(model)
assistant.generation_config.assistant_confidence_threshold = 0
assistant.generation_config.num_assistant_tokens = 5
torch.manual_seed(5)
with torch.no_grad():
    for weight in assistant.parameters():
        weight.add_(torch.randn_like(weight) * 0.02)
prompt = tokenizer("abc abc abcabc and abc and cba cab abc", return_tensors="pt").input_ids


def processor(name, regex):
    if name == "xgrammar":
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(words), stop_token_ids=[1])
        return xgrammar.contrib.hf.LogitsProcessor(xgrammar.GrammarCompiler(info).compile_regex(regex))
    return get_regex_logits_processor(name, outlines.from_transformers(model, tokenizer), regex)


def text(name, regex, **drafts):
    try:
        out = model.generate(prompt, max_new_tokens=60, logits_processor=[processor(name, regex)], **drafts)
    except (AssertionError, ValueError) as error:
        return type(error).__name__
    return tokenizer.decode(out[0, prompt.shape[1]:], skip_special_tokens=True)


lookup, assisted = {"prompt_lookup_num_tokens": 4}, {"assistant_model": assistant}
for name in "xgrammar", "outlines_core", "llguidance":
    counted = [text(name, "[a-e]{20,24}", **drafts) for drafts in ({}, lookup, assisted)]
    words_ = text(name, r"[a-e]+ [a-e]+ [a-e]+\.", **lookup)
    print(name, counted, words_)
    assert re.fullmatch("[a-e]{20,24}", counted[0]), "changed"
    wrong = ["AssertionError"] * 2 if name == "xgrammar" else ["dcd"] * 2
    assert counted[1:] == wrong and words_ == "dc.", "changed"
try:
    import lmformatenforcer.integrations.transformers  # noqa: F401
except ImportError as error:
    print("lm-format-enforcer:", error)
    assert "transformers is not installed" in str(error), "changed"
else:
    raise SystemExit("changed: lm-format-enforcer works with transformers 5")
P
