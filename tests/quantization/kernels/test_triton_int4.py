"""The Triton kernel, under Triton's interpreter where there is no GPU: layout, product, splitting, operator."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_trl.quantization.kernels.base import join_rows
from spec_trl.quantization.kernels.reference import ReferenceInt4
from spec_trl.quantization.kernels.triton_int4 import TritonInt4
from spec_trl.quantization.rtn import RoundToNearest
from tests.generation.engine.cuda.kernels.ahead_of_time import CAPABILITIES, compile_for
from tests.quantization.conftest import layer_spec
from tests.quantization.conftest import pack as pack_weight


mm = pytest.importorskip("spec_trl.quantization.kernels.triton_int4_mm", reason="triton is not installed")
BF16 = torch.bfloat16
MEMORY = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024, 120: 100 * 1024}  # shared, per multiprocessor
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
@given(tiles=st.integers(1, 1200), spans=st.integers(1, 80), most=st.integers(2, 3))
def test_splits(tiles, spans, most):
    splits = mm.splits_for(tiles, spans, 132, most)
    each = -(-spans // splits)
    assert (splits - 1) * each < spans <= splits * each  # none is empty, and all is covered
    assert splits == 1 or -(-tiles * splits // 132) <= most


# Of Qwen2.5 7 B and 0.5 B and Llama 8 B: [out, in] of q, k, v | o | gate, up | down.
LAYERS = {
    "7 B": [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)],
    "8 B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    "0.5 B": [(1152, 896), (896, 896), (9728, 896), (896, 4864)],
}


@pytest.mark.parametrize(
    ("model", "programs"),
    [("7 B", [252, 196, 296, 252]), ("8 B", [384, 256, 224, 256]), ("0.5 B", [36, 28, 304, 70])],
)  # fmt: skip
def test_programs_per_multiprocessor(model, programs):
    """For up to 8 rows on 132 of them: two or three on the busiest, if there are spans for so many; and the work of
    the busiest is at most 1.35 times the mean."""
    for (out, columns), expected in zip(LAYERS[model], programs, strict=True):
        tiles, spans = mm.tiles_for(out), -(-columns // 256)
        splits = mm.splits_for(tiles, spans, 132, 3)
        assert tiles * splits == expected
        busiest = -(-expected // 132)
        if tiles * spans >= 2 * 132:
            assert 2 <= busiest <= 3 and busiest * -(-spans // splits) <= 1.36 * tiles * spans / 132
    # An output head has nine tiles for each multiprocessor; keys and values take one span per program.
    assert [mm.splits_for(tiles, 14, 132, 3) for tiles in (1188, 4)] == [1, 14]


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


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_machine_code(capability, tmp_path):
    """The interpreter does not see the assembly; Triton's own assembler does, and needs no GPU."""
    # BLOCK_M, WORDS, GROUP, DIVIDED.
    cases = [(8, 32, 128, True), (8, 32, 128, False), (32, 32, 32, False), (32, 32, 128, True), (16, 16, 64, True)]
    calls = f"""
from spec_trl.quantization.kernels import triton_int4_mm as mm
for block_m, words, group, divided in {cases}:
    m, n, k, spans = 3, 256, 32 * words, 4
    out, integers = torch.zeros(m, n, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int32)
    mm._int4_mm[(2, 2, 1)](
        out, integers, integers, out, torch.zeros(2, m, n), integers, m, n, k, n, spans, 2, k, n,
        GROUP=group, WORDS=words, BLOCK_M=block_m, BLOCK_N=mm.BLOCK_N, EVEN_K=True, DIVIDED=divided, INTERPRETED=False,
        num_warps=mm.NUM_WARPS, num_stages=mm.stages_for(block_m, {MEMORY[capability]}),
    )
"""
    for case, compiled in zip(cases, compile_for(capability, calls, tmp_path), strict=True):
        ptx, divided = compiled.ptx, case[-1]
        fit = MEMORY[capability] // (compiled.shared + 1024)  # programs
        assert fit >= (1 if capability == 120 and case[0] > mm.FEW_ROWS else 2), case
        assert fit >= 3 or case[0] > mm.FEW_ROWS or MEMORY[capability] < mm.THREE_PROGRAMS_MEMORY, case
        if capability == 100:
            continue  # its tensor cores keep products in a memory of their own
        products = len(re.findall(r"^\s*(?:wgmma\.mma_async\.sync|mma\.sync)", ptx, re.M))
        assert products >= 8, case
        assert ptx.count("cp.async.c") >= mm.NUM_STAGES - 1, case  # loads run ahead
        stores = ptx[: ptx.index("st.global")].count("st.shared")
        assert stores <= 8, case  # of the result's way out: unpacked weights stay in registers
        if divided:  # every thread has stored its part before one counts the program, and loads none before that
            before, counted, after = re.split(r"(atom\.\S+)", ptx)
            assert counted.startswith("atom.global.gpu.acq_rel.add"), case
            assert "bar.sync" in before[before.rindex("st.global") :], case
            assert "bar.sync" in after[: after.index("ld.global.cg")] and "ld.global.cg" not in before, case
