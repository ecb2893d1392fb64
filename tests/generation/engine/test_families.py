"""Model families: the ragged engine against each family's own forward and `generate`, in float64."""

import copy
import inspect
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.planner.control import Chain
from tests.generation.calls import Prompts, generate, outputs, pad_left, random_rows, reference_outputs
from tests.generation.races import Knowing, Plans, raced


WINDOW = 6
# Names of sizes differ between families; each config takes those it knows (attribute_map does the rest).
SIZES = dict(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64, initializer_range=0.12, pad_token_id=0,
    bos_token_id=None, eos_token_id=None, tie_word_embeddings=False, attention_dropout=0.0,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
LATENT = dict(
    q_lora_rank=16, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_routed_experts=4,
    n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=1, num_key_value_heads=4, head_dim=8,
    num_experts_per_tok=2, moe_intermediate_size=32,
)  # fmt: skip
OLD = dict(num_key_value_heads=4)
MIXED = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biased and tied": ("llama", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "qwen2": ("qwen2", {}),
    "qwen2 with window": ("qwen2", dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "mistral": ("mistral", dict(sliding_window=None)),
    "mistral with window": ("mistral", dict(sliding_window=WINDOW)),
    "mixtral": ("mixtral", EXPERTS),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", dict(sliding_window=WINDOW, query_pre_attn_scalar=16)),
    "gemma3_text": ("gemma3_text", MIXED | dict(query_pre_attn_scalar=16)),
    "gpt_neox": ("gpt_neox", OLD),
    "gpt2": ("gpt2", OLD | dict(embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)),
    "opt": ("opt", OLD | dict(ffn_dim=64, word_embed_proj_dim=64)),
    "bitnet": ("bitnet", {}),
    "gpt_oss": ("gpt_oss", MIXED | EXPERTS),
    "phi": ("phi", {}),
    "phi3": ("phi3", {}),
    "phi3 with window": ("phi3", dict(sliding_window=WINDOW)),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", MIXED),
    "olmoe": ("olmoe", EXPERTS),
    "stablelm": ("stablelm", {}),
    "granite": ("granite", {}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", MIXED),
    "smollm3": ("smollm3", {}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "starcoder2": ("starcoder2", dict(sliding_window=None)),
    "starcoder2 with window": ("starcoder2", dict(sliding_window=WINDOW)),
    "exaone4": ("exaone4", MIXED),
    "llama4_text": ("llama4_text", EXPERTS | dict(
        attention_chunk_size=WINDOW, layer_types=["chunked_attention", "full_attention"], intermediate_size_mlp=64,
        no_rope_layers=[1, 0], floor_scale=4, attn_scale=1.0)),  # published: 8192 positions, 0.1
    "nemotron": ("nemotron", {}),
    "falcon, rotary": ("falcon", dict(alibi=False, num_kv_heads=2, new_decoder_architecture=True)),
    "gpt_bigcode": ("gpt_bigcode", OLD),
    "seed_oss": ("seed_oss", {}),
    "gpt_neo": ("gpt_neo", dict(num_layers=2, num_heads=4, intermediate_size=64, window_size=WINDOW,
                                attention_types=[[["global", "local"], 1]])),
    "bart": ("bart", dict(decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64, d_model=64, dropout=0.0,
                          forced_eos_token_id=None)),
    "gptj, eager": ("gptj", OLD | dict(rotary_dim=8)),
    # hybrid families without recurrent layers: Granite 4.0 dense, and one whose layer types are a property
    "granitemoehybrid, dense": ("granitemoehybrid", dict(
        layer_types=["full_attention"] * 2, num_local_experts=0, shared_intermediate_size=64)),
    "jamba, attention alone": ("jamba", EXPERTS | dict(
        attn_layer_period=1, attn_layer_offset=0, use_mamba_kernels=False)),
}  # fmt: skip


def build(name: str, **changes: Any) -> PreTrainedModel:
    """A random float64 model of a family."""
    model_type, own = FAMILIES[name]
    settings = SIZES | own | changes
    known = AutoConfig.for_model(model_type)
    mapped = known.attribute_map
    settings = {k: v for k, v in settings.items() if k in mapped or k in own or k in changes or k in known.to_dict()}
    torch.manual_seed(sum(map(ord, name)))
    config = AutoConfig.for_model(model_type, **settings)
    # grouped_mm has no float64.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, experts_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    if model_type == "gemma2":
        model.set_attn_implementation("eager")  # the SDPA that 5.17 would take leaves softcaps out
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases of 0 and norms and sinks of 1 would hide their loss
                parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    """Ragged prompts; with 20 new tokens every row passes the window of 6."""
    return pad_left(random_rows([3, 11, 7, 1]))


def plain_logprobs(model: PreTrainedModel, prompts: Prompts, tokens: list[list[int]]) -> torch.Tensor:
    """`[B, new]` float32, log-probabilities of each row's tokens by one ordinary forward of that row alone."""
    found = []
    for ids, mask, new in zip(prompts["input_ids"], prompts["attention_mask"].bool(), tokens, strict=True):
        row = torch.cat([ids[mask], torch.tensor(new)])[None]  # [1, n]
        with torch.no_grad():
            logprobs = model(row).logits[0].log_softmax(-1)  # [n, V]
        found.append(logprobs[-len(new) - 1 : -1].gather(1, torch.tensor(new)[:, None])[:, 0])
    return torch.stack(found).float()


@pytest.mark.filterwarnings("ignore:.*of the drafter stay dense")
@pytest.mark.parametrize("name", FAMILIES)
def test_drafting_equals_none_and_the_plain_forward(name: str, prompts: Prompts) -> None:
    """Ragged rows, refill, a drafter that shares the cache, and races, whose chains cross the borders of windows and
    chunks. Logprobs tell any error of mask, position or cache from rounding, where tokens would often not."""
    model = build(name)
    plain = generate(model, prompts, max_new_tokens=20)
    expected = plain_logprobs(model, prompts, outputs(plain))
    members = [SelfDrafter(model, kernel="reference"), *(Knowing(outputs(plain), seed, f"k{seed}") for seed in (0, 1))]
    control = Plans(3, [[Chain(0, 4)], [Chain(1, 4), Chain(2, 3), Chain(0, 2)], []])
    options = dict(config={"max_batch_size": 3}, drafter=members, control=control, max_new_tokens=20)
    drafted = generate(model, prompts, **options)
    assert outputs(drafted) == outputs(plain)
    for result in (plain, drafted):
        torch.testing.assert_close(result.logprobs, expected, rtol=1e-5, atol=1e-6)
    assert drafted.statistics.drafter_failure is None and raced(control) > 2
    assert drafted.statistics.per_drafter["self"].acceptance_rate > 0.3


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_forwards_read_no_signatures(name: str, prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    generate(model, prompts, max_new_tokens=1)
    read = Mock(wraps=inspect.signature)
    monkeypatch.setattr(inspect, "signature", read)
    counts = []
    for new in (4, 20):
        read.reset_mock()
        generate(model, prompts, max_new_tokens=new)
        counts.append(read.call_count)
    assert counts[0] == counts[1], "as many in a call of 4 tokens as in one of 20"


def modules_of(model: PreTrainedModel) -> dict[str, tuple[Any, ...]]:
    return {key: (id(each), type(each), each.training, set(vars(each))) for key, each in model.named_modules()}


@pytest.mark.filterwarnings("ignore:.*of the drafter stay dense")
@pytest.mark.parametrize("name", ["gemma3_text", "gpt2", "gptj, eager"])
def test_a_policy_in_training(name: str, prompts: Prompts) -> None:
    """Train mode, live dropout, gradient checkpointing: the engine runs the eval policy and leaves it as it was."""
    rates = ("embd_pdrop", "resid_pdrop", "attn_pdrop") if name.startswith("gpt") else ("attention_dropout",)
    policy = build(name, **dict.fromkeys(rates, 0.3))
    expected = reference_outputs(policy, prompts, max_new_tokens=12)
    policy.train()
    policy.gradient_checkpointing_enable()
    policy.set_attn_implementation("eager")
    with torch.no_grad():
        ids = prompts["input_ids"][1:2]
        assert not torch.equal(policy(ids).logits, policy(ids).logits), "dropout is not live: this test tests nothing"
    config, weights, modules = copy.deepcopy((policy.config, policy.state_dict(), modules_of(policy)))
    for strategy in ("none", "self"):
        assert outputs(generate(policy, prompts, strategy, max_new_tokens=12, do_sample=False)) == expected
    assert modules_of(policy) == modules and all(module.training for module in policy.modules())
    assert policy.is_gradient_checkpointing and policy.config == config and config.use_cache is True
    torch.testing.assert_close(policy.state_dict(), weights, rtol=0, atol=0)


def rope(rope_type: str, **more: Any) -> dict[str, Any]:
    return dict(rope_parameters=dict(rope_type=rope_type, rope_theta=10_000.0, factor=2.0) | more)


# LongRoPE changes its factors at the length it was pretrained for, far below its context.
LONG = dict(short_factor=[1.0] * 8, long_factor=[3.0] * 8, original_max_position_embeddings=31)


@pytest.mark.parametrize(
    ("name", "changes", "end"),
    [
        ("gpt2", dict(max_position_embeddings=31), "its learned positions end"),
        ("opt", dict(max_position_embeddings=31), "its learned positions end"),
        ("llama", dict(max_position_embeddings=31) | rope("dynamic"), ".'dynamic'. RoPE scaling"),
        ("llama", rope("longrope", **LONG), ".'longrope'. RoPE scaling"),
    ],
)
def test_up_to_the_last_position(name: str, changes: dict[str, Any], end: str, prompts: Prompts) -> None:
    """Drafts reach beyond it where the output just fits."""
    model = build(name, **changes)
    result = generate(model, prompts, "self", {"draft_length": 8}, do_sample=False, max_new_tokens=20)
    assert outputs(result) == reference_outputs(model, prompts, max_new_tokens=20)
    with pytest.raises(ValueError, match=f"reach 32, and at 31 {end}.*within 31"):
        generate(model, prompts, max_new_tokens=21)


@pytest.mark.parametrize("context", [16, 2])  # which outputs exceed, or prompts
def test_beyond_the_context(context: int, prompts: Prompts) -> None:
    """RoPE models go on beyond their context, as in `generate`; the user is told."""
    model = build("llama", max_position_embeddings=context)
    with pytest.warns(UserWarning, match=f"beyond the model's context of {context} "):
        result = generate(model, prompts, "self", do_sample=False, max_new_tokens=20)
    assert outputs(result) == reference_outputs(model, prompts, max_new_tokens=20)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("bloom", {}, "'bloom'.*ALiBi"),
        ("falcon", dict(alibi=True), "alibi=True"),
        ("mpt", {}, "'mpt'.*ALiBi"),
        ("recurrent_gemma", {}, "recurrent state"),
        ("gemma", dict(use_bidirectional_attention=True), "both directions .use_bidirectional_attention=True"),
        ("gemma3_text", dict(use_bidirectional_attention=True), "both directions .use_bidirectional_attention=True"),
        ("gemma4_text", dict(use_bidirectional_attention="all"), "both directions .use_bidirectional_attention='all'"),
        ("llama", dict(is_causal=False), "both directions .is_causal=False"),
        ("t5", dict(d_kv=16), "encoder-decoder"),
    ],
)
def test_families_that_are_refused(model_type: str, changes: dict[str, Any], message: str) -> None:
    small = dict(
        hidden_size=32, d_model=32, intermediate_size=32, d_ff=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=64,
    )  # fmt: skip
    auto = transformers.AutoModelForSeq2SeqLM if model_type == "t5" else AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(model_type, **small | changes)).eval()
    with pytest.raises(ValueError, match=message):
        model.generate(torch.tensor([[3, 4]]), assistant_strategy="none", max_new_tokens=2, pad_token_id=0)
