"""What Humming cannot hold, and how its extra is asked for; its kernel runs on a GPU only, see test_on_gpu.py."""

import pytest
import torch

from spec_trl.quantization.kernels import LayerSpec, find_kernel
from spec_trl.quantization.kernels.humming import HummingInt4


def spec(out_features, in_features=256, dtype=None):
    return LayerSpec(out_features, in_features, 4, 128, torch.bfloat16, dtype, torch.device("cuda"))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (spec(64, dtype=torch.float16), "humming: activation_dtype=torch.float16"),
        (spec(72), "humming: 72 output features are no multiple of 64"),
    ],
)
def test_what_does_not_fit_gets_a_reason(layer, reason):
    assert reason in find_kernel("humming", layer)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert 'pip install spec-trl[humming]"' in find_kernel("humming", spec(64))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert find_kernel("humming", spec(64)) == "humming: the GPU is older than compute capability 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert find_kernel("humming", spec(64)) is HummingInt4
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "64 output features are no multiple of 128, which this GPU needs" in find_kernel("humming", spec(64))
    assert find_kernel("humming", spec(128)) is HummingInt4
