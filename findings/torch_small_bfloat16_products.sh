#!/usr/bin/env bash
# torch 2.13.0 on a CPU: F.linear in bfloat16 leaves products with rows * in * out <= 16^3 to other code than oneDNN's,
# which sums in another order. So a row's result depends on how many rows are multiplied with it, for some weights of a
# narrow layer, while oneDNN itself (torch.ops.mkldnn._linear_pointwise, as Inductor calls it) sums all alike from two
# rows on. Seen on an AMD EPYC with AVX-512 BF16: "F.linear: 3 of 200 weights, 2 rows; oneDNN: 0".
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import torch
import torch.nn.functional as F


def by_onednn(x, weight):
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


different = {"F.linear": 0, "oneDNN": 0}
with torch.no_grad():
    for seed in range(200):
        draws = torch.Generator().manual_seed(seed)
        weight = (torch.randn(64, 32, generator=draws) * 0.1).bfloat16()
        x = torch.randn(65, 32, generator=draws).bfloat16()
        for name, multiply in (("F.linear", F.linear), ("oneDNN", by_onednn)):
            different[name] += not torch.equal(multiply(x[:2], weight), multiply(x, weight)[:2])
print(f"F.linear: {different['F.linear']} of 200 weights, 2 rows; oneDNN: {different['oneDNN']}")
assert different["F.linear"] > 0 == different["oneDNN"], "the behaviour has changed"
PY
