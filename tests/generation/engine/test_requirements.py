"""What cannot be served is refused before any work, in one sentence that says what to do."""

from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import (
    DynamicCache,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)
from transformers.generation.streamers import BaseStreamer

from spec_trl import SpeculativeConfig, speculative_decoding
from spec_trl.generation import decoding as entry
from spec_trl.generation.engine import runner
from tests.conftest import tiny_llama
from tests.generation.calls import Prompts, generate, pad_left, random_rows


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return pad_left(random_rows([4, 6]))


@pytest.fixture
def refuses(tiny: PreTrainedModel, prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Expects a ValueError, before any forward."""

    def forbid(*_: Any, **__: Any) -> None:
        raise AssertionError("a forward ran before the refusal")

    def check(message: str, strategy: str = "none", config: Any = None, **options: Any) -> None:
        monkeypatch.setattr(runner.EagerRunner, "_run", forbid)
        given = prompts | {name: options.pop(name) for name in list(options) if name in prompts}
        with pytest.raises(ValueError, match=message):
            generate(tiny, given, strategy, config, **options)

    return check


# ---- The keyword and its options -------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["eagle", "", "Self", "off"])
def test_unknown_strategy(strategy: str, tiny: PreTrainedModel, prompts: Prompts) -> None:
    with pytest.raises(ValueError, match=r"assistant_strategy=.*unknown.*'none', 'self', 'model', 'ngram'"):
        tiny.generate(**prompts, custom_generate=speculative_decoding, assistant_strategy=strategy or "''")


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(draft_length=0), r"draft_length=0 is out of range; it must be 1 to 64"),
        (dict(draft_length=65), r"draft_length=65"),
        (dict(draft_length=-1), r"draft_length=-1"),
        (dict(draft_length=True), r"draft_length=True is a bool; pass an integer"),
        (dict(draft_length=5.0), r"draft_length=5\.0 is a float"),
        (dict(draft_length=None), r"draft_length=None is a NoneType"),
        (dict(ngram_size=0), r"ngram_size=0"),
        (dict(max_batch_size=0), r"max_batch_size=0 is out of range; it must be at least 1"),
        (dict(max_batch_size=2.5), r"max_batch_size=2\.5"),
        (dict(seed="x"), r"seed='x' is a str"),
        (dict(seed=False), r"seed=False"),
        (dict(verification="lossy"), r"verification='lossy'.*'exact', 'rejection'"),
        (dict(draft_lm_head="half"), r"draft_lm_head='half'.*'auto', 'dense', 'packed'"),
        (dict(draft_quantization="int3"), r"draft_quantization='int3'.*'rtn-w4-g128'"),
        (dict(draft_kernel="magic"), r"draft_kernel='magic'.*'auto'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str, refuses: Callable[..., None]) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**options)
    refuses(message, "self", options)


def test_unknown_option(refuses: Callable[..., None]) -> None:
    refuses(r"speculative_config has no field \['gamma'\]; its fields are \['draft_length'", config={"gamma": 5})


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        (dict(draft_lenght=5), "draft_length"),
        (dict(sd_toggle="allways"), "always"),
        (dict(verification="exakt"), "exact"),
        (dict(draft_quantization="rtn-w4-128"), "rtn-w4-g128"),
    ],
)
def test_what_was_meant(options: dict[str, Any], meant: str, refuses: Callable[..., None]) -> None:
    with pytest.raises(ValueError, match=f"Did you mean '{meant}"):
        SpeculativeConfig(**options)
    refuses(f"Did you mean '{meant}", config=options)


def test_strategy_that_was_meant(refuses: Callable[..., None]) -> None:
    refuses("assistant_strategy='n-gram' is unknown.*Did you mean 'ngram'", "n-gram")


@pytest.mark.parametrize("drafter", ["self", ["self"], 5])
def test_drafters_that_are_none(drafter: Any, refuses: Callable[..., None]) -> None:
    refuses(r"^drafter=.* is neither a Drafter nor a list of them; a strategy is named by assist", drafter=drafter)


def test_drafters_of_best_of_n_that_are_no_list(refuses: Callable[..., None]) -> None:
    refuses("best_of_n_drafters=5 must be one or more", config={"best_of_n_drafters": 5})


def test_config_of_the_wrong_type(tiny: PreTrainedModel, prompts: Prompts) -> None:
    with pytest.raises(ValueError, match=r"speculative_config=5 is a int; pass a SpeculativeConfig or a dict"):
        tiny.generate(**prompts, assistant_strategy="none", speculative_config=5)


def test_config_without_a_strategy(tiny: PreTrainedModel, prompts: Prompts) -> None:
    with pytest.raises(ValueError, match="speculative_config is given without assistant_strategy"):
        tiny.generate(**prompts, speculative_config={"draft_length": 3})


def test_two_decoding_methods(tiny: PreTrainedModel, prompts: Prompts) -> None:
    for other in (lambda *_, **__: None, "somebody/method"):
        with pytest.raises(ValueError, match="custom_generate and assistant_strategy both name"):
            tiny.generate(**prompts, assistant_strategy="none", custom_generate=other)


def test_assistants(refuses: Callable[..., None], tiny_assistant: PreTrainedModel) -> None:
    refuses('assistant_strategy="model" needs assistant_model', "model")
    refuses("assistant_model=7 is neither", "model", assistant_model=7)
    refuses("assistant_model=Linear is neither", "model", assistant_model=torch.nn.Linear(2, 2))
    refuses("assistant_model='/no/such' is a folder that does not exist", "model", assistant_model="/no/such")
    refuses("assistant_model='no/such' is no causal LM that can be loaded", "model", assistant_model="no/such")
    refuses(r"best_of_n_assistants\['model'\]='no/such' is no causal LM", "best_of_n",
            {"best_of_n_drafters": ["model"], "best_of_n_assistants": {"model": "no/such"}})  # fmt: skip
    refuses("vocabulary of 65 tokens and the target one of 64", "model", assistant_model=tiny_llama(vocab_size=65))
    refuses("assistant_model is on meta and the target on cpu", "model", assistant_model=tiny_llama().to("meta"))
    for strategy in ("none", "self", "ngram"):
        refuses(
            f"assistant_model is given, but assistant_strategy='{strategy}'", strategy, assistant_model=tiny_assistant
        )


def test_assistants_are_checked_before_calibrating(
    refuses: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "find_profile", lambda *_: pytest.fail("calibrated"))
    assistant = tiny_llama(vocab_size=65)
    refuses("vocabulary of 65 tokens", "model", {"sd_toggle": "roofline"}, assistant_model=assistant)


@pytest.mark.parametrize("model_type", ["mamba", "t5", "bloom"])
def test_assistants_of_a_refused_family(model_type: str, refuses: Callable[..., None]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model(
        model_type, vocab_size=64, num_layers=1, n_layer=1, num_hidden_layers=1, hidden_size=32
    )
    auto = AutoModelForSeq2SeqLM if model_type == "t5" else AutoModelForCausalLM
    assistant = auto.from_config(config)
    refuses("assistant_model cannot draft: .*(recurrent|encoder-decoder|ALiBi)", "model", assistant_model=assistant)


def test_rejection_needs_probabilities(refuses: Callable[..., None], tiny, prompts) -> None:
    refuses(
        "verification=.rejection. needs draft probabilities, which NgramDrafter",
        "ngram",
        {"verification": "rejection"},
    )


def test_rejection_with_ngram_is_fine_when_greedy(tiny, prompts) -> None:
    generate(tiny, prompts, "ngram", {"verification": "rejection"}, do_sample=False, max_new_tokens=2)


# ---- Prompts ---------------------------------------------------------------------------------------------------


def test_prompts(refuses: Callable[..., None]) -> None:
    ids = torch.randint(3, 64, (2, 5))
    refuses("prompt 1 is not left-padded.*padding_side='left'", input_ids=ids,
            attention_mask=torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]))  # fmt: skip
    refuses("prompt 0 is not left-padded", input_ids=ids,
            attention_mask=torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 1, 1]]))  # fmt: skip
    refuses("prompt 1 is empty: its attention_mask has no 1", input_ids=ids,
            attention_mask=torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]))  # fmt: skip
    refuses(r"attention_mask has shape \[2, 4\] and input_ids \[2, 5\]", input_ids=ids,
            attention_mask=torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]))  # fmt: skip
    refuses("input_ids is empty", input_ids=ids[:, :0], attention_mask=torch.ones(2, 0).long())


def test_prompts_beyond_the_context(prompts: Prompts) -> None:
    model = tiny_llama(max_position_embeddings=5)
    with pytest.raises(ValueError, match="longest prompt has 6 tokens and the model's context is 5"):
        generate(model, prompts, max_new_tokens=1)


def test_learned_positions_are_not_exceeded(prompts: Prompts) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=20)).eval()
    generate(model, prompts, max_new_tokens=14, eos_token_id=None)
    with pytest.raises(ValueError, match="reach 21, and at 20 its learned positions end.*within 20"):
        generate(model, prompts, max_new_tokens=15)


def test_request_ids(refuses: Callable[..., None]) -> None:
    refuses("request_ids has 3 entries for 2 rows", request_ids=[1, 2, 3])


# ---- Memory ----------------------------------------------------------------------------------------------------


def test_a_cache_that_does_not_fit(tiny, prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 30_000

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    with pytest.raises(
        ValueError, match=r"K/V cache of 2 rows x 35 columns x 2 layers would not.*GiB.*max_batch_size"
    ):
        generate(tiny, prompts)
    generate(tiny, prompts, config={"max_batch_size": 1}, max_new_tokens=4)  # what the message advises works


@pytest.mark.filterwarnings("ignore:.*beyond the model's context")
def test_a_budget_beyond_all_memory(tiny, prompts) -> None:
    with pytest.raises(ValueError, match=r"the tokens of 2 rows x 10{10}11 columns would not fit in memory.*GiB"):
        generate(tiny, prompts, max_new_tokens=10**12)


# ---- Modes of generate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    [
        dict(num_beams=2),
        dict(num_beams=4, do_sample=False),
        dict(penalty_alpha=0.6, top_k=4, do_sample=False),
        dict(dola_layers="low", do_sample=False),
        dict(guidance_scale=1.5),
        dict(prompt_lookup_num_tokens=3),
        dict(force_words_ids=[[5, 6]]),
        dict(use_mtp=True),
        dict(assistant_early_exit=1),
        dict(num_assistant_tokens=7),
        dict(token_healing=True),
        dict(cache_implementation="paged"),
        dict(use_cache=False),
        dict(cache_implementation="static"),
        dict(output_scores=True),
        dict(output_logits=True),
        dict(output_attentions=True),
        dict(output_hidden_states=True),
    ],
)
def test_other_modes(option: dict[str, Any], refuses: Callable[..., None]) -> None:
    refuses(f"{next(iter(option))}=.*cannot be combined with assistant_strategy", **option)


def test_scores_are_refused_with_the_way_out(refuses: Callable[..., None]) -> None:
    refuses(r"output_scores=True.*\.logprobs", output_scores=True)


def test_modes_in_a_generation_config(tiny, prompts) -> None:
    config = GenerationConfig(num_beams=3, max_new_tokens=3, pad_token_id=0)
    with pytest.raises(ValueError, match="num_beams=3"):
        tiny.generate(**prompts, generation_config=config, assistant_strategy="none")


@pytest.mark.parametrize("option", [dict(token_healing=True), dict(cache_implementation="paged")])
def test_what_generate_does_before_it_decodes(option: dict[str, Any], tiny, prompts) -> None:
    """In a config too, and with a tokenizer, which `generate` keeps from a custom method."""
    config = GenerationConfig(max_new_tokens=3, pad_token_id=0, **option)
    with pytest.raises(ValueError, match=f"{next(iter(option))}=.*cannot be combined with assistant_strategy"):
        tiny.generate(**prompts, generation_config=config, assistant_strategy="none", tokenizer=object())


def test_token_healing_is_refused_with_the_way_out(refuses: Callable[..., None]) -> None:
    refuses(r"token_healing=True.*pass input_ids=model.heal_tokens\(input_ids, tokenizer\)", token_healing=True)


def test_a_number_of_assistant_tokens_that_nobody_asked_for(prompts: Prompts) -> None:
    """What generate fills in, and what the model's own config brings: transformers' own loop writes it there."""
    model = tiny_llama()
    expected = generate(model, prompts, max_new_tokens=2)
    model.generation_config.num_assistant_tokens = 7
    assert torch.equal(generate(model, prompts, max_new_tokens=2).sequences, expected.sequences)
    with pytest.raises(ValueError, match="num_assistant_tokens=8.*'draft_length'.* says how many tokens are drafted"):
        generate(model, prompts, num_assistant_tokens=8)


def test_positions(refuses: Callable[..., None], tiny: PreTrainedModel, prompts: Prompts) -> None:
    """Prompts of 4 and 6 tokens: those that are counted from the first one serve, whatever stands at padding."""
    expected = generate(tiny, prompts, max_new_tokens=2).sequences
    counted = torch.tensor([[9, 9, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    assert torch.equal(generate(tiny, prompts, max_new_tokens=2, position_ids=counted).sequences, expected)
    for wrong in (torch.arange(6).expand(2, 6), counted + 1, counted[:, :5], torch.zeros(2, 6).long()):
        refuses(r"position_ids of shape \[2, .\] do not count 0, 1, 2, ... from each prompt's", position_ids=wrong)


def test_synced_gpus(refuses: Callable[..., None]) -> None:
    refuses("synced_gpus=True cannot be combined with assistant_strategy", synced_gpus=True)


def test_streamer_with_two_rows(refuses: Callable[..., None]) -> None:
    class Sink(BaseStreamer):
        def put(self, value: torch.Tensor) -> None: ...

        def end(self) -> None: ...

    refuses("streamer is given with 2 rows", streamer=Sink())


# ---- Inputs that would be dropped ------------------------------------------------------------------------------


def test_inputs_embeds(tiny, prompts) -> None:
    embeds = tiny.get_input_embeddings()(prompts["input_ids"])
    with pytest.raises(ValueError, match="inputs_embeds|input_ids is empty"):
        tiny.generate(inputs_embeds=embeds, assistant_strategy="none", max_new_tokens=2, pad_token_id=0)


def test_other_model_inputs(tiny, prompts) -> None:
    for name in ("pixel_values", "token_type_ids"):
        with pytest.raises(ValueError, match=name):
            generate(tiny, prompts, **{name: torch.zeros(2, 3)})


def test_prior_past_key_values(tiny, prompts) -> None:
    cache = DynamicCache()
    tiny(prompts["input_ids"][:, :3], past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values already holds tokens"):
        generate(tiny, prompts, past_key_values=cache)
    generate(tiny, prompts, past_key_values=DynamicCache(), max_new_tokens=2)


@pytest.mark.parametrize("adapter", [PromptTuningConfig, PrefixTuningConfig])
def test_prompt_learning(adapter: type, prompts) -> None:
    model = get_peft_model(tiny_llama(), adapter(task_type="CAUSAL_LM", num_virtual_tokens=3))
    for _ in range(2):
        with pytest.raises(ValueError, match="prompt learning.*LoRA"):
            generate(model, prompts)


def test_a_model_on_two_devices(prompts) -> None:
    model = tiny_llama()
    model.hf_device_map = {"model.layers.0": "cpu", "model.layers.1": "disk"}
    with pytest.raises(ValueError, match=r"spread over \['cpu', 'disk'\]"):
        generate(model, prompts)


@pytest.mark.parametrize("strategy", ["none", "self"])
def test_adapters_that_act_on_some_tokens_or_rows(strategy: str, prompts) -> None:
    settings = dict(task_type="CAUSAL_LM", target_modules=["q_proj"])
    activated = get_peft_model(tiny_llama(), LoraConfig(**settings, alora_invocation_tokens=[5, 6]))
    with pytest.raises(ValueError, match="aLoRA.*Use LoRA"):
        generate(activated, prompts, strategy)
    with activated.disable_adapter():
        generate(activated, prompts, strategy, max_new_tokens=2)
    two = get_peft_model(tiny_llama(), LoraConfig(**settings))
    two.add_adapter("other", LoraConfig(**settings))
    with pytest.raises(ValueError, match="adapter_names.*one adapter at a time"):
        generate(two.eval(), prompts, strategy, adapter_names=["default", "other"])
