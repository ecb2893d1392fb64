"""Attention over a ragged cache against the textbook, in the interpreter or on a device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


pytest.importorskip("triton", reason="Triton is not installed")

from spec_trl.generation.engine.cuda.kernels import ragged_attention
from spec_trl.generation.engine.cuda.kernels.ragged_attention import ragged_decode_attention
from spec_trl.generation.engine.network import attention


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLUMNS = 150


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


def attend(query, keys, values, spans, scale, softcap=None, sinks=None, table=None, exact=False) -> torch.Tensor:
    bounds = spans[..., 0], spans[..., 1]
    return ragged_decode_attention(query, keys, values, *bounds, scale, softcap, sinks, table, exact)


def paged(states: torch.Tensor, batch: int, dtype: torch.dtype = torch.int32) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of `states` `[rows, kv_heads, columns, d]` in pages of 64 in any order, between pages of NaN, and the
    table `[batch, pages]` that leads to them. What a row's last page has more than the row is NaN too."""
    rows, kv_heads, columns, size = states.shape
    count = -(-columns // 64)
    pool = torch.full((2 * rows * count + 1, kv_heads, 64, size), torch.nan, dtype=states.dtype, device=DEVICE)
    places = 1 + torch.randperm(2 * rows * count)[: rows * count].view(rows, count)
    for row in range(rows):
        for page in range(count):
            part = states[row, :, 64 * page : 64 * page + 64]
            pool[places[row, page], :, : part.shape[1]] = part
    return pool, places[:batch].to(DEVICE, dtype)


def compare(query, keys, values, spans, scale=None, softcap=None, sinks=None, tolerance=1e-5, exact=False) -> None:
    scale = query.shape[3] ** -0.5 if scale is None else scale
    output = attend(query, keys, values, spans, scale, softcap, sinks, exact=exact)
    expected = textbook(query, keys, values, spans, scale, softcap, sinks)
    assert output.dtype == query.dtype and output.is_contiguous()
    torch.testing.assert_close(output.double().cpu(), expected, rtol=tolerance, atol=tolerance)


def test_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped heads, a window, sinks, V narrower than K, several splits of which some have no columns, NaN where no
    query looks, bounds past the cache, a query that sees nothing, and a broken one. test_attention.py has softcap."""
    monkeypatch.setattr(ragged_attention, "_multiprocessors", lambda device: 3)
    torch.manual_seed(0)
    columns, query = 50, queries(3, 4, 2, 24)
    keys, values = cache(4, 2, 24)[:, :, :columns], cache(4, 2, 8)[:, :, :columns]
    spans = causal([0, 20, columns - 2], 2, window=12)
    spans[2, 1, 1] = 2**40
    for row, (first, last) in enumerate([(0, 1), (9, 21), (37, columns - 1)]):
        for states in (keys, values):
            states[row, :, :first] = torch.nan
            states[row, :, last + 1 :] = torch.nan
    keys[3], values[3] = torch.nan, torch.nan  # a row of the cache that is not in the batch
    spans[0, 1] = torch.tensor([9, 8])
    compare(query, keys, values, spans, 0.5, sinks=random(4) + 2)
    query[1, 1, 1] = torch.nan  # a broken query must not pass for one that sees nothing
    broken = attend(query, keys, values, spans, 0.1).isnan()  # [B, q, heads, d_v]
    assert broken[1, 1, 1].all() and int(broken.sum()) == 8


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("limits", [{}, dict(window=40), dict(chunk=50)], ids=str)
def test_pages(dtype: torch.dtype, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and shares begin within pages; nothing of a page outside of a row's columns is read."""
    monkeypatch.setattr(ragged_attention, "_multiprocessors", lambda device: 5)
    torch.manual_seed(0)
    query, states = queries(3, 4, 2, 24), cache(4, 2, 24)
    spans = causal([0, 75, COLUMNS - 2], 2, **limits)
    first, last = spans[..., 0].clamp(min=0).amin(1), spans[..., 1].amax(1)
    for row in range(3):
        states[row, :, : first[row]] = torch.nan
        states[row, :, last[row] + 1 :] = torch.nan
    pool, table = paged(states, 3, dtype)
    expected = textbook(query, states, states, spans, 0.3)
    output = ragged_decode_attention(query, pool, pool, spans[..., 0], spans[..., 1], 0.3, None, None, table)
    torch.testing.assert_close(output.double().cpu(), expected, rtol=1e-5, atol=1e-5)
    mask = torch.cat([spans.int(), torch.nn.functional.pad(table, (0, 1)).int().unflatten(1, (-1, 2))], dim=1)[:, None]
    monkeypatch.setattr(attention, "run_on", lambda device: True)
    through, _ = attention.ragged_attention(torch.nn.Module(), query, pool, pool, mask, 0.3)
    assert torch.equal(through, output), "the table that comes with the spans"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("batch", "length"),
    [
        pytest.param(batch, length, marks=pytest.mark.slow if batch == 64 or batch * length > 70 else [])
        for batch in (1, 7, 64)
        for length in (1, 6, 9, 65)
    ],
)
def test_exact_results_do_not_depend_on_what_else_is_attended(
    batch: int, length: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each query alone, over a shorter cache and over pages: the same bits. Rows are of any length, and a window
    begins within a block; shares are short here, so that there are several."""
    monkeypatch.setattr(ragged_attention, "_EXACT_SHARE", 64)
    monkeypatch.setattr(ragged_attention, "WORK_SPACE", 2**15)
    torch.manual_seed(length)
    heads = 3 if batch * length < 20 else 1
    query, keys, values = queries(batch, heads, length, 16, dtype), *(cache(batch, 1, 16, dtype) for _ in range(2))
    starts = torch.randint(0, COLUMNS - length + 1, (batch,)).tolist()
    spans, sinks = causal(starts, length, window=37 if length == 9 else None), random(heads)
    whole = attend(query, keys, values, spans, 0.3, sinks=sinks, exact=True)  # [B, q, heads, d]
    for row in range(0, batch, 3 if batch < 10 else 21):
        for step in {0, length // 2, length - 1}:
            alone = slice(row, row + 1), slice(step, step + 1)
            end = int(spans[row, step, 1]) + 1
            own = keys[alone[0], :, :end], values[alone[0], :, :end]
            result = attend(query[alone[0], :, alone[1]], *own, spans[alone], 0.3, sinks=sinks, exact=True)
            assert torch.equal(result, whole[alone]), (row, step)
    if batch == 64:
        return
    torch.manual_seed(0)
    key_pool, table = paged(keys, batch)
    torch.manual_seed(0)
    value_pool, _ = paged(values, batch)
    assert torch.equal(attend(query, key_pool, value_pool, spans, 0.3, sinks=sinks, table=table, exact=True), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_exact_results_do_not_depend_on_chains_beside_them(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chains after each row's last committed token, the second one behind the first, over borders of blocks and
    pages: their queries have the bits that they have where each chain lies alone."""
    monkeypatch.setattr(ragged_attention, "_EXACT_SHARE", 64)
    torch.manual_seed(0)
    query, keys, values = queries(2, 2, 6, 16, dtype), cache(2, 1, 16, dtype), cache(2, 1, 16, dtype)
    last, chains = torch.tensor([61, 5], device=DEVICE), ([0, 1, 2, 3], [0, 4, 5])
    beside = torch.tensor([0, 1, 2, 3, 1, 2], device=DEVICE)  # positions after the last token's
    spans = torch.stack([(last[:, None] + beside - 50).clamp(min=0), last[:, None] + beside], dim=-1)  # a window
    shift = torch.tensor([0, 0, 0, 0, 3, 3], device=DEVICE).expand(2, -1)
    moved = torch.stack([last[:, None].expand(-1, 6) + 1, shift], dim=-1)  # [B, q, 2]
    given = spans[..., 0], spans[..., 1], 0.3, None, random(2)
    whole = ragged_decode_attention(query, keys, values, *given, None, True, moved)  # [B, q, heads, d]
    torch.manual_seed(0)
    key_pool, table = paged(keys, 2)
    torch.manual_seed(0)
    value_pool, _ = paged(values, 2)
    assert torch.equal(ragged_decode_attention(query, key_pool, value_pool, *given, table, True, moved), whole)
    for own in chains:
        column = torch.arange(COLUMNS, device=DEVICE).expand(2, -1)
        at = torch.where(column <= last[:, None], column, (column + shift[0, own[-1]]).clamp(max=COLUMNS - 1))
        own_keys, own_values = (states.take_along_dim(at[:, None, :, None], dim=2) for states in (keys, values))
        alone = attend(query[:, :, own], own_keys, own_values, spans[:, own], 0.3, sinks=given[4], exact=True)
        assert torch.equal(alone, whole[:, own]), own


@pytest.mark.parametrize("length", [1, 6])
def test_exact_results_are_right(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged_attention, "_EXACT_SHARE", 64)
    monkeypatch.setattr(ragged_attention, "WORK_SPACE", 2**15)
    torch.manual_seed(0)
    query, spans = queries(3, 14, length, 24), causal([2, 70, COLUMNS - length], length, window=80)
    compare(query, cache(3, 2, 24), cache(3, 2, 8), spans, 0.5, 5.0, random(14), exact=True)


@pytest.mark.slow
@settings(deadline=None, max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_shapes(data: st.DataObject) -> None:
    """Groups, lengths, windows, chunks, head sizes, splits, softcap, sinks, strides, paddings and bounds past the
    cache; scores so large that exp would overflow without the maximum; workspace that holds NaN."""
    length, groups, kv_heads = (data.draw(st.sampled_from(sizes)) for sizes in ([1, 2, 6, 17], [1, 2, 7], [1, 2]))
    size, value_size = data.draw(st.sampled_from([(64, 64), (80, 80), (128, 128), (64, 40), (8, 24)]))
    limits = data.draw(st.sampled_from([{}, dict(window=1), dict(window=40), dict(chunk=64)]))
    heads, batch = groups * kv_heads, data.draw(st.integers(1, 3))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    query, keys, values = queries(batch, heads, length, size), cache(3, kv_heads, size), cache(3, kv_heads, value_size)
    if data.draw(st.booleans()):
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
        keys, values = (states.transpose(1, 2).contiguous().transpose(1, 2) for states in (keys, values))
    starts = data.draw(st.lists(st.integers(0, COLUMNS - length), min_size=batch, max_size=batch))
    spans = causal(starts, length, **limits)
    odd = data.draw(st.sampled_from([None, [1, 0], [9, 8], [-7, 3], [0, 2**40], [-(2**40), COLUMNS]]))
    if odd is not None:
        spans[0, 0] = torch.tensor(odd)
    scale = data.draw(st.sampled_from([size**-0.5, 0.5, 30.0, 100.0]))
    softcap = data.draw(st.sampled_from([None, 1.5]))
    sinks = random(heads) + 2 if data.draw(st.booleans()) else None
    with pytest.MonkeyPatch.context() as patch:
        splits = data.draw(st.sampled_from([1, 5, 1000]))
        patch.setattr(ragged_attention, "_multiprocessors", lambda device: splits)
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills memory that is not initialised with NaN
        table = None
        if data.draw(st.booleans()):
            torch.manual_seed(1)
            keys_pool, table = paged(keys, batch)
            torch.manual_seed(1)
            values_pool, _ = paged(values, batch)
        try:
            tolerance = 1e-4 if scale > 1 else 1e-5
            compare(query, keys, values, spans, scale, softcap, sinks, tolerance)
            if table is not None:
                bounds = spans[..., 0], spans[..., 1].clamp(max=COLUMNS - 1)
                output = ragged_decode_attention(query, keys_pool, values_pool, *bounds, scale, softcap, sinks, table)
                expected = textbook(query, keys, values, spans, scale, softcap, sinks)
                torch.testing.assert_close(output.double().cpu(), expected, rtol=tolerance, atol=tolerance)
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.slow
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


def test_splits_come_from_shapes() -> None:
    splits = ragged_attention._splits
    assert splits(programs=4, blocks=1000, multiprocessors=132) == 128
    assert splits(programs=32, blocks=1000, multiprocessors=132) == 16
    assert splits(programs=32, blocks=3, multiprocessors=132) == 3
    assert splits(programs=10_000, blocks=1000, multiprocessors=132) == 1


@pytest.mark.parametrize("exact", [False, True])
def test_prompts_of_one_head_of_keys_fit_on_a_device(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA launches at most 65,535 programs along the second and third axis; and long caches take no more memory."""
    grids, taken = [], []

    class Watched:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return self.launch

        def launch(self, *given: Any, **_: Any) -> None:
            tensors = {id(each): each for each in given if isinstance(each, torch.Tensor)}.values()
            taken.append(sum(tensor.nbytes for tensor in tensors if tensor.dtype == torch.float32))

    monkeypatch.setattr(ragged_attention, "_attend", Watched())
    monkeypatch.setattr(ragged_attention, "_merge", Watched())
    query = torch.empty(1, 71, 2048, 64, dtype=torch.float16)
    pool, table = torch.empty(2, 1, 64, 64, dtype=torch.float16), torch.zeros(1, 512).int()  # 32,768 columns
    output = attend(query, pool, pool, torch.zeros(1, 2048, 2).long(), 0.1, table=table, exact=exact)
    assert output.shape == (1, 2048, 71, 64) and len(grids) == (20 if exact else 2)
    assert all(max(grid[1:]) < 2**16 for grid in grids)
    assert max(taken) <= ragged_attention.WORK_SPACE


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "tests",
    [("test_schema", "test_faketensor"), pytest.param("test_aot_dispatch_dynamic", marks=pytest.mark.slow)],
)
def test_is_a_proper_operator(tests: str | tuple[str, ...]) -> None:
    spans = causal([3], 1)
    inputs = queries(1, 2, 1, 16), cache(1, 1, 16), cache(1, 1, 16), spans[..., 0], spans[..., 1], 0.1, None, random(2)
    torch.library.opcheck(torch.ops.spec_trl.ragged_decode_attention.default, inputs, test_utils=tests)
    assert attend(queries(0, 4, 3, 64), cache(2, 2, 64), cache(2, 2, 40), causal([], 3), 0.1).shape == (0, 3, 4, 40)


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
        (dict(table=torch.zeros(3, 4, dtype=torch.int32)), r"table is torch.int32 of shape \[3, 4\]"),
        (dict(table=torch.zeros(2, 4, dtype=torch.int32)), "keys have pages of 9 columns"),
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


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_results_on_a_device_do_not_depend_on_what_else_is_attended(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, keys, values = queries(64, 14, 65, 128, dtype), cache(64, 2, 128, dtype), cache(64, 2, 128, dtype)
    spans = causal(torch.randint(0, COLUMNS - 64, (64,)).tolist(), 65)
    whole = attend(query, keys, values, spans, 0.1, exact=True)  # [B, q, heads, d]
    for rows, steps in ((slice(3, 4), slice(0, 1)), (slice(7, 14), slice(9, 15)), (slice(0, 64), slice(40, 49))):
        given = query[rows, :, steps], keys[rows], values[rows], spans[rows, steps]
        assert torch.equal(attend(*given, 0.1, exact=True), whole[rows, steps])


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
        expected = textbook(query, keys, values, spans, 0.1)
        torch.testing.assert_close(output.double().cpu(), expected, rtol=0.02, atol=0.02)


@pytest.mark.cuda
def test_a_captured_graph_reads_the_table_as_it_is() -> None:
    torch.manual_seed(0)
    query, states = queries(3, 14, 6, 128, torch.bfloat16), cache(3, 2, 128, torch.bfloat16)
    spans, (pool, table) = causal([3, 60, 144], 6), paged(states, 3)
    given = query, pool, pool, spans[..., 0], spans[..., 1], 0.1, None, None, table
    ragged_decode_attention(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = ragged_decode_attention(*given)
    for rows in ([0, 1, 2], [0, 2, 1]):
        expected = textbook(query, states[rows], states[rows], spans, 0.1)
        table.copy_(table[rows])
        graph.replay()
        torch.testing.assert_close(output.double().cpu(), expected, rtol=0.02, atol=0.02)
