"""Low-rank corrections against the same written out for each row, and their Adam against torch's."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from spec_trl.papers.test_time_speculation.trained_weights import RowAdam, RowAdapters


LAYERS = {"a": nn.Linear(6, 4).double(), "b": Conv1D(5, 6).double()}


def learned(rows: int) -> RowAdapters:
    """Adapters that correct something."""
    adapters = RowAdapters(LAYERS, rows, rank=3)
    generator = torch.Generator().manual_seed(0)
    for tensor in adapters.tensors:
        tensor += torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    return adapters


@pytest.mark.parametrize(("rows", "first"), [(1, 0), (5, 0), (5, 2)])
@pytest.mark.parametrize("name", LAYERS)
def test_each_row_has_its_own(name: str, rows: int, first: int) -> None:
    adapters, layer = learned(rows), LAYERS[name]
    handles = adapters.attach(LAYERS, lambda: first)
    x = torch.randn(3, 2, 6, dtype=torch.float64)  # [B, q, in]
    corrected = layer(x)
    for handle in handles:
        handle.remove()
    for b in range(3):
        own = 0 if rows == 1 else first + b
        expected = layer(x[b]) + x[b] @ (adapters.up[name][own] @ adapters.down[name]).T
        torch.testing.assert_close(corrected[b], expected)
    assert not torch.equal(corrected, layer(x))  # the handles are gone


def test_rows_start_at_nothing_move_and_are_reset() -> None:
    assert not any(tensor.any() for tensor in RowAdapters(LAYERS, 4, rank=3).tensors)
    adapters = learned(4)
    before = [tensor.clone() for tensor in adapters.tensors]
    adapters.move([3], [1])
    adapters.reset([0])
    for tensor, old in zip(adapters.tensors, before, strict=True):
        assert not tensor[0].any()
        assert torch.equal(tensor[1:], old[[3, 2, 3]])


@torch.no_grad()
def test_a_step_changes_a_layer_by_its_own_scale() -> None:
    """Layers whose weights differ a thousandfold are changed by the same share."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(64, 64, bias=False).double() for name in ("small", "large")}
    layers["large"].weight.data = 1000 * layers["small"].weight.data
    adapters, x = RowAdapters(layers, 1, rank=8), torch.ones(1, 1, 64).double()
    plain = {name: layer(x) for name, layer in layers.items()}
    adapters.attach(layers, lambda: 0)
    for up in adapters.tensors:
        up += 1e-3
    shares = [float((layer(x) - plain[name]).norm() / plain[name].norm()) for name, layer in layers.items()]
    assert all(1e-4 < share < 1e-1 for share in shares) and max(shares) < 10 * min(shares)


def test_adam_is_torchs_for_each_row() -> None:
    """Rows that start at different times, and one that starts anew, each as torch.optim.Adam would have them."""
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(3, 2, 4, generator=generator, dtype=torch.float64)
    adam = RowAdam([tensor], learning_rate=0.1)
    own = [nn.Parameter(row.clone()) for row in tensor]
    theirs = [torch.optim.Adam([parameter], lr=0.1) for parameter in own]
    for step in range(12):
        gradient = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        rows = 2 if step < 5 else 3
        adam.step([gradient], torch.arange(rows) != (0 if step == 2 else -1))  # row 0 once learns nothing
        for row in range(1 if step == 2 else 0, rows):
            own[row].grad = gradient[row]
            theirs[row].step()
        if step == 7:
            adam.reset([1])
            theirs[1] = torch.optim.Adam([own[1]], lr=0.1)
        if step == 9:  # row 2 comes to stand in row 0
            tensor[0] = tensor[2]
            adam.move([2], [0])
            own[0].data.copy_(own[2].data)
            theirs[0].load_state_dict(copy.deepcopy(theirs[2].state_dict()))
        torch.testing.assert_close(tensor, torch.stack([parameter.data for parameter in own]))


@pytest.mark.parametrize("rows", [1, 3])
def test_layers_that_see_no_rows_and_half_precision(rows: int) -> None:
    """Corrections of rows need inputs by row; one correction for all does not. They are float32 at least."""
    x, layer = torch.randn(6, 4).bfloat16(), nn.Linear(4, 5).bfloat16()
    adapters = RowAdapters({"layer": layer}, rows, rank=2)
    adapters.attach({"layer": layer}, lambda: 0)
    assert adapters.down["layer"].dtype == torch.float32
    if rows == 1:
        assert layer(x).shape == (6, 5) and layer(x).dtype == torch.bfloat16
    else:
        with pytest.raises(ValueError, match='use tts.scope="rollout"'):
            layer(x)
