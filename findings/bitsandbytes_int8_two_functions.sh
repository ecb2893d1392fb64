#!/usr/bin/env bash
# bitsandbytes 0.50.2 on a CPU: Linear8bitLt computes another function in train mode (dequantized weights, float input)
# than in eval mode (input quantized to 8 bits, outliers of all rows together). So a policy that samples in eval mode
# and trains in train mode has two distributions, and in eval mode a row's output depends on the other rows.
# Seen: "train against eval: 0.190 of 32.2", "a row alone and beside a row with an outlier: train 3.8e-06, eval 0.010".
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 bitsandbytes==0.50.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import logging

import bitsandbytes as bnb
import torch

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
torch.manual_seed(0)
layer = bnb.nn.Linear8bitLt(128, 64, False, has_fp16_weights=False, threshold=6.0)
layer.load_state_dict({"weight": torch.randn(64, 128)})
layer = layer.to("cpu")
x = torch.randn(2, 128)
x[1, 5] = 9.0  # an outlier in the second row
with torch.no_grad():
    train, train_alone = layer.train()(x)[:1], layer(x[:1])
    evaluated, eval_alone = layer.eval()(x)[:1], layer(x[:1])
modes = (train - evaluated).abs().max().item()
rows, rows_train = (evaluated - eval_alone).abs().max().item(), (train - train_alone).abs().max().item()
print(f"train against eval: {modes:.3f} of {train.abs().max():.1f}")
print(f"a row alone and beside a row with an outlier: train {rows_train:.1e}, eval {rows:.3f}")
assert modes > 0.01 and rows > 1e-3 > rows_train, "the behaviour has changed"
PY
