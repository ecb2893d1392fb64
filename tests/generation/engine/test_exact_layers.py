"""Exact shadows, as on a GPU: a row has the same bits in every forward. The kernels run in Triton's interpreter."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from spec_trl.generation.engine.cuda import graph_runner
from spec_trl.generation.engine.forwards import runner_choice
from spec_trl.generation.engine.forwards.exactness import unordered_sums
from spec_trl.generation.engine.forwards.runner import EagerRunner
from spec_trl.generation.engine.kv.cache import RaggedCache
from spec_trl.generation.engine.kv.pages import PagedCache
from spec_trl.generation.engine.network import attention, exact_sums, fused_layers, products, shadow
from spec_trl.generation.engine.network.products import Product, make_copies
from spec_trl.generation.engine.network.shadow import make_shadow
from spec_trl.generation.planner.control import Chain
from spec_trl.generation.session import Session
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.engine.tape import install_tape
from tests.generation.races import Knowing, Plans


pytestmark = pytest.mark.usefixtures("products_in_order")

# One layer, and narrow: the interpreter is slow.
SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=256, initializer_range=0.1, eos_token_id=None,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen2": SIZES | dict(use_sliding_window=True, sliding_window=4, max_window_layers=0),
    "gemma3_text": SIZES | dict(sliding_window=4),
    "helium": SIZES,  # its norm is its own
    # Its gate is torch's: on this CPU, unlike on a GPU, numbers at the end that fill no register round otherwise.
    "gpt_oss": SIZES | dict(intermediate_size=48, num_local_experts=3, num_experts_per_tok=2, sliding_window=4,
        rope_parameters=dict(rope_type="default", rope_theta=10_000.0)),
    "deepseek_v3": SIZES | dict(
        n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, n_shared_experts=1,
        moe_intermediate_size=16, first_k_dense_replace=0, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, head_dim=8, v_head_dim=16, num_key_value_heads=2),
    "gpt2": dict(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=256, initializer_range=0.1),
}


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention, exact_sums, fused_layers, shadow):
        monkeypatch.setattr(module, "run_on", lambda device: True)
    monkeypatch.setattr(runner_choice, "inexact_parts", lambda *_: [])  # which tries what a CPU runs


def model_of(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES.get(family, SIZES) | changes)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


@torch.no_grad()
def logits_of(
    network: PreTrainedModel, tokens: Tensor, cache: RaggedCache, counts: list[int], row: int = 0, prompt: bool = False
) -> Tensor:
    """`[B, n, V]` for tokens `[B, n]` of the cache's rows from `row` on, of which each forward runs the next `counts`,
    as pieces of a prompt or as a step or verification."""
    runner, logits = EagerRunner(network, cache), []
    ends = torch.tensor(counts).cumsum(0).tolist()
    for count, end in zip(counts, ends, strict=True):
        positions = torch.arange(end - count, end).expand(len(tokens), -1)
        cache.reserve([end] * len(tokens), row)
        fed, places = tokens[:, end - count : end], [(b, at) for b in range(len(tokens)) for at in range(count)]
        given = fed, positions, end, row
        found = runner.prefill(*given, places) if prompt else runner.forward(*given)
        assert found is not None
        logits.append(found.view(len(tokens), count, -1))
    return torch.cat(logits, dim=1)


def check_bits(network: PreTrainedModel) -> None:
    """A row alone, step by step, over another cache, against rows that read it as a prompt in pieces, or verify it."""
    tokens = torch.stack(random_rows([7, 7]))  # [2, 7]
    ragged, paged = partial(RaggedCache.for_network, network), partial(PagedCache.with_pages, network)
    steps = logits_of(network, tokens[1:2], ragged(1, 64), [1] * 7)
    for cache, counts, row in ((ragged(4, 640), [7], 0), (paged(4, 128, 4), [3, 4], 2)):
        whole = logits_of(network, tokens, cache, counts, row, prompt=row > 0)
        assert torch.equal(whole[1:2], steps), (type(cache).__name__, counts)


SLOW = [pytest.mark.slow]
IN_BOTH = [family for family in FAMILIES if family not in ("helium", "gpt_oss", "deepseek_v3")]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(pytest.param(family, torch.float32, marks=SLOW * (family == "deepseek_v3")) for family in FAMILIES),
        *((family, torch.float16) for family in IN_BOTH),
    ],
    ids=str,
)
def test_a_row_has_the_same_bits_in_every_forward(family: str, dtype: torch.dtype, on_a_gpu) -> None:
    model = model_of(family, dtype)
    network = make_shadow(model, exact=True)
    check_bits(network)
    if dtype == torch.float32 and family in ("gpt_oss", "deepseek_v3"):
        assert unordered_sums(model) == []
    with torch.no_grad():
        tokens = torch.arange(6)[None]
        ours = logits_of(network, tokens, RaggedCache.for_network(network, 1, 64), [6])
        expected = model(tokens).logits
    torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.02 if dtype == torch.float16 else 1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_under_autocast_the_copies_are_multiplied_so(
    family: str, on_a_gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, exactly, dtypes = make_shadow(model_of(family), exact=True), products.multiply_exactly, set()
    monkeypatch.setattr(products, "multiply_exactly", lambda *xwb: dtypes.add(xwb[1].dtype) or exactly(*xwb))
    with torch.autocast("cpu", torch.float16):
        make_copies(network)
        assert any(isinstance(module, Product) and module.copies for module in network.modules())
        check_bits(network)
    assert dtypes == {torch.float16}


def test_without_a_gpu_a_shadow_stays_as_it_is() -> None:
    names = [type(module) for module in make_shadow(model_of("gpt2"), exact=True).modules()]
    assert names == [type(module) for module in make_shadow(model_of("gpt2")).modules()]


def test_what_is_not_exact_is_named(on_a_gpu) -> None:
    dbrx = dict(
        d_model=32, n_heads=2, n_layers=1, max_seq_len=64, vocab_size=64,
        attn_config=dict(kv_n_heads=1, rope_theta=10_000.0, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=16, moe_num_experts=2, moe_top_k=1),
    )  # fmt: skip
    config = AutoConfig.for_model("dbrx", **dbrx)
    found = unordered_sums(AutoModelForCausalLM.from_config(config).eval())
    assert found == ["index_add_ in DbrxExperts", "linalg_vector_norm in DbrxFFN"]


@pytest.mark.parametrize("strategy", ["self", "ngram"])
def test_drafts_change_no_bit_of_a_log_probability(strategy: str, on_a_gpu) -> None:
    """In float32: with drafts, and with fewer rows in flight. One begins where another has read the prompt."""
    model = model_of("llama")
    rows = random_rows([3, 5])
    prompts, options = pad_left([*rows, rows[1]]), dict(max_new_tokens=5)
    expected = generate(model, prompts, "none", {"exact": True}, **options)
    found = generate(model, prompts, strategy, {"draft_length": 2, "max_batch_size": 2, "exact": True}, **options)
    assert expected.statistics.exact is found.statistics.exact is True
    assert found.statistics.total.drafted > 0 and found.statistics.drafter_failure is None
    assert outputs(found) == outputs(expected)
    assert torch.equal(found.logprobs, expected.logprobs)


def test_races_change_no_bit_of_a_log_probability(on_a_gpu) -> None:
    model, prompts = model_of("llama"), pad_left(random_rows([3, 5]))
    expected = generate(model, prompts, "none", {"exact": True}, max_new_tokens=5)
    members = [Knowing(outputs(expected), None, name) for name in ("short", "long")]
    control = Plans(2, [[Chain(0, 1), Chain(1, 3)]])
    found = generate(model, prompts, config={"exact": True}, drafter=members, control=control, max_new_tokens=5)
    assert found.statistics.exact is True and found.statistics.best_of_n.wins["long"] > 0
    assert outputs(found) == outputs(expected)
    assert torch.equal(found.logprobs, expected.logprobs)


def test_auto_compiles_nothing(on_a_gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled layers would round otherwise than those they replace in the middle of a row."""
    install_tape(monkeypatch)
    monkeypatch.setattr(graph_runner, "COMPILE_AFTER", 1)
    compiled: list[object] = []
    twin: Callable[..., PreTrainedModel] = graph_runner.compiled_twin
    monkeypatch.setattr(graph_runner, "compiled_twin", lambda *given: compiled.append(given) or twin(*given))
    model = model_of("llama")
    found = generate(model, pad_left(random_rows([3])), "none", {"exact": True}, max_new_tokens=7)
    assert found.statistics.graphs == 1 and not compiled and found.statistics.exact is True


def test_kept_shadows_are_told_apart(on_a_gpu) -> None:
    model = model_of("gpt2")
    with Session.lend(model) as session:
        pass
    for exact in (True, False, True):
        network = runner_choice.shadow_for(session, model, exact)
        assert {each.routine == "exact" for each in network.modules() if isinstance(each, Product)} == {exact}
        session.check_shadow()
        assert runner_choice.shadow_for(session, model, exact) is network
