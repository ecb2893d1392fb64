"""The product of a dense layer, in the interpreter or on a device: right, and the same bits whatever rows share it."""

import pytest
import torch
from torch.nn import functional as F

from tests.generation.engine.cuda.kernels.ahead_of_time import CAPABILITIES, compile_for


pytest.importorskip("triton", reason="Triton is not installed")

from spec_trl.generation.engine.cuda.kernels import dense_product as kernel
from spec_trl.generation.engine.cuda.kernels.dense_product import dense_product, expert_product, row_sum


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
dtypes = pytest.mark.parametrize("dtype", kernel.DTYPES, ids=str)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE, dtype)


@dtypes
@pytest.mark.parametrize("more", [0, 9])  # whole steps of k, and a part of one
def test_a_row_is_the_same_whatever_rows_share_the_product(more: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = kernel.tile_for(40, dtype).inputs + more
    x, weight, bias = random(5, 65, inputs, dtype=dtype), random(40, inputs, dtype=dtype), random(40, dtype=dtype)
    whole = dense_product(x, weight, bias)  # [5, 65, 40]
    assert whole.shape == (5, 65, 40) and whole.dtype == dtype and whole.is_contiguous()
    for batch in (1, 3, 5):
        for length in (1, 6, 9, 65):
            rows, steps = slice(5 - batch, 5), slice(65 - length, 65)
            assert torch.equal(dense_product(x[rows, steps], weight, bias), whole[rows, steps]), (batch, length)


@dtypes
@pytest.mark.parametrize("outputs", [3, 70])
def test_is_right(outputs: int, dtype: torch.dtype) -> None:
    """Rows of any strides, a transposed weight as GPT-2's, with a bias and without."""
    torch.manual_seed(0)
    wide, transposed, bias = random(5, 3, 2 * 90, dtype=dtype), random(90, outputs, dtype=dtype), random(outputs)
    for x in (wide[..., :90], wide[..., ::2], wide[:, 0, :90], wide[0, 0, :90]):
        for weight in (transposed.t(), transposed.t().contiguous()):
            for given in (None, bias.to(dtype)):
                expected = F.linear(x.double(), weight.double(), None if given is None else given.double())
                # Rounded once; the interpreter truncates to bfloat16.
                eps = max(torch.finfo(dtype).eps, 1e-5)
                torch.testing.assert_close(dense_product(x, weight, given).double(), expected, rtol=eps, atol=2 * eps)
    assert dense_product(wide[:0, :, :90], transposed.t()).shape == (0, 3, outputs)


@dtypes
def test_a_pair_of_row_and_expert_is_the_same_whatever_pairs_are_beside_it(dtype: torch.dtype) -> None:
    """More pairs than a tile has rows; an expert without any, and pairs of no expert."""
    torch.manual_seed(0)
    x, weight, bias = random(40, 20, dtype=dtype), random(4, 20, 5, dtype=dtype), random(4, 5, dtype=dtype)
    weight, chosen = weight.transpose(1, 2), torch.randint(0, 2, (40, 2), device=DEVICE) * 3  # 0 and 3
    chosen[7] = 4

    def multiply(rows: slice, sharing: int) -> torch.Tensor:  # [rows, 2, 5]
        of_pairs, pairs = chosen[rows].flatten().sort(stable=True)
        starts = torch.searchsorted(of_pairs, torch.arange(5, device=DEVICE))
        given = x[rows] if sharing == 2 else x[rows].repeat_interleave(2, 0)
        return expert_product(given, weight, bias, pairs, starts, sharing).view(-1, 2, 5)

    whole = multiply(slice(None), 2)
    assert torch.equal(multiply(slice(None), 1), whole) and not whole[7].any()
    for rows in (slice(3, 4), slice(5, 12)):
        assert torch.equal(multiply(rows, 2), whole[rows])
    for row, slot in ((0, 0), (39, 1)):
        expert = int(chosen[row, slot])
        assert torch.equal(whole[row, slot], dense_product(x[row], weight[expert], bias[expert]))
    assert expert_product(x[:0], weight, None, chosen[:0, 0], chosen[:5, 0], 2).shape == (0, 5)


@dtypes
def test_the_sum_of_a_row_is_the_same_whatever_rows_are_beside_it(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = random(3, 7, 300, dtype=dtype)
    whole = row_sum(x)
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole.double(), x.double().sum(-1), rtol=1e-5, atol=1e-4)
    assert torch.equal(row_sum(x[1:2, 2:3]), whole[1:2, 2:3]) and torch.equal(row_sum(x[:, :0]), whole[:, :0])


def test_rows_do_not_decide_the_tile() -> None:
    """Outputs do, and a tile of a layer in half precision reads its weights once for up to 64 rows."""
    tiles = [kernel.tile_for(outputs, torch.bfloat16) for outputs in (512, 8192, 151936)]
    assert [tile.outputs for tile in tiles] == [32, 64, 128] and {tile.rows for tile in tiles} == {64}
    for tile in tiles:
        assert 2 * (tile.rows + tile.outputs) * tile.inputs * tile.stages == 96 * 1024, "bytes of shared memory"


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (torch.zeros(2, 9), torch.zeros(4, 8), None),
        (torch.zeros(2, 8), torch.zeros(4, 8), torch.zeros(3)),
        (torch.zeros(2, 8).half(), torch.zeros(4, 8), None),
        (torch.zeros(2, 8).double(), torch.zeros(4, 8).double(), None),
    ],
)
def test_bad_input_is_refused(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    with pytest.raises(ValueError, match=r"x, weight and bias are .* of shapes \[\[2, .*: pass"):
        dense_product(x, weight, bias)


@pytest.mark.parametrize(
    "tests",
    [("test_schema", "test_faketensor"), pytest.param("test_aot_dispatch_dynamic", marks=pytest.mark.slow)],
)
def test_is_a_proper_operator(tests: str | tuple[str, ...]) -> None:
    inputs, order = (random(2, 3, 32), random(5, 32), random(5)), torch.arange(3, device=DEVICE)
    torch.library.opcheck(torch.ops.spec_trl.dense_product.default, inputs, test_utils=tests)
    torch.library.opcheck(torch.ops.spec_trl.row_sum.default, inputs[:1], test_utils=tests)
    inputs = random(3, 8), random(2, 5, 8), None, order, order, 1
    torch.library.opcheck(torch.ops.spec_trl.expert_product.default, inputs, test_utils=tests)


# Outputs, inputs, dtype, bias, transposed: of 7 B and 0.5 B models, a vocabulary, GPT-2.
SHAPES = [
    (3584, 3584, "bfloat16", True, False), (512, 3584, "float16", True, False), (4864, 896, "float32", False, False),
    (18944, 3584, "bfloat16", False, False), (8192, 2048, "bfloat16", False, False),
    (152064, 3584, "bfloat16", False, False), (2304, 768, "bfloat16", True, True), (2304, 765, "float32", True, True),
]  # fmt: skip


# Of Qwen3-30B-A3B, Mixtral 8x7B, GPT-OSS, whose weights are transposed.
EXPERTS = """
from spec_trl.generation.engine.cuda.kernels.dense_product import expert_product
for experts, top, outputs, inputs, dtype, transposed in (
    (128, 8, 1536, 2048, torch.bfloat16, False), (8, 2, 28672, 4096, torch.float16, False),
    (32, 4, 5760, 2880, torch.bfloat16, True), (8, 2, 96, 64, torch.float32, False),
):
    weight = torch.empty((experts, inputs, outputs) if transposed else (experts, outputs, inputs), dtype=dtype)
    bias = torch.empty(experts, outputs, dtype=dtype) if transposed else None
    weight = weight.transpose(1, 2) if transposed else weight
    for rows in (1, 6, 16, 64, 448):
        pairs, starts = torch.empty(rows * top, dtype=torch.int64), torch.empty(experts + 1, dtype=torch.int64)
        expert_product(torch.empty(rows, inputs, dtype=dtype), weight, bias, pairs, starts, top)
"""
SUMS = """
from spec_trl.generation.engine.cuda.kernels.dense_product import row_sum
for size, dtype in ((8, torch.float32), (64, torch.float16), (2048, torch.bfloat16), (5120, torch.float32)):
    for rows in (1, 6, 16, 64, 448):
        row_sum(torch.empty(rows, size, dtype=dtype))
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_machine_code(capability: int, tmp_path) -> None:
    """One piece for every number of rows: so what holds on one GPU for one number holds for all."""
    calls = f"""
from spec_trl.generation.engine.cuda.kernels.dense_product import dense_product
for outputs, inputs, dtype, biased, transposed in {SHAPES}:
    dtype = getattr(torch, dtype)
    weight = torch.empty((inputs, outputs) if transposed else (outputs, inputs), dtype=dtype)
    bias = torch.empty(outputs, dtype=dtype) if biased else None
    for rows in (1, 6, 16, 64, 448):
        dense_product(torch.empty(rows, inputs, dtype=dtype), weight.t() if transposed else weight, bias)
"""
    for program, name in ((calls, "_multiply"), (EXPERTS, "_multiply_experts"), (SUMS, "_sum")):
        kernels = compile_for(capability, program, tmp_path)
        assert {each.name for each in kernels} == {name} and len(kernels) % 5 == 0
        for at in range(0, len(kernels), 5):
            assert len({each.ptx for each in kernels[at : at + 5]}) == 1, (name, at // 5)
        assert max(each.shared for each in kernels) <= 99 * 1024  # what the smallest of these GPUs gives a program


@pytest.mark.cuda
@dtypes
def test_a_row_on_a_device_is_the_same_whatever_rows_share_the_product(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for outputs in (512, 8192, 20000):
        x, weight = random(448, 1000, dtype=dtype), random(outputs, 1000, dtype=dtype)
        whole = dense_product(x, weight)
        for rows in (1, 2, 6, 16, 33, 64, 300):
            assert torch.equal(dense_product(x[-rows:], weight), whole[-rows:]), (outputs, rows)
