"""The kinds of files in a run's directory, how much of the disk each kind takes, and what bounds it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from sluice import host_files
from sluice.errors import ConfigError
from sluice.file_systems import no_locks

CONFIG_FILE = "config.toml"
LOCK_FILE = ".lock"
METRICS_FILE = "metrics.jsonl"
JOURNAL_FILE = "journal.sqlite"
"""Written by the orchestrator. A run without it never began, for example because its settings were wrong."""
REPORT_FILE = "report.json"
TRAJECTORIES = "trajectories"

OTHER = "other files"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file.

    Attributes:
        name: For people.
        names: Patterns of the files and folders that hold it, directly in the run's directory.
        bound: What keeps it from growing, or why nothing does.
    """

    name: str
    names: tuple[str, ...]
    bound: str


KINDS = (
    Kind("logs", ("logs",), "bounded by log_mb and log_files of each service"),
    Kind("log of calls", ("calls",), "bounded by security.call_log_mb and security.call_log_files of each service"),
    Kind(
        "journal, facts",
        ("journal.sqlite*", "journal.v1.sqlite*"),
        "no bound: resume, audit and trace need every fact, some 400 bytes each",
    ),
    Kind(
        "journal, payloads",
        ("journal",),
        "bounded by orchestrator.checkpoint.every_mb: a checkpoint deletes those that the one before it covers",
    ),
    Kind("trajectories", ("trajectories",), "bounded by orchestrator.disk.trajectories_mb and dropped_mb"),
    Kind("events", ("events*.jsonl",), "bounded: two files of 64 MiB"),
    Kind(
        "checkpoints",
        ("checkpoints",),
        "bounded by trainer.checkpoint.keep, and one that orchestrator.evaluation.keep_best keeps",
    ),
    Kind("versions", ("weights",), "bounded by weightsync.keep and weightsync.max_bytes; versions in use stay"),
    Kind("records of batches", ("trainer",), "no bound: an audit needs them, some 37 bytes a trajectory"),
    Kind("metrics", ("metrics.jsonl", "tensorboard"), "no bound: the report needs every step, some kilobytes each"),
    Kind("states of the training API", ("trainings",), "bounded by tuner.limits.states of each principal"),
    Kind(OTHER, ("*",), "settings, report and plots"),
)
"""Every kind. The last one has all files that belong to no other kind."""


@dataclass(frozen=True, slots=True)
class Use:
    """Disk usage of a kind of file.

    Attributes:
        kind: The kind.
        size_bytes: Size of its files; a file with several names (hard links) counts once.
        files: Number of its files.
    """

    kind: Kind
    size_bytes: int
    files: int


def uses(run_dir: Path, versions: Path | None = None) -> list[Use]:
    """Return the disk usage of each kind that has files, the largest first.

    Args:
        run_dir: The run's directory, also of a run that lives.
        versions: The directory of the run's versions; None: ``weights`` in the run's directory.

    Raises:
        OSError: if the run's directory cannot be read.
    """
    places = {each.name: each for each in run_dir.iterdir()}
    if versions is not None:
        places["weights"] = versions
    sizes: dict[str, list[int]] = {kind.name: [] for kind in KINDS}
    seen: set[tuple[int, int]] = set()
    for name, place in places.items():
        for status in _files(place):
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                sizes[kind_of(name).name].append(status.st_size)
    found = [Use(kind, sum(sizes[kind.name]), len(sizes[kind.name])) for kind in KINDS if sizes[kind.name]]
    return sorted(found, key=lambda use: -use.size_bytes)


def kind_of(name: str) -> Kind:
    """Return the kind of the file or folder of this name in a run's directory."""
    return next(kind for kind in KINDS if any(fnmatch(name, pattern) for pattern in kind.names))


def _files(place: Path) -> Iterator[os.stat_result]:
    """Yield the files at a place or below it. The place may be a link to another disk; links below it are not followed."""
    pending, follows = [place], True
    while pending:
        path = pending.pop()
        try:
            status = path.stat(follow_symlinks=follows)
            if stat.S_ISDIR(status.st_mode):
                pending += path.iterdir()
            elif stat.S_ISREG(status.st_mode):
                yield status
        except OSError:
            pass  # a live run removed it, or it belongs to another user
        follows = False


def is_held(directory: Path) -> bool:
    """Return whether a process holds the run in this directory.

    Raises:
        ConfigError: if the lock file cannot be opened.
    """
    if not os.path.lexists(directory / LOCK_FILE):
        return False
    with locked(directory) as is_ours:
        return not is_ours


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[bool]:
    """Lock a run while the block lasts; False if another process holds it."""
    path = directory / LOCK_FILE
    try:
        lock = host_files.open_private(path, os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise ConfigError(f"cannot open the lock {path}: {error.strerror}; choose another --output-dir") from error
    try:
        try:
            is_ours = host_files.lock_now(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise ConfigError(no_locks(directory, error)) from error
        yield is_ours
    finally:
        host_files.close(lock)
