"""What cannot be served is refused before any work, in one sentence that says what to do."""

import re
import warnings
from collections.abc import Callable, Iterator
from inspect import Parameter, Signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import psutil
import pytest
import torch
import transformers
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BatchEncoding,
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from spec_trl import speculative_decoding
from spec_trl.generation import keyword, strategies
from spec_trl.generation.engine.kv import cache, memory
from spec_trl.generation.engine.network.family_hooks import cache_argument
from tests.conftest import tiny_llama
from tests.generation.calls import generate, pad_left, random_rows


PROMPTS = pad_left(random_rows([4, 6]))


@pytest.fixture
def refuses(tiny: PreTrainedModel) -> Iterator[Callable[..., None]]:
    """Expects a ValueError, before any forward."""

    def check(message: str, strategy: str = "none", config: Any = None, **options: Any) -> None:
        given = PROMPTS | {name: options.pop(name) for name in list(options) if name in PROMPTS}
        with pytest.raises(ValueError, match=message):
            generate(tiny, given, strategy, config, **options)

    # Generation's own twin of the model has the hook too.
    hook = tiny.register_forward_pre_hook(lambda *_: pytest.fail("a forward ran before the refusal"))
    yield check
    hook.remove()


IDS = torch.randint(3, 64, (2, 5))
MODES = dict(
    num_beams=4, penalty_alpha=0.6, dola_layers="low", guidance_scale=1.5, prompt_lookup_num_tokens=3,
    force_words_ids=[[5, 6]], use_mtp=True, assistant_early_exit=1,
    assistant_ensemble_weight=0.5, output_logits=True, output_attentions=True, output_hidden_states=True,
)  # fmt: skip


def masked(*rows: list[int]) -> dict[str, Any]:
    return dict(input_ids=IDS, attention_mask=torch.tensor(rows))


REFUSED: list[tuple[str, dict[str, Any]]] = [
    # the keyword and its options
    (r"assistant_strategy='eagle' is unknown.*Did you mean 'eagle3'", dict(strategy="eagle")),
    (r"^draft_length=0 is out of range", dict(strategy="self", config={"draft_length": 0})),
    (r"inputs_embeds|input_ids is empty",
        dict(inputs_embeds=torch.zeros(2, 6, 64), input_ids=None, attention_mask=None)),
    (r"assistant_strategy='off' is unknown", dict(strategy="off", custom_generate=speculative_decoding)),
    *((r"^drafter=.* is neither a Drafter.*assistant_strategy", dict(drafter=given)) for given in ("self", ["self"])),
    (r"request_ids has 3 entries for 2 rows", dict(request_ids=[1, 2, 3])),
    # assistants
    (r'assistant_strategy="model" needs assistant_model', dict(strategy="model")),
    (r"assistant_model=7 is neither", dict(strategy="model", assistant_model=7)),
    (r"='/no/such' is a folder that does not exist", dict(strategy="model", assistant_model="/no/such")),
    (r"assistant_model='no/such' is no causal LM that can be", dict(strategy="model", assistant_model="no/such")),
    (r"specactor.assistants\['model'\]='no/such' is no causal LM", dict(strategy="best_of_n", config={
        "specactor": {"drafters": ["model"], "assistants": {"model": "no/such"}}})),
    # prompts
    (r"prompt 1 is not left-padded.*padding_side='left'", masked([1, 1, 1, 1, 1], [1, 1, 1, 0, 0])),
    (r"prompt 1 is empty: its attention_mask has no 1", masked([0, 0, 1, 1, 1], [0, 0, 0, 0, 0])),
    (r"attention_mask has shape \[2, 4\] and input_ids \[2, 5\]", masked([1, 1, 1, 1], [0, 1, 1, 1])),
    (r"input_ids is empty", dict(input_ids=IDS[:, :0], attention_mask=torch.ones(2, 0).long())),
    (r"input_ids is empty", dict(input_ids=IDS[:0], attention_mask=torch.ones(0, IDS.shape[1]).long())),
    *(
        (rf"position_ids of shape \[2, {ids.shape[1]}\].*unset", dict(position_ids=ids))
        for ids in (torch.arange(6).expand(2, 6), torch.arange(5).expand(2, 5), torch.zeros(2, 6).long())
    ),
    # prompts of another kind
    *(
        (rf"input_ids is {said}.*pass a tensor \[B, width\] of token ids", dict(input_ids=ids, attention_mask=None))
        for said, ids in (
            ("torch.float32", IDS.float()), ("torch.bool", IDS.bool()), ("a list", IDS.tolist()), ("a str", "tell me"),
            (r"torch.int64 of shape \[5\]", IDS[0]), (r"torch.int64 of shape \[1, 2, 5\]", IDS[None]),
            ("a BatchEncoding", BatchEncoding({"input_ids": IDS})),
        )
    ),
    (r"input_ids is on meta and the model on cpu; move it", dict(input_ids=IDS.to("meta"))),
    (r"input_ids holds the token 64, and the model's vocabulary is 0 to 63", dict(input_ids=torch.full((2, 6), 64))),
    (r"input_ids holds the token -1, and", dict(input_ids=torch.full((2, 6), -1))),
    (r"assistant_tokenizer='object' cannot be .*the target's own tokenizer", dict(assistant_tokenizer=object())),
    # other modes of generate
    (r"num_beams=2 cannot be combined with assistant_strategy", dict(num_beams=2)),
    *(
        (rf"{name}={re.escape(repr(value))} cannot", {name: value, "do_sample": False, "top_k": 4})
        for name, value in MODES.items()
    ),
    (r"token_healing=True.*pass input_ids=model.heal_tokens\(input_ids, tokenizer\)", dict(token_healing=True)),
    (r"cache_implementation='quantized' .*rounded K/V change tokens", dict(cache_implementation="quantized")),
    (r"output_scores=True.*\.logprobs", dict(output_scores=True)),
    # in a config too, and with a tokenizer, which generate keeps from a custom method
    *(
        (f"{name}=.*cannot be combined", dict(generation_config=GenerationConfig(**{name: value}), tokenizer=object()))
        for name, value in (("token_healing", True), ("cache_implementation", "quantized"), ("num_beams", 3))
    ),
    # inputs that would be dropped
    (r"images of model type 'llama' are not served", dict(pixel_values=torch.zeros(2, 3))),
    (r"token_type_ids", dict(token_type_ids=torch.zeros(2, 3))),
    (r"the tokens of 2 rows x 10{10}11 columns would not fit in memory.*GiB", dict(max_new_tokens=10**12)),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*beyond the model's context")
@pytest.mark.parametrize(("message", "call"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_refused(message: str, call: dict[str, Any], refuses: Callable[..., None]) -> None:
    refuses(message, **call)


# ---- What depends on a model -------------------------------------------------------------------------------------


def test_assistants_that_do_not_fit(refuses: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    refuses("assistant_model cannot draft: .* meta device", "model", assistant_model=tiny_llama().to("meta"))
    elsewhere = tiny_llama()
    elsewhere.__class__ = type("Elsewhere", (type(elsewhere),), {"device": torch.device("meta")})
    refuses("assistant_model is on meta, the target on cpu; call", "model", assistant_model=elsewhere)
    monkeypatch.setattr(strategies, "find_profile", lambda *_: pytest.fail("calibrated"))
    other = tiny_llama(vocab_size=65)
    message = "vocabulary of 65 tokens and the target one of 64"
    refuses(message, "model", {"sd_toggle": "roofline"}, assistant_model=other)
    bloom = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", vocab_size=64, n_layer=1, hidden_size=32))
    refuses("assistant_model cannot draft: .*ALiBi", "model", assistant_model=bloom)


def test_lengths() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=20)).eval()
    generate(model, PROMPTS, max_new_tokens=14, eos_token_id=None)
    with pytest.raises(
        ValueError, match="^prompt 1 has 6 tokens; .*reach 21, and at 20 its learned positions end.*within 20"
    ):
        generate(model, PROMPTS, max_new_tokens=15)


def test_a_cache_that_does_not_fit(tiny: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is taken at once; else one row has to fit (`test_row_memory.py`)."""
    monkeypatch.setattr(cache, "takes_memory_late", lambda device: False)
    monkeypatch.setattr(memory, "LITTLE", 0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=30_000))
    with pytest.raises(ValueError, match=r"K/V cache.* 2 x 35 x 2\) would not.*GiB.*max_batch_size"):
        generate(tiny, PROMPTS, config={"max_batch_size": 2})
    generate(tiny, PROMPTS, config={"max_batch_size": 1}, max_new_tokens=4)  # what the message advises works


@pytest.mark.parametrize("adapter", [PromptTuningConfig, PrefixTuningConfig])
def test_prompt_learning(adapter: type) -> None:
    model = get_peft_model(tiny_llama(), adapter(task_type="CAUSAL_LM", num_virtual_tokens=3))
    for _ in range(2):
        with pytest.raises(ValueError, match="prompt learning.*LoRA"):
            generate(model, PROMPTS)


def test_a_model_on_two_devices() -> None:
    model = tiny_llama()
    model.hf_device_map = {"model.layers.0": "cpu", "model.layers.1": "disk"}
    with pytest.raises(ValueError, match=r"spread over \['cpu', 'disk'\]"):
        generate(model, PROMPTS)


def test_adapters_that_act_on_some_tokens_or_rows() -> None:
    settings = dict(task_type="CAUSAL_LM", target_modules=["q_proj"])
    activated = get_peft_model(tiny_llama(), LoraConfig(**settings, alora_invocation_tokens=[5, 6]))
    two = get_peft_model(tiny_llama(), LoraConfig(**settings))
    two.add_adapter("other", LoraConfig(**settings))
    for strategy in ("none", "self"):
        with pytest.raises(ValueError, match="aLoRA.*Use LoRA"):
            generate(activated, PROMPTS, strategy)
        with activated.disable_adapter():
            generate(activated, PROMPTS, strategy, max_new_tokens=2)
        with pytest.raises(ValueError, match="adapter_names.*one adapter at a time"):
            generate(two.eval(), PROMPTS, strategy, adapter_names=["default", "other"])


def test_what_looks_like_it_and_is_served() -> None:
    model = tiny_llama()
    expected = generate(model, PROMPTS, max_new_tokens=2).sequences
    # Positions that are counted from each prompt's first token, whatever stands at padding, and an empty cache.
    counted = torch.tensor([[9, 9, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    name = cache_argument(model)
    same = generate(model, PROMPTS, max_new_tokens=2, position_ids=counted, **{name: DynamicCache()}).sequences
    assert torch.equal(same, expected)
    # A padding token that no vocabulary holds, and ids of 32 bits.
    assert PROMPTS["attention_mask"][0, 0] == 0
    ids = PROMPTS["input_ids"].where(PROMPTS["attention_mask"].bool(), 99).int()
    same = model.generate(ids, attention_mask=PROMPTS["attention_mask"], assistant_strategy="none", max_new_tokens=2)
    assert torch.equal(same[:, -2:], generate(model, PROMPTS, max_new_tokens=2, do_sample=False).sequences[:, -2:])
    cache = DynamicCache()
    model(PROMPTS["input_ids"][:, :3], **{name: cache})
    with pytest.raises(ValueError, match=f"{name} already holds tokens"):
        generate(model, PROMPTS, **{name: cache})
    generate(model, PROMPTS, "ngram", {"verification": "rejection"}, do_sample=False, max_new_tokens=2)


NEUTRAL_VALUES: dict[str, Any] = dict(
    use_cache=False, cache_implementation="static", cache_config={"nbits": 4}, max_cache_len=99, prefill_chunk_size=4,
    compile_config=CompileConfig(), num_assistant_tokens=7, num_assistant_tokens_schedule="heuristic",
    assistant_confidence_threshold=0.9, max_matching_ngram_size=2, assistant_lookbehind=7, target_lookbehind=7,
    speculation_type="dflash",
)  # fmt: skip


@pytest.mark.parametrize("place", ["this call", "generation_config", "model.generation_config", "model.config"])
def test_settings_that_change_no_token(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are overridden, wherever they stand, and a warning says so once."""
    assert NEUTRAL_VALUES.keys() == keyword.NEUTRAL.keys()
    monkeypatch.setattr(keyword, "_said", set())
    model = tiny_llama()
    options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None, return_dict_in_generate=True)
    expected = model.generate(**PROMPTS, **options).sequences
    speculative = dict(assistant_strategy="self", speculative_config={"sd_toggle": "always"})
    settings = NEUTRAL_VALUES
    if place == "this call":
        options |= settings
    elif place == "generation_config":
        options = dict(generation_config=GenerationConfig(**options | settings))
    elif place == "model.generation_config":
        model.generation_config.update(**settings)
    else:
        model.config.use_cache, settings = False, {"use_cache": False}
        model.generation_config = GenerationConfig.from_model_config(model.config)
    for times in (1, 0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = model.generate(**PROMPTS, **options, **speculative)
        assert torch.equal(found.sequences, expected) and found.statistics.total.drafted > 0
        said = [str(each.message) for each in caught if "changes no token" in str(each.message)]
        assert sorted(said) == sorted(
            f"{name}={value!r} ({place}) is overridden, which changes no token: {keyword.NEUTRAL[name]}."
            for name, value in settings.items()
        ) * times


def test_generate_makes_no_cache_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the call handed to continuous batching."""
    monkeypatch.setattr(GenerationMixin, "_prepare_static_cache", lambda *_, **__: pytest.fail("a second cache"))
    for kind in ("paged", "offloaded", "static"):
        model = tiny_llama()
        assert generate(model, PROMPTS, cache_implementation=kind).statistics.rounds
        config = GenerationConfig(cache_implementation=kind, max_new_tokens=2)
        assert generate(model, PROMPTS, generation_config=config).statistics.rounds
        assert config.cache_implementation == kind
        model.generation_config.cache_implementation = kind
        assert generate(model, PROMPTS).statistics.rounds


@pytest.mark.parametrize("how", ["disk", "meta", "cpu_offload"])
def test_weights_that_are_not_in_memory(how: str, tmp_path: Path) -> None:
    model = tiny_llama()
    if how == "disk":
        model.save_pretrained(tmp_path)
        where = dict(device_map={"": "disk"}, offload_folder=tmp_path / "off")
        model = AutoModelForCausalLM.from_pretrained(tmp_path, **where)
    elif how == "cpu_offload":
        accelerate.cpu_offload(model, torch.device("cpu"))
    else:
        model = model.to("meta")
    with pytest.raises(ValueError, match="weights lie on the meta device.*Load the model on one device"):
        generate(model, PROMPTS)


def test_a_layer_that_asks_the_cache_for_its_length_is_refused() -> None:
    class Asking(LlamaAttention):
        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
            scale = 1 + kwargs["cache"].get_seq_length(self.layer_idx)
            return super().forward(scale * hidden_states, **kwargs)

    model = tiny_llama()
    model.model.layers[1].self_attn.__class__ = Asking
    with pytest.raises(ValueError, match="'llama' is not served: its Asking asks the cache for one length"):
        generate(model, PROMPTS)


@pytest.mark.parametrize("renamed, missing", [("cache", "no K/V cache"), ("position_ids", "no position_ids")])
def test_a_release_that_renames_an_argument_says_which_to_install(
    renamed: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"new_{name}" if name == renamed else name for name in ("self", "input_ids", "cache", "position_ids")]

    class Renamed:
        def forward(self, *_: Any, **__: Any) -> None:
            raise AssertionError("a forward ran before the refusal")

    Renamed.forward.__signature__ = Signature(  # type: ignore[attr-defined]
        [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    )
    model = tiny_llama()
    for module in (model, model.model):
        module.__class__ = type(type(module).__name__, (Renamed, type(module)), {})
    with pytest.raises(ValueError, match=f"'llama' is not served: its forward takes {missing}") as told:
        generate(model, PROMPTS)
    assert "install" not in str(told.value), "under a tested version the family lacks it"
    monkeypatch.setattr(transformers, "__version__", "5.99.0")
    with pytest.raises(ValueError, match=f"takes {missing}.*transformers 5.99.0 is installed.*'transformers>=5"):
        generate(model, PROMPTS)
