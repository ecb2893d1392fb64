"""The Triton kernel, under Triton's interpreter where there is no GPU: layout, product, splitting, operator."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_trl.quantization.kernels.base import join_rows
from spec_trl.quantization.kernels.reference import ReferenceInt4
from spec_trl.quantization.kernels.triton_int4 import TritonInt4
from spec_trl.quantization.rtn import RoundToNearest
from tests.quantization.conftest import layer_spec
from tests.quantization.conftest import pack as pack_weight


mm = pytest.importorskip("spec_trl.quantization.kernels.triton_int4_mm", reason="triton is not installed")
BF16 = torch.bfloat16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# out, in, group: whole tiles, rows and columns that need padding, words of 16 and of 32, one row, a small model's
SHAPES = [
    (128, 256, 128), (64, 128, 128), (208, 64, 32), (40, 192, 64), (344, 256, 32), (300, 1024, 128), (496, 896, 128),
    (1, 512, 64), (128, 288, 32),
]  # fmt: skip


def pack(kernel, weight, group):
    """`weight` as both kernels store it: with scales in bfloat16."""
    return pack_weight(kernel, layer_spec(*weight.shape, group, device=DEVICE.type, activation_dtype=BF16), weight)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((20, 192, 64), 3), ((18, 256, 32), 2),  # words of 16, and of 32; padded rows and columns
        *(pytest.param(shape, rows, marks=pytest.mark.slow) for shape in SHAPES for rows in (1, 8, 16, 40)),
    ],
)  # fmt: skip
def test_multiplies_like_the_reference(shape, rows):
    """One rounding of the result, and what the interpreter's arithmetic cuts off; sums are fp32."""
    torch.manual_seed(0)
    weight, x = torch.randn(*shape[:2], device=DEVICE), torch.randn(rows, shape[1], device=DEVICE).to(BF16)
    packed, reference = pack(TritonInt4, weight, shape[2]), pack(ReferenceInt4, weight, shape[2])
    layer = reference.layer
    steps = reference.unpack().view(-1, layer.groups, layer.group).double() - reference.zeros.double()[..., None]
    exact = x.double() @ (steps * reference.scales.double()[..., None]).flatten(1).T  # [rows, out]
    y = packed.linear(x)  # [rows, out]
    assert y.dtype == BF16 and y.shape == exact.shape
    noise = 2**-16 * x.double().abs() @ weight.double().abs().T  # [rows, out]
    assert ((y.double() - exact).abs() <= 2**-7 * exact.abs() + noise).all()


def test_rows_of_x_do_not_mix_and_may_be_a_view():
    torch.manual_seed(0)
    packed = pack(TritonInt4, torch.randn(20, 192, device=DEVICE), 64)
    wide = torch.randn(3, 384, device=DEVICE).to(BF16)
    x = wide[:, ::2]
    clean = packed.linear(x.contiguous())
    wide[1] = torch.nan
    y = packed.linear(x)
    assert y[1].isnan().all() and torch.equal(y[[0, 2]], clean[[0, 2]])
    assert packed.linear(x[:0]).shape == (0, 20)


def test_slices_of_one_weight():
    """Packed into each, multiplied by each and by the whole."""
    torch.manual_seed(0)
    weights = [torch.randn(rows, 320, device=DEVICE) for rows in (32, 16, 48)]
    apart = [pack(TritonInt4, weight, 64) for weight in weights]
    parts = [TritonInt4(packed.layer) for packed in apart]
    whole = join_rows(parts)
    for part, weight in zip(parts, weights, strict=True):
        RoundToNearest().quantize_(weight, part)
    x = torch.randn(3, 320, device=DEVICE).to(BF16)
    expected = [packed.linear(x) for packed in apart]
    assert all(map(torch.equal, [part.linear(x) for part in parts], expected))
    assert torch.equal(whole.linear(x), torch.cat(expected, dim=1))
    odd = TritonInt4(layer_spec(17, 320, 64, device=DEVICE.type, activation_dtype=BF16))
    assert join_rows([odd, *parts]) is None  # a block has 16 rows
    other = TritonInt4(layer_spec(32, 320, 32, device=DEVICE.type, activation_dtype=BF16))
    assert join_rows([other, *parts]) is None


def test_division_of_the_columns_changes_rounding_only(monkeypatch):
    torch.manual_seed(0)
    packed = pack(TritonInt4, torch.randn(20, 512, device=DEVICE), 128)
    x = torch.randn(3, 512, device=DEVICE).to(BF16)
    products = []
    for splits in (1, 2):
        monkeypatch.setattr(mm, "splits_for", lambda *shape, splits=splits: splits)
        products.append(packed.linear(x))
    assert torch.equal(products[-1], packed.linear(x))  # the same bits at each call
    torch.testing.assert_close(products[1], products[0], rtol=2**-7, atol=1e-3)


def test_the_last_program_of_a_tile_adds_the_parts_in_order():
    """As captured: over counters that stay, in memory that holds what the call before has left; into float32,
    since the interpreter cuts off where bfloat16 rounds."""
    torch.manual_seed(0)
    packed = pack(TritonInt4, torch.randn(200, 1024, device=DEVICE), 128)  # two tiles, of four spans
    x = torch.randn(40, 1024, device=DEVICE).to(BF16)  # two blocks
    y, parts = (
        torch.empty(40, 200, device=DEVICE),
        torch.empty(4, 40, 200, device=DEVICE),
    )
    arrivals = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    constants = dict(GROUP=128, WORDS=32, BLOCK_M=32, BLOCK_N=128, EVEN_K=True, DIVIDED=True)
    for _ in range(2):
        y.fill_(torch.nan)
        mm._int4_mm[(2, 4, 2)](
            x, packed.codes, packed.scales_and_offsets, y, parts, arrivals, 40, 200, 1024, 208, 4, 1, 1024, 208,
            **constants, INTERPRETED=DEVICE.type == "cpu",
        )  # fmt: skip
        assert torch.equal(y, ((parts[0] + parts[1]) + parts[2]) + parts[3]) and not arrivals.any()
        torch.testing.assert_close(y, packed.linear(x).float(), rtol=2**-7, atol=1e-3)
        parts.fill_(torch.nan)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(tiles=st.integers(1, 1200), spans=st.integers(1, 80))
def test_splits(tiles, spans):
    splits = mm.splits_for(tiles, spans, 132)
    each = -(-spans // splits)
    assert (splits - 1) * each < spans <= splits * each  # none is empty, and all is covered
    busiest = -(-tiles * splits // 132) * each
    fewest = min(-(-tiles * n // 132) * -(-spans // n) for n in range(1, spans + 1))
    assert busiest <= max(fewest, mm.IMBALANCE * tiles * spans / 132)
    # An output head has nine tiles for each multiprocessor; keys and values take one span per program.
    assert [mm.splits_for(tiles, 14, 132) for tiles in (1188, 4, 28)] == [1, 14, 4]


def run_ptx(lines, inputs):
    """The registers after the few kinds of instructions that the unpacking uses; inputs are $1, $2, … ."""
    registers = {f"${i + 1}": value for i, value in enumerate(inputs)}

    def read(name):
        return registers[name] if name in registers else int(name, 0)

    for line in lines.split(";"):
        found = re.match(r"\s*\{?\s*([a-z0-9.]+)\s+(.*)", line.strip(" \n{}"), re.S)
        if not found or found[1].startswith(".reg"):
            continue
        operation, arguments = found[1], [a.strip() for a in found[2].split(",")]
        target, values = arguments[0], [read(a) for a in arguments[1:]]
        if operation == "prmt.b32":
            octets = values[0].to_bytes(4, "little") + values[1].to_bytes(4, "little")
            registers[target] = int.from_bytes(bytes(octets[values[2] >> 4 * i & 7] for i in range(4)), "little")
        elif operation == "shr.u32":
            registers[target] = values[0] >> values[1]
        elif operation == "lop3.b32":
            a, b, c, table = values
            bits = [table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1 for i in range(32)]
            registers[target] = sum(bit << i for i, bit in enumerate(bits))
        elif operation == "mov.b32":
            registers[target] = values[0]
        elif operation == "fma.rn.bf16x2":
            a, b, c = (torch.tensor([v & 0xFFFF, v >> 16]).to(torch.int16).view(BF16).double() for v in values)
            halves = (a * b + c).to(BF16).view(torch.int16).int() & 0xFFFF
            registers[target] = int(halves[0]) | int(halves[1]) << 16
        else:
            raise AssertionError(f"{operation} is not known here")
    return registers["$0"]


PAIR = st.tuples(*(st.integers(0, 2**32 - 1),) * 2)


@settings(deadline=None, max_examples=80, derandomize=True)
@given(nibble=st.integers(0, 7), words=PAIR, zeros=st.tuples(*(st.integers(0, 15),) * 2), scales=PAIR)
def test_the_assembly_unpacks_exactly(nibble, words, zeros, scales):
    """It runs on a GPU only, so here its instructions are followed one by one."""
    offsets = (-(128 + torch.tensor(zeros).to(BF16))).view(torch.int16).int() & 0xFFFF
    parameters = [scale & 0xFFFF0000 | int(offset) for scale, offset in zip(scales, offsets, strict=True)]
    pair = run_ptx(mm.ASSEMBLY.value[nibble], [*words, *parameters])
    steps = torch.tensor([pair & 0xFFFF, pair >> 16]).to(torch.int16).view(BF16).tolist()
    assert steps == [(word >> 4 * nibble & 15) - zero for word, zero in zip(words, zeros, strict=True)]


def test_the_operator_can_be_compiled():
    torch.manual_seed(0)
    packed = pack(TritonInt4, torch.randn(4, 128, device=DEVICE), 64)
    x = torch.randn(1, 128, device=DEVICE).to(BF16)
    arguments = (x, packed.codes, packed.scales_and_offsets, packed.arrivals, 4, 64)
    torch.library.opcheck(mm.triton_int4_mm, arguments, test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(lambda x: packed.linear(x) * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), packed.linear(x) * 2)


COMPILE = """
import importlib.util, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

spec = importlib.util.spec_from_file_location("mm", sys.argv[1])
mm = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mm)
names, found = mm._int4_mm.arg_names, []
for capability, block_m, words, group, divided in json.loads(sys.argv[2]):
    pointers = {"x_ptr": "*bf16", "words_ptr": "*i32", "parameters_ptr": "*i32", "out_ptr": "*bf16"}
    pointers |= {"parts_ptr": "*fp32", "arrivals_ptr": "*i32"}
    constants = dict(GROUP=group, WORDS=words, BLOCK_M=block_m, BLOCK_N=mm.BLOCK_N, EVEN_K=True)
    constants |= dict(DIVIDED=divided, INTERPRETED=False)
    signature = {name: pointers.get(name, "constexpr" if name in constants else "i32") for name in names}
    aligned = [*pointers, "n", "k", "stored_n", "row_stride"]
    kernel = triton.compile(
        ASTSource(
            mm._int4_mm, signature, {(names.index(name),): value for name, value in constants.items()},
            {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        ),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": mm.NUM_WARPS, "num_stages": mm.NUM_STAGES},
    )
    assert kernel.asm["cubin"]
    found.append(kernel.asm["ptx"])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_it_compiles_for_gpus_that_are_not_here():
    """The interpreter does not see the assembly; Triton's own assembler does, and needs no GPU."""
    # Capability, BLOCK_M, WORDS, GROUP, DIVIDED. In one process: importing takes longer than compiling.
    cases = [(90, 8, 32, 128, True), (90, 32, 32, 32, False), (90, 16, 16, 64, True), (80, 16, 16, 128, True)]
    arguments = [mm.__file__, json.dumps(cases)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE, *arguments], env=environment, capture_output=True, text=True)
    if "Cannot find ptxas" in done.stderr:
        pytest.skip("this build of Triton has no assembler for NVIDIA GPUs")
    assert done.returncode == 0, done.stderr[-2000:]
    for case, ptx in zip(cases, json.loads(done.stdout), strict=True):
        products = len(re.findall(r"^\s*(?:wgmma\.mma_async\.sync|mma\.sync)", ptx, re.M))
        assert products >= 8, case
        assert ptx.count("cp.async.c") >= mm.NUM_STAGES, case  # loads run ahead
        stores = ptx[: ptx.index("st.global")].count("st.shared")
        assert stores <= 8, case  # of the result's way out: unpacked weights stay in registers
        if case[-1]:  # every thread has stored its part before one counts the program, and loads none before that
            before, counted, after = re.split(r"(atom\.\S+)", ptx)
            assert counted.startswith("atom.global.gpu.acq_rel.add"), case
            assert "bar.sync" in before[before.rindex("st.global") :], case
            assert "bar.sync" in after[: after.index("ld.global.cg")] and "ld.global.cg" not in before, case
