"""Checkpoints beside training: copied at once, written in the background, whole or told of; and who writes what."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_learner import assert_same, learner, names, state, train
from thread_ranks import Meeting, ThreadRanks, on_ranks
from tiny_policy import policy_step, ragged_batch, tiny_model
from transformers import AutoModelForCausalLM

from sluice import checkpoint_files
from sluice.rpc import SluiceError
from sluice.slices import TensorSlice
from sluice.v1 import checkpoint_pb2
from trainer_svc.checkpoint import saver
from trainer_svc.checkpoint.saver import CheckpointDamagedError, EngineCheckpoints, Saver, export_state
from trainer_svc.checkpoint.state import (
    LiveState,
    decode_slices,
    encode_slices,
    held_slices,
    share_out,
    training_state,
    write_slices,
)
from trainer_svc.config import TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.service.compute_thread import ComputeThread
from trainer_svc.service.trainer import CheckpointWriter

WAIT_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


class Gate:
    """A disk that sets `reached` when a write begins, and writes only after the test sets `open`."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def write(self, slices: dict[TensorSlice, torch.Tensor], directory: Path, rank: int) -> list[Path]:
        self.reached.set()
        assert self.open.wait(WAIT_S)
        return write_slices(slices, directory, rank)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(saver, "write_slices", made.write)
    yield made
    made.open.set()


def engine(model: Path, **settings: object) -> TrainEngine:
    return TrainEngine(TrainerConfig(**({"lr": 1e-2, "device": "cpu", "threads": 1} | settings)), model)


def test_steps_go_on_while_the_disk_is_slow_and_the_checkpoint_is_of_its_moment(
    model: Path, tmp_path: Path, gate: Gate
) -> None:
    policy = learner(model, tmp_path)
    policy.restore(1, "")
    train(policy, 1)
    then = state(policy)
    writing = policy.begin_save(journal_position=3)
    assert gate.reached.wait(WAIT_S)
    train(policy, 2, 3)
    assert not writing.done()
    assert names(policy) == []
    assert [path.name for path in policy.checkpoints.directory.iterdir()] == [".step_1.partial"]
    gate.open.set()
    assert writing.result(WAIT_S).journal_position == 3
    assert names(policy) == ["step_1"]
    policy.restore(2, "step_1")
    assert_same(state(policy), then)


@pytest.mark.slow
def test_the_next_checkpoint_waits_for_the_one_before_as_long_as_it_may(
    model: Path, tmp_path: Path, gate: Gate
) -> None:
    policy = learner(model, tmp_path, deadlines={"save_s": 1.0})
    policy.restore(1, "")
    train(policy, 1)
    first = policy.begin_save(0)
    train(policy, 2)
    with pytest.raises(TimeoutError, match=r"still being written after 1 s: is the disk hanging"):
        policy.begin_save(0).result()
    gate.open.set()
    assert first.result(WAIT_S).name == "step_1"
    assert policy.begin_save(0).result().name == "step_2"
    assert names(policy) == ["step_2", "step_1"]


@contextmanager
def failing_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def full(*_: object) -> list[Path]:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(saver, "write_slices", full)
        yield


def test_a_failed_write_is_told_and_leaves_nothing_behind(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = engine(model)
    checkpoints = EngineCheckpoints(policy)
    with failing_disk(monkeypatch), pytest.raises(OSError, match="No space left"):
        checkpoints.save(tmp_path / "here")
    assert list(tmp_path.iterdir()) == []
    checkpoints.save(tmp_path / "here")
    with failing_disk(monkeypatch), pytest.raises(OSError, match="No space left"):
        checkpoints.save(tmp_path / "here")
    EngineCheckpoints(engine(model)).load(tmp_path / "here")


@pytest.mark.slow
async def test_a_record_that_cannot_be_synced_fails_the_checkpoint_and_training_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang_up() -> None:
        raise OSError("Input/output error")

    policy = learner(model, tmp_path)
    policy.restore(1, "")
    train(policy, 1)
    compute = ComputeThread()
    writer = CheckpointWriter(policy, compute)
    with monkeypatch.context() as patched:
        patched.setattr(policy.record, "position", hang_up)
        await writer.begin_scheduled()
        with pytest.raises(SluiceError, match="Input/output error") as refused:
            await writer.save(0)
    assert refused.value.reason == "CHECKPOINT_NOT_WRITTEN"
    assert "Input/output error" in writer.last_error
    assert names(policy) == []
    train(policy, 2)
    assert (await writer.save(0)).name == "step_2"
    assert policy.checkpoints.newest().batch_record == policy.record.position()
    assert await compute.stop(WAIT_S)


@pytest.mark.parametrize("fails", [True, False])
def test_what_the_first_rank_cannot_prepare_fails_the_checkpoint_on_every_rank(tmp_path: Path, *, fails: bool) -> None:
    def before() -> None:
        if fails:
            raise OSError("Input/output error")
        manifest.run = "runs/prepared"

    def save(_share: None, ranks: ThreadRanks) -> str:
        begun = Saver(ranks, ThreadRanks(writing, ranks.index)).begin(
            tmp_path / "step_1", manifest, LiveState({"weight": torch.ones(2)}, {}), before=before
        )
        error = begun.exception(WAIT_S)
        return begun.result().run if error is None else f"{type(error).__name__}: {error}"

    manifest, writing = checkpoint_pb2.CheckpointManifest(), Meeting.of(2)
    first, second = on_ranks([None, None], save)
    if fails:
        assert first == "OSError: Input/output error"
        assert second == "OSError: rank 0 raised OSError: Input/output error"
        assert list(tmp_path.iterdir()) == []
    else:
        assert first == second == "runs/prepared"


def test_memory_that_is_full_fails_the_checkpoint_and_not_who_asked_for_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    policy = engine(model)
    checkpoints = EngineCheckpoints(policy)
    with monkeypatch.context() as patched:
        patched.setattr(saver.torch, "empty", full)
        writing = checkpoints.begin_save(tmp_path / "x")
    with pytest.raises(RuntimeError, match="allocate"):
        writing.result(0)
    checkpoints.save(tmp_path / "x")


@pytest.mark.parametrize(("renames", "steps"), [(1, 0), (2, 1)])
def test_a_kill_around_the_renames_leaves_the_old_checkpoint_or_the_new_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int, steps: int
) -> None:
    """The export gets its name first, then the old checkpoint makes room, then the new one takes its place."""
    policy = engine(model)
    checkpoints = EngineCheckpoints(policy)
    checkpoints.save(tmp_path / "x")
    policy_step(policy, ragged_batch(seed=1, groups=1))
    done: list[Path] = []

    def killed(path: Path, target: Path) -> Path:
        if len(done) == renames:
            raise SystemExit("killed")
        done.append(path)
        return rename(path, target)

    rename = Path.rename
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        patched.setattr(saver, "remove_tree", lambda _: True)
        with pytest.raises(SystemExit):
            checkpoints.save(tmp_path / "x")
    resumed = engine(model)
    EngineCheckpoints(resumed).load(tmp_path / "x")
    assert resumed.optimizer_steps == steps


def test_the_manifest_comes_after_all_else(model: Path, tmp_path: Path) -> None:
    """At the moment of the export the shards are there and the manifest is not; it names every other file."""
    seen: list[set[str]] = []
    policy = engine(model)

    def export(directory: Path, target: Path) -> None:
        seen.append({path.name for path in directory.parent.rglob("*")})
        export_state(policy, directory, target)

    begun = Saver().begin(
        tmp_path / "x", checkpoint_pb2.CheckpointManifest(), training_state({"policy": policy}, 0), export=export
    )
    manifest = begun.result(WAIT_S)
    assert seen == [{"state", "rank-00000-00000.safetensors"}]
    written = {path.relative_to(tmp_path / "x").as_posix() for path in (tmp_path / "x").rglob("*") if path.is_file()}
    assert written == {file.path for file in manifest.files} | {"manifest.json"}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_engine_goes_on_exactly_from_its_directory(model: Path, tmp_path: Path, optimizer: str) -> None:
    straight, resumed = engine(model, optimizer=optimizer), engine(model, optimizer=optimizer)
    for seed in (1, 2):
        policy_step(straight, ragged_batch(seed=seed, groups=2))
    EngineCheckpoints(straight).save(tmp_path / "two", dtype=torch.bfloat16)
    torch.rand(5)
    EngineCheckpoints(resumed).load(tmp_path / "two")
    drawn = torch.rand(3)
    EngineCheckpoints(resumed).load(tmp_path / "two")
    assert torch.equal(torch.rand(3), drawn), "the random state is that of the save"
    for each in (straight, resumed):
        policy_step(each, ragged_batch(seed=3, groups=2))
    assert resumed.optimizer_steps == straight.optimizer_steps == 3
    assert_same(resumed.state_tensors(), straight.state_tensors())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "hf", dtype="auto")
    assert exported.dtype is torch.bfloat16


def test_several_engines_share_a_checkpoint_and_one_alone_is_not_taken_for_both(model: Path, tmp_path: Path) -> None:
    policy, critic = engine(model), TrainEngine(TrainerConfig(device="cpu"), model, head="value")
    policy_step(policy, ragged_batch(seed=1, groups=1))
    both = {"policy": policy, "critic": critic}
    Saver().begin(tmp_path / "both", checkpoint_pb2.CheckpointManifest(), training_state(both, 0)).result(WAIT_S)
    again = {"policy": engine(model), "critic": TrainEngine(TrainerConfig(device="cpu"), model, seed=9, head="value")}
    Saver().load(tmp_path / "both", again)
    for name, trained in both.items():
        assert_same(again[name].state_tensors(), trained.state_tensors())
    assert (again["policy"].optimizer_steps, again["critic"].optimizer_steps) == (1, 0)
    EngineCheckpoints(policy).save(tmp_path / "one")
    with pytest.raises(ValueError, match="holds no 'critic'"):
        Saver().load(tmp_path / "one", again)


def test_what_is_damaged_or_not_whole_is_refused_before_it_is_read(model: Path, tmp_path: Path) -> None:
    policy = engine(model)
    checkpoints = EngineCheckpoints(policy)
    checkpoints.save(tmp_path / "x")
    before = {name: tensor.clone() for name, tensor in policy.state_tensors().items()}
    shard = next((tmp_path / "x" / "state").iterdir())
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match=shard.name):
        checkpoints.load(tmp_path / "x")
    (tmp_path / "x" / "manifest.json").unlink()
    with pytest.raises(CheckpointDamagedError, match="not a complete checkpoint"):
        checkpoints.load(tmp_path / "x")
    assert_same(policy.state_tensors(), before)


def test_a_disk_that_fails_on_one_rank_damages_no_checkpoint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    EngineCheckpoints(engine(model)).save(tmp_path / "x")
    digest = checkpoint_files.file_digest

    def fails(path: Path) -> str:
        if threading.current_thread().name == "failing":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return digest(path)

    def load(name: str, ranks: ThreadRanks) -> OSError | None:
        threading.current_thread().name = name
        try:
            Saver(ranks).load(tmp_path / "x", {})
        except OSError as error:
            return error
        return None

    monkeypatch.setattr(checkpoint_files, "file_digest", fails)
    errors = on_ranks(["failing", "whole"], load)
    assert all("Input/output error" in str(error) for error in errors)


@st.composite
def layouts(draw: st.DrawFn) -> list[list[TensorSlice]]:
    """What each of several processes holds: every tensor cut along its first dimension, each part held by some."""
    ranks = draw(st.integers(1, 5))
    held: list[list[TensorSlice]] = [[] for _ in range(ranks)]
    for index in range(draw(st.integers(1, 6))):
        rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 4))
        cuts = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=3))})
        for begin, end in pairwise(cuts):
            held_slice = TensorSlice(f"t{index}", (rows, columns), (begin, 0), (end - begin, columns))
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                held[rank].append(held_slice)
    return held


@given(layouts())
def test_every_slice_is_written_once_by_one_that_holds_it(held: list[list[TensorSlice]]) -> None:
    shares = share_out([decode_slices(encode_slices(each)) for each in held])
    assert all(share <= set(own) for share, own in zip(shares, held, strict=True))
    written = [each for share in shares for each in share]
    assert sorted(written) == sorted({each for own in held for each in own})
    most = max(each.elements for each in written)
    if all(len(own) == len(held[0]) for own in held) and len({tuple(sorted(own)) for own in held}) == 1:
        loads = [sum(each.elements for each in share) for share in shares]
        assert max(loads) - min(loads) <= most, "what all hold is shared out evenly"


def test_ranks_that_do_not_hold_a_whole_tensor_together_are_refused() -> None:
    whole = held_slices({"a": torch.zeros(4, 2), "b": torch.zeros(())})
    assert share_out([whole]) == [set(whole)]
    half = TensorSlice("a", (4, 2), (0, 0), (2, 2))
    with pytest.raises(ValueError, match="4 of the 8 values of 'a'"):
        share_out([[half], [half]])
    with pytest.raises(ValueError, match="one rank and"):
        share_out([[half], [TensorSlice("a", (2, 2), (0, 0), (2, 2))]])
