"""The log of calls that change something: who did what, when, and with which outcome, one JSON line a call.

`LOGGED` lists the calls. Calls that a run makes all the time (batches, pushed bytes, rewards) are logged only if an admin makes them; for
the others there are the journal and the trainer's record.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import structlog
from google.protobuf.json_format import MessageToDict, SerializeToJsonError
from google.protobuf.message import Message
from prometheus_client import Counter

from sluice.config import SecurityConfig
from sluice.host_files import rotate
from sluice.rpc.access import caller
from sluice.rpc.channel import REQUEST_ID
from sluice.rpc.errors import SluiceError
from sluice.threads import SerialThread

Request: TypeAlias = Any
"""A request message of a logged call."""

LOGGED: Mapping[str, tuple[str, ...]] = {
    "sluice.v1.ServerAdminService/DrainServer": ("grace",),
    "sluice.v1.OrchestratorService/PauseRun": ("run",),
    "sluice.v1.OrchestratorService/ResumeRun": ("run",),
    "sluice.v1.OrchestratorService/StopRun": ("run", "reason"),
    "sluice.v1.OrchestratorService/SetRun": ("run", "values"),
    "sluice.v1.OrchestratorService/RegisterReplica": ("run", "replica", "address"),
    "sluice.v1.RolloutAdminService/SetWeightPolicy": ("mode", "version", "owner", "ttl"),
    "sluice.v1.RolloutAdminService/UpdateWeights": ("version",),
    "sluice.v1.RolloutAdminService/ReloadWeights": (),
    "sluice.v1.RolloutAdminService/Pause": ("mode", "owner", "ttl"),
    "sluice.v1.RolloutAdminService/Resume": ("owner",),
    "sluice.v1.RolloutAdminService/LoadAdapter": ("adapter", "version"),
    "sluice.v1.RolloutAdminService/UnloadAdapter": ("adapter",),
    "sluice.v1.RolloutAdminService/AbortRequests": ("request_ids",),
    "sluice.v1.RolloutAdminService/Drain": ("grace",),
    "sluice.v1.TrainerService/BeginEpoch": ("run", "epoch", "checkpoint"),
    "sluice.v1.TrainerService/SaveCheckpoint": ("run", "journal_position"),
    "sluice.v1.TrainerService/KeepCheckpoint": ("run", "checkpoint", "reason"),
    "sluice.v1.WeightSyncService/CommitVersion": ("manifest.run", "manifest.version", "manifest.kind"),
    "sluice.v1.WeightSyncService/DeleteVersion": ("run", "version"),
}
"""The calls that are logged, with the fields of their requests that are written."""

LOGGED_OF_ADMINS: Mapping[str, tuple[str, ...]] = {
    "sluice.v1.EpisodeService/OpenEpisode": ("lease_id", "request_id"),
    "sluice.v1.EpisodeService/RecordReward": ("episode_id", "reward", "generation_id", "branch"),
    "sluice.v1.EpisodeService/SubmitTrajectory": ("episode_id", "reward", "truncated"),
    "sluice.v1.EpisodeService/AbandonEpisode": ("episode_id", "reason", "requeue"),
    "sluice.v1.SessionService/RecordGeneration": ("episode_id", "gateway"),
    "sluice.v1.SessionService/ReleaseGeneration": ("episode_id", "gateway"),
    "sluice.v1.TrainerService/SubmitBatch": (),
    "sluice.v1.TrainingService/CreateTraining": ("run",),
    "sluice.v1.TrainingService/DeleteTraining": ("training",),
    "sluice.v1.TrainingService/ForwardBackward": ("place", "objective"),
    "sluice.v1.TrainingService/OptimStep": ("place", "learning_rate"),
    "sluice.v1.TrainingService/SaveState": ("place", "state"),
    "sluice.v1.TrainingService/LoadState": ("place", "state"),
    "sluice.v1.WeightSyncService/PushWeights": (),
}
"""Calls that services and agents make all the time: logged only if the caller is an admin of a principals file."""

_FIELDS: Mapping[str, tuple[str, ...]] = {**LOGGED, **LOGGED_OF_ADMINS}

_TEXT_CHARACTERS = 256
_LINE_BYTES = 4096
"""Longest line. A single write of this size is not interleaved with writes of another process."""

_MOST_WAITING = 1000
"""Most lines that may wait for the disk. Further lines are lost, and counted."""

_CLOSE_S = 2.0

LOST = Counter("sluice_call_log_lost", "Lines of the log of calls that could not be written.")

log = structlog.get_logger(__name__)


def may_be_logged(method: str) -> bool:
    """Return whether calls of a method are logged for at least some callers."""
    return method in _FIELDS


def is_logged(method: str) -> bool:
    """Return whether a call of a method by the `caller` of this context is logged."""
    principal = caller()
    return method in LOGGED or (method in LOGGED_OF_ADMINS and principal.role == "admin" and principal.listed)


class CallLog:
    """Appends to one file, in a thread. If the disk is full or hangs, calls do not fail: that is logged, and lost lines are counted.

    A file that is full becomes `NAME.1.jsonl`, the one before it `NAME.2.jsonl`, and so on.

    Args:
        path: The file; its folder is made with the first line.
        security: How large it may be, and how many older ones are kept.
    """

    def __init__(self, path: Path, security: SecurityConfig) -> None:
        self._path = path
        self._most_bytes, self._kept = security.call_log_mb << 20, security.call_log_files
        self._thread: SerialThread | None = None
        self._writing: set[asyncio.Future[None]] = set()
        self._lost = 0
        self._broken = False

    def record(self, method: str, request: Request | None, peer: str, code: str) -> None:
        """Write the line of a call that has ended. Its principal is the `caller` of this context.

        Args:
            method: A key of `LOGGED` or `LOGGED_OF_ADMINS`.
            request: Its request; None if no request was read, or the call has a stream of requests.
            peer: Address of the client.
            code: Name of the status code that it ended with.
        """
        principal = caller()
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "principal": principal.name,
            "role": principal.role,
            "peer": peer,
            "method": method.removeprefix("sluice.v1."),
            "request": {} if request is None else _fields(request, _FIELDS[method]),
            "code": code,
            "request_id": REQUEST_ID.get(),
        }
        if len(self._writing) >= _MOST_WAITING:
            self._lose(f"{_MOST_WAITING} lines wait for the disk")
            return
        if self._thread is None:
            self._thread = SerialThread("call-log")
        writing = self._thread.submit(self._append, _encoded(line))
        self._writing.add(writing)
        writing.add_done_callback(self._written)

    @contextlib.contextmanager
    def recorded(self, method: str, request: Request, peer: str) -> Iterator[None]:
        """While the block runs a call that did not come by gRPC, note its outcome; then write its line."""
        code = "OK"
        try:
            yield
        except SluiceError as error:
            code = error.code.name
            raise
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        except Exception:
            code = "INTERNAL"
            raise
        finally:
            self.record(method, request, peer, code)

    async def close(self) -> None:
        """Wait for the disk, a few seconds at most."""
        if self._writing:
            await asyncio.wait(self._writing, timeout=_CLOSE_S)
        if self._thread is not None:
            self._thread.end()
            self._thread = None

    def _append(self, line: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if self._path.lstat().st_size + len(line) > self._most_bytes:
                older = (self._path.with_suffix(f".{number}.jsonl") for number in range(1, self._kept + 1))
                rotate([self._path, *older])
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            written = os.write(descriptor, line)
            if written < len(line):  # the disk is full: the next line must not be appended to this part of a line
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
                raise OSError(f"only {written} of {len(line)} bytes were written")
        finally:
            os.close(descriptor)

    def _written(self, writing: asyncio.Future[None]) -> None:
        self._writing.discard(writing)
        if writing.cancelled():
            return
        error = writing.exception()
        if error is not None:
            self._lose(str(error))
        elif self._broken:
            self._broken = False
            log.warning("the log of calls is written again", path=str(self._path), lost=self._lost)
            self._lost = 0

    def _lose(self, why: str) -> None:
        LOST.inc()
        self._lost += 1
        if not self._broken:
            self._broken = True
            log.error(
                "the log of calls cannot be written; calls are served, and their lines are lost until the disk takes them",
                path=str(self._path),
                error=why,
            )


def _fields(request: Request, names: tuple[str, ...]) -> dict[str, Any]:
    """Return those of the named fields that the request has, in their JSON form."""
    found: dict[str, Any] = {}
    for name in names:
        message = request
        *tables, field = name.split(".")
        for table in tables:
            message = getattr(message, table)
        part = type(message)()
        _copy_field(message, part, field)
        try:
            value = MessageToDict(part, preserving_proto_field_name=True).get(field)
        except SerializeToJsonError:  # such as a duration beyond what JSON may name
            value = "cannot be shown"
        if value is not None:
            found[field] = _short(value)
    return found


def _copy_field(source: Message, target: Message, name: str) -> None:
    for field, value in source.ListFields():
        if field.name != name:
            continue
        if isinstance(value, str | bytes | int | float):
            setattr(target, name, value)
        else:
            getattr(target, name).MergeFrom(value)


def _short(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Cut long texts."""
    if isinstance(value, str):
        return value if len(value) <= _TEXT_CHARACTERS else value[:_TEXT_CHARACTERS] + "..."
    if isinstance(value, dict):
        return {_short(key): _short(inner) for key, inner in value.items()}
    return [_short(inner) for inner in value] if isinstance(value, list) else value


def _encoded(line: dict[str, Any]) -> bytes:
    text = json.dumps(line)
    if len(text) >= _LINE_BYTES:
        text = json.dumps({**line, "request": "left out, it is too long"})
    return f"{text}\n".encode()
