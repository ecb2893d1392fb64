"""Which families are served: the rules on a handful of them, and the table in the documentation."""

import dataclasses
import re
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spec_trl.generation.engine.forwards import runner
from spec_trl.generation.engine.network.attention import MaskPlan
from spec_trl.generation.engine.requirements import check_model, position_limit
from tests import families
from tests.conftest import TRANSFORMERS
from tests.families import CRASH, DOCUMENT, REFUSED, SERVED, UNTRIED, WRONG, Outcome, documented, examine
from tests.tiny_families import OPTIONAL, SETTINGS, SIZES, make, tiny_settings


TABLE = documented(DOCUMENT.read_text(encoding="utf-8"))


# One of each way in that a family may need, and the vision-language models by how they are built.
@pytest.mark.parametrize(
    "family",
    [
        "marian",  # tells its position table
        "mvp",  # whose decoder hands its table no positions at all
        "trocr",  # cross-attention that no text reaches
        "moshi",  # a window that no mask has
        "afmoe",  # takes a view of what attention returns
        "git",  # a vision tower within the decoder
        "phi4_multimodal",  # the same, and projections for images and sound
        "mllama",  # layers that text skips
        "gemma4_text",  # heads of two sizes, which the config does not tell
        "gemma3", "llava", "qwen2_vl",
    ],
)  # fmt: skip
def test_served(family: str) -> None:
    if family == "git" and TRANSFORMERS < (5, 23):
        pytest.skip("its vision tower takes masks of two dimensions alone there, and the call ends in an error")
    outcome = examine(family, new_tokens=12)
    assert outcome.verdict == SERVED
    assert "constant" not in outcome.why and "draft" not in outcome.why and outcome.drafted


@pytest.mark.parametrize(
    "family, message",
    [
        ("roformer", "one table for all rows"), ("doge", "what the tokens say"), ("paligemma", "both directions"),
        ("prophetnet", "takes no position_ids"), ("openai-gpt", "takes no K/V cache"),
        ("xlm", "cuts its input by the length"), ("whisper", "no max_position_embeddings"),
    ],
)  # fmt: skip
def test_refused_by_name(family: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^model type '[\w.-]+' .*{message}"):
        check_model(make(family))


def test_an_encoder_is_no_decoder() -> None:
    model = make("bert")
    check_model(model)
    model.config.is_decoder = False
    with pytest.raises(ValueError, match="'bert' attends in both directions; set config.is_decoder=True"):
        check_model(model)


def test_positions_that_cannot_be_told() -> None:
    config = make("trocr").config
    config.use_learned_position_embeddings = False
    with pytest.raises(ValueError, match="'trocr' .*takes no position_ids"):
        check_model(type(make("trocr"))(config))


def test_a_window_that_no_mask_has_is_a_limit() -> None:
    model = make("moshi")
    assert MaskPlan.for_network(model).layer_types == ("full_attention",)
    assert position_limit(model) == 48
    ids = torch.tensor([[5, 9, 11]])
    with pytest.raises(ValueError, match="reach 49, and at 48 generate would forget .*sliding_window.*within 48"):
        model.generate(ids, max_new_tokens=46, assistant_strategy="none")
    assert MaskPlan.for_network(make("mistral")).layer_types == ("sliding_attention",)


@pytest.mark.parametrize("family, extra", [("gemma3", "token_type_ids"), ("qwen2_vl", "mm_token_type_ids")])
def test_what_processors_say_of_text(family: str, extra: str) -> None:
    model = make(family)
    ids = torch.tensor([[5, 9, 11, 40, 7]])
    options = {"attention_mask": torch.ones_like(ids), extra: torch.zeros_like(ids), "max_new_tokens": 6}
    expected = model.generate(ids, do_sample=False, **options)
    assert torch.equal(model.generate(ids, do_sample=False, assistant_strategy="ngram", **options), expected)


def test_images_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: Any, **__: Any) -> None:
        raise AssertionError("a forward ran before the refusal")

    monkeypatch.setattr(runner.EagerRunner, "_run", forbid)
    gemma = make("gemma3")
    ids = torch.tensor([[5, 9, 11]])
    options = dict(max_new_tokens=2, assistant_strategy="none")
    with pytest.raises(ValueError, match=r"more than text \(token_type_ids\), and pixel_values, .* are not given"):
        gemma.generate(ids, token_type_ids=torch.tensor([[0, 1, 1]]), **options)
    with pytest.raises(ValueError, match=r"more than text \(image\)|not used by the model"):  # by 5.17
        gemma.generate(ids, mm_encoder_outputs={"image": torch.zeros(1, 4)}, **options)


# Its config has full attention alone by default.
def test_layers_of_published_checkpoints_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"layers of type \['minimax_m3_sparse'\]"):
        check_model(make("minimax_m3_vl_text"))


# ---- Tiny models ----------------------------------------------------------------------------------------------


def default_settings(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """What a tiny config changes besides sizes and layers."""
    settings: dict[str, Any] = {}
    default = config_class()
    for field in dataclasses.fields(config_class):
        name, value = field.name, vars(default).get(field.name)
        if name in SETTINGS:
            settings[name] = SETTINGS[name]
        elif name in OPTIONAL and value is None:
            settings[name] = SIZES[name]
        elif isinstance(value, PreTrainedConfig):
            settings[name] = default_settings(type(value)) | {"model_type": value.model_type}
    return settings


def kinds_of_layers(family: str, settings: dict[str, Any]) -> set[Any]:
    """Of each layer of the decoder: its modules, by name and class, with their flags, and which of their sizes are
    zero or None."""
    auto = AutoModelForCausalLM if family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForImageTextToText
    with torch.device("meta"):
        model = auto.from_config(CONFIG_MAPPING[family](**settings))
    within = model if family == "modernbert-decoder" else model.get_decoder()  # there this is the last layer
    layers = [layer for each in within.modules() if isinstance(each, nn.ModuleList) for layer in each]
    named = [[(re.sub(r"\d+", "", name), part) for name, part in layer.named_modules()] for layer in layers]
    return {frozenset(_traits(name, part) for name, part in parts) for parts in named}


def _traits(name: str, module: nn.Module) -> Any:
    values = {**vars(module), **module._modules}
    numbers = {key: value for key, value in values.items() if not re.match("_|training|layer_(idx|id|number)", key)}
    flags = {
        (key, bool(value) if isinstance(value, int) else value)
        for key, value in numbers.items() if value is None or isinstance(value, bool | int | str)
    }  # fmt: skip
    return name, type(module).__name__, frozenset(flags)


def assert_every_kind_of_layer(family: str) -> None:
    config_class = CONFIG_MAPPING[family]
    wanted = kinds_of_layers(family, default_settings(config_class))
    assert wanted and wanted <= kinds_of_layers(family, tiny_settings(config_class))


# Of whose layers a tiny model once lacked some, by what tells them apart.
@pytest.mark.parametrize(
    "family",
    [
        "afmoe", "gemma3n_text", "flint", "inkling2_text", "jamba", "kimi_linear", "llama4_text", "mimo_v2_flash",
        "modernbert-decoder", "recurrent_gemma", "smollm3",
    ],
)  # fmt: skip
def test_a_tiny_model_has_every_kind_of_layer_of_its_family(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    assert_every_kind_of_layer(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(TABLE))
def test_every_tiny_model_has_every_kind_of_layer(family: str) -> None:
    if family in ("cohere_compass_text", "dbrx", "lfm2_moe", "qwen4_exp", "qwen4_exp_text"):
        pytest.skip("the defaults of its config make no model")
    if TABLE[family] == UNTRIED:
        pytest.skip("no tiny model of it can be made")
    test_a_tiny_model_has_every_kind_of_layer_of_its_family(family)


# ---- The table -------------------------------------------------------------------------------------------------


@pytest.fixture
def same_release() -> None:
    if f"transformers {transformers.__version__};" not in DOCUMENT.read_text(encoding="utf-8"):
        pytest.skip("the table was made with another release of transformers")


def test_every_family_stands_in_the_table(same_release: None) -> None:
    assert sorted(TABLE) == families.families()
    assert not {WRONG, CRASH} & set(TABLE.values())
    assert sum(verdict == SERVED for verdict in TABLE.values()) >= 120


def test_the_page() -> None:
    outcomes = [Outcome("a", SERVED, "nearly constant output"), Outcome("b-c", REFUSED, "why"), Outcome("d.e", WRONG)]
    outcomes += [Outcome("f", SERVED), Outcome("g", REFUSED, "why")]
    page = families.document(outcomes)
    assert "5 families: 2 served (1 of them with nearly constant output), 2 refused, 0 not tried." in page
    assert documented(page) == {"a": SERVED, "b-c": REFUSED, "d.e": WRONG, "f": SERVED, "g": REFUSED}


@pytest.mark.slow
@pytest.mark.parametrize("family", TABLE)
def test_the_table_is_true(family: str, same_release: None) -> None:
    assert family in CONFIG_MAPPING
    assert examine(family).verdict == TABLE[family]
