#!/usr/bin/env bash
# transformers 5.23.0: an entry of one's own in model.generation_config, such as custom_generate methods read.
# A generation config that was made from the model's config (a new model, a checkpoint without generation_config.json) carries
# _from_model_config=True. It saves the entry, and drops it when it is loaded again, or copied by from_dict(to_dict()), without
# a word; entries that transformers knows survive. One that was made by itself keeps both.
# Seen: file {"mine": 1}; reloaded: None, max_new_tokens 7. With model.generation_config = GenerationConfig(...): 1 and 7.
. "$(dirname "$0")/environment.bash"
"$PYTHON" -m pip install -q torch==2.13.0 transformers==5.23.0
"$PYTHON" - <<'P'
import json
import tempfile
from pathlib import Path

import tiny
from transformers import GenerationConfig, LlamaForCausalLM

found = {}
for how in ("made from the model's config", "made by itself"):
    folder, model = tempfile.mkdtemp(), tiny.llama(50)
    if how == "made by itself":
        model.generation_config = GenerationConfig()
    model.generation_config.mine, model.generation_config.max_new_tokens = 1, 7
    model.save_pretrained(folder)
    assert json.loads((Path(folder) / "generation_config.json").read_text())["mine"] == 1, "changed: it is not saved"
    again = LlamaForCausalLM.from_pretrained(folder).generation_config
    found[how] = (getattr(again, "mine", None), again.max_new_tokens)
print(found)
assert found == {"made from the model's config": (None, 7), "made by itself": (1, 7)}, "changed"
P
