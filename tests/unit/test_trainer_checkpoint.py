"""Checkpoints: whole or not there, without pickles, and exact."""

from __future__ import annotations

import json
import pickletools
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from small_learner import assert_same, learner, names, state, train
from tiny_policy import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from sluice.config import CommonConfig
from sluice.rpc import SluiceError
from sluice.versions import Version
from trainer_svc.checkpoint.manifest import CheckpointDamagedError
from trainer_svc.config import TrainerConfig
from trainer_svc.service.learner import Learner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_a_resumed_run_ends_with_the_very_weights_of_an_uninterrupted_one(model: Path, tmp_path: Path) -> None:
    uninterrupted = learner(model, tmp_path / "one")
    uninterrupted.restore(1, "")
    train(uninterrupted, 1, 2, 3, 4, 5)

    first = learner(model, tmp_path / "two")
    first.restore(1, "")
    train(first, 1, 2, 3)
    first.save(journal_position=17)
    train(first, 4)

    second = learner(model, tmp_path / "two")
    restored = second.restore(2, "")
    assert (restored.version, restored.origin, restored.last_batch_id) == (Version(2, 3), Version(1, 3), "b3")
    train(second, 4, 5)
    assert_same(state(second), state(uninterrupted))
    assert second.optimizer_steps == uninterrupted.optimizer_steps == 5


def test_the_random_state_goes_on_where_it_was(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    torch.rand(3)
    policy.save(0)
    drawn = torch.rand(3)
    policy.restore(2, "")
    assert torch.equal(torch.rand(3), drawn)


def test_a_frozen_model_leaves_the_generators_to_the_seed_of_the_run(model: Path, tmp_path: Path) -> None:
    common = CommonConfig(run="test", output_dir=tmp_path, model=str(model), seed=7)
    pulled = {"objective": {"preset": "grpo", "kl_coef": 0.1}, "reference": {"model": "base"}}
    states = []
    for settings in ({}, pulled):
        Learner(common, TrainerConfig(device="cpu", **settings)).load()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_a_rollback_in_the_same_process_is_exact_too(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    fresh = state(policy)
    train(policy, 1, 2)
    policy.restore(2, "")
    assert_same(state(policy), fresh)
    assert policy.version == Version(2, 0)
    assert policy.optimizer_steps == 0


def test_no_file_of_a_checkpoint_is_a_pickle(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    train(policy, 1)
    policy.save(0)
    files = [path for path in (tmp_path / "test").rglob("*") if path.is_file()]
    assert any(path.name == "manifest.json" for path in files)
    for path in files:
        match path.suffix:
            case ".safetensors":
                with safe_open(path, framework="pt") as opened:
                    assert opened.keys()
            case ".json":
                json.loads(path.read_text())
            case ".jinja":
                path.read_text()
            case _:
                assert path.name in ("epochs.binpb", "00000001.record")
        with pytest.raises((ValueError, IndexError, KeyError, EOFError)):
            list(pickletools.genops(path.read_bytes()))


def test_the_export_beside_it_is_the_model(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    train(policy, 1)
    name = policy.save(0).name
    directory = tmp_path / "test" / "checkpoints" / name / "hf"
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for key, tensor in policy.weights().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key
    assert AutoTokenizer.from_pretrained(directory).chat_template


def test_a_directory_without_a_readable_manifest_is_not_a_checkpoint(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    train(policy, 1)
    policy.save(0)
    checkpoints = tmp_path / "test" / "checkpoints"
    (checkpoints / "step_9").mkdir()
    (checkpoints / ".step_7.partial").mkdir()
    (checkpoints / "step_8").mkdir()
    (checkpoints / "step_8" / "manifest.json").write_text("{ half")
    assert names(policy) == ["step_1"]
    assert learner(model, tmp_path).restore(2, "").version == Version(2, 1)
    assert not (checkpoints / ".step_7.partial").exists(), "what an interrupted write left is swept"


def test_the_newest_are_kept_and_an_interrupted_write_leaves_them_alone(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    for number in (1, 2, 3):
        train(policy, number)
        policy.save(0)
    assert names(policy) == ["step_3", "step_2"]
    train(policy, 4)
    policy.engine.model_dir = str(tmp_path / "gone")  # the export fails half-way
    with pytest.raises(OSError, match="gone"):
        policy.save(0)
    assert names(policy) == ["step_3", "step_2"]
    assert sorted(path.name for path in policy.checkpoints.directory.iterdir()) == ["step_2", "step_3"]


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_nothing_of_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    for number in (1, 2):
        train(policy, number)
        policy.save(0)
    train(policy, 3)

    def killed(path: Path, *, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise SystemExit("killed")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(SystemExit):
            policy.save(0)
    again = learner(model, tmp_path)
    assert names(again) == ["step_3", "step_2"]
    assert sorted(path.name for path in again.checkpoints.directory.iterdir()) == ["step_2", "step_3"]


def test_a_damaged_file_is_noticed_before_it_is_trained_on(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    train(policy, 1)
    policy.save(0)
    path = next((tmp_path / "test" / "checkpoints" / "step_1" / "state").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match="restore another checkpoint"):
        policy.checkpoints.load(policy.checkpoints.complete()[0], policy.engines)
    with pytest.raises(SluiceError) as error:
        policy.restore(2, "")
    assert error.value.reason == "CHECKPOINT_DAMAGED"


def test_saving_a_version_twice_keeps_the_files_and_the_later_journal_position(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    train(policy, 1)
    first = policy.save(5)
    second = policy.save(9)
    assert (first.create_time, second.journal_position) == (second.create_time, 9)
    assert policy.checkpoints.complete()[0].checkpoint.journal_position == 9
    assert policy.save(3).journal_position == 9


def test_what_an_operator_rolled_back_is_not_resumed(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    for number in (1, 2):
        train(policy, number)
        policy.save(0)
    assert policy.restore(2, "step_1").version == Version(2, 1)
    again = learner(model, tmp_path)
    assert again.restore(3, "").origin == Version(1, 1), "step_2 was left behind on purpose"
    train(again, 2)
    again.save(0)
    assert Version.from_proto(again.checkpoints.complete()[0].checkpoint.policy_version) == Version(3, 2)
    assert names(again) == ["step_2", "step_1"], "the new step_2 took the place of the retired one"


def test_an_unknown_checkpoint_is_refused_with_the_names_of_the_known(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    train(policy, 1)
    policy.save(0)
    with pytest.raises(SluiceError, match="step_1") as error:
        policy.restore(2, "step_7")
    assert error.value.reason == "NO_CHECKPOINT"
