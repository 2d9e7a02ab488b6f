"""Checkpoints written beside training: the state is copied at once, the files are written in a thread of their own.

    step_8/
        state/rank-00000-00000.safetensors ...   weights, optimizers and random state: each process's share
        hf/                                      what transformers and vLLM load
        manifest.json                            written last: protobuf-JSON of CheckpointManifest

A checkpoint is built in a hidden directory and renamed when it is whole; a directory without a manifest is not one.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from sluice.v1.checkpoint_pb2 import CheckpointManifest
from trainer_svc.checkpoint.durable import sync_directory
from trainer_svc.checkpoint.manifest import (
    MANIFEST,
    CheckpointDamagedError,
    check_files,
    describe_files,
    read_manifest,
    write_manifest,
)
from trainer_svc.checkpoint.pieces import Piece, held_pieces, pieces_from_bytes, pieces_to_bytes, share_out
from trainer_svc.checkpoint.shards import write_shards
from trainer_svc.checkpoint.state import Trained, restore_state
from trainer_svc.checkpoint.writers import ALONE, PartFailedError, Writers

__all__ = ["EXPORT", "STATE", "Export", "Saver", "recover"]

STATE = "state"
EXPORT = "hf"

Export = Callable[[Path, Path], None]
"""Makes a Hugging Face directory: of the directory with the state, where to put it."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What one process writes of a checkpoint.

    Attributes:
        target: The checkpoint's directory.
        manifest: All facts but the files and the size.
        pieces: Copies in host memory.
        export: Makes what lies beside the state.
        after: Comes when all is in place.
    """

    target: Path
    manifest: CheckpointManifest
    pieces: Mapping[Piece, torch.Tensor]
    export: Export | None
    after: Callable[[], None]


class Saver:
    """Writes one checkpoint at a time, and reads.

    Every process of a trainer makes the same calls, from one thread.

    Args:
        writers: The processes.
        deadline_s: Seconds that a checkpoint may take to be written.
    """

    def __init__(self, writers: Writers = ALONE, deadline_s: float = 1800.0) -> None:
        self.writers = writers
        self._deadline_s = deadline_s
        self._pending: Future[CheckpointManifest] | None = None
        self._buffers: dict[Piece, torch.Tensor] = {}

    def begin(
        self,
        target: Path,
        manifest: CheckpointManifest,
        tensors: Mapping[str, torch.Tensor],
        *,
        export: Export | None = None,
        after: Callable[[], None] = lambda: None,
    ) -> Future[CheckpointManifest]:
        """Copy the state to host memory, and write it in the background; training may go on when this returns.

        Args:
            target: The checkpoint's directory, on a file system that all processes share. One of this name makes room.
            manifest: All facts but the files and the size; the first process's counts.
            tensors: The live state of this process.
            export: Run by the first process in the background.
            after: Run by the first process when the checkpoint is in place.

        Returns:
            The completed manifest, on every process, when it is on disk; or what went wrong (TimeoutError if the checkpoint
            before is not written within the deadline, OSError if the disk is full, RuntimeError if memory is): then older
            checkpoints are as they were.
        """
        future: Future[CheckpointManifest] = Future()
        future.set_running_or_notify_cancel()  # nobody cancels a write
        try:
            self.wait()
            pieces = self._copies(self._own_share(target, tensors))
        except (OSError, ValueError, RuntimeError) as error:
            future.set_exception(error)
            return future
        self._pending = future
        snapshot = _Snapshot(target, manifest, pieces, export, after)
        # A daemon: a disk that hangs must not keep the process from exiting.
        threading.Thread(target=self._run, args=(snapshot, future), name="checkpoint", daemon=True).start()
        return future

    def wait(self) -> None:
        """Return when no checkpoint is being written, however that ended.

        Raises:
            TimeoutError: if that is not so within the deadline.
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

    def load(self, directory: Path, engines: Mapping[str, Trained]) -> CheckpointManifest:
        """Verify a checkpoint, and put its state back: the same on any number of processes, in any layout.

        Raises:
            CheckpointDamagedError: if a file is missing or not as it was written; nothing has changed then.
            ValueError: if it is of other engines, models or optimizers; the state is undefined then.
        """
        self.wait()

        def recovered() -> bytes:
            if self.writers.index == 0:
                recover(directory)
            return b""

        def check() -> bytes:
            manifest = read_manifest(directory / MANIFEST)
            if manifest is None:
                raise CheckpointDamagedError(f"{directory} has no readable {MANIFEST}: it is not a whole checkpoint")
            files = [file for file in manifest.files if file.path.startswith(f"{STATE}/")]
            check_files(files[self.writers.index :: self.writers.size], directory)
            return manifest.SerializeToString()

        try:
            self.writers.agree(recovered)  # before anyone looks for the manifest
            manifests = self.writers.agree(check)
        except PartFailedError as error:
            raise CheckpointDamagedError(str(error)) from error
        restore_state(engines, directory / STATE, self.writers.index)
        return CheckpointManifest.FromString(manifests[0])

    def _own_share(self, target: Path, tensors: Mapping[str, torch.Tensor]) -> dict[Piece, torch.Tensor]:
        """What this process is to write, where it lies; the directory is there when this returns."""
        held = held_pieces(tensors)

        def prepare() -> bytes:
            if self.writers.index == 0:
                building = _building(target)
                shutil.rmtree(building, ignore_errors=True)
                (building / STATE).mkdir(parents=True)
            return pieces_to_bytes(held)

        shares = share_out([pieces_from_bytes(each) for each in self.writers.agree(prepare)])
        return {piece: tensor for piece, tensor in held.items() if piece in shares[self.writers.index]}

    def _copies(self, pieces: Mapping[Piece, torch.Tensor]) -> dict[Piece, torch.Tensor]:
        """Copies in host memory that is used again for the next checkpoint: new memory takes five times as long to fill."""
        copies: dict[Piece, torch.Tensor] = {}

        def copy() -> bytes:
            for piece, tensor in pieces.items():
                buffer = self._buffers.get(piece)
                if buffer is None or buffer.dtype != tensor.dtype:
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                copies[piece] = buffer.copy_(tensor, non_blocking=True)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return b""

        # All or none: a process whose memory is full must not leave the others waiting for its share.
        self.writers.agree(copy)
        self._buffers = copies
        return copies

    def _run(self, snapshot: _Snapshot, future: Future[CheckpointManifest]) -> None:
        try:
            result = self._write(snapshot)
        except BaseException as error:  # noqa: BLE001  whoever awaits the future gets it
            future.set_exception(error)
        else:
            future.set_result(result)

    def _write(self, snapshot: _Snapshot) -> CheckpointManifest:
        try:
            parts = self.writers.agree(lambda: self._write_share(snapshot))
            complete = self.writers.agree(lambda: self._complete(snapshot, parts) if self.writers.index == 0 else b"")
        except BaseException:
            if self.writers.index == 0:
                shutil.rmtree(_building(snapshot.target), ignore_errors=True)
            raise
        return CheckpointManifest.FromString(complete[0])

    def _write_share(self, snapshot: _Snapshot) -> bytes:
        paths = write_shards(snapshot.pieces, _building(snapshot.target) / STATE, self.writers.index)
        return CheckpointManifest(files=describe_files(paths, _building(snapshot.target))).SerializeToString()

    def _complete(self, snapshot: _Snapshot, parts: list[bytes]) -> bytes:
        """The first process's part: all shares are on disk; now what lies beside them, the manifest, and the name."""
        building, complete = _building(snapshot.target), CheckpointManifest()
        complete.CopyFrom(snapshot.manifest)
        for part in parts:
            complete.files.extend(CheckpointManifest.FromString(part).files)
        _check_shared(complete, building)
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


def _building(target: Path) -> Path:
    """Where a checkpoint lies until it is whole."""
    return target.with_name(f".{target.name}.partial")


def _check_shared(manifest: CheckpointManifest, directory: Path) -> None:
    for file in manifest.files:
        if not (directory / file.path).is_file():
            raise OSError(
                f"another rank wrote {file.path}, but it is not below {directory} here: put output_dir on a file system that all hosts share"
            )


def _put_in_place(building: Path, target: Path) -> None:
    """Rename; a retired checkpoint of the same name makes room."""
    retired = target.with_name(f".{target.name}.retired")
    shutil.rmtree(retired, ignore_errors=True)
    if target.exists():
        target.rename(retired)
    building.rename(target)
    sync_directory(target.parent)
    shutil.rmtree(retired, ignore_errors=True)


def recover(target: Path) -> None:
    """Finish what a kill between the two renames left: the new checkpoint is whole then, and has no name yet."""
    if not target.exists() and (_building(target) / MANIFEST).exists():
        _building(target).rename(target)
