"""What imports what, what importing the package brings along, and two rules for its source: length and privacy."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import spec_trl
from docs.write_map import PAGE, sentence_of, with_map
from tests.cli.sample_run import make_profile


ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "spec_trl").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
# Only types: the options of a call have those of the papers.
OPTIONS = tuple(f"papers.{room}.options" for room in ("efficient_rollout", "test_time_speculation", "specactor"))
# Each imports from its own room and from those before it.
FLOORS: list[tuple[str, ...]] = [
    ("cuda_graphs", "hardware", "json_files", "papers", "user_cache"),
    ("value_checks", "native.native_code"),
    ("native",),
    ("generation.planner", "quantization"),
    ("generation.registry",),
    ("generation.refusals",),
    ("generation.engine.network.snapshot",),
    OPTIONS,
    ("generation.session", "generation.options"),
    ("generation.engine",),
    ("generation.drafters",),
    ("generation",),
    ("papers.test_time_speculation", "papers.efficient_rollout"),
    ("papers.specactor",),
    ("drafter_training", "distributed"),
    ("papers.specactor.draft_ranks", "papers.specactor.rank_races"),
    ("trainers",),
    ("cli",),
    ("vllm",),
    ("papers.specactor.commands",),
    ("papers.efficient_rollout.commands",),
]
ROOMS = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def name_of(path: Path) -> str:
    """A module's dotted name within the package."""
    return ".".join(path.relative_to(ROOT / "spec_trl").with_suffix("").parts)


def room_of(module: str) -> str:
    """The room that a module is in, the most particular one."""
    return max((room for room in ROOMS if f"{module}.".startswith(f"{room}.")), key=len, default="")


def imports_of(path: Path, types: bool = False) -> Iterator[str]:
    """Absolute names of what a file imports, wherever in it. `types`: also what type checkers alone read."""

    def visit(node: ast.AST) -> Iterator[str]:
        if not types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parent.parts
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += [node.module] if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    return visit(ast.parse(path.read_text()))


def test_imports_run_one_way() -> None:
    wrong = []
    for path in SOURCES:
        own = room_of(name_of(path))
        for name in imports_of(path):
            other = room_of(name.removeprefix("spec_trl."))
            if own and name.startswith("spec_trl.") and other != own and ROOMS.get(other, 99) >= ROOMS[own]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_no_modules_import_each_other() -> None:
    """Not by way of others, nor for type checkers alone."""
    modules = {f"spec_trl.{name_of(path)}".removesuffix(".__init__"): path for path in SOURCES}
    left = {
        module: {name if name in modules else name.rpartition(".")[0] for name in imports_of(path, types=True)}
        for module, path in modules.items()
    }
    while free := {module for module, names in left.items() if not names & left.keys() - {module}}:
        left = {module: names for module, names in left.items() if module not in free}
    assert not left


@pytest.mark.parametrize("room", ["json_files", "value_checks", "papers", "generation.planner"])
def test_plain_python(room: str) -> None:
    names = {name for path in SOURCES if room_of(name_of(path)) == room for name in imports_of(path)}
    assert names and not {name.partition(".")[0] for name in names} & {"torch", "transformers", "trl", "datasets"}


def test_papers_are_reached_by_name_alone() -> None:
    """Outside of their rooms nothing imports them, and `load` names modules that there are."""
    outside = [path for path in SOURCES if not room_of(name_of(path)).startswith("papers.")]
    imported = {name.rpartition(".")[0] for path in outside for name in imports_of(path, types=True)}
    imported = {name for name in imported if name.startswith("spec_trl.papers.")}
    assert imported == {f"spec_trl.{room}" for room in OPTIONS}
    loaded = {name for path in outside for name in re.findall(r'\bload\("([\w.]+)"\)', path.read_text())}
    assert len(loaded) > 8 and loaded <= {name_of(path) for path in SOURCES}


def test_every_module_has_a_room() -> None:
    assert [str(path) for path in SOURCES if not room_of(name_of(path)) and path.parent.name != "spec_trl"] == []


def test_the_map_of_the_package_is_made_of_its_docstrings() -> None:
    assert all(sentence_of(path) for path in SOURCES)
    page = PAGE.read_text()
    assert page == with_map(page), "run python -m docs.write_map"


def run(code: str) -> str:
    """Runs `code` in a new interpreter; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_generating_brings_no_heavy_package_and_by_default_no_paper() -> None:
    # transformers itself imports scipy and Triton where they are installed; generating must not import more.
    printed = run("""
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
before = set(sys.modules)
import spec_trl

def papers():
    names = {name.removeprefix("spec_trl.papers.") for name in sys.modules if name.startswith("spec_trl.papers.")}
    return {name.partition(".")[0] for name in names if "." in name and not name.endswith(".options")}

def generate(strategy, **options):
    return model.generate(
        torch.ones(2, 8, dtype=torch.long), max_new_tokens=24, min_new_tokens=24, assistant_strategy=strategy,
        return_dict_in_generate=True, **options,
    )

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(config).eval()
rounds = [generate(strategy).statistics.rounds for strategy in ("none", "self", "auto", "ngram", "history")]
new = {name.partition(".")[0] for name in set(sys.modules) - before}
heavy = {"bitsandbytes", "datasets", "matplotlib", "pandas", "peft", "pydantic", "scipy", "triton", "trl"}
print(*sorted(new & heavy))
print(*sorted({"SpecGRPOConfig", "SpecGRPOTrainer"} & set(dir(spec_trl))))
from spec_trl import SpecDistillationTrainer, SpecGRPOConfig, SpecGRPOTrainer, SpecRLOOTrainer
SpecGRPOConfig(use_cpu=True)
print("trl.experimental.gmpo" in sys.modules)
print(*papers(), min(rounds) > 0)
generate("tts")
print(*papers())
generate("self", speculative_config={"sd_toggle": "roofline"})
print(*sorted(papers()))
""").splitlines()
    assert printed[:2] == ["", "SpecGRPOConfig SpecGRPOTrainer"]
    assert printed[-4:] == ["False", "True", "test_time_speculation", "efficient_rollout test_time_speculation"]


def test_unknown_names_are_missing_as_anywhere() -> None:
    assert not hasattr(spec_trl, "SpecGRPO")


def test_the_command_reads_arguments_before_torch_is_imported(tmp_path: Path) -> None:
    make_profile().save(tmp_path / "profile.json")
    printed = run(f"""
import sys
import spec_trl_command
for arguments in (["--help"], ["bench", "--help"], ["calibrate", "model", "--dtype", "bf16"]):
    sys.argv = ["spec-trl", *arguments]
    try:
        spec_trl_command.main()
    except SystemExit:
        print("torch" in sys.modules, "matplotlib" in sys.modules)
sys.argv = ["spec-trl", "predict", {str(tmp_path / "profile.json")!r}, "--acceptance", "0.9"]
print(spec_trl_command.main(), "torch" in sys.modules)
""").splitlines()
    assert [line for line in printed if line.endswith(("True", "False"))] == ["False False"] * 3 + ["0 False"]


# ---- the source -----------------------------------------------------------------------------------------------------


LONGEST = 450
# Attributes and methods that our classes keep to themselves.
PRIVATE = {name for path in SOURCES for name in re.findall(r"(?:self\.|    def )(_[a-z]\w*)", path.read_text())}
PRIVATE.discard("_replace")  # of named tuples, where it is public


def privates_touched(path: Path) -> Iterator[int]:
    """Lines in which something else than `self` or `cls` is asked for one of them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE:
            if ast.unparse(node.value) not in ("self", "cls", "super()"):
                yield node.lineno


def test_no_file_is_long() -> None:
    assert not [path for path in SOURCES + TESTS if len(path.read_text().splitlines()) > LONGEST]


def test_tests_touch_nothing_private() -> None:
    found = {str(path.relative_to(ROOT)): lines for path in TESTS if (lines := sorted(privates_touched(path)))}
    assert not found
