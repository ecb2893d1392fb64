"""Exact in float32 and bfloat16: drafts, other rows and their order change no bit of a log-probability."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from spec_trl import release
from spec_trl.generation.engine.forwards import exactness
from spec_trl.generation.engine.network import products
from spec_trl.native.native_code import compiler
from tests.conftest import STORY_MODEL, WIDE, tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.engine.test_families import build
from tests.tiny_families import ODD_SIZES, make


pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.filterwarnings("ignore:.*of the drafter stay dense"),
]
ROWS = random_rows([5, 21, 1, 17, 3])  # some short, some read as prompts are
ROWS += [ROWS[1]] * 3 + [ROWS[0]] * 3  # copies, of which some come when others are under way
DTYPES = [torch.float32, torch.bfloat16]
INSTRUCTIONS = pytest.mark.instructions
FAMILIES = [
    "llama, biased and tied", "qwen2", "qwen3", "mistral with window", "gemma2", "gemma3_text",
    pytest.param("gpt2", marks=INSTRUCTIONS), "phi",
    "smollm3", "phi3", "olmo2", "mixtral", "qwen3_moe", "gpt_oss", "opt",
    # attention that its family does not declare, heads of two sizes, experts that it multiplies in its own way
    "stablelm", "falcon, rotary", "gpt_neo", "gptj, eager", "bart", "jamba, attention alone",
    pytest.param("deepseek_v3", marks=INSTRUCTIONS),
    "llama4_text",
]  # fmt: skip
TWO_SIZES = {"deepseek_v3": dict(v_head_dim=24)}  # and heads of 16 numbers for keys
HIDDEN = 192  # sums of so many numbers differ where their order does: smaller models would hide a difference
# Strategy, config, options, and which of the rows.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], slice]] = {
    "a copy": ("self", dict(draft_length=3), {}, slice(None)),
    "long drafts": ("self", dict(draft_length=8), {}, slice(None)),
    "one draft token": ("ngram", dict(draft_length=1), {}, slice(None)),
    "lookups": ("history", dict(draft_length=5), {}, slice(None)),
    "a race": ("best_of_n", dict(specactor=dict(drafters=["self", "ngram"])), {}, slice(None)),
    "one row at a time": ("none", dict(max_batch_size=1), {}, slice(0, 3)),
    "rows that wait": ("self", dict(max_batch_size=2, draft_length=5), {}, slice(0, 7)),
    "a row alone": ("none", {}, {}, slice(0, 1)),
    "a row alone, with drafts": ("ngram", dict(draft_length=5), {}, slice(1, 2)),
}


def run(model: PreTrainedModel, strategy: str, config: dict[str, Any], rows: slice, **options: Any) -> Any:
    prompts, ids = pad_left(ROWS, 24), list(range(len(ROWS)))[rows]
    own = {name: value[rows] for name, value in prompts.items()}
    return generate(model, own, strategy, config, request_ids=ids, **dict(max_new_tokens=20) | options)


def check(model: PreTrainedModel, sampling: dict[str, Any], several_chains: bool = True) -> None:
    plain, drafted = run(model, "none", {}, slice(None), **sampling), 0
    assert plain.statistics.exact is True
    for name, (strategy, config, options, rows) in CASES.items():
        if strategy == "best_of_n" and not several_chains:
            continue
        found = run(model, strategy, config, rows, **options, **sampling)
        drafted += found.statistics.total.drafted
        width = found.logprobs.shape[1]
        assert torch.equal(found.logprobs, plain.logprobs[rows, :width]), name
        assert outputs(found) == outputs(plain)[rows], name
    assert drafted > 100
    release(model)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_bits(family: str, dtype: torch.dtype) -> None:
    width = "d_model" if family == "bart" else "hidden_size"
    sizes = {} if hasattr(build(family).config, "num_experts_per_tok") else {width: HIDDEN}
    check(build(family, **sizes, **TWO_SIZES.get(family, {})).to(dtype), {})


@pytest.mark.instructions
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_trained_weights(dtype: torch.dtype) -> None:
    """Of heads of 8 numbers: in copies of a loop over so few a compiler may round what it fuses elsewhere."""
    check(AutoModelForCausalLM.from_pretrained(STORY_MODEL, dtype=dtype).eval(), {})


@pytest.mark.instructions
@pytest.mark.parametrize("family", ["falcon_h1", "mamba"])
def test_bits_of_prompts_of_one_length(family: str) -> None:
    """A family's scan over all of them would sum in an order that depends on their number."""
    model, rows = make(family, std=0.1).float(), random_rows([21, 21, 21, 18, 18, 1, 5, 5])

    def run(chosen: list[int], strategy: str) -> Any:
        prompts = pad_left([rows[row] for row in chosen])
        return generate(model, prompts, strategy, {"draft_length": 3}, request_ids=chosen, max_new_tokens=12)

    together, drafted = run(list(range(len(rows))), "ngram"), 0
    assert together.statistics.exact is True
    for chosen in ([0], [1], [0, 1], [3], [2, 4], [6]):
        found = run(chosen, "ngram")
        drafted += found.statistics.total.drafted
        assert torch.equal(found.logprobs, together.logprobs[chosen][:, : found.logprobs.shape[1]]), chosen
    assert drafted + together.statistics.total.drafted > 5


@pytest.mark.instructions
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize(
    "family", ["qwen3_5_text", "mamba", "lfm2_moe", pytest.param("bailing_hybrid", marks=pytest.mark.slow)]
)
def test_bits_of_gates_and_scans(family: str, dtype: torch.dtype) -> None:
    """Of sizes that fill no register. A mixer of Ling's kind does not ask whether its cache records."""
    check(make(family, sizes=ODD_SIZES).to(dtype), {}, several_chains=False)


@pytest.mark.instructions
@pytest.mark.parametrize("family", ["llama, biased and tied", "gpt2", "mixtral"])
def test_bits_in_float16(family: str) -> None:
    check(build(family).half(), {})


@pytest.mark.parametrize("family", ["olmo2", "gemma"])
def test_activations_that_fill_no_register(family: str) -> None:
    """SiLU and tanh-GELU of torch round otherwise there, and 172 numbers a token put each token elsewhere."""
    check(build(family, hidden_size=HIDDEN, intermediate_size=172).float(), {})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sampling", [dict(do_sample=False), dict(temperature=0.7, top_k=20, top_p=0.9)], ids=str)
def test_bits_of_other_distributions(sampling: dict[str, Any], dtype: torch.dtype) -> None:
    # Attention reads heads of 96 in blocks of 32 columns, and a row comes from its first to its second.
    check(tiny_llama(**WIDE | dict(num_attention_heads=2)).to(dtype), sampling)


class _Odd(nn.Module):
    """What gives a token something else beside many tokens than beside few."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 if x[..., 0].numel() < 3 else 1.00001)


def test_what_is_not_exact_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path))
    model = tiny_llama(hidden_size=HIDDEN).float()
    model.model.layers[1].mlp.act_fn = _Odd()
    with pytest.warns(UserWarning, match=r"is not exact on this machine: .*layers\.1\.mlp\.act_fn, float32, 1 row"):
        found = run(model, "none", {}, slice(None))
    assert found.statistics.exact == ["model.layers.1.mlp.act_fn, float32, 1 row"]
    with pytest.raises(ValueError, match=r"^exact=True is asked for.*act_fn.*Set exact=\"auto\""):
        run(model, "none", {"exact": True}, slice(None))
    assert run(model, "none", {"exact": False}, slice(None)).statistics.exact is None


def test_attention_under_masks_is_named() -> None:
    """Its sums depend on where keys lie, and those of a race lie elsewhere."""
    with pytest.warns(UserWarning, match="attention under masks"):
        found = run(tiny_llama(hidden_size=HIDDEN).float(), "none", {"runner": "eager"}, slice(None))
    assert found.statistics.exact == ["attention under masks"]


@pytest.mark.parametrize("which", ["of one length", "equal", "long and alone", "in a row that has moved"])
def test_situations_of_prompts_are_tried(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family may compute prompts of one length at once, in sums that depend on their number or their places."""
    read, forward = exactness._Trial.read, exactness._Trial.forward

    def odd(trial: Any, rows: slice, first: int) -> Tensor:
        logits, lengths = read(trial, rows, first), trial.lengths[rows].tolist()
        for row, length in enumerate(lengths):
            if {
                "of one length": lengths.count(length) > 1,
                "equal": lengths.index(length) < row,
                "long and alone": lengths == [max(exactness._PROMPTS)],
            }.get(which):
                logits[row] *= 1.01
        return logits

    def moved(trial: Any, *arguments: Any) -> Tensor:
        logits = forward(trial, *arguments)
        if which == "in a row that has moved" and len(trial.lengths) > 1 and trial.lengths[-1] == trial.lengths[0]:
            logits[-1] *= 1.01
        return logits

    monkeypatch.setattr(exactness._Trial, "read", odd)
    monkeypatch.setattr(exactness._Trial, "forward", moved)
    with pytest.warns(UserWarning, match="is not exact on this machine: .*what decoder layers compute"):
        run(tiny_llama(hidden_size=HIDDEN).float(), "none", {}, slice(None))


def test_layers_whose_config_has_lists_are_tried() -> None:
    """The trial runs the first layers of such a network, with the config of all."""
    model = build("gpt_neo", num_hidden_layers=4, attention_types=[[["global", "local"], 2]]).float()
    assert run(model, "none", {}, slice(None)).statistics.exact is True


def test_a_trial_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(runner: Any) -> list[str]:
        raise TypeError("of the trial")

    monkeypatch.setattr(exactness, "_try_out", fail)
    with pytest.warns(UserWarning, match="may not be exact on this machine: .*could not be tried: TypeError: of the"):
        found = run(tiny_llama(hidden_size=HIDDEN).float(), "none", {}, slice(None))
    assert found.statistics.exact == ["it could not be tried: TypeError: of the trial"]


def test_products_of_prompts_are_tried_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN sums 25 rows in bfloat16 otherwise than others where the CPU has AVX-512 alone and two threads."""
    multiply = products.multiply

    def odd(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = multiply(x, weight, bias)
        return y * 1.01 if y.shape == (25, 64) else y

    monkeypatch.setattr(products, "multiply", odd)
    with pytest.warns(UserWarning, match="gate_proj, float32, 25 of a prompt's tokens"):
        run(tiny_llama(hidden_size=HIDDEN).float(), "none", {}, slice(None))


def test_a_trial_is_kept_for_the_machine(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path))
    tried: list[int] = []
    try_out = exactness._try_out
    monkeypatch.setattr(exactness, "_try_out", lambda runner: (tried.append(1), try_out(runner))[1])
    for seed, threads in ((0, 1), (1, 1), (0, 2)):  # weights do not matter, threads do
        torch.set_num_threads(threads)
        model = tiny_llama(seed).float()
        for _ in range(2):
            assert run(model, "none", {}, slice(None)).statistics.exact is True
    torch.set_num_threads(1)
    assert len(tried) == 2


@pytest.mark.filterwarnings("ignore:.*is not exact on this machine")
def test_weights_that_lie_otherwise_are_tried_anew(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruning leaves such weights: C++ multiplies no slice of one."""
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path))
    tried: list[int] = []
    try_out = exactness._try_out
    monkeypatch.setattr(exactness, "_try_out", lambda runner: (tried.append(1), try_out(runner))[1])
    model = tiny_llama().float()
    down = model.model.layers[0].mlp.down_proj
    for weight in (down.weight.data, torch.cat([down.weight.data] * 2, dim=1)[:, : down.in_features]):
        down.weight.data = weight
        run(model, "none", {}, slice(None))
    assert len(tried) == 2


def test_heads_are_not_taken_for_tokens() -> None:
    """The trial reads as many tokens at once as this model has heads, and its norms are given heads first."""
    heads = exactness.NEW
    model = build("gemma3_text", hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=1)
    assert run(model.float(), "none", {}, slice(None)).statistics.exact is True


def test_bits_under_autocast(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generations read copies of the weights there, and so does the trial."""
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path))
    model = tiny_llama(hidden_size=576, intermediate_size=1536).float()
    with torch.autocast("cpu", torch.bfloat16):
        alone, drafted = (run(model, name, {}, slice(0, 3), max_new_tokens=6) for name in ("none", "ngram"))
    assert alone.statistics.exact is True and torch.equal(alone.logprobs, drafted.logprobs)
