"""Write checkpoints while training continues: copy the state at once, write the files in a background thread.

    step_8/
        state/rank-00000-00000.safetensors ...   weights, optimizers and random state; each rank writes a part
        hf/                                      a directory that transformers and vLLM load
        manifest.json                            protobuf-JSON of CheckpointManifest, written last

A checkpoint is built in a hidden directory and renamed when it is whole; a directory without a manifest is not a checkpoint.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import structlog
import torch
import torch.distributed as dist
from google.protobuf import json_format

from sluice.checkpoint_files import MANIFEST, damaged, file_digest, read_manifest
from sluice.host_files import remove_tree
from sluice.slices import TensorSlice
from sluice.v1.checkpoint_pb2 import CheckpointFile, CheckpointManifest
from trainer_svc.checkpoint.state import (
    POLICY,
    LiveState,
    decode_slices,
    encode_slices,
    held_slices,
    read_below,
    restore_state,
    share_out,
    training_state,
    write_slices,
)
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.parallel.mesh import ALONE, Mesh, OtherRankError, Ranks, agree

STATE = "state"
EXPORT = "hf"

SAVE_S = 1800.0
"""Seconds that a checkpoint of one engine may take to be written."""

Export = Callable[[Path, Path], None]
"""Takes the directory with the state and the directory to write, and writes a Hugging Face directory."""

T = TypeVar("T")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """One rank's part of a checkpoint. The fields are arguments of `Saver.begin`, except these.

    Attributes:
        slices: The slices that the rank writes, in host memory: copies, and live state that does not change until `read` is set.
        read: Set when the slices are written, or when writing has failed.
    """

    target: Path
    manifest: CheckpointManifest
    slices: Mapping[TensorSlice, torch.Tensor]
    read: threading.Event
    export: Export | None
    after: Callable[[], None]


class Saver:
    """Write one checkpoint at a time, and read checkpoints.

    Every rank of a trainer makes the same calls, from one thread.

    Args:
        ranks: All ranks, for exchanges in the calling thread.
        writing: All ranks in a second group, for exchanges of the background threads.
        deadline_s: Seconds that a checkpoint may take to be written.
    """

    def __init__(self, ranks: Ranks = ALONE, writing: Ranks = ALONE, deadline_s: float = SAVE_S) -> None:
        self._ranks, self._writing_ranks = ranks, writing
        self._deadline_s = deadline_s
        self._pending: Future[CheckpointManifest] | None = None
        self._buffers: dict[TensorSlice, torch.Tensor] = {}

    @classmethod
    def of(cls, mesh: Mesh, deadline_s: float = SAVE_S) -> Self:
        """Return a saver for all ranks of a mesh. All ranks call this together."""
        if mesh.dims.world_size == 1:
            return cls(deadline_s=deadline_s)
        # One rank may wait for its previous checkpoint until the deadline. The other ranks wait for that rank.
        timeout = timedelta(seconds=2 * deadline_s)
        calls, writing = (Ranks(dist.new_group(backend="gloo", timeout=timeout)) for _ in range(2))
        return cls(calls, writing, deadline_s)

    def begin(
        self,
        target: Path,
        manifest: CheckpointManifest,
        state: LiveState,
        *,
        export: Export | None = None,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> Future[CheckpointManifest]:
        """Copy the state to host memory and write it in the background; training may continue when this returns.

        Args:
            target: The checkpoint's directory, on a file system that all ranks share. An existing one is replaced.
            manifest: All facts except the files and the size. The first rank's manifest is used.
            state: The live state of this rank.
            export: Run by the first rank in the background.
            before: Run by the first rank at once, before anything is copied. It may complete the manifest. If it raises, the
                checkpoint fails on every rank.
            after: Run by the first rank when the checkpoint is in place.

        Returns:
            A future, on every rank. Its result is the completed manifest, once that is on disk. Its exception is TimeoutError
            if the previous checkpoint is not written within the deadline, OSError if the disk is full or another rank failed,
            RuntimeError if memory is full. After an exception, older checkpoints are as they were.
        """
        future: Future[CheckpointManifest] = Future()
        future.set_running_or_notify_cancel()  # nobody cancels a write
        read = threading.Event()
        try:
            slices = self._copies(self._assigned(target, state, before), state, read)
        except (OSError, ValueError, RuntimeError) as error:
            read.set()
            future.set_exception(error)
            return future
        self._pending = future

        def run() -> None:
            try:
                future.set_result(self._write(_Snapshot(target, manifest, slices, read, export, after)))
            except BaseException as error:  # noqa: BLE001 - the caller that awaits the future gets the error
                read.set()
                future.set_exception(error)

        # A daemon: a disk that hangs must not keep the process from exiting.
        threading.Thread(target=run, name="checkpoint", daemon=True).start()
        return future

    def wait(self) -> None:
        """Wait until no checkpoint is being written, whatever the outcome.

        Raises:
            TimeoutError: if one is still being written after the deadline.
        """
        if self._pending is None:
            return
        try:
            self._pending.exception(self._deadline_s)
        except TimeoutError as error:
            raise TimeoutError(
                f"the checkpoint before is still being written after {self._deadline_s:g} s: is the disk hanging? Raise"
                " deadlines.save_s if it is only slow"
            ) from error

    def load(self, directory: Path, engines: Mapping[str, TrainEngine]) -> None:
        """Verify a checkpoint and restore its state. Any number of ranks in any layout restore the same state.

        Raises:
            CheckpointDamagedError: if a file is missing or differs from what was written; nothing has changed then.
            OSError: if a rank cannot read a file; nothing has changed then.
            ValueError: if the checkpoint is of other engines, models or optimizers; the state is undefined then.
        """

        def damage() -> str:
            manifest = read_manifest(directory / MANIFEST)
            if manifest is None:
                return f"{directory} has no readable {MANIFEST}: it is not a complete checkpoint"
            files = [file for file in manifest.files if file.path.startswith(f"{STATE}/")]
            return damaged(files[self._ranks.index :: self._ranks.size], directory)

        def first_recovers() -> None:
            self.wait()
            if self._ranks.index == 0:
                recover(directory)

        _agreed(self._ranks, first_recovers)  # before any rank reads the manifest
        for found in self._ranks.exchange(_agreed(self._ranks, damage).encode()):
            if found:
                raise CheckpointDamagedError(found.decode())
        restore_state(engines, directory / STATE, self._ranks.index)

    def _assigned(self, target: Path, state: LiveState, before: Callable[[], None]) -> dict[TensorSlice, torch.Tensor]:
        """Create the checkpoint's hidden directory, and return the live slices that this rank has to write."""

        def prepare() -> dict[TensorSlice, torch.Tensor]:
            self.wait()
            if self._ranks.index == 0:
                before()
                building = _building(target)
                remove_tree(building)
                (building / STATE).mkdir(parents=True)
            return held_slices(state)

        held = _agreed(self._ranks, prepare)
        assigned = share_out([decode_slices(each) for each in self._ranks.exchange(encode_slices(held))])
        return {each: tensor for each, tensor in held.items() if each in assigned[self._ranks.index]}

    def _copies(
        self, slices: Mapping[TensorSlice, torch.Tensor], state: LiveState, read: threading.Event
    ) -> dict[TensorSlice, torch.Tensor]:
        """Copy the slices into host memory, and keep that memory for the next checkpoint: new memory takes five times as long to fill.

        State that is already in host memory, and does not change until `read` is set, is not copied.
        """
        given: dict[TensorSlice, torch.Tensor] = {}
        copied: dict[TensorSlice, torch.Tensor] = {}

        def copy() -> None:
            lent = state.lend(read)
            for each, tensor in slices.items():
                if each.name in lent:
                    given[each] = tensor
                    continue
                buffer = self._buffers.get(each)
                if buffer is None or buffer.dtype != tensor.dtype:
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                copied[each] = buffer.copy_(tensor, non_blocking=True)
            if torch.cuda.is_available():
                torch.cuda.synchronize()

        _agreed(self._ranks, copy)
        self._buffers = copied
        return copied | given

    def _write(self, snapshot: _Snapshot) -> CheckpointManifest:
        ranks = self._writing_ranks
        try:
            own = _agreed(ranks, partial(self._write_own, snapshot))
            parts = ranks.exchange(own.SerializeToString())
            complete = _agreed(ranks, lambda: self._complete(snapshot, parts) if ranks.index == 0 else b"")
        except BaseException:
            if ranks.index == 0:
                remove_tree(_building(snapshot.target))
            raise
        return CheckpointManifest.FromString(ranks.exchange(complete)[0])

    def _write_own(self, snapshot: _Snapshot) -> CheckpointManifest:
        building = _building(snapshot.target)
        try:
            paths = write_slices(snapshot.slices, building / STATE, self._writing_ranks.index)
        finally:
            snapshot.read.set()
        return CheckpointManifest(files=describe_files(paths, building))

    def _complete(self, snapshot: _Snapshot, parts: list[bytes]) -> bytes:
        """When the parts of all ranks are on disk, write the export and the manifest, and rename the directory (first rank)."""
        building, complete = _building(snapshot.target), CheckpointManifest()
        complete.CopyFrom(snapshot.manifest)
        for part in parts:
            complete.files.extend(CheckpointManifest.FromString(part).files)
        for file in complete.files:
            if not (building / file.path).is_file():
                raise OSError(
                    f"another rank wrote {file.path}, but it is not below {building} here: put output_dir on a file system"
                    " that all hosts share"
                )
        if snapshot.export is not None:
            snapshot.export(building / STATE, building / EXPORT)
            exported = [path for path in (building / EXPORT).rglob("*") if path.is_file()]
            complete.files.extend(describe_files(exported, building))
        complete.checkpoint.size_bytes = sum(file.size_bytes for file in complete.files)
        complete.checkpoint.create_time.GetCurrentTime()
        sync_directory(building)
        write_manifest(complete, building)
        _put_in_place(building, snapshot.target)
        snapshot.after()
        return complete.SerializeToString()


def _agreed(ranks: Ranks, work: Callable[[], T]) -> T:
    """Call `agree`. Raise OSError if another rank failed, so that callers treat that like a failure of this rank's disk."""
    try:
        return agree(ranks, work)
    except OtherRankError as error:
        raise OSError(str(error)) from error


def _building(target: Path) -> Path:
    """Return the directory in which a checkpoint is built."""
    return target.with_name(f".{target.name}.partial")


def _put_in_place(building: Path, target: Path) -> None:
    """Rename the finished directory to its target; replace a checkpoint of the same name."""
    retired = target.with_name(f".{target.name}.retired")
    remove_tree(retired)
    if target.exists():
        target.rename(retired)
    building.rename(target)
    sync_directory(target.parent)
    remove_tree(retired)


def recover(target: Path) -> None:
    """Rename a complete checkpoint that stayed in its hidden directory because the process was killed between the two renames."""
    if not target.exists() and (_building(target) / MANIFEST).exists():
        _building(target).rename(target)


def export_state(engine: TrainEngine, state: Path, directory: Path, dtype: torch.dtype | None = None) -> None:
    """Write a Hugging Face directory of the policy's weights that a checkpoint has in `state`. Any thread may call it."""
    engine.export_weights(read_below(f"{POLICY}.model.", state), directory, dtype)


class EngineCheckpoints:
    """Checkpoints of one engine, for programs that train without the service. Every rank makes the same calls.

    Args:
        engine: The engine to save and to restore.
    """

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self._saver = Saver.of(engine.mesh)

    def save(self, directory: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write a checkpoint, and wait until it is on disk; see `begin_save`.

        Raises:
            OSError: if a rank could not write its part, or did not finish within `SAVE_S`.
            UnfitWeightsError: as in `begin_save`.
        """
        writing = self.begin_save(directory, dtype=dtype)
        self._saver.wait()
        writing.result()

    def begin_save(self, directory: str | Path, *, dtype: torch.dtype | None = None) -> Future[CheckpointManifest]:
        """Copy the state and write a checkpoint in the background; training may continue when this returns.

        Args:
            directory: The checkpoint's directory, on a file system that all ranks share. It appears whole or not at all, and
                replaces an existing one.
            dtype: Precision of the Hugging Face directory `hf` in it; None keeps float32.

        Returns:
            A future that is done when the checkpoint is on disk or has failed. Check it for an exception before the next
            checkpoint and at the end.

        Raises:
            UnfitWeightsError: if weights are not finite, or would not be finite in `dtype`; nothing was written then.
        """
        engine = self._engine
        engine.require_fit(dtype)
        state = training_state({POLICY: engine}, engine.mesh.rank)
        manifest = CheckpointManifest(optimizer_steps=engine.optimizer_steps)
        return self._saver.begin(Path(directory), manifest, state, export=partial(export_state, engine, dtype=dtype))

    def load(self, directory: str | Path) -> None:
        """Restore a checkpoint, also one of the trainer service. Any number of ranks may have written it.

        Raises:
            CheckpointDamagedError: if a file is missing or damaged.
            ValueError: if it is of another model or optimizer.
        """
        self._saver.load(Path(directory), {POLICY: self._engine})


# Manifests, and files that survive a power failure.


class CheckpointDamagedError(Exception):
    """A file of a checkpoint differs from its manifest, or is missing."""


def write_manifest(manifest: CheckpointManifest, directory: Path) -> None:
    """Write the manifest of a checkpoint; on return it is on disk."""
    text = json_format.MessageToJson(manifest, preserving_proto_field_name=True)
    write_durably(directory / MANIFEST, text.encode())


def describe_files(paths: Iterable[Path], directory: Path) -> list[CheckpointFile]:
    """Sync files below the checkpoint's directory to disk, and take their digests."""
    described = []
    for path in sorted(paths):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        name = path.relative_to(directory).as_posix()
        described.append(CheckpointFile(path=name, size_bytes=path.stat().st_size, digest=file_digest(path)))
    for parent in {path.parent for path in paths}:
        sync_directory(parent)
    return described


def write_durably(path: Path, content: bytes) -> None:
    """Write a temporary file in the same directory, sync it, and rename it to `path`.

    Raises:
        OSError: if the disk is full or not writable.
    """
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
