"""Attention over a ragged cache against the textbook, in the interpreter or on a device."""

import pytest
import torch

from tests.generation.engine.kernels.ahead_of_time import compile_for


pytest.importorskip("triton", reason="Triton is not installed")

from spec_trl.generation.engine.kernels import ragged_attention
from spec_trl.generation.engine.kernels.ragged_attention import ragged_decode_attention


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLUMNS = 150


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter stores bfloat16 as integers of 16 bits, and tl.dot there multiplies these integers."""
    if DEVICE == "cuda":
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def create_dot(builder, *operands_and_options):
        operands = [builder.cast_impl(operand, tl.float32) for operand in operands_and_options[:3]]
        return multiply(builder, *operands, *operands_and_options[3:])

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE, dtype)


def cache(rows: int, kv_heads: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`[rows, kv_heads, COLUMNS, size]`, the visible part of a longer buffer."""
    return random(rows, kv_heads, COLUMNS + 21, size, dtype=dtype)[:, :, :COLUMNS]


def queries(batch: int, heads: int, length: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`[batch, heads, length, size]` as a model hands them over, transposed."""
    return random(batch, length, heads, size, dtype=dtype).transpose(1, 2)


def causal(starts: list[int], length: int, window: int | None = None, chunk: int | None = None) -> torch.Tensor:
    """`[B, length, 2]` int64, first and last column of queries at `starts[b]`, `starts[b] + 1`, ..."""
    start = torch.tensor(starts, dtype=torch.int64, device=DEVICE)[:, None]  # [B, 1]
    last = start + torch.arange(length, device=DEVICE)  # [B, length]
    first = torch.zeros_like(last)
    if window is not None:
        first = last - window + 1  # negative near the start
    elif chunk is not None:
        first = last // chunk * chunk
    return torch.stack([first, last], dim=-1)


def textbook(query, keys, values, spans, scale, softcap=None, sinks=None) -> torch.Tensor:
    """`[B, q, heads, d_v]` float64, one query of one head at a time."""
    batch, heads, length, _ = query.shape
    groups = heads // keys.shape[1]
    query, keys, values = query.double().cpu(), keys.double().cpu(), values.double().cpu()
    output = torch.zeros(batch, length, heads, values.shape[3], dtype=torch.float64)
    for row in range(batch):
        for step, (first, last) in enumerate(spans[row].tolist()):
            seen = slice(max(first, 0), last + 1)
            for head in range(heads if first <= last else 0):
                scores = keys[row, head // groups, seen] @ query[row, head, step] * scale
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double().cpu()])
                weights = scores.softmax(0)[: keys[row, 0, seen].shape[0]]
                output[row, step, head] = weights @ values[row, head // groups, seen]
    return output


def attend(query, keys, values, spans, scale, softcap=None, sinks=None) -> torch.Tensor:
    return ragged_decode_attention(query, keys, values, spans[..., 0], spans[..., 1], scale, softcap, sinks)


def compare(query, keys, values, spans, scale=None, softcap=None, sinks=None, tolerance=1e-5) -> None:
    scale = query.shape[3] ** -0.5 if scale is None else scale
    output = attend(query, keys, values, spans, scale, softcap, sinks)
    expected = textbook(query, keys, values, spans, scale, softcap, sinks)
    assert output.dtype == query.dtype and output.is_contiguous()
    torch.testing.assert_close(output.double().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("length", [1, 6, 17])
@pytest.mark.parametrize("groups", [1, 2, 7])
def test_lengths_and_groups(groups: int, length: int) -> None:
    torch.manual_seed(0)
    query = queries(2, 2 * groups, length, 64)
    keys, values = cache(3, 2, 64), cache(3, 2, 64)
    compare(query, keys, values, causal([5, COLUMNS - length], length))


@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("limits", [dict(window=1), dict(window=40), dict(chunk=64)], ids=str)
def test_windows(limits: dict[str, int], length: int) -> None:
    torch.manual_seed(0)
    query, keys, values = queries(3, 4, length, 64), cache(3, 2, 64), cache(3, 2, 64)
    # With a chunk of 64 the queries of the second row fall into two chunks.
    compare(query, keys, values, causal([3, 61, COLUMNS - length], length, **limits))


@pytest.mark.parametrize("sizes", [(80, 80), (128, 128), (64, 40), (8, 24)], ids=str)
def test_head_dimensions(sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    query, keys, values = queries(2, 4, 2, sizes[0]), cache(2, 2, sizes[0]), cache(2, 2, sizes[1])
    compare(query, keys, values, causal([5, 130], 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 6])
def test_half_precision(length: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query = queries(3, 14, length, 128, dtype)
    keys, values = cache(3, 2, 128, dtype), cache(3, 2, 128, dtype)
    spans = causal([2, 70, COLUMNS - length], length)
    error = attend(query, keys, values, spans, 0.1).double().cpu() - textbook(query, keys, values, spans, 0.1)
    # Weights and result are rounded once each (the interpreter truncates): relative to what adds up without signs.
    size = textbook(query, keys, values.abs(), spans, 0.1)
    assert (error.abs() <= 2 * torch.finfo(dtype).eps * size).all()


@pytest.mark.parametrize("splits", [1, 1000])
@pytest.mark.parametrize("extra", ["softcap", "sinks", "both", "large"])
def test_softcap_and_sinks(monkeypatch: pytest.MonkeyPatch, extra: str, splits: int) -> None:
    monkeypatch.setattr(ragged_attention, "_multiprocessors", lambda device: splits)
    torch.manual_seed(0)
    query, keys, values = queries(2, 6, 3, 64), cache(2, 2, 64), cache(2, 2, 64)
    sinks = None if extra == "softcap" else random(6) + 2
    softcap = 1.5 if extra in ("softcap", "both") else None
    scale = 30.0 if extra == "large" else 0.5  # scores in the hundreds: exp would overflow without the maximum
    compare(query, keys, values, causal([1, 120], 3), scale, softcap, sinks, 1e-4 if extra == "large" else 1e-5)


def test_scores_beyond_the_softcap_saturate() -> None:
    torch.manual_seed(0)
    query, keys, values = queries(2, 4, 2, 64), cache(2, 2, 64), cache(2, 2, 64)
    compare(query, keys, values, causal([30, 120], 2), scale=100.0, softcap=2.0)


@pytest.mark.parametrize("multiprocessors", [1, 5, 1000])
def test_any_number_of_splits(monkeypatch: pytest.MonkeyPatch, multiprocessors: int) -> None:
    """Also more than the shortest row has blocks."""
    monkeypatch.setattr(ragged_attention, "_multiprocessors", lambda device: multiprocessors)
    torch.manual_seed(0)
    query, keys, values = queries(3, 4, 2, 64), cache(3, 2, 64), cache(3, 2, 64)
    compare(query, keys, values, causal([0, 33, COLUMNS - 2], 2))
    compare(query, keys, values, causal([0, 33, COLUMNS - 2], 2, window=5))


def test_splits_come_from_shapes() -> None:
    splits = ragged_attention._splits
    assert splits(programs=4, blocks=1000, multiprocessors=132) == 128
    assert splits(programs=32, blocks=1000, multiprocessors=132) == 16
    assert splits(programs=32, blocks=3, multiprocessors=132) == 3
    assert splits(programs=10_000, blocks=1000, multiprocessors=132) == 1


def test_offsets_beyond_31_bits() -> None:
    """Strides that fit into 32 bits, and a row that does not. Of the 4 GiB next to nothing is touched."""
    torch.manual_seed(0)
    rows, stride = 3, 2**30
    storage = torch.empty(2 * stride + COLUMNS * 64, dtype=torch.float16, device=DEVICE)
    far = storage.as_strided((rows, 1, COLUMNS, 64), (stride, COLUMNS * 64, 64, 1))
    near = random(rows, 1, COLUMNS, 64, dtype=torch.float16)
    far.copy_(near)
    query, spans = queries(rows, 2, 1, 64, torch.float16), causal([COLUMNS - 1] * rows, 1)
    assert torch.equal(attend(query, far, far, spans, 0.1), attend(query, near, near, spans, 0.1))


def test_splits_without_columns_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspace that holds NaN: what a split did not write is not read."""
    monkeypatch.setattr(ragged_attention, "_multiprocessors", lambda device: 1000)
    torch.manual_seed(0)
    query, keys, values, spans = queries(3, 4, 2, 64), cache(3, 2, 64), cache(3, 2, 64), causal([0, 33, 148], 2)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills memory that is not initialised with NaN
    try:
        assert torch.empty(3).isnan().all() and query.new_empty(3).isnan().all()
        compare(query, keys, values, spans)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unseen_columns_may_hold_anything(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, keys, values = queries(3, 4, 6, 80, dtype), cache(5, 2, 80, dtype), cache(5, 2, 80, dtype)
    spans = causal([0, 70, COLUMNS - 6], 6, window=30)
    clean = attend(query, keys, values, spans, 0.1)
    for row, (first, last) in enumerate([(0, 5), (41, 75), (115, COLUMNS - 1)]):
        for states in (keys, values):
            states[row, :, :first] = torch.nan
            states[row, :, last + 1 :] = torch.nan
    keys[3:], values[3:] = torch.nan, torch.nan  # rows of the cache that are not in the batch
    assert torch.equal(attend(query, keys, values, spans, 0.1), clean)
    assert torch.isfinite(clean).all()


@pytest.mark.parametrize("sinks", [False, True])
def test_padding_gives_zeros(sinks: bool) -> None:
    torch.manual_seed(0)
    query, keys, values = queries(3, 4, 3, 64), cache(3, 2, 64), cache(3, 2, 64)
    spans = causal([40, 90, 20], 3)
    spans[0, 1] = torch.tensor([1, 0])  # one query
    spans[1] = torch.tensor([9, 8])  # a whole row
    query[1], keys[1], values[1] = torch.nan, torch.nan, torch.nan
    output = attend(query, keys, values, spans, 0.1, sinks=random(4) if sinks else None)
    assert (output[0, 1] == 0).all() and (output[1] == 0).all()
    compare(query, keys, values.nan_to_num(), spans, sinks=random(4) if sinks else None)


def test_nan_stays_in_sight() -> None:
    """A broken query must not pass for one that sees nothing."""
    torch.manual_seed(0)
    query, keys, values = queries(2, 4, 3, 64), cache(2, 2, 64), cache(2, 2, 64)
    query[0, 1, 2] = torch.nan
    broken = attend(query, keys, values, causal([40, 90], 3), 0.1).isnan()  # [B, q, heads, d]
    assert broken[0, 2, 1].all()
    assert int(broken.sum()) == 64


def test_bounds_past_the_cache_are_cut() -> None:
    torch.manual_seed(0)
    query, keys, values = queries(2, 4, 2, 64), cache(2, 2, 64), cache(2, 2, 64)
    spans = torch.tensor([[[-7, 3], [0, 2**40]], [[-(2**40), COLUMNS], [10, 20]]], device=DEVICE)
    compare(query, keys, values, spans)


def test_strides_and_bounds_of_any_kind() -> None:
    torch.manual_seed(0)
    expected_of = queries(2, 4, 3, 64), cache(2, 2, 64), cache(2, 2, 64), causal([30, 100], 3)
    query, keys, values, spans = expected_of
    expected = attend(*expected_of, 0.1)
    strided = torch.empty(2, 3, 64, 8, device=DEVICE).permute(0, 3, 1, 2)[:, ::2]  # d is not contiguous
    assert torch.equal(attend(strided.copy_(query), keys, values, spans, 0.1), expected)
    by_column = [states.transpose(1, 2).contiguous().transpose(1, 2) for states in (keys, values)]
    assert torch.equal(attend(query, *by_column, spans, 0.1), expected)
    assert torch.equal(attend(query, keys, values, spans.int(), 0.1), expected)


def test_empty_batch() -> None:
    output = attend(queries(0, 4, 3, 64), cache(2, 2, 64), cache(2, 2, 40), causal([], 3), 0.1)
    assert output.shape == (0, 3, 4, 40)


def _layer(query, keys, values, first, last, sinks):
    return ragged_decode_attention(query * 2, keys, values, first, last, 0.1, 3.0, sinks).flatten(2) + 1


def test_compiles_as_one_graph() -> None:
    torch.manual_seed(0)
    spans = causal([30, 100], 3)
    inputs = queries(2, 4, 3, 64), cache(2, 2, 64), cache(2, 2, 40), spans[..., 0], spans[..., 1], random(4)
    compiled = torch.compile(_layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), _layer(*inputs))


def test_is_a_proper_operator() -> None:
    spans = causal([30, 100], 3)
    inputs = queries(2, 4, 3, 64), cache(2, 2, 64), cache(2, 2, 40), spans[..., 0], spans[..., 1], 0.1, None, random(4)
    op = torch.ops.spec_trl.ragged_decode_attention.default
    torch.library.opcheck(op, inputs, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(query=torch.zeros(2, 4, 3, 64, dtype=torch.float64)), "query is torch.float64"),
        (dict(keys=torch.zeros(2, 2, 9, 64).half()), "keys are torch.float16 and query is torch.float32"),
        (dict(keys=torch.zeros(1, 2, 9, 64)), r"keys of shape \[1, 2, 9, 64\] do not fit"),
        (dict(values=torch.zeros(2, 3, 9, 64)), r"values of shape \[2, 3, 9, 64\] do not fit"),
        (dict(keys=torch.zeros(2, 2, 9, 32)), "keys have head dimension 32 and query has 64"),
        (dict(values=torch.zeros(2, 2, 64, 9).transpose(2, 3)), "values have strides"),
        (dict(last=torch.zeros(2, 4, dtype=torch.int64)), r"last is torch.int64 of shape \[2, 4\]"),
        (dict(first=torch.zeros(2, 3)), r"first is torch.float32 of shape \[2, 3\]"),
        (dict(softcap=0.0), "softcap=0.0 must be positive"),
        (dict(sinks=torch.zeros(2)), r"sinks have shape \[2\]"),
    ],
    ids=str,
)
def test_bad_input_is_refused(change: dict[str, object], message: str) -> None:
    given = dict(
        query=torch.zeros(2, 4, 3, 64), keys=torch.zeros(2, 2, 9, 64), values=torch.zeros(2, 2, 9, 64),
        first=torch.zeros(2, 3, dtype=torch.int64), last=torch.zeros(2, 3, dtype=torch.int64), scale=0.1,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        ragged_decode_attention(**(given | change))


# Query heads, K/V heads, queries, d, d_v, dtype, softcap, sinks.
SHAPES = [
    (28, 4, 1, 128, 128, "bfloat16", None, False),
    (28, 4, 64, 128, 128, "bfloat16", None, False),
    (32, 32, 6, 80, 80, "float16", None, False),
    (8, 4, 64, 256, 256, "bfloat16", 50.0, False),
    (64, 8, 6, 64, 64, "bfloat16", None, True),
    (28, 4, 6, 128, 128, "float32", None, False),
]


@pytest.mark.parametrize(
    ("capability", "shapes"), [pytest.param(89, SHAPES[::2], marks=pytest.mark.slow), (90, SHAPES[1::2])]
)
def test_machine_code(capability: int, shapes: list[tuple[object, ...]], tmp_path) -> None:
    """What the interpreter lets pass, a compiler may not; and a tile has to fit into shared memory."""
    calls = f"""
from spec_trl.generation.engine.kernels.ragged_attention import ragged_decode_attention
for heads, kv_heads, length, d, d_v, dtype, softcap, sinks in {shapes}:
    dtype = getattr(torch, dtype)
    query = torch.empty(2, length, heads, d, dtype=dtype).transpose(1, 2)
    keys, values = (torch.empty(2, kv_heads, 2048, size, dtype=dtype) for size in (d, d_v))
    spans = torch.empty(2, length, 2, dtype=torch.int64)
    sink = torch.empty(heads, dtype=dtype) if sinks else None
    ragged_decode_attention(query, keys, values, spans[..., 0], spans[..., 1], 0.1, softcap, sink)
"""
    kernels = compile_for(capability, calls, tmp_path)
    assert [name for name, _ in kernels] == ["_attend", "_merge"] * len(shapes)
    assert max(shared for _, shared in kernels) <= 99 * 1024  # what the smallest of these GPUs gives a program


@pytest.mark.cuda
def test_a_captured_graph_serves_every_length() -> None:
    torch.manual_seed(0)
    query = queries(3, 14, 6, 128, torch.bfloat16)
    keys, values = cache(3, 2, 128, torch.bfloat16), cache(3, 2, 128, torch.bfloat16)
    spans = causal([0, 0, 0], 6)
    attend(query, keys, values, spans, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(query, keys, values, spans, 0.1)
    for starts in ([3, 60, 144], [100, 0, 7]):
        spans.copy_(causal(starts, 6))
        graph.replay()
        assert torch.equal(output, attend(query, keys, values, spans, 0.1))
        torch.testing.assert_close(
            output.double().cpu(), textbook(query, keys, values, spans, 0.1), rtol=0.02, atol=0.02
        )
