"""MTP heads in training: trained along, and written back into saved policies under the names they came with."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, modeling_utils
from transformers.utils import hub

import spec_trl
from spec_trl import SpecRLOOTrainer
from spec_trl.generation.drafters.mtp.mtp_drafter import MtpDrafter
from spec_trl.trainers.saved_heads import adding_heads
from tests.generation.calls import generate
from tests.generation.drafters.mtp.heads import add, random_head, write_heads
from tests.trainers.harness import Run, assert_same_training, make_run, tiny_policy, train, train_plainly
from tests.trainers.trl_trainers import PROMPT, make_trainer


OPTIONS: dict[str, Any] = dict(max_steps=2, drafter_adaptation=dict(learning_rate=1e-3), draft_length=[4])


@pytest.fixture
def policy(tmp_path: Path) -> PreTrainedModel:
    """From a checkpoint with a head, of which one tensor is stored in another dtype."""
    made = tiny_policy(num_nextn_predict_layers=1)
    made.save_pretrained(tmp_path / "policy")
    head = random_head(made, "llama")
    head["mtp.fc.weight"] = head["mtp.fc.weight"].bfloat16()
    add(tmp_path / "policy", head)
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float64)
    return loaded


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by its index where it has no single file, and no other file holds some."""
    if (folder / "model.safetensors").is_file():
        files = ["model.safetensors"]
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = sorted(set(index["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for file in files:
        with safe_open(folder / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        part = load_file(folder / file)
        assert len(files) == 1 or {name for name, of in index["weight_map"].items() if of == file} == part.keys()
        assert not tensors.keys() & part.keys()
        tensors |= part
    assert sorted(path.name for path in folder.glob("*.safetensors")) == files
    if len(files) > 1:
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    return tensors


def check_saved(run: Run, folder: Path, source: Path, is_trained: bool) -> None:
    """Names, shapes and dtypes of the head are those of `source`; values too, unless it was trained."""
    found, before = stored(folder), stored(source)
    assert found.keys() == before.keys()
    heads = [name for name in before if name.startswith("mtp.")]
    for name in before:
        assert (found[name].shape, found[name].dtype) == (before[name].shape, before[name].dtype)
        expected = before[name] if name in heads else run.trainer.model.state_dict()[name]
        assert name in heads and is_trained or found[name].equal(expected)
    assert {name for name in heads if not found[name].equal(before[name])} == (set(heads) if is_trained else set())
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert all(tensor.equal(found[name]) for name, tensor in again.state_dict().items())
    for name, tensor in MtpDrafter(None, again).tensors().items():
        assert tensor.equal(found[name])


def test_a_head_is_trained_along(policy: PreTrainedModel, tmp_path: Path) -> None:
    """Nothing of the policy changes; checkpoints and the saved policy have the trained head, also saved over."""
    run = train(tmp_path / "run", "mtp", policy=policy, save_strategy="steps", save_steps=1, **OPTIONS)
    drafter = run.calls[-1].drafters[0]
    assert isinstance(drafter, MtpDrafter) and min(run.metric("rollout/sd_on_fraction")) > 0.9
    assert len(run.metric("drafter/loss")) == 2
    assert_same_training(run, train_plainly(max_steps=2))
    check_saved(run, run.folder / "checkpoint-2", tmp_path / "policy", is_trained=True)
    for _ in range(2):
        run.trainer.save_model()
        check_saved(run, run.folder, tmp_path / "policy", is_trained=True)
    drafted = load_file(run.folder / "drafter/model.safetensors")
    assert drafted.keys() == {name for name in stored(run.folder) if name.startswith("mtp.")}
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float64)
    rest = train(tmp_path / "rest", "mtp", resume=run.folder / "checkpoint-1", policy=policy, **OPTIONS)
    assert rest.completions == run.completions[1:] and rest.losses == run.losses[1:]
    rest.trainer.save_model()
    assert all(tensor.equal(stored(run.folder)[name]) for name, tensor in stored(rest.folder).items())


@pytest.mark.parametrize("strategy", ["none", "auto"])
def test_a_head_stays_as_it_was(strategy: str, policy: PreTrainedModel, tmp_path: Path) -> None:
    """Where nothing trains it. "auto" takes it among its drafters."""
    run = train(tmp_path / "run", strategy, policy=policy, **OPTIONS | {"drafter_adaptation": False})
    expected = ["self", "history", "mtp"] if strategy == "auto" else []
    assert [drafter.strategy for drafter in run.calls[0].drafters] == expected
    run.trainer.save_model()
    check_saved(run, run.folder, tmp_path / "policy", is_trained=False)


def test_auto_trains_a_head_along(policy: PreTrainedModel, tmp_path: Path) -> None:
    run = train(tmp_path / "run", "auto", policy=policy, **OPTIONS)
    assert len(run.metric("drafter/loss")) == 2
    assert_same_training(run, train_plainly(max_steps=2))
    run.trainer.save_model()
    check_saved(run, run.folder, tmp_path / "policy", is_trained=True)


def pushed(folder: Path, save: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `save` uploads, in `folder`."""
    monkeypatch.setattr(modeling_utils, "hf_api", lambda *_: Mock(create_repo=lambda *a, **k: Mock(repo_id="me/it")))
    monkeypatch.setattr(hub, "hf_api", lambda *_: Mock(create_repo=lambda *a, **k: Mock(repo_id="me/it")))
    monkeypatch.setattr(modeling_utils, "create_and_tag_model_card", lambda *_, **__: Mock())
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *_, **__: Mock())
    upload = lambda _, where, *args, **kwargs: shutil.copytree(where, folder)  # noqa: E731
    monkeypatch.setattr(PreTrainedModel, "_upload_modified_files", upload)
    save()
    return folder


@pytest.mark.parametrize("way", ["SpecRLOOTrainer", "trainer", "trainer with LoRA", "loop"])
def test_whatever_is_saved_drafts_again(
    way: str, policy: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By trainers and loops, adapters merged, to folders and to the hub, after the drafting too. Without it
    transformers would save a config that promises a head."""
    folders, adapter = [], {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}
    if way == "SpecRLOOTrainer":
        options = dict(kind=SpecRLOOTrainer, policy=policy, max_steps=1, drafter_adaptation=False)
        run = train(tmp_path / "run", "mtp", **options)
        run.trainer.save_model()
        folders.append(run.folder)
    elif way == "loop":
        with spec_trl.speculate(policy, "mtp", sd_toggle="always") as speculation:
            policy.generate(**PROMPT, max_new_tokens=8)
        assert speculation.verdict.drafted_rounds
    else:
        options = dict(max_steps=1, save_strategy="steps", save_steps=1, policy=policy)
        trainer = make_trainer("rloo", tmp_path / "run", adapter if "LoRA" in way else None, **options)
        with spec_trl.speculate(trainer, "mtp", sd_toggle="always") as speculation:
            trainer.train()
        assert speculation.verdict.drafted_rounds
        trainer.save_model()
        if "LoRA" in way:
            policy = trainer.model.merge_and_unload()
        else:
            folders += [tmp_path / "run", tmp_path / "run/checkpoint-1"]
    policy.save_pretrained(tmp_path / "saved")
    folders.append(tmp_path / "saved")
    if way == "loop":
        folders.append(pushed(tmp_path / "pushed", lambda: policy.push_to_hub("me/it"), monkeypatch))
        save = partial(policy.save_pretrained, tmp_path / "it", push_to_hub=True, repo_id="me/it", token="t")
        folders.append(pushed(tmp_path / "saved and pushed", save, monkeypatch))
    for folder in folders:
        names = stored(tmp_path / "policy").keys()
        assert stored(folder).keys() == names and any(name.startswith("mtp.") for name in names)
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        plain, drafted = (generate(again, PROMPT, strategy) for strategy in ("none", "mtp"))
        assert plain.sequences.equal(drafted.sequences) and drafted.statistics.total.drafted > 0, folder
    spec_trl.uninstall()
    spec_trl.install()
    policy.save_pretrained(tmp_path / "plain")  # transformers' own
    assert not any(name.startswith("mtp.") for name in stored(tmp_path / "plain"))


def test_an_adapter_is_saved_without_a_head(policy: PreTrainedModel, tmp_path: Path) -> None:
    """Which lies in the drafter's folder."""
    adapter = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}
    run = train(tmp_path / "run", "mtp", policy=policy, trainer=adapter, **OPTIONS)
    run.trainer.save_model()
    assert [path.name for path in run.folder.glob("*.safetensors")] == ["adapter_model.safetensors"]
    assert not (run.folder / "model.safetensors.index.json").exists()
    drafted, before = load_file(run.folder / "drafter/model.safetensors"), stored(tmp_path / "policy")
    assert drafted.keys() == {name for name in before if name.startswith("mtp.")}
    assert not any(tensor.equal(before[name]) for name, tensor in drafted.items())


def test_sharded_policies_of_experts(tmp_path: Path) -> None:
    """Two heads and the copies that they bring along, which nobody drafts with, come back as well."""
    model, head = write_heads(tmp_path / "policy", "glm4_moe", shards=True)
    second = {name.replace("layers.2.", "layers.3."): tensor + 1 for name, tensor in head.items()}
    save_file(second, tmp_path / "policy/model-00003-of-00003.safetensors", metadata={"format": "pt"})
    index = tmp_path / "policy/model.safetensors.index.json"
    settings = json.loads(index.read_text())
    settings["weight_map"] |= dict.fromkeys(second, "model-00003-of-00003.safetensors")
    index.write_text(json.dumps(settings))
    drafter = MtpDrafter(None, model)
    with torch.no_grad():
        drafter.network.layers[0].mlp.experts.down_proj[1] += 1
    with adding_heads(model, tmp_path / "saved", drafter.tensors()):
        model.save_pretrained(tmp_path / "saved", max_shard_size="100KB")
        assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2
        before = stored(tmp_path / "saved")
    found = stored(tmp_path / "saved")
    assert found.keys() == before.keys() | head.keys() | second.keys()
    changed = "model.layers.2.mlp.experts.1.down_proj.weight"
    expected = before | head | second | {changed: head[changed] + 1}
    assert all(tensor.equal(expected[name]) for name, tensor in found.items())


def test_a_policy_saved_over_its_source(policy: PreTrainedModel, tmp_path: Path) -> None:
    """More than once: its head is read before the file that holds it is lost."""
    before = stored(tmp_path / "policy")
    for _ in range(3):
        with adding_heads(policy, tmp_path / "policy", {}):
            policy.save_pretrained(tmp_path / "policy")
        found = stored(tmp_path / "policy")
        assert found.keys() == before.keys() and all(tensor.equal(found[name]) for name, tensor in before.items())


def test_a_source_that_is_gone(policy: PreTrainedModel, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "policy")
    with pytest.warns(UserWarning, match="saved is saved without the policy's multi-token-prediction head"):
        with adding_heads(policy, tmp_path / "saved", {}):
            policy.save_pretrained(tmp_path / "saved")
    policy.config.name_or_path = ""
    with adding_heads(policy, tmp_path / "saved", {}):
        pass
    assert stored(tmp_path / "saved").keys() == policy.state_dict().keys()


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_source_that_rotation_deletes(is_trained: bool, policy: PreTrainedModel, tmp_path: Path) -> None:
    """The policy comes from a checkpoint of the same run, which the first save deletes."""
    before = stored(tmp_path / "policy")
    (tmp_path / "run").mkdir()
    shutil.copytree(tmp_path / "policy", tmp_path / "run/checkpoint-0")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoint-0", dtype=torch.float64)
    saves = dict(save_strategy="steps", save_steps=1, save_total_limit=1, save_only_model=True)
    options = OPTIONS | saves | {"drafter_adaptation": is_trained, "max_steps": 3}
    run = train(tmp_path / "run", "mtp", policy=policy, **options)
    assert [path.name for path in run.folder.glob("checkpoint-*")] == ["checkpoint-3"]
    check_saved(run, run.folder / "checkpoint-3", tmp_path / "policy", is_trained)
    assert before.keys() == stored(run.folder / "checkpoint-3").keys()


def test_a_trained_head_outlives_its_source(policy: PreTrainedModel, tmp_path: Path) -> None:
    """Which is deleted before the first save."""
    before, drafter = stored(tmp_path / "policy"), MtpDrafter(None, policy)
    shutil.rmtree(tmp_path / "policy")
    with adding_heads(policy, tmp_path / "saved", drafter.tensors()):
        policy.save_pretrained(tmp_path / "saved")
    found = stored(tmp_path / "saved")
    assert found.keys() == before.keys() and all(tensor.equal(found[name]) for name, tensor in before.items())


def test_no_index_stays_without_its_shards(policy: PreTrainedModel, tmp_path: Path) -> None:
    """A save without heads, over one with them."""
    for promised in (1, 0):
        policy.config.num_nextn_predict_layers = promised
        with adding_heads(policy, tmp_path / "saved", {}):
            policy.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved/model.safetensors.index.json").exists()
    assert stored(tmp_path / "saved").keys() == policy.state_dict().keys()


@pytest.mark.parametrize("size", [{"hidden_size": 32}, {"num_hidden_layers": 1}], ids=str)
def test_heads_of_another_size_stay_out(size: dict[str, int], policy: PreTrainedModel, tmp_path: Path) -> None:
    """The policy is made from the checkpoint's config with another size, which still names the checkpoint."""
    for name, value in size.items():
        setattr(policy.config, name, value)
    other = AutoModelForCausalLM.from_config(policy.config, dtype=torch.float64)
    assert other.config.name_or_path == str(tmp_path / "policy")
    (name,) = size
    with pytest.warns(UserWarning) as caught:
        for _ in range(2):
            with adding_heads(other, tmp_path / "saved", {}):
                other.save_pretrained(tmp_path / "saved")
    (said,) = (str(one.message) for one in caught)
    assert re.search(f"saved is saved without .*{name}=.*, and the policy's is {size[name]}", said)
    assert stored(tmp_path / "saved").keys() == other.state_dict().keys()


def test_bad_heads_end_a_run_before_it_begins(policy: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "policy/model.safetensors").unlink()
    policy.save_pretrained(tmp_path / "policy")
    with pytest.raises(ValueError, match="config.name_or_path=.* has no multi-token-prediction head"):
        make_run(tmp_path / "run", "mtp", policy=policy)
