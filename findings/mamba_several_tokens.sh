#!/usr/bin/env bash
# transformers 5.24.0: several tokens over the cache of a state-space model, after a prompt that it has read.
# Guessed: the logits of one token after the other, up to rounding, as over a K/V cache.
# Seen: Mamba 2 does so. Mamba and Falcon-Mamba raise nothing and give other logits, 0.001 and 0.13 apart with tiny random
# weights, where one token after the other stays within 1e-5 of reading all at once. Who verifies drafts, or reads a prompt in
# pieces, over such a cache gets another text.
. "$(dirname "$0")/environment.bash"
"$PYTHON" -m pip install -q torch==2.13.0 transformers==5.24.0
"$PYTHON" - <<'P'
import torch
from transformers import AutoConfig, AutoModelForCausalLM

KINDS = {"mamba": {}, "falcon_mamba": {}, "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4}}
READ, ALL = 12, 17
found = {}
for kind, sizes in KINDS.items():
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, num_hidden_layers=2, vocab_size=64, hidden_size=32, state_size=8, **sizes)
    model, ids = AutoModelForCausalLM.from_config(config).eval(), torch.arange(3, 3 + ALL)[None]
    with torch.no_grad():
        whole = model(ids).logits[:, READ:]
        for count in (1, ALL - READ):
            cache, parts = model(ids[:, :READ], use_cache=True).cache_params, []
            for part in ids[:, READ:].split(count, dim=1):
                out = model(part, use_cache=True, cache_params=cache)
                cache = out.cache_params
                parts.append(out.logits)
            found[kind, count] = float((torch.cat(parts, dim=1) - whole).abs().max())
print(found)
assert all(found[kind, 1] < 1e-5 for kind in KINDS) and found["mamba2", 5] < 1e-5, "changed"
assert found["mamba", 5] > 1e-4 and found["falcon_mamba", 5] > 1e-4, "changed"
P
