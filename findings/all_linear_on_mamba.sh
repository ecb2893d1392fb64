#!/usr/bin/env bash
# PEFT 0.21.2 with transformers 5.24.0: LoraConfig(target_modules="all-linear") on models with Mamba layers.
# For Falcon-H1, Nemotron-H and Mamba-2 it is an error: "all-linear" picks out_proj, PEFT then refuses out_proj and asks
# to remove it from target_modules, where it does not stand. exclude_modules=["out_proj"] is the way out. For Bamba and Granite
# hybrids, which have the same layers, nothing is refused and out_proj is adapted.
# Seen: ValueError for falcon_h1 and mamba2, 9 kinds of layers with out_proj for bamba.
. "$(dirname "$0")/environment.bash"
"$PYTHON" -m pip install -q torch==2.13.0 transformers==5.24.0 peft==0.21.2
"$PYTHON" - <<'P' 2>&1 | grep -v "^Failed to load\|^W[0-9]\|fast path\|mamba-ssm"
import tiny  # noqa: F401 (one thread)
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BambaConfig, FalconH1Config, Mamba2Config

size = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
attention = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
mamba = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
configs = [
    FalconH1Config(**size, **attention, **mamba | {"mamba_d_ssm": 64}),
    Mamba2Config(**size, num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=8),
    BambaConfig(**size, **attention, **mamba, mamba_n_groups=1, attn_layer_indices=[1]),
]
for config in configs:
    found = {}
    for name, settings in {"all-linear": {}, "without out_proj": {"exclude_modules": ["out_proj"]}}.items():
        model = AutoModelForCausalLM.from_config(config)
        try:
            model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", **settings))
            found[name] = sorted({key.split(".lora_A")[0].split(".")[-1] for key, _ in model.named_parameters() if "lora_A" in key})
        except ValueError as error:
            found[name] = f"ValueError: {error}"
    print(config.model_type, found)
    refused = config.model_type != "bamba"
    assert ("Please remove it from `target_modules`" in found["all-linear"]) == refused, "changed"
    assert "in_proj" in found["without out_proj"] and "out_proj" not in found["without out_proj"], "changed"
    assert refused or "out_proj" in found["all-linear"], "changed"
P
