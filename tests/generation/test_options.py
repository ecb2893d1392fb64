"""Options: declared once and the same wherever they are named, and refused by name where a value is bad."""

import ast
import inspect
import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from spec_trl.drafter_training.adaptation import AdaptationOptions
from spec_trl.generation.options import OPTIONS
from spec_trl.papers.efficient_rollout.draft_length import DraftLengthController
from spec_trl.papers.specactor.options import SpecActorOptions
from spec_trl.papers.test_time_speculation.options import TTSOptions
from spec_trl.trainers.rollout_options import DRAFT_LENGTHS, RolloutOptions
from spec_trl.value_checks import kinds_of, require_folder_or_id


DOCS = Path(__file__).parents[2] / "docs"
PAGES = [*DOCS.glob("*.md"), *(DOCS.parent / "spec_trl").rglob("*.md")]
CONFIGS = SpecGRPOConfig, SpecRLOOConfig, SpecDistillationConfig, SpecGMPOConfig


# ---- Declared once -------------------------------------------------------------------------------------------------


def test_options_are_few_and_declared_once() -> None:
    assert len(fields(SpeculativeConfig)) <= 16
    for config in CONFIGS:
        (base,) = {*config.__bases__} - {RolloutOptions}
        own = [option.name for option in fields(config)][len(fields(base)) :]
        assert own == [option.name for option in fields(RolloutOptions)] and len(own) <= 9
        assert not OPTIONS.keys() & {*own}
    assert all(option.metadata["help"] for option in [*OPTIONS.values(), *fields(RolloutOptions)])


def test_others_that_name_an_option_have_its_default() -> None:
    config = SpeculativeConfig()
    arguments = build_parser().parse_args(["calibrate", "model"])
    assert (arguments.quantization, arguments.kernel) == (config.draft_quantization, config.draft_kernel)
    assert arguments.lm_head == config.efficient_rollout.lm_head
    margin = build_parser().parse_args(["predict", "p.json", "--acceptance", "1"]).margin
    assert MARGIN == config.efficient_rollout.margin == margin
    controller = inspect.signature(DraftLengthController).parameters
    assert tuple(controller["draft_lengths"].default) == DRAFT_LENGTHS
    for name in ("up", "down", "patience"):
        assert controller[name].default == vars(config.efficient_rollout)[f"draft_length_{name}"]


def test_an_example_takes_its_options_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["generate.py"])
    arguments, config = generate.parse_arguments(), SpeculativeConfig()
    assert (arguments.draft_length, arguments.verification) == (config.draft_length, config.verification)
    assert (arguments.tts_drafter, arguments.best_of_n_drafters) == (config.tts.drafter, config.specactor.drafters)
    assert arguments.batch_size is config.max_batch_size is None


def test_docstrings_and_docs_list_every_option() -> None:
    own = {option.name for option in fields(RolloutOptions)}
    for config, names in ((SpeculativeConfig, {*OPTIONS}), *((config, own) for config in CONFIGS)):
        for name in names:
            assert f"        {name} (defaults to " in (config.__doc__ or "")
    page = (DOCS / "options.md").read_text()
    assert all(f"| `{name}` |" in page for name in {*OPTIONS, *own})
    for path in PAGES:
        assert path.read_text() == with_tables(path.read_text()), f"{path.name}: run python -m docs.write_options"


def test_tables_written_by_hand_have_the_defaults() -> None:
    """Rows of other pages' tables that have a column "default" and begin with an option's place."""
    defaults = {name: option.default for name, option in OPTIONS.items()}
    defaults |= {option.name: option.default for option in [*fields(RolloutOptions), *fields(AdaptationOptions)]}
    for path in (path for path in PAGES if path.name != "options.md"):
        for rows in re.findall(r"^\| [^|]*\| default \|.*\n\|[-|]+\n((?:\|.*\n)+)", path.read_text(), re.MULTILINE):
            for name, shown in re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|", rows, re.MULTILINE):
                if name in defaults:
                    assert ast.literal_eval(shown.replace("`", "").strip()) == defaults[name], (path.name, name)


# ---- Values ----------------------------------------------------------------------------------------------------


def bounds_of(name: str) -> dict[str, Any]:
    return dict(low=None, high=None, positive=False) | OPTIONS[name].metadata.get("bounds", {})


def at(place: str, value: Any) -> dict[str, Any]:
    group, _, name = place.rpartition(".")
    return {group: {name: value}} if group else {name: value}


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
    group, _, inner = name.rpartition(".")
    checked = [{*bad.get(group, ())} if group and bad.get(group) != 3 else {*bad} for bad, _ in BAD]
    assert values or any(inner in names for names in checked)
    for value, message in values.items():
        with pytest.raises(ValueError, match=f"^{name}={re.escape(repr(value))} {message}"):
            SpeculativeConfig.coerce(at(name, value))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"draft_length": True}, "^draft_length=True is a bool; pass an integer"),
    ({"draft_length": []}, r"^draft_length=\[\] is not ascending; use \[5, 7, 9, 11\]"),
    ({"draft_length": [5, 5]}, r"^draft_length=\[5, 5\] is not ascending; use \[5\]"),
    ({"draft_length": [5, 65]}, "^draft_length=65 is out of range; it must be 1 to 64"),
    ({"draft_length": [5, 7.5]}, "^draft_length=7.5 is a float; pass an integer"),
    ({"draft_length": [5, 7], "efficient_rollout": {"initial_draft_length": 6}},
     r"^efficient_rollout.initial_draft_length=6 is not one of draft_length=\[5, 7\]"),
    ({"verification": ["exact"]}, r"^verification=\['exact'\] is unknown"),
    ({"efficient_rollout": {"margin": True}}, "^efficient_rollout.margin=True is out of range"),
    ({"efficient_rollout": {"draft_length_up": 1.5}}, "draft_length_up=1.5 must be shares, the first the smaller one"),
    ({"efficient_rollout": {"draft_length_down": 0.94}}, "^efficient_rollout.draft_length_down=0.94 and"),
    ({"efficient_rollout": {"draft_length_down": 0.0}}, "^efficient_rollout.draft_length_down=0.0 and"),
    ({"efficient_rollout": {"profile": "no.json"}}, r"profile='no.json' does not exist; .*sd_toggle=.roofline."),
    ({"efficient_rollout": {"profile": "no/p.json"}, "sd_toggle": "roofline"}, "profile='no/p.json' must be a file"),
    ({"efficient_rollout": {"profile": "."}, "sd_toggle": "roofline"}, "profile='.' must be a file in a folder"),
    ({"max_graph_memory": 0}, "^max_graph_memory=0 is out of range; it must be a positive number of GiB, e.g. 4.0"),
    ({"keep_graphs": "never"}, "^keep_graphs='never' is no bool; pass True or False or \"auto\"."),
    ({"tts": {"stride": 0}}, '^tts.stride=0 is out of range; it must be at least 1 or "adaptive"'),
    ({"tts": {"stride": "often"}}, "^tts.stride='often' is a str; pass an integer or \"adaptive\""),
    ({"tts": 3}, "^tts=3 is a int; pass a TTSOptions or a dict"),
    ({"specactor": {"drafters": "self"}}, "^specactor.drafters='self' must be one or more"),
    ({"specactor": {"drafters": ()}}, r"^specactor.drafters=\(\) must be one or more"),
    ({"specactor": {"drafters": ["self", "self"]}}, "must be one or more different ones"),
    ({"specactor": {"drafters": ["self", "auto"]}}, r"^specactor.drafters=\('self', 'auto'\) must be"),
    ({"specactor": {"assistants": {"model": "a/b"}}}, r"^specactor.assistants=\{'model': 'a/b'\} must be a dict with"),
    ({"specactor": {"drafters": ["model"], "assistants": {"model": "./nothing"}}},
     r"^specactor.assistants\['model'\]='./nothing' is a folder that does not exist"),
    ({"specactor": {"assistants": "x"}}, "^specactor.assistants='x' must be a dict"),
    ({"draft_quantization": "w4"}, r"^draft_quantization='w4' is unknown; choose one of \['auto', 'rtn-w4-g128'"),
    ({"draft_kernel": "torch_int"}, r"^draft_kernel='torch_int' is unknown; choose one of .* Did you mean 'torch_int"),
    ({"draft_lenght": 3}, r"^speculative_config has no option 'draft_lenght'. .* Did you mean 'draft_length'\?"),
    ({"tts": {"strid": 3}}, r"^tts has no option 'strid'. Its options are \['drafter', .* Did you mean 'stride'\?"),
    # earlier names
    *(({name: 1}, f"has no option '{name}'. Give speculative_config={{{place}: ...}}") for name, place in (
        ("tts_stride", '"tts": {"stride"'), ("best_of_n_race", '"specactor": {"race"'),
        ("draft_lengths", '"draft_length"'), ("decoupled_execution", '"specactor": {"decoupled_execution"'),
        ("sd_margin", '"efficient_rollout": {"margin"'), ("rollout_batch_size", '"max_batch_size"'),
        ("draft_length_up", '"efficient_rollout": {"draft_length_up"'), ("tts.stride", '"tts": {"stride"'),
    )),
]  # fmt: skip


def test_numbers_that_yaml_reads_as_text() -> None:
    config = SpeculativeConfig(tts={"learning_rate": "1e-3"}, efficient_rollout={"margin": "2e-1"})
    assert (config.tts.learning_rate, config.efficient_rollout.margin) == (0.001, 0.2)
    with pytest.raises(ValueError, match="^tts.learning_rate='fast'"):
        SpeculativeConfig(tts={"learning_rate": "fast"})


@pytest.mark.parametrize(("bad", "message"), BAD, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_bad_values(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.coerce(bad)


@given(st.data())
@settings(deadline=None, max_examples=60, derandomize=True)
def test_values_within_the_bounds(data: st.DataObject) -> None:
    numbered = {name for name in OPTIONS if {int, float} & set(kinds_of(OPTIONS[name]))}
    shares = {"efficient_rollout.draft_length_up", "efficient_rollout.draft_length_down"}  # one bounds the other
    name = data.draw(st.sampled_from(sorted(numbered - shares)))
    bounds, kinds = bounds_of(name), kinds_of(OPTIONS[name])
    words = [kind for kind in kinds if isinstance(kind, str)] + [None] * (type(None) in kinds)
    if int in kinds:
        numbers: st.SearchStrategy[Any] = st.integers(bounds["low"], bounds["high"])
    else:
        numbers = st.floats(0, allow_infinity=False, exclude_min=bounds["positive"])
    value = data.draw(numbers | st.sampled_from(words) if words else numbers)
    assert SpeculativeConfig(**at(name, value)).by_place()[name] == value


def test_coerce() -> None:
    config = SpeculativeConfig(draft_length=3)
    assert SpeculativeConfig.coerce(config) is config
    assert SpeculativeConfig.coerce({"draft_length": 3}) == config
    assert SpeculativeConfig.coerce(None) == SpeculativeConfig()
    assert SpeculativeConfig(tts={"rank": 4}) == SpeculativeConfig(tts=TTSOptions(rank=4))
    saved = SpeculativeConfig(draft_length=[3, 5], tts={"stride": 2}, specactor={"drafters": ["self", "ngram"]})
    assert SpeculativeConfig.coerce(json.loads(json.dumps(saved.to_dict()))) == saved
    with pytest.raises(ValueError, match="speculative_config=3 is a int; pass a SpeculativeConfig or a dict"):
        SpeculativeConfig.coerce(3)


def test_what_follows_from_options(tmp_path: Path) -> None:
    given: tuple[int | list[int] | None, ...] = (None, 1, 5, 64, [5, 7, 9], [1, 3], [3])
    choices = [SpeculativeConfig(draft_length=lengths).choice_of_draft_lengths() for lengths in given]
    assert choices == [(2, 5, 10), (1, 2), (2, 5, 10), (32, 64), (2, 5, 7, 9), (1, 3), (3,)]
    for ahead in ({"decoupled_execution": "auto"}, {"draft_ranks": 1}):
        config = SpeculativeConfig(draft_length=[2, 5], specactor=ahead)
        assert config.choice_of_draft_lengths() == (config.first_draft_length,) == (2,)
    assert replace(config, efficient_rollout={"initial_draft_length": 5}).first_draft_length == 5
    (tmp_path / "profile.json").touch()
    for toggle, name in (("measured", "profile.json"), ("roofline", "profile.json"), ("roofline", "new.json")):
        SpeculativeConfig(efficient_rollout={"profile": str(tmp_path / name)}, sd_toggle=toggle)
    require_folder_or_id("assistant_model", str(tmp_path))
    require_folder_or_id("assistant_model", "some/drafter")


@pytest.mark.parametrize(
    ("options", "tts_drafter", "assistant", "found"),
    [
        ({}, "self", None, {}),
        ({"drafters": ["self", "model"]}, "self", "a", {"model": "a"}),
        ({"drafters": ["tts"]}, "model", "a", {"tts": "a"}),
        ({"drafters": ["tts"]}, "self", None, {}),
        ({"drafters": ["model", "eagle3"], "assistants": {"eagle3": "b"}}, "self", "a", {"model": "a", "eagle3": "b"}),
        ({}, "self", "a", r"assistant_model='a' with .* of which \[\] lack an assistant"),
        ({"drafters": ["model"]}, "self", None, r"assistant_model=None with .* of which \['model'\] lack"),
        ({"drafters": ["model", "dflash"]}, "self", 3, r"assistant_model=int with .*serves exactly one of them"),
    ],
)
def test_assistants_of_races(
    options: dict[str, Any], tts_drafter: str, assistant: Any, found: dict[str, str] | str
) -> None:
    config = SpecActorOptions(**options)
    if isinstance(found, dict):
        assert config.assistants_with(assistant, tts_drafter) == found
    else:
        with pytest.raises(ValueError, match=found):
            config.assistants_with(assistant, tts_drafter)
