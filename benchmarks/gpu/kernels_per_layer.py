"""How many kernels a decoder layer launches in a decoding forward, with the families' own code and with fused kernels,
of a bfloat16 model and of a float32 one under autocast to bfloat16: a test looks at them.

On a GPU they are counted in the profiler's trace. Without one every tensor operation that is no view counts as a
kernel, and each of our operators as those that it launches; the kernels then run in Triton's interpreter, on a tiny
model, and a product with packed weights counts as one. A layer is the difference between a model of two layers and one
of one.
"""

import os
from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from peft import LoraConfig, get_peft_model  # may import Triton

from benchmarks.gpu.shapes import TINY, config_of, random_model
from spec_trl.generation.engine.forwards.runner import EagerRunner
from spec_trl.generation.engine.kv.cache import RaggedCache
from spec_trl.generation.engine.network import attention, fused_layers
from spec_trl.generation.engine.network.products import make_copies
from spec_trl.generation.engine.network.shadow import make_shadow
from spec_trl.quantization import quantize_projections
from spec_trl.quantization.kernels.reference import ReferenceInt4


LAUNCHES = {"ragged_decode_attention": 2}
"""Kernels of our operators, where these are not one."""
# What makes no kernel though it is no view either.
_NOTHING = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "_unsafe_view", "detach"}


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._schema.name.split("::")[1]
        if not func.is_view and name not in _NOTHING:
            self.found[name] += LAUNCHES.get(name, 1)
        return func(*args, **(kwargs or {}))


def _one_operation(packed: ReferenceInt4, x: torch.Tensor) -> torch.Tensor:
    return x.new_ones(len(x), packed.layer.out_features)


def in_a_forward(
    model: PreTrainedModel, quantized: bool = False, fused: bool = True, adapted: bool = False, tokens: int = 1
) -> Counter[str]:
    """Kernels or operations of one forward of `tokens` per row, under autocast if the weights are float32; `adapted`:
    with LoRA on all projections."""
    device, mixed = model.device, model.dtype == torch.float32
    if adapted:
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear")).base_model.model
    with mock.patch.object(fused_layers, "run_on", lambda _device: fused):
        network = make_shadow(model)
    if quantized:
        with mock.patch.object(ReferenceInt4, "activation_dtypes", (torch.bfloat16,)):  # as those of a GPU's kernels
            quantize_projections(network, kernel="auto" if device.type == "cuda" else "reference", lm_head="dense")
    runner = EagerRunner(network, RaggedCache.for_network(network, rows=2, columns=64))
    token = torch.ones(2, tokens, dtype=torch.int64, device=device)
    positions = torch.arange(1, tokens + 1, device=device).expand(2, -1)

    def forward() -> None:
        with mock.patch.object(attention, "run_on", lambda _device: True):
            runner._run(token, positions, 64, spans=True)

    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=mixed, cache_enabled=False):
        make_copies(network)
        forward()  # allocates and compiles
        if device.type == "cpu":
            with _Operations() as operations, mock.patch.object(ReferenceInt4, "linear", _one_operation):
                forward()
            return operations.found
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            forward()
            torch.cuda.synchronize()
        return Counter(event.name for event in recorded.events() if event.device_type == DeviceType.CUDA)


def per_layer(
    family: str, quantized: bool = False, fused: bool = True, mixed: bool = False, **how: Any
) -> Counter[str]:
    """Kernels of one layer by name; `mixed`: of float32 weights under autocast; `how` as :func:`in_a_forward` has
    it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    for layers in (1, 2):
        config = config_of(TINY, model_type=family, num_hidden_layers=layers, head_dim=32)
        model = random_model(config, device, torch.float32 if mixed else torch.bfloat16)
        found.append(in_a_forward(model, quantized, fused, **how))
    return found[1] - found[0]
