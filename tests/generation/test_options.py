"""Options: declared once and the same wherever they are named, and refused by name where a value is bad."""

import ast
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, Literal, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trl import GRPOConfig

from docs.write_options import with_tables
from examples import generate
from spec_trl import (
    SpecDistillationConfig,
    SpecGMPOConfig,
    SpecGRPOConfig,
    SpecRLOOConfig,
    SpeculativeConfig,
)
from spec_trl.cli.arguments import MARGIN
from spec_trl.cli.main import build_parser
from spec_trl.generation.options import OPTIONS, Distillation, kinds_of
from spec_trl.papers.efficient_rollout.draft_length import DraftLengthController
from spec_trl.trainers.rollout_options import RolloutOptions
from spec_trl.value_checks import require_folder_or_id


DOCS = Path(__file__).parents[2] / "docs"
PAGES = [*DOCS.glob("*.md"), *(DOCS.parent / "spec_trl").rglob("*.md")]
TRAINER_ONLY = {
    "assistant_strategy", "assistant_model", "draft_lengths", "initial_draft_length", "draft_length_up",
    "draft_length_down", "draft_length_patience", "rollout_batch_size", "rollout_sharing", "draft_ranks",
    "exact_logprobs",
    "drafter_adaptation", "drafter_learning_rate", "drafter_hidden_weight", "drafter_token_weight",
}  # fmt: skip
NOT_IN_THE_TRAINER = {"draft_length", "ngram_size", "max_batch_size", "seed"}
"""`draft_lengths` and `rollout_batch_size` stand for two of them; `seed` is GRPOConfig's."""
OTHER_DEFAULTS = {"keep_graphs": "auto", "tts_scope": "run"}
"""Of the trainer: it needs the memory, and comes back to the same task."""


def default_of(option: Any) -> Any:
    return option.default if option.default_factory is MISSING else option.default_factory()


# ---- Declared once -------------------------------------------------------------------------------------------------


def test_the_trainer_has_the_options_of_generate() -> None:
    inherited = {option.name for option in fields(GRPOConfig)}
    own = {option.name: option for option in fields(SpecGRPOConfig) if option.name not in inherited}
    assert own.keys() - OPTIONS.keys() == TRAINER_ONLY
    assert OPTIONS.keys() - own.keys() == NOT_IN_THE_TRAINER
    for name in own.keys() & OPTIONS.keys():
        expected = OTHER_DEFAULTS.get(name, OPTIONS[name].default)
        assert default_of(own[name]) == (list(expected) if isinstance(expected, tuple) else expected), name
        assert own[name].metadata["help"] == OPTIONS[name].metadata["help"]
        for_a_shell = "tts_stride", "keep_graphs", "exact", "best_of_n_drafters", "best_of_n_assistants"
        if name not in for_a_shell:
            is_choice = get_origin(OPTIONS[name].type) is Literal
            assert RolloutOptions.__annotations__[name] == (str if is_choice else OPTIONS[name].type), name
    assert all(option.metadata["help"] for option in own.values())


def test_others_that_name_an_option_have_its_default() -> None:
    config = SpeculativeConfig()
    assert config.distillation() == Distillation()
    assert {f"tts_{each.name}" for each in fields(Distillation)} | {"tts_drafter"} == {
        name for name in OPTIONS if name.startswith("tts_")
    }
    arguments = build_parser().parse_args(["calibrate", "model"])
    assert (arguments.quantization, arguments.kernel, arguments.lm_head) == config.packing()
    assert MARGIN == config.sd_margin == build_parser().parse_args(["predict", "p.json", "--acceptance", "1"]).margin
    controller = inspect.signature(DraftLengthController).parameters
    trainer = {option.name: default_of(option) for option in fields(SpecGRPOConfig)}
    assert list(controller["draft_lengths"].default) == trainer["draft_lengths"]
    for name, option in (("up", "draft_length_up"), ("down", "draft_length_down"), ("patience",) * 2):
        assert controller[name].default == trainer.get(option, trainer.get(f"draft_length_{option}"))


def test_an_example_takes_its_options_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["generate.py"])
    arguments, config = generate.parse_arguments(), SpeculativeConfig()
    for name in ("draft_length", "verification", "tts_drafter", "best_of_n_drafters"):
        assert vars(arguments)[name] == vars(config)[name]
    assert arguments.batch_size is config.max_batch_size is None


def test_docstrings_and_docs_list_every_option() -> None:
    trained_with = {option.name for option in fields(RolloutOptions)}
    configs = SpecGRPOConfig, SpecRLOOConfig, SpecDistillationConfig, SpecGMPOConfig
    for config, names in ((SpeculativeConfig, {*OPTIONS}), *((config, trained_with) for config in configs)):
        for name in names:
            assert f"        {name} (defaults to " in (config.__doc__ or "")
    page = (DOCS / "options.md").read_text()
    assert all(f"| `{name}` |" in page for name in {*OPTIONS, *trained_with})
    for path in PAGES:
        assert path.read_text() == with_tables(path.read_text()), f"{path.name}: run python -m docs.write_options"


def test_tables_written_by_hand_have_the_defaults() -> None:
    """Rows of other pages' tables that have a column "default" and begin with an option's name."""
    trainer = {option.name: default_of(option) for option in fields(SpecGRPOConfig)}
    for path in (path for path in PAGES if path.name != "options.md"):
        for rows in re.findall(r"^\| [^|]*\| default \|.*\n\|[-|]+\n((?:\|.*\n)+)", path.read_text(), re.MULTILINE):
            for name, shown in re.findall(r"^\| `(\w+)` \| ([^|]+) \|", rows, re.MULTILINE):
                allowed = [trainer[name]] if name in trainer else []
                allowed += [OPTIONS[name].default] if name in OPTIONS else []
                assert not allowed or ast.literal_eval(shown.replace("`", "").strip()) in allowed, (path.name, name)


# ---- Values ----------------------------------------------------------------------------------------------------


def bounds_of(name: str) -> dict[str, Any]:
    return dict(low=None, high=None, positive=False) | OPTIONS[name].metadata


def bad_values(name: str) -> dict[Any, str]:
    """Values that the annotation or the bounds of an option forbid, and what is said of them."""
    kinds, bounds = kinds_of(OPTIONS[name]), bounds_of(name)
    if bool in kinds:
        return {1: "is no bool; pass True or False", "no": "is no bool"}
    if int in kinds:
        numbers = [] if bounds["low"] is None else [bounds["low"] - 1]
        numbers += [] if bounds["high"] is None else [bounds["high"] + 1]
        return {5.5: "is a float; pass an integer", "0": "is a str; pass an integer"} | dict.fromkeys(
            numbers, rf"is out of range; it must be ({bounds['low']} to {bounds['high']}|at least {bounds['low']})"
        )
    if float in kinds:
        bound = "positive number" if bounds["positive"] else "number of at least 0"
        numbers = [-0.1, math.nan, math.inf, "4GB", *[0.0] * bounds["positive"]]
        return dict.fromkeys(numbers, f"is out of range; it must be a {bound}")
    words = [kind for kind in kinds if isinstance(kind, str)]
    return {words[0] + "x": f"is unknown; choose one of .*Did you mean '{words[0]}'"} if words else {}


@pytest.mark.parametrize("name", OPTIONS)
def test_values_out_of_bounds(name: str) -> None:
    values = bad_values(name)
    assert values or name in {name for bad, _ in BAD for name in bad}
    for value, message in values.items():
        with pytest.raises(ValueError, match=f"^{name}={re.escape(repr(value))} {message}"):
            SpeculativeConfig.coerce({name: value})


BAD: list[tuple[dict[str, Any], str]] = [
    ({"draft_length": True}, "^draft_length=True is a bool; pass an integer"),
    ({"draft_length": None}, "^draft_length=None is a NoneType; pass an integer"),
    ({"verification": ["exact"]}, r"^verification=\['exact'\] is unknown"),
    ({"sd_margin": True}, "^sd_margin=True is out of range"),
    ({"roofline_profile": "p.json", "sd_toggle": "always"}, "^roofline_profile='p.json' is not read under"),
    ({"roofline_profile": "no.json"}, r"^roofline_profile='no.json' does not exist; .*sd_toggle=.roofline."),
    ({"roofline_profile": "no/p.json", "sd_toggle": "roofline"}, "^roofline_profile='no/p.json' must be a file in"),
    ({"roofline_profile": ".", "sd_toggle": "roofline"}, "^roofline_profile='.' must be a file in a folder"),
    ({"max_graph_memory": 0}, "^max_graph_memory=0 is out of range; it must be a positive number of GiB, e.g. 4.0"),
    ({"keep_graphs": "never"}, "^keep_graphs='never' is no bool; pass True or False or \"auto\"."),
    ({"tts_stride": 0}, '^tts_stride=0 is out of range; it must be at least 1 or "adaptive"'),
    ({"tts_stride": "often"}, "^tts_stride='often' is a str; pass an integer or \"adaptive\""),
    ({"best_of_n_drafters": "self"}, "^best_of_n_drafters='self' must be one or more"),
    ({"best_of_n_drafters": ()}, r"^best_of_n_drafters=\(\) must be one or more"),
    ({"best_of_n_drafters": ["self", "self"]}, "must be one or more different ones"),
    ({"best_of_n_drafters": ["self", "auto"]}, r"^best_of_n_drafters=\['self', 'auto'\] must be"),
    ({"best_of_n_assistants": {"model": "a/b"}}, r"^best_of_n_assistants=\{'model': 'a/b'\} must be a dict with some"),
    ({"best_of_n_drafters": ["model"], "best_of_n_assistants": {"model": "./nothing"}},
     r"^best_of_n_assistants\['model'\]='./nothing' is a folder that does not exist"),
    ({"best_of_n_assistants": "x"}, "^best_of_n_assistants='x' must be a dict"),
    ({"draft_quantization": "w4"}, r"^draft_quantization='w4' is unknown; choose one of \['auto', 'rtn-w4-g128'"),
    ({"draft_kernel": "torch_int"}, r"^draft_kernel='torch_int' is unknown; choose one of .* Did you mean 'torch_int"),
    ({"draft_lenght": 3}, r"^speculative_config has no field \['draft_lenght'\]; .* Did you mean 'draft_length'\?"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "message"), BAD, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_bad_values(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.coerce(bad)


@given(st.data())
@settings(deadline=None, max_examples=60, derandomize=True)
def test_values_within_the_bounds(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([name for name in OPTIONS if {int, float} & set(kinds_of(OPTIONS[name]))]))
    bounds, kinds = bounds_of(name), kinds_of(OPTIONS[name])
    words = [kind for kind in kinds if isinstance(kind, str)] + [None] * (type(None) in kinds)
    if int in kinds:
        numbers: st.SearchStrategy[Any] = st.integers(bounds["low"], bounds["high"])
    else:
        numbers = st.floats(0, allow_infinity=False, exclude_min=bounds["positive"])
    value = data.draw(numbers | st.sampled_from(words) if words else numbers)
    assert vars(SpeculativeConfig(**{name: value}))[name] == value


def test_coerce() -> None:
    config = SpeculativeConfig(draft_length=3)
    assert SpeculativeConfig.coerce(config) is config
    assert SpeculativeConfig.coerce({"draft_length": 3}) == config
    assert SpeculativeConfig.coerce(None) == SpeculativeConfig()
    with pytest.raises(ValueError, match="speculative_config=3 is a int; pass a SpeculativeConfig or a dict"):
        SpeculativeConfig.coerce(3)


def test_what_follows_from_options(tmp_path: Path) -> None:
    lengths = {length: SpeculativeConfig(draft_length=length).choice_of_draft_lengths() for length in (1, 5, 64)}
    assert lengths == {1: (1, 2), 5: (2, 5, 10), 64: (32, 64)}
    choices = [SpeculativeConfig().choice_of_draft_lengths(lengths) for lengths in ([5, 7, 9], [1, 3], [3])]
    assert choices == [(2, 5, 7, 9), (1, 3), (3,)]
    assert SpeculativeConfig(decoupled_execution="auto").choice_of_draft_lengths([2, 5]) == (5,)
    given = dict(scope="run", steps=2, anchor_weight=0.5, anchor="initial", asynchronous=True, rank=4)
    config = SpeculativeConfig(**{f"tts_{name}": value for name, value in given.items()})
    assert config.distillation() == Distillation(stride=None, **given)
    assert replace(config, tts_stride=3).distillation().stride == 3
    with pytest.raises(ValueError, match="^tts_rank=0 is out of range"):
        Distillation(rank=0)
    (tmp_path / "profile.json").touch()
    for toggle in ("measured", "roofline"):
        SpeculativeConfig(roofline_profile=str(tmp_path / "profile.json"), sd_toggle=toggle)
    SpeculativeConfig(roofline_profile=str(tmp_path / "new.json"), sd_toggle="roofline")
    require_folder_or_id("assistant_model", str(tmp_path))
    require_folder_or_id("assistant_model", "some/drafter")


@pytest.mark.parametrize(
    ("options", "assistant", "found"),
    [
        ({}, None, {}),
        ({"best_of_n_drafters": ["self", "model"]}, "a", {"model": "a"}),
        ({"best_of_n_drafters": ["tts"], "tts_drafter": "model"}, "a", {"tts": "a"}),
        ({"best_of_n_drafters": ["tts"]}, None, {}),
        ({"best_of_n_drafters": ["model", "eagle3"], "best_of_n_assistants": {"eagle3": "b"}}, "a",
         {"model": "a", "eagle3": "b"}),
        ({}, "a", r"assistant_model='a' with .* of which \[\] lack an assistant"),
        ({"best_of_n_drafters": ["model"]}, None, r"assistant_model=None with .* of which \['model'\] lack"),
        ({"best_of_n_drafters": ["model", "dflash"]}, 3, r"assistant_model=int with .*serves exactly one of them"),
    ],
)  # fmt: skip
def test_assistants_of_best_of_n(options: dict[str, Any], assistant: Any, found: dict[str, str] | str) -> None:
    call: Callable[..., dict[str, Any]] = SpeculativeConfig(**options).assistants_of_best_of_n
    if isinstance(found, dict):
        assert call(assistant) == found
    else:
        with pytest.raises(ValueError, match=found):
            call(assistant)
