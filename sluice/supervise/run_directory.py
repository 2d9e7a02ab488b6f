"""The directory ``outputs/<run>``: locked by one supervisor at a time, and never overwritten by another run."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from sluice import host_files
from sluice.config import ConfigError, RunConfig, dump_toml

__all__ = ["claim", "describe_resume", "is_held", "newest_checkpoint", "write_settings"]

CONFIG_FILE = "config.toml"
LOCK_FILE = ".lock"
JOURNAL_FILE = "journal.sqlite"
"""Written by the orchestrator. A run without it never began, for example because its settings were wrong."""


@contextlib.contextmanager
def claim(run: RunConfig, *, resume: bool) -> Iterator[Path]:
    """Lock the run's directory while the block lasts.

    Args:
        run: The run.
        resume: Resume the run if it exists; otherwise start it.

    Raises:
        ConfigError: if the run exists and `resume` is False, or another process runs it.
    """
    directory = run.run_dir
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror}; choose another --output-dir") from error
    with _locked(directory) as locked:
        if not locked:
            raise ConfigError(
                f"another process runs {run.run!r} in {directory}: stop it, or choose another name with --run NAME"
            )
        if (directory / JOURNAL_FILE).exists() and not resume:
            raise ConfigError(
                f"run {run.run!r} exists in {directory}: continue it with --resume, or choose another with --run NAME"
            )
        yield directory


def is_held(directory: Path) -> bool:
    """Return whether a process holds the run in this directory.

    Raises:
        ConfigError: if the lock file cannot be opened.
    """
    if not os.path.lexists(directory / LOCK_FILE):
        return False
    with _locked(directory) as locked:
        return not locked


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Lock a run while the block lasts; False if another process holds it.

    Raises:
        ConfigError: if the lock file cannot be opened.
    """
    path = directory / LOCK_FILE
    try:
        lock = host_files.open_private(path, os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise ConfigError(f"cannot open the lock {path}: {error.strerror}; choose another --output-dir") from error
    try:
        yield host_files.lock_now(lock, fcntl.LOCK_EX)
    finally:
        host_files.close(lock)


def newest_checkpoint(directory: Path) -> str:
    """Return the name of a run's newest complete checkpoint, such as ``step_50``; empty without one."""
    complete = [path.parent.name for path in directory.glob("checkpoints/step_*/manifest.json")]
    return max(complete, key=lambda name: int(name.removeprefix("step_")), default="")


def describe_resume(directory: Path) -> str:
    """Return where `--resume` starts, for people."""
    if not (directory / JOURNAL_FILE).exists():
        return f"there is no run in {directory} to resume: starting a new one"
    checkpoint = newest_checkpoint(directory)
    if not checkpoint:
        return f"the run in {directory} has no checkpoint: training starts at step 0"
    return f"resumes from {checkpoint} of {directory}"


def write_settings(run: RunConfig) -> Path:
    """Write the resolved settings to the run's directory, without secrets, and return the file."""
    path = run.run_dir / CONFIG_FILE
    host_files.write_whole(path, dump_toml(run))
    return path
