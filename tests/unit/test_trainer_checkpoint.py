"""Checkpoints: whole or not there, without pickles, and exact."""

from __future__ import annotations

import errno
import json
import os
import pickletools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from small_learner import assert_same, learner, names, state, train
from structlog.testing import capture_logs
from tiny_policy import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from sluice import checkpoint_files
from sluice.checkpoint_files import MANIFEST
from sluice.config import CommonConfig
from sluice.rpc import SluiceError
from sluice.v1 import checkpoint_pb2, trainer_pb2
from sluice.versions import BASE, Lineage, Version
from trainer_svc.checkpoint import checkpoints
from trainer_svc.checkpoint.checkpoints import surplus
from trainer_svc.checkpoint.saver import CheckpointDamagedError
from trainer_svc.config import TrainerConfig
from trainer_svc.service.learner import Learner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_very_weights_of_an_uninterrupted_one(model: Path, tmp_path: Path) -> None:
    uninterrupted = learner(model, tmp_path / "one")
    uninterrupted.restore(1, "")
    train(uninterrupted, 1, 2, 3, 4, 5)

    first = learner(model, tmp_path / "two")
    first.restore(1, "")
    train(first, 1, 2, 3)
    first.begin_save(journal_position=17).result()
    train(first, 4)

    second = learner(model, tmp_path / "two")
    restored = second.restore(2, "")
    assert (restored.version, restored.origin, restored.last_batch_id) == (Version(2, 3), Version(1, 3), "b3")
    train(second, 4, 5)
    assert_same(state(second), state(uninterrupted))
    assert second.engine.optimizer_steps == uninterrupted.engine.optimizer_steps == 5


def test_the_random_state_goes_on_where_it_was(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    torch.rand(3)
    policy.begin_save(0).result()
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
    assert policy.engine.optimizer_steps == 0


def test_no_file_of_a_checkpoint_is_a_pickle(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    train(policy, 1)
    policy.begin_save(0).result()
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
    name = policy.begin_save(0).result().name
    directory = tmp_path / "test" / "checkpoints" / name / "hf"
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for key, tensor in policy.engine.named_tensors(policy.publish_dtype).items():
        assert torch.equal(loaded.state_dict()[key], tensor), key
    assert AutoTokenizer.from_pretrained(directory).chat_template


def test_a_directory_without_a_readable_manifest_is_not_a_checkpoint(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    train(policy, 1)
    policy.begin_save(0).result()
    directory = tmp_path / "test" / "checkpoints"
    (directory / "step_9").mkdir()
    (directory / ".step_7.partial").mkdir()
    (directory / "step_8").mkdir()
    (directory / "step_8" / "manifest.json").write_text("{ half")
    assert names(policy) == ["step_1"]
    assert learner(model, tmp_path).restore(2, "").version == Version(2, 1)
    assert not (directory / ".step_7.partial").exists(), "what an interrupted write left is swept"


def test_a_complete_checkpoint_that_a_kill_left_without_its_name_is_used(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    train(policy, 1)
    policy.begin_save(0).result()
    directory = tmp_path / "test" / "checkpoints"
    (directory / "step_1").rename(directory / ".step_1.partial")
    assert learner(model, tmp_path).restore(2, "").version == Version(2, 1)
    assert [path.name for path in directory.iterdir()] == ["step_1"]


@pytest.mark.slow
def test_the_newest_are_kept_and_an_interrupted_write_leaves_them_alone(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    for number in (1, 2, 3):
        train(policy, number)
        policy.begin_save(0).result()
    assert names(policy) == ["step_3", "step_2"]
    train(policy, 4)
    policy.engine.model_dir = str(tmp_path / "gone")  # the export fails half-way
    with pytest.raises(OSError, match="gone"):
        policy.begin_save(0).result()
    assert names(policy) == ["step_3", "step_2"]
    assert sorted(path.name for path in policy.checkpoints.directory.iterdir()) == ["step_2", "step_3"]


@pytest.mark.slow
def test_a_kill_while_an_old_checkpoint_is_removed_leaves_nothing_of_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    for number in (1, 2):
        train(policy, number)
        policy.begin_save(0).result()
    train(policy, 3)

    def killed(path: Path) -> bool:
        if path.exists():
            raise SystemExit("killed")
        return True

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "remove_tree", killed)
        with pytest.raises(SystemExit):
            policy.begin_save(0).result()
    again = learner(model, tmp_path)
    assert names(again) == ["step_3", "step_2"]
    assert sorted(path.name for path in again.checkpoints.directory.iterdir()) == ["step_2", "step_3"]


def test_a_damaged_file_is_noticed_before_it_is_trained_on(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    train(policy, 1)
    policy.begin_save(0).result()
    path = next((tmp_path / "test" / "checkpoints" / "step_1" / "state").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match="use another checkpoint"):
        policy.checkpoints.load(policy.checkpoints.complete()[0], policy.update.engines)
    with pytest.raises(SluiceError) as error:
        policy.restore(2, "")
    assert error.value.reason == "CHECKPOINT_DAMAGED"


def _flip_a_byte(checkpoint: Path) -> None:
    path = next((checkpoint / "state").iterdir())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _cut_short(checkpoint: Path) -> None:
    path = next((checkpoint / "state").iterdir())
    path.write_bytes(path.read_bytes()[:-1])


def _remove_a_file(checkpoint: Path) -> None:
    next((checkpoint / "hf").glob("*.safetensors")).unlink()


def _remove_the_manifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()


def _tear_the_manifest(checkpoint: Path) -> None:
    path = checkpoint / MANIFEST
    path.write_bytes(path.read_bytes()[:-40])


FAULTS = [_flip_a_byte, _cut_short, _remove_a_file, _remove_the_manifest, _tear_the_manifest]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_torn_or_damaged_checkpoint_is_skipped_with_a_warning(
    fault: Callable[[Path], None], model: Path, tmp_path: Path
) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    for number in (1, 2):
        train(policy, number)
        policy.begin_save(0).result()
    fault(tmp_path / "test" / "checkpoints" / "step_2")
    with capture_logs() as logs:
        again = learner(model, tmp_path)
        restored = again.restore(2, "")
    assert (restored.origin, restored.last_batch_id) == (Version(1, 1), "b1")
    (warning,) = [each for each in logs if "skipped" in each["event"]]
    assert "step_2" in warning.get("path", warning.get("name"))
    assert any(word in warning["reason"] for word in ("manifest.json", "bytes", "missing"))
    listed = ["step_2", "step_1"] if fault is _flip_a_byte else ["step_1"]
    assert names(again) == listed, "only a digest shows the flipped byte, and a list does not read the files"
    train(again, 2)
    again.begin_save(0).result()
    assert names(again) == ["step_2", "step_1"], "the damaged one was replaced"
    assert learner(model, tmp_path).restore(3, "").origin == Version(2, 2)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_at_the_base_model(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    for number in (1, 2):
        train(policy, number)
        policy.begin_save(0).result()
        _flip_a_byte(tmp_path / "test" / "checkpoints" / f"step_{number}")
    before = policy.version
    with pytest.raises(SluiceError, match="step_1") as error:
        policy.restore(2, "")
    assert error.value.code is grpc.StatusCode.DATA_LOSS
    assert (policy.version, policy.checkpoints.lineage.newest_epoch) == (before, 1)
    with pytest.raises(SluiceError, match="step_2") as error:
        policy.restore(2, "step_2")
    assert error.value.code is grpc.StatusCode.DATA_LOSS


@pytest.mark.parametrize("place", [(checkpoint_files, "file_digest"), (checkpoint_files, "read_manifest")])
def test_a_disk_that_fails_damages_no_checkpoint(
    place: tuple[Any, str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    train(policy, 1)
    policy.begin_save(0).result()

    def fails(_: Path) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(*place, fails)
    with pytest.raises(SluiceError, match="Too many open files") as error:
        policy.restore(2, "")
    assert (error.value.code.name, error.value.reason) == ("UNAVAILABLE", "CHECKPOINT_UNREADABLE")


def test_saving_a_version_twice_keeps_the_files_and_the_later_journal_position(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    train(policy, 1)
    first = policy.begin_save(5).result()
    second = policy.begin_save(9).result()
    assert (first.create_time, second.journal_position) == (second.create_time, 9)
    assert policy.checkpoints.complete()[0].checkpoint.journal_position == 9
    assert policy.begin_save(3).result().journal_position == 9


def test_an_epoch_without_a_batch_saves_the_version_whose_batches_are_recorded(model: Path, tmp_path: Path) -> None:
    def saved(policy: Learner) -> list[tuple[str, Version, int]]:
        found = [each.checkpoint for each in policy.checkpoints.complete()]
        return [(each.name, Version.from_proto(each.policy_version), each.journal_position) for each in found]

    policy = learner(model, tmp_path)
    policy.restore(1, "")
    train(policy, 1, 2)
    first = policy.begin_save(5).result()
    for epoch in (2, 3):
        policy = learner(model, tmp_path)
        assert policy.restore(epoch, "").version == Version(epoch, 2)
        again = policy.begin_save(5 + epoch).result()
        assert (again.create_time, again.last_batch_id) == (first.create_time, "b2"), "nothing is written again"
        assert saved(policy) == [("step_2", Version(1, 2), 5 + epoch)]
    shutil.rmtree(policy.checkpoints.directory / "step_2")
    assert Version.from_proto(policy.begin_save(9).result().policy_version) == Version(1, 2)
    manifest = policy.checkpoints.complete()[0]
    assert {each.epoch for each in manifest.lineage.origins} == {1, 2, 3}
    recorded = {Version.from_proto(each.policy_version) for each in policy.restore(4, "").held}
    assert Version.from_proto(manifest.checkpoint.policy_version) in recorded
    train(policy, 3)
    policy.begin_save(9).result()
    assert saved(policy)[0] == ("step_3", Version(4, 3), 9)


def test_what_an_operator_rolled_back_is_not_resumed(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    for number in (1, 2):
        train(policy, number)
        policy.begin_save(0).result()
    assert policy.restore(2, "step_1").version == Version(2, 1)
    again = learner(model, tmp_path)
    assert again.restore(3, "").origin == Version(1, 1), "step_2 was left behind on purpose"
    train(again, 2)
    again.begin_save(0).result()
    assert Version.from_proto(again.checkpoints.complete()[0].checkpoint.policy_version) == Version(3, 2)
    assert names(again) == ["step_2", "step_1"], "the new step_2 took the place of the retired one"


@pytest.mark.slow
def test_a_rollback_costs_no_checkpoint_that_the_weights_build_upon(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    for number in (1, 2, 3):
        train(policy, number)
        if number != 2:
            policy.begin_save(0).result()
    policy.restore(2, "step_1")
    train(policy, 2)
    policy.begin_save(0).result()
    assert names(policy) == ["step_2", "step_1"], "step_3 is on no line that is trained, step_1 is the fallback"
    assert learner(model, tmp_path).restore(3, "step_1").origin == Version(1, 1)


def test_a_periodic_and_a_final_checkpoint_of_one_version_leave_the_one_before(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    for number in (1, 2):
        train(policy, number)
        policy.begin_save(0).result()
    policy.begin_save(7).result()
    assert names(policy) == ["step_2", "step_1"]
    policy.restore(2, "")
    policy.begin_save(9).result()
    assert names(policy) == ["step_2", "step_1"], "the same weights under the next epoch"


def written(*versions: Version) -> list[checkpoint_pb2.CheckpointManifest]:
    return [
        checkpoint_pb2.CheckpointManifest(
            checkpoint=trainer_pb2.Checkpoint(name=str(each), policy_version=each.to_proto())
        )
        for each in versions
    ]


@given(st.integers(2, 4), st.data())
def test_the_newest_ancestors_stay_whatever_the_epochs(keep: int, data: st.DataObject) -> None:
    lineage, line = Lineage(), [BASE]
    complete: list[Version] = []
    for epoch in range(1, data.draw(st.integers(2, 4))):
        origin = data.draw(st.sampled_from(line))
        lineage = lineage.begin(epoch, origin)
        line = [each for each in line if each <= origin]
        for number in range(origin.number + 1, origin.number + data.draw(st.integers(2, 4))):
            line.append(Version(epoch, number))
            complete.append(line[-1])
    ancestors = [each for each in reversed(line) if each in complete]
    removed = surplus(written(*sorted(complete, reverse=True)), line[-1], lineage, keep)
    gone = {each.checkpoint.name for each in removed}
    assert len(gone) == max(0, len(complete) - keep)
    assert not gone & {str(each) for each in ancestors[:keep]}


def test_an_unknown_checkpoint_is_refused_with_the_names_of_the_known(model: Path, tmp_path: Path) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    train(policy, 1)
    policy.begin_save(0).result()
    with pytest.raises(SluiceError, match=r"no such directory.*step_1") as error:
        policy.restore(2, "step_7")
    assert error.value.reason == "NO_CHECKPOINT"
    _cut_short(tmp_path / "test" / "checkpoints" / "step_1")
    with pytest.raises(SluiceError, match=r"bytes.*; begin from one of: none"):
        policy.restore(2, "step_1")
