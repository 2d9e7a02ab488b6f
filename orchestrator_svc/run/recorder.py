"""Writes what a run leaves for people, in a thread of its own while the run continues.

`Recorder` writes the metrics of every step and ``report.json``, and beside them:

    trajectories/step_*.jsonl   the trajectories of each step as text (`TrajectoryFiles`), read by `sluice rescore`
    trajectories/dropped.jsonl  trajectories that never reached a batch (`DroppedFile`)
    events.jsonl                the events of `Watch` (`EventFile`)

Continuing, forking and auditing a run need none of the last three. Each has a bound: the oldest files are deleted.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import structlog
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from orchestrator_svc.journal.records import Each, SharedRecord
from orchestrator_svc.run.metrics import EPOCH, MEAN_TOKENS, build_report, read_metrics, read_rows, token_ages
from sluice.host_files import rotate, write_whole
from sluice.tasks import discard_outcome
from sluice.telemetry import MetricsWriter, cut_torn_line
from sluice.tensorboard_log import shows_samples, spread
from sluice.threads import SerialThread
from sluice.v1 import common_pb2, orchestrator_pb2, tokens_pb2
from sluice.versions import ENDLESS, Lineage, Version, sampled_tokens

log = structlog.get_logger(__name__)

DROPPED_FILE = "dropped.jsonl"
EVENTS_FILE = "events.jsonl"

EVENTS_BYTES = 64 << 20
"""Size of one of the two files of events: enough for a month of a run that reports its load."""

LOAD_EVERY_S = 10.0
"""Least seconds between two load events in the file, so that a day of them takes 3 MB. Watchers get every load event."""

_IS_ID = '"trajectory_id": '

_STEP = "step_"

_WAITING = 16
"""Writes that may wait. With more, the run waits for the disk."""


_DISK_S = 300.0
"""Seconds that the disk may take for one write. A disk that needs longer counts as gone."""


_MOST_BESIDE_BYTES = 64 << 20
"""Most bytes of waiting writes that the run does not wait for. A single larger trajectory may wait, too."""


class Dropped(NamedTuple):
    """A trajectory that never reached a batch, and why, as a reason of GetRun."""

    record: SharedRecord
    reason: str


class Recorder:
    """Writes files in a thread while the run continues.

    If the disk is far behind with metrics and trajectories, the run waits; if the disk fails, the run ends. The run never waits for events and
    dropped trajectories: what a slow or broken disk does not take is left out, and the log says so.

    Args:
        run_dir: The run's directory.
        texts: Takes the trajectories of each step; None if they are not written.
        dropped: Takes trajectories that never reached a batch; None if they are not written.
        with_tokens: How many trajectories of a step are written with their tokens, from as many different groups as possible.
        settings: The run's settings, some of which TensorBoard shows.
    """

    def __init__(
        self,
        run_dir: Path,
        texts: TrajectoryFiles | None,
        dropped: DroppedFile | None = None,
        *,
        with_tokens: int = 0,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._run_dir, self._texts, self._settings, self._with_tokens = run_dir, texts, settings, with_tokens
        self._dropped, self._events = dropped, EventFile(run_dir)
        self._beside_bytes = self._left_out = 0
        self._is_closed = False
        self._thread = SerialThread("recorder")
        self._writer: MetricsWriter | None = None
        self._waiting: deque[asyncio.Future[Any]] = deque()

    async def write_step(
        self, step: int, metrics: Mapping[str, float], records: Sequence[SharedRecord], lineage: Lineage
    ) -> None:
        """Record one applied batch; return before it is written, unless the disk is far behind.

        Raises:
            OSError: if an earlier write failed.
        """

        def write() -> None:
            self._metrics().write(step, metrics)
            if self._texts is not None:
                number_of = cache(lineage.number)  # many trajectories, few versions
                chosen, whole = _spread(records, self._with_tokens), Each(records, SharedRecord.whole)
                rows = (
                    _line(trajectory_row(each, number_of, with_tokens=place in chosen))
                    for place, each in enumerate(whole)
                )
                self._texts.write(step, rows)
                if records and shows_samples(step):
                    rewards = [_reward(each) for each in records]
                    self._metrics().samples(
                        step, [trajectory_row(whole[place], number_of) for place in spread(rewards)]
                    )

        await self._soon(write)

    def write_dropped(self, lost: Sequence[Dropped]) -> None:
        """Write trajectories that never reached a batch. Returns at once; nothing may change them afterwards."""
        file = self._dropped
        if file is None or not lost:
            return

        def write() -> None:
            file.write(dropped_row(trajectory_row(each.record.whole(), _no_number), each.reason) for each in lost)

        self._beside(write, sum(each.record.trajectory_bytes + each.record.text_bytes for each in lost))

    def write_event(self, event: orchestrator_pb2.RunEvent) -> None:
        """Write an event. Returns at once."""
        if self._events.takes(event):
            self._beside(lambda: self._events.write(event), event.ByteSize())

    def _beside(self, write: Callable[[], None], size: int) -> None:
        """Write without making the run wait, unless too much of this kind waits already."""
        if self._is_closed:
            return
        if self._beside_bytes and self._beside_bytes + size > _MOST_BESIDE_BYTES:
            self._leave_out(f"{self._beside_bytes:,} bytes wait for the disk")
            return
        self._beside_bytes += size
        self._thread.submit(write).add_done_callback(partial(self._written_beside, size))

    def _written_beside(self, size: int, writing: asyncio.Future[None]) -> None:
        self._beside_bytes -= size
        if writing.cancelled():
            return
        if (error := writing.exception()) is not None:
            self._leave_out(str(error))
        elif self._left_out:
            log.warning("events and dropped trajectories are written again", left_out=self._left_out)
            self._left_out = 0

    def _leave_out(self, why: str) -> None:
        self._left_out += 1
        if self._left_out == 1:
            log.error(
                "events, or rows of dropped trajectories, are left out until the disk takes them; the run continues",
                path=str(self._run_dir),
                error=why,
            )

    async def write_scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record scalars of an evaluation."""
        await self._soon(lambda: self._metrics().write(step, metrics))

    async def recorded_steps(self) -> Mapping[int, int]:
        """Return the last epoch in which each step was recorded, by this process and earlier ones."""
        path = self._run_dir / "metrics.jsonl"

        def read() -> dict[int, int]:
            if not path.exists():
                return {}
            with path.open(encoding="utf-8") as lines:  # earlier releases noted no epoch, and recorded each step
                return {
                    step: int(values.get(EPOCH, ENDLESS)) for step, values in read_rows(lines) if MEAN_TOKENS in values
                }

        await self._drain(0)
        return await self._thread.submit(read)

    async def write_report(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write ``report.json`` from all steps recorded so far and some facts of the run; return it."""

        def write() -> dict[str, Any]:
            self._metrics().flush()
            report = build_report(read_metrics(self._run_dir / "metrics.jsonl"), facts)
            write_whole(self._run_dir / "report.json", json.dumps(report, indent=2) + "\n")
            return report

        await self._drain(0)
        written = self._thread.submit(write)
        self._waiting.append(written)
        await self._drain(0)
        return written.result()

    async def close(self) -> None:
        """Write what waits and close the files."""

        def close() -> None:
            if self._writer is not None:
                self._writer.close()

        self._waiting.append(self._thread.submit(close))
        self._is_closed = True
        self._thread.end()
        try:
            await self._drain(0)
        finally:
            discard_outcome(*self._waiting)

    def _metrics(self) -> MetricsWriter:
        if self._writer is None:
            self._writer = MetricsWriter(self._run_dir, self._settings)
        return self._writer

    async def _soon(self, write: Callable[[], None]) -> None:
        self._waiting.append(self._thread.submit(write))
        await self._drain(_WAITING)

    async def _drain(self, left: int) -> None:
        """Wait until at most `left` writes are waiting, and raise the error of a finished one.

        Cancelling a caller cancels no write: if the write fails, the next caller raises the error.

        Raises:
            OSError: if a write failed, or the disk does not answer.
        """
        while len(self._waiting) > left or (self._waiting and self._waiting[0].done()):
            first = self._waiting[0]
            done, _ = await asyncio.wait({first}, timeout=_DISK_S)
            if not done:
                raise TimeoutError(
                    f"the disk of {self._run_dir} did not take the run's files within {_DISK_S:g} s: check the disk, then start"
                    " the run again: it continues"
                )
            if self._waiting and self._waiting[0] is first:  # another caller may have removed it meanwhile
                self._waiting.popleft().result()


def _reward(record: SharedRecord) -> float | None:
    return record.trajectory.reward if record.trajectory.HasField("reward") else None


def _no_number(version: Version) -> int:
    """Stand in for `Lineage.number` for a trajectory without a step, whose staleness is not needed."""
    raise ValueError(f"a trajectory of version {version} has no step")


def _spread(records: Sequence[SharedRecord], count: int) -> Collection[int]:
    """Return the places of `count` trajectories: the first of each group, then the second of each, and so on."""
    if not count:
        return ()
    seen: Counter[str] = Counter()
    ranks = []
    for each in records:
        ranks.append(seen[each.trajectory.group_id])
        seen[each.trajectory.group_id] += 1
    return set(sorted(range(len(records)), key=lambda place: ranks[place])[:count])


_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode
"""`json.dumps` would make an encoder for each of the rows."""


def _line(row: Mapping[str, Any]) -> str:
    return _encode(row) + "\n"


def trajectory_row(
    record: orchestrator_pb2.TrajectoryRecord, number_of: Callable[[Version], int], *, with_tokens: bool = False
) -> dict[str, Any]:
    """Return a trajectory for people: text, reward and its parts, advantage, who sampled it when, its outcome.

    Times are seconds since 1970. `environment`, `replica` and the times are None if an earlier release, or a workflow of the user, did
    not record them. `turn_rewards` are pairs of turn and reward, and missing if the environment gave none.

    Args:
        record: The trajectory.
        number_of: Returns the number that a version counts as, such as `Lineage.number`.
        with_tokens: Whether to add `token_ids`, prompt first, the `mask_runs` that say which of them were sampled to be trained, and
            their `logprobs`, from the sampler: the trainer reports none per token.
    """
    trajectory = record.trajectory
    messages = record.conversation.messages
    ages = [age for age, _ in token_ages(trajectory, number_of, record.step - 1)] if record.step else []
    turn_rewards = [[each.turn, each.reward] for each in trajectory.turn_rewards]
    return {
        "step": record.step,
        "trajectory_id": trajectory.trajectory_id,
        "group_id": trajectory.group_id,
        "task_id": trajectory.task_id,
        "environment": record.environment or None,
        "prompt": [_message(each) for each in messages[:-1]],
        "completion": messages[-1].content if messages else "",
        "reward": trajectory.reward if trajectory.HasField("reward") else None,
        "metrics": dict(sorted(record.metrics.items())),
        **({"turn_rewards": turn_rewards} if turn_rewards else {}),
        "advantage": trajectory.advantages[0] if len(trajectory.advantages) == 1 else list(trajectory.advantages),
        "prompt_tokens": trajectory.mask_runs[0] if trajectory.mask_runs else 0,
        "tokens": sampled_tokens(trajectory),
        "finish_reason": tokens_pb2.FinishReason.Name(trajectory.finish_reason).removeprefix("FINISH_REASON_").lower(),
        "versions": [[span.start, str(Version.from_proto(span.policy_version))] for span in trajectory.version_spans],
        "staleness": max(ages, default=None),
        "replica": ", ".join(record.replicas) or None,
        "drawn": _seconds(record, "draw_time"),
        "sampled": _seconds(record, "sample_time"),
        "scored": _seconds(record, "score_time"),
        "outcome": "trained" if record.outcome == tokens_pb2.TRAJECTORY_OUTCOME_TRAINED else "dropped",
        "reason": record.reason,
        **(_tokens(trajectory) if with_tokens else {}),
    }


def _seconds(record: orchestrator_pb2.TrajectoryRecord, field: str) -> float | None:
    """Return a time of a trajectory in seconds since 1970; None if it is not known."""
    if not record.HasField(field):  # type: ignore[arg-type]  # the stubs list the names
        return None
    time_of: Timestamp = getattr(record, field)
    return (time_of.seconds * 1_000_000 + time_of.nanos // 1_000) / 1e6 or None


def _tokens(trajectory: tokens_pb2.Trajectory) -> dict[str, Any]:
    return {
        "token_ids": list(trajectory.token_ids),
        "mask_runs": list(trajectory.mask_runs),
        "logprobs": list(trajectory.logprobs),
    }


def _message(message: tokens_pb2.ChatMessage) -> dict[str, Any]:
    """Return role and content, and the other fields that are set."""
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    rest = {
        "name": message.name,
        "reasoning": message.reasoning,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
    }
    return {"role": message.role, "content": message.content, **{key: value for key, value in rest.items() if value}}


class BoundedLines:
    """Appends lines to a file, and begins a new one when it is full.

    If a kill left a part of a line, the next process cuts it off when it begins to write. A full disk leaves no part of a line.

    Args:
        path: The file, as ``NAME.jsonl``.
        most_bytes: Size of one file; a longer line gets a file of its own.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._begun = False

    @property
    def paths(self) -> tuple[Path, Path]:
        """The file and the previous one. Either may be missing."""
        return self._path, self._path.with_suffix(".1.jsonl")

    def append(self, lines: Iterable[str]) -> bool:
        """Append lines together; return whether a new file was begun for them.

        Raises:
            OSError: if they cannot be written; then none is.
        """
        data = "".join(lines).encode()
        if not self._begun:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._path.is_symlink():  # symbolic links are not followed below either
                cut_torn_line(self._path)
            self._begun = True
        rotated = self._path.exists() and 0 < self._path.lstat().st_size > self._most_bytes - len(data)
        if rotated:
            rotate(self.paths)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            left = memoryview(data)
            try:
                while left:
                    left = left[os.write(descriptor, left) :]
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        return rotated


class DroppedFile:
    """Holds the trajectories that never reached a batch, in the format of ``step_*.jsonl``.

    A trajectory has at most one row in the two files, even after restarts: rows are recognised by their names. If a process is killed, the rows
    for what it dropped last may be missing. If the journal lost the drop, the trajectory is dropped again and keeps its first row.

    Args:
        directory: That of the trajectories.
        most_bytes: Size of one of the two files.
    """

    def __init__(self, directory: Path, most_bytes: int) -> None:
        self._lines = BoundedLines(directory / DROPPED_FILE, most_bytes)
        self._newer: set[str] | None = None  # None until the files of earlier processes were read
        self._older: set[str] = set()

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows, except for trajectories that have one already.

        Raises:
            OSError: if they cannot be written.
        """
        if self._newer is None:
            self._newer, self._older = (_ids(path) for path in self._lines.paths)
        new: dict[str, str] = {}
        for row in rows:
            name = row["trajectory_id"]
            if name not in self._newer and name not in self._older:
                new[name] = json.dumps(row, ensure_ascii=False) + "\n"
        if new and self._lines.append(new.values()):
            self._older, self._newer = self._newer, set()
        self._newer |= new.keys()


def _ids(path: Path) -> set[str]:
    """Return the names of the trajectories in a file. Ignore an incomplete line."""
    found, decoder = set[str](), json.JSONDecoder()
    if not path.exists() or path.is_symlink():
        return found
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            # Search for this key instead of parsing the row, whose text is a thousand times as long. No key before this one has a text.
            place = line.find(_IS_ID)
            if place >= 0 and line.endswith("\n"):
                found.add(decoder.raw_decode(line, place + len(_IS_ID))[0])
    return found


class EventFile:
    """Holds the events of a run as JSON lines: all except scored groups, whose rewards are in the journal and in the trajectories.

    Args:
        run_dir: The run's directory.
        most_bytes: Size of one of the two files.
    """

    def __init__(self, run_dir: Path, most_bytes: int = EVENTS_BYTES) -> None:
        self._lines = BoundedLines(run_dir / EVENTS_FILE, most_bytes)
        self._last_load_s = 0.0

    def takes(self, event: orchestrator_pb2.RunEvent) -> bool:
        """Return whether an event is to be written, and note that it will be. Does not block."""
        kind = event.WhichOneof("kind")
        if kind == "load":
            now = event.time.ToMicroseconds() / 1e6
            if 0 <= now - self._last_load_s < LOAD_EVERY_S:
                return False
            self._last_load_s = now
        return kind != "group_scored"

    def write(self, event: orchestrator_pb2.RunEvent) -> None:
        """Append an event.

        Raises:
            OSError: if it cannot be written.
        """
        self._lines.append([json.dumps(event_row(event), ensure_ascii=False) + "\n"])


def event_row(event: orchestrator_pb2.RunEvent) -> dict[str, Any]:
    """Return an event in the form of a line of the file: number, time in seconds since 1970, kind, and the fields of that kind.

    Names are as in the contract, versions and enums as in the trajectories: ``1.7``, ``running``. A finished step has no metrics:
    ``metrics.jsonl`` has them.
    """
    kind = event.WhichOneof("kind") or ""
    fields = _plain(getattr(event, kind), without="metrics" if kind == "step_finished" else "") if kind else {}
    seconds = event.time.ToMicroseconds() / 1e6
    return {"sequence_no": event.sequence_no, "time": seconds, "kind": kind, **fields}


def _plain(message: Message, *, without: str = "") -> Any:  # noqa: ANN401 - anything that JSON has
    """Return a message as JSON without the field `without`. Fields that are 0 or empty are included; whole numbers are numbers."""
    if isinstance(message, common_pb2.PolicyVersion):
        return str(Version.from_proto(message))
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.name == without or (field.has_presence and not message.HasField(field.name)):
            continue
        value, kind = getattr(message, field.name), field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            found[field.name] = dict(sorted(value.items()))
        elif field.is_repeated:
            found[field.name] = [_plain(each) for each in value] if kind is not None else list(value)
        elif kind is not None:
            found[field.name] = _plain(value)
        elif field.enum_type is not None:
            found[field.name] = _enum(field.enum_type.name, field.enum_type.values_by_number, value)
        else:
            found[field.name] = value
    return found


def _enum(name: str, values: Mapping[int, Any], number: int) -> str | int:
    """Return the name of a value in small letters, without the enum's name. Return the number if this release does not know the value."""
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper() + "_"
    return str(values[number].name).removeprefix(prefix).lower() if number in values else number


def dropped_row(row: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """Return the row of a trajectory that never reached a batch."""
    return {**row, "step": None, "staleness": None, "outcome": "dropped", "reason": reason}


class TrajectoryFiles:
    """Writes one file for each step, and removes the oldest ones when their total size is too large. Every method blocks.

    Args:
        directory: Where the files lie; made with the first file.
        most_bytes: Size of all files; 0: no bound. The last file always stays.
    """

    def __init__(self, directory: Path, most_bytes: int) -> None:
        self._directory, self._most_bytes = directory, most_bytes
        self._sizes: dict[int, int] | None = None  # by step; None until the files of earlier processes were listed

    def write(self, step: int, lines: Iterable[str]) -> None:
        """Write the lines of a step. Replace the file of an epoch that was rolled back.

        Raises:
            OSError: if the file cannot be written. An old file that cannot be removed is only logged.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        write_whole(self._path(step), lines)
        if self._most_bytes:
            self._remove_oldest(step)

    def _remove_oldest(self, newest: int) -> None:
        if self._sizes is None:
            found = {int(path.stem.removeprefix(_STEP)): path for path in self._directory.glob(f"{_STEP}*.jsonl")}
            self._sizes = {step: found[step].stat().st_size for step in sorted(found)}
        self._sizes[newest] = self._path(newest).stat().st_size
        total = sum(self._sizes.values())
        for step in sorted(self._sizes.keys() - {newest}):
            if total <= self._most_bytes:
                return
            try:
                self._path(step).unlink(missing_ok=True)
            except OSError as error:
                log.warning("cannot remove old trajectories", path=str(self._path(step)), error=str(error))
                return
            total -= self._sizes.pop(step)

    def _path(self, step: int) -> Path:
        return self._directory / f"{_STEP}{step:06d}.jsonl"
