"""Attention over a ragged cache, compiled for GPUs that need not be there."""

import re

import pytest

from tests.generation.engine.cuda.kernels.ahead_of_time import CAPABILITIES, compile_for


pytest.importorskip("triton", reason="Triton is not installed")

# Query heads, K/V heads, queries, d, d_v, dtype, softcap, sinks.
SHAPES = [
    (28, 4, 1, 128, 128, "bfloat16", None, False), (28, 4, 2048, 128, 128, "bfloat16", None, False),
    (32, 32, 6, 80, 80, "float16", None, False), (8, 4, 2048, 256, 256, "bfloat16", 50.0, False),
    (64, 8, 6, 64, 64, "bfloat16", None, True), (28, 4, 6, 128, 128, "float32", None, False),
    (28, 4, 6, 128, 128, "bfloat16", None, False), (32, 8, 1, 128, 128, "bfloat16", None, False),
    (14, 2, 1, 64, 64, "bfloat16", None, False), (12, 2, 6, 128, 128, "bfloat16", None, False),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_machine_code(capability: int, exact: bool, tmp_path) -> None:
    """What the interpreter lets pass, a compiler may not; and a tile has to fit into shared memory."""
    calls = f"""
from spec_trl.generation.engine.cuda.kernels import ragged_attention
from spec_trl.generation.engine.cuda.kernels.ragged_attention import ragged_decode_attention
ragged_attention._multiplies_from_memory = lambda device: {capability in (90, 100)}
exact = {exact}
for heads, kv_heads, length, d, d_v, dtype, softcap, sinks in {SHAPES}:
    dtype = getattr(torch, dtype)
    query = torch.empty(2, length, heads, d, dtype=dtype).transpose(1, 2)
    keys, values = (torch.empty(2, kv_heads, 2048, size, dtype=dtype) for size in (d, d_v))
    spans = torch.empty(2, length, 2, dtype=torch.int64)
    sink = torch.empty(heads, dtype=dtype) if sinks else None
    bounds = spans[..., 0], spans[..., 1]
    ragged_decode_attention(query, keys, values, *bounds, 0.1, softcap, sink, exact=exact)
    pools, table = (states.unflatten(2, (-1, 64))[:, :, 0] for states in (keys, values)), spans.new_empty(2, 32)
    ragged_decode_attention(query, *pools, *bounds, 0.1, softcap, sink, table, exact)
"""
    kernels = compile_for(capability, calls, tmp_path)
    assert [kernel.name for kernel in kernels] == ["_attend", "_merge"] * 2 * len(SHAPES)
    assert max(kernel.shared for kernel in kernels) <= 99 * 1024  # what the smallest of these GPUs gives a program


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_piece_of_machine_code_serves_every_exact_call(dtype: str, tmp_path) -> None:
    """So what holds on one GPU for one number of queries holds for all. Chains have another, with the same operations
    on numbers in the same order."""
    calls = f"""
from spec_trl.generation.engine.cuda.kernels.ragged_attention import ragged_decode_attention
for batch, length, columns in ((1, 1, 256), (7, 6, 256), (64, 9, 2048), (2, 16, 4096), (3, 65, 8192)):
    query = torch.empty(batch, length, 28, 128, dtype=torch.{dtype}).transpose(1, 2)
    states = torch.empty(batch, 4, columns, 128, dtype=torch.{dtype})
    spans = torch.empty(batch, length + columns // 128, 2, dtype=torch.int64)
    table = spans[:, length:].flatten(1)
    pool = torch.empty(9, 4, 64, 128, dtype=torch.{dtype})
    bounds = spans[:, :length].unbind(-1)
    ragged_decode_attention(query, pool, pool, *bounds, 0.1, None, None, table, True)
moved = torch.empty(3, 65, 2, dtype=torch.int64)
ragged_decode_attention(query, pool, pool, *bounds, 0.1, None, None, table, True, moved)
"""
    kernels = compile_for(90, calls, tmp_path)
    *attends, chains = [kernel for kernel in kernels if kernel.name == "_attend"]
    assert len(attends) == 5 and len({kernel.ptx for kernel in attends}) == 1
    assert _numeric(chains.ptx) == _numeric(attends[0].ptx) and len(_numeric(chains.ptx)) > 200


def _numeric(ptx: str) -> list[str]:
    """Operations on floating-point numbers, and exchanges of them between threads, in their order."""
    found = re.findall(r"^\s*(?:@\S+ )?(\S*(?:f32|f16|mma|shfl)\S*)", ptx, re.MULTILINE)
    return [name for name in found if not name.startswith(("ld", "st", "mov", "selp"))]
