#!/usr/bin/env bash
# bitsandbytes 0.50.2 on a CPU with AVX-512 BF16: one forward of Linear4bit in eval mode packs its weight anew, in place.
# The layer stays packed in train mode, where its product then passes no gradient to its input: torch warns, nothing
# raises, and LoRA below it learns nothing. The scales are rounded to bfloat16 for good.
# Expected: an eval forward leaves the weight, or train mode unpacks it, or backward raises.
# Seen: "gradient of x before: 269.17, after one eval forward: None", "output moved by 0.144", "state_dict restores: False".
# Without the CPU's instruction the packing does not happen: the script says so and exits 0.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 bitsandbytes==0.50.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import sys

import bitsandbytes as bnb
import torch

if not bnb.functional.has_avx512bf16():
    sys.exit(print("no AVX-512 BF16: nothing is packed here"))
torch.manual_seed(0)
layer = bnb.nn.Linear4bit(128, 64, False, torch.float32, quant_type="nf4")
layer.load_state_dict({"weight": torch.randn(64, 128)})
layer = layer.to("cpu").train()
x = torch.randn(9, 128, requires_grad=True)
before = layer(x)
before.sum().backward()
gradient, x.grad = x.grad, None
with torch.no_grad():
    layer.eval()(x.detach())
after = layer.train()(x)
after.sum().backward()
print(f"gradient of x before: {gradient.norm():.2f}, after one eval forward: {x.grad}")
print(f"output moved by {(after - before).abs().max():.3f}; weight {tuple(layer.weight.shape)}")
layer.state_dict()  # unpacks in place
restored = torch.equal(layer(x), before)
print(f"state_dict restores: {restored}")
assert x.grad is None and not torch.equal(after, before) and not restored, "the behaviour has changed"
PY
