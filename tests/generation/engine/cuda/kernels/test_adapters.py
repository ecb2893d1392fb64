"""What adapters add, against PEFT's formula, in the interpreter or on a device."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.generation.engine.cuda.kernels.ahead_of_time import CAPABILITIES, compile_for


pytest.importorskip("triton", reason="Triton is not installed")

from spec_trl.generation.engine.cuda.kernels import adapters as kernels
from spec_trl.generation.engine.cuda.kernels.adapters import add_lora


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES, SCALINGS = [130, 8, 40], [2.0, 0.75, 1.7]  # more than a program's share, and less


def eighths(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers whose sums are the same in any order: only roundings can differ."""
    return (torch.randint(-24, 25, shape) / 8).to(DEVICE, dtype)


def peft(x: Tensor, y: Tensor, a: Tensor, b: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    added = F.linear(F.linear(x.to(dtype), a.to(dtype)), b.to(dtype)) * scaling
    return (y + added).to(y.dtype)


def operands(rows: int, inputs: int, rank: int, outer: torch.dtype, kept: torch.dtype) -> list:
    x, ys = eighths(rows, 1, inputs, dtype=outer), [eighths(rows, 1, size, dtype=outer) for size in SIZES]
    a, b = zip(*((eighths(rank, inputs, dtype=kept), eighths(n, rank, dtype=kept) / 64) for n in SIZES), strict=True)
    return [x, ys, list(a), list(b)]


# Of activations, of the adapters, and in which these compute: one dtype, wide adapters, and those under autocast.
DTYPES = [
    (torch.float32, torch.float32, torch.float32), (torch.float16, torch.float16, torch.float16),
    (torch.float16, torch.float32, torch.float32), (torch.float16, torch.float32, torch.float16),
]  # fmt: skip


@pytest.mark.parametrize(("outer", "kept", "dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("most", [kernels._MOST_NUMBERS, 0], ids=["one kernel", "two"])
def test_every_rounding_is_pefts(outer, kept, dtype, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any rows and ranks, whether the sums over inputs come from a kernel of their own, in parts, or not."""
    monkeypatch.setattr(kernels, "_MOST_NUMBERS", most)
    monkeypatch.setattr(kernels, "_SPLIT", 64)
    torch.manual_seed(0)
    for rows, rank in ((1, 4), (5, 20), (20, 6)):
        x, ys, a, b = operands(rows, 150, rank, outer, kept)
        each = [peft(x, *one, dtype) for one in zip(ys, a, b, SCALINGS, strict=True)]
        for count in (1, 3):
            ours = add_lora(x, ys[:count], a[:count], b[:count], SCALINGS[:count], dtype)
            assert ours.is_contiguous() and ours.dtype == outer
            expected = torch.cat(each[:count], dim=-1)
            if dtype == torch.float32:  # sums fused with the scaling may round once
                torch.testing.assert_close(ours, expected, rtol=torch.finfo(outer).eps, atol=0)
            else:
                assert torch.equal(ours, expected)
        ys[1], b[1] = ys[0] / 4, b[0]
        gate, up = (peft(x, *one, dtype) for one in list(zip(ys, a, b, SCALINGS, strict=True))[:2])
        ours = add_lora(x, ys[:2], a[:2], b[:2], SCALINGS[:2], dtype, gated=True)
        torch.testing.assert_close(ours, F.silu(gate) * up, rtol=2 * torch.finfo(outer).eps, atol=1e-3)


def test_bad_input_is_refused() -> None:
    x, ys, a, b = operands(2, 32, 4, torch.float32, torch.float32)
    bad = [
        (x[..., :31], ys, a, b), (x.double(), ys, a, b), (x, [y.half() for y in ys[:1]] + ys[1:], a, b),
        (x, ys, [a[0][:3], *a[1:]], b), (x, ys, a, [each.t().contiguous().t() for each in b]), (x[:1], ys, a, b),
        (x, ys, *([each.new_zeros(65, 32) for each in a], [each.new_zeros(len(each), 65) for each in b])),
    ]  # fmt: skip
    for given in bad:
        with pytest.raises(ValueError, match=r"x, outputs and adapters do not fit together.*a rank up to 64"):
            add_lora(*given, SCALINGS, torch.float32)
    with pytest.raises(ValueError, match="do not fit together"):
        add_lora(x, ys[:2], a[:2], b[:2], SCALINGS[:2], torch.float32, gated=True)


@pytest.mark.parametrize(
    "tests",
    [("test_schema", "test_faketensor"), pytest.param("test_aot_dispatch_dynamic", marks=pytest.mark.slow)],
)
def test_are_proper_operators(tests: str | tuple[str, ...]) -> None:
    x, ys, a, b = operands(2, 32, 4, torch.float32, torch.float32)
    torch.library.opcheck(torch.ops.spec_trl.lora_sums.default, (x, a, torch.float32), test_utils=tests)
    for parts in (None, kernels.lora_sums(x, a, torch.float32)):
        given = x, ys, a, b, SCALINGS, torch.float32, parts
        torch.library.opcheck(torch.ops.spec_trl.lora_add.default, given, test_utils=tests)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_machine_code(capability: int, tmp_path) -> None:
    """Of a 7 B model: gate and up; and down, whose sums take a kernel of their own."""
    calls = """
from spec_trl.generation.engine.cuda.kernels.adapters import add_lora
layers = (3584, [18944, 18944]), (18944, [3584])
for rank in (8, 64):
    for outer, kept, dtype in DTYPES:
        for rows in (1, 40):
            for inputs, sizes in layers:
                a = [torch.empty(rank, inputs, dtype=kept) for _ in sizes]
                b = [torch.empty(size, rank, dtype=kept) for size in sizes]
                ys = [torch.empty(rows, size, dtype=outer) for size in sizes]
                scalings = [2.0] * len(sizes)
                add_lora(torch.empty(rows, inputs, dtype=outer), ys, a, b, scalings, dtype, len(sizes) == 2)
"""
    found = [kernel.name for kernel in compile_for(capability, calls.replace("DTYPES", str(DTYPES[:3])), tmp_path)]
    assert found.count("_add") == 2 * 3 * 2 * 2 and found.count("_shrink") >= 2 * 3 * 2
