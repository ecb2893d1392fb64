"""Where the kernel cuts, against transformers' top-p, in the interpreter or on a device."""

from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import TopPLogitsWarper

from tests.generation.engine.kernels.ahead_of_time import CAPABILITIES, compile_for


pytest.importorskip("triton", reason="Triton is not installed")

from spec_trl.generation.engine.kernels import sampling as kernel
from spec_trl.generation.engine.kernels.sampling import fused_draw


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def kept(x: Tensor, floors: Tensor, first: Tensor) -> Tensor:
    """`[N, V]` bool."""
    token = torch.arange(x.shape[1], device=x.device)
    return (x > floors[:, None]) | ((x == floors[:, None]) & (token >= first[:, None]))


def of_stable_sort(x: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """What transformers' top-p keeps if its sort is stable, in float64; and which rows cut too close to a token to
    ask float32 for it."""
    values, tokens = x.double().sort(stable=True)
    mass = values.softmax(-1).cumsum(-1)
    removed = mass <= 1 - top_p
    removed[:, -1] = False
    close = ((mass - (1 - top_p)).abs() < 1e-6).any(1)
    return removed.logical_not().scatter(1, tokens, removed.logical_not()), close


@settings(deadline=None, max_examples=25, derandomize=True, database=None, phases=[Phase.generate])  # it is slow
@given(
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.99]), seed=st.integers(0, 2**32),
    vocabulary=st.sampled_from([1, 7, 40, 75]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    temperature=st.sampled_from([1.0, 0.7]), top_k=st.sampled_from([None, 1, 5]), scale=st.sampled_from([0.1, 3.0]),
)  # fmt: skip
def test_keeps_what_a_stable_sort_keeps(top_p, seed, vocabulary, dtype, temperature, top_k, scale) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(4, 2, vocabulary, generator=generator)).to(DEVICE, dtype)[:, 1]
    logits[1] = logits[1].round()  # ties, zeros of either sign
    logits[2] = 0.5
    x = logits.float() * (1 / torch.tensor(temperature))
    floors = None if top_k is None else x.topk(min(top_k, vocabulary)).values[:, -1].contiguous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "CHUNK", 32)
        floor, first = kernel.top_p_floors(logits, top_p, temperature, floors)
    filtered = x if floors is None else x.masked_fill(x < floors[:, None], -torch.inf)
    expected, close = of_stable_sort(filtered, top_p)
    assert torch.equal(kept(filtered, floor, first)[~close], expected[~close])
    assert kept(filtered, floor, first).any(1).all()
    if top_k is None:
        alone = expected[~close] == (TopPLogitsWarper(top_p)(None, x)[~close] > -torch.inf)
        assert alone[(x[~close].sort(1).values.diff(dim=1) > 0).all(1)].all()  # transformers itself, without ties


def random_logits(dtype: torch.dtype) -> Tensor:
    """`[6, 75]`, of any size, with ties, zeros of either sign and numbers that a float32 hardly holds."""
    scales = torch.tensor([0.3, 3, 3, 9, 1e-42, 0])[:, None]
    logits = scales * torch.randn(6, 75, generator=torch.Generator().manual_seed(0))
    logits[1] = logits[1].round()
    logits[2] -= 20
    return logits.to(DEVICE, dtype)


@pytest.mark.parametrize(
    ("dtype", "top_p", "temperature"),
    [(torch.float32, 0.9, 0.7), (torch.bfloat16, 0.3, 0.7), (torch.float16, 0.9, 1.0)], ids=str,
)  # fmt: skip
def test_cuts_where_a_bisection_cuts(dtype, top_p, temperature, monkeypatch) -> None:
    """Bit for bit: both search for the lowest key with more than the same bound at or below it, by the same sums."""
    logits = random_logits(dtype)
    monkeypatch.setattr(kernel, "CHUNK", 32)
    found = kernel.top_p_floors(logits, top_p, temperature)
    monkeypatch.setattr(kernel, "WAYS", 2)
    bisected = kernel.top_p_floors(logits, top_p, temperature)
    assert all(map(torch.equal, found, bisected))
    alone = kernel.top_p_floors(logits[1:2], top_p, temperature)
    assert all(torch.equal(one, many[1:2]) for one, many in zip(alone, bisected, strict=True))


@pytest.mark.skipif(DEVICE == "cuda", reason="it counts in the interpreter")
@pytest.mark.parametrize(("dtype", "passes"), [(torch.bfloat16, 5), (torch.float32, 9)], ids=str)
def test_passes_over_the_logits(dtype, passes, monkeypatch) -> None:
    """The one for the peaks, which is torch's, and the steps; then each row reads one chunk."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, amax, read = InterpreterBuilder.create_masked_load, Tensor.amax, []

    def count(builder, pointers, *others):
        if pointers.data.shape == (32,):  # nothing but logits is read in chunks
            read.append(pointers.data.size)
        return load(builder, pointers, *others)

    def count_all(logits, dim):
        read.append(logits.shape[0] * 96)
        return amax(logits, dim)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", count)
    monkeypatch.setattr(Tensor, "amax", count_all)
    monkeypatch.setattr(kernel, "CHUNK", 32)
    logits = random_logits(dtype)  # three chunks
    kernel.top_p_floors(logits, 0.9)
    assert sum(read) == passes * len(logits) * 96 + len(logits) * 32


def test_rows_that_are_broken() -> None:
    """Nothing is removed, as by transformers, and the draw says what is wrong."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits[0, 3], logits[1], logits[2, 9] = torch.nan, -torch.inf, torch.inf
    floors, first = kernel.top_p_floors(logits, 0.5)
    assert floors.tolist()[:3] == [-torch.inf] * 3 and first.tolist()[:3] == [0, 0, 0] and floors[3] > -torch.inf
    _, scores, _ = fused_draw(logits, None, 1.0, floors, first)
    assert scores[0].isnan() and scores[1] == -torch.inf and scores[3] == logits[3].max()


def test_of_equals_the_draw_takes_those_that_are_left() -> None:
    logits = torch.zeros(2, 40, device=DEVICE)
    floors, first = kernel.top_p_floors(logits, 0.26)
    tokens, _, logprobs = fused_draw(logits, None, 1.0, floors, first)
    assert first.tolist() == tokens.tolist() == [29, 29]  # 11 of 40 hold 0.26 and more
    torch.testing.assert_close(logprobs, torch.full_like(logprobs, 11.0).log().neg())


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_machine_code(capability, tmp_path: Path) -> None:
    """Nothing spills; and where 16 divides the vocabulary, logits are read 16 bytes at a time."""
    calls = """
from spec_trl.generation.engine.kernels.sampling import fused_draw
from spec_trl.generation.engine.kernels.sampling import top_p_floors
for vocabulary, dtype in ((50_257, torch.bfloat16), (151_936, torch.bfloat16), (128_256, torch.float32)):
    logits = torch.zeros(4, vocabulary, dtype=dtype)
    floors, first = top_p_floors(logits, 0.9, 0.7, torch.zeros(4))
    fused_draw(logits, None, 0.7, floors, first)
"""
    compiled = compile_for(capability, calls, tmp_path)
    steps = {2: 4, 4: 8}  # bytes of a logit
    for size, is_aligned in ((2, False), (2, True), (4, True)):
        names = ["_narrow"] * steps[size] + ["_finish", "_draw_chunk", "_merge_chunks"]
        assert [each.name for each in compiled[: len(names)]] == names
        for each in compiled[: len(names)]:
            if each.name in ("_narrow", "_draw_chunk") and is_aligned:  # chunks of 4096 by 256 threads
                assert each.ptx.count("ld.global.v4.b32") >= size, each.name
        del compiled[: len(names)]
