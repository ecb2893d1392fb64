"""Functions of single numbers: the same bits wherever in a tensor a number stands."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spec_trl.dense_linear import activation_class, by_registers


@pytest.mark.parametrize("function", [F.silu, torch.sigmoid], ids=["silu", "sigmoid"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_number_has_the_same_bits_everywhere(function, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.randn(70, 1370, generator=torch.Generator().manual_seed(0))  # of which three threads take parts
        whole = by_registers(function, x)
        assert torch.equal(by_registers(function, x[:, 100:300]), whole[:, 100:300])
        for rows in (1, 7, 31):
            assert torch.equal(by_registers(function, x[9 : 9 + rows]), whole[9 : 9 + rows])
        assert torch.equal(by_registers(function, x[:0]), x[:0])
        assert torch.allclose(whole, function(x))
    finally:
        torch.set_num_threads(before)


def test_which_modules_are_activations() -> None:
    assert issubclass(activation_class(nn.SiLU), nn.SiLU) and activation_class(nn.SiLU) is not nn.SiLU
    assert activation_class(nn.Softmax) is nn.Softmax and activation_class(nn.Linear) is nn.Linear
