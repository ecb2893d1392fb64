"""Runs the README's scripts and every strategy on the shipped model: `python tests/as_a_user.py CLONE`.

`tests/as_a_user.sh` calls it in a fresh environment, where spec_trl is what pip installed.
"""

import re
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import spec_trl
from spec_trl.generation.engine.network.shadow import make_shadow
from spec_trl.generation.engine.network.whole_network import whole
from spec_trl.generation.registry import strategies


CLONE = Path(sys.argv[1])
MODEL = str(CLONE / "examples" / "data" / "stories260K")
assert CLONE not in Path(spec_trl.__file__).parents, f"{spec_trl.__file__} is not what pip installed"
sys.path.append(str(CLONE))
from examples.train_drafter import write_dflash, write_eagle3  # noqa: E402


def run_readme() -> None:
    """Runs its Python as it stands, with the shipped model and two steps of training in place of four."""
    scripts = re.findall(r"```python\n(.*?)```", (CLONE / "README.md").read_text(), re.DOTALL)
    assert len(scripts) == 2
    for script in scripts:
        small = script.replace("Qwen/Qwen2.5-0.5B-Instruct", MODEL).replace("max_steps=4", "max_steps=2")
        assert MODEL in small
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(small, names)
        assert "trainer" in names or torch.equal(names["out"].sequences, names["plain"].sequences)
    assert (Path("out") / "rollout_log.jsonl").exists()


def check_fused_layers() -> None:
    """In float32 all decoder layers are one call of C++ under the newest transformers too."""
    network = make_shadow(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32))
    assert whole(network) is not None


def run_strategies(model: PreTrainedModel) -> None:
    """Compares the greedy tokens of all strategies with those of generate, in float64."""
    write_eagle3("eagle3", model)
    write_dflash("dflash", model)
    assistants: dict[str, Any] = {"model": MODEL, "eagle3": "eagle3", "dflash": "dflash"}
    prompt = torch.tensor([[1, 403, 407, 261, 378, 403, 407, 261, 378, 403, 407]])  # repeats itself: lookups draft too
    plain = dict(input_ids=prompt, do_sample=False, max_new_tokens=40, min_new_tokens=40)
    expected = model.generate(**plain)
    for strategy in strategies():
        if strategy == "mtp":  # the shipped model has no such head
            continue
        options: dict[str, Any] = {}
        if strategy not in ("none", "auto", "best_of_n"):
            options["sd_toggle"] = "always"
        out = model.generate(
            **plain, assistant_strategy=strategy, assistant_model=assistants.get(strategy),
            speculative_config=options, return_dict_in_generate=True,
        )  # fmt: skip
        drafted = out.statistics.total.drafted
        print(f"{strategy:10} drafted {drafted:4}: {out.statistics.reason}")
        assert torch.equal(out.sequences, expected), strategy
        assert drafted > 0 or "sd_toggle" not in options, f"{strategy} drafted nothing"


run_readme()
check_fused_layers()
run_strategies(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64))
print("The README's path works.")
