"""Values that are made from files, such as a token or a certificate, and made again when the files change."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar
from weakref import WeakSet

from sluice.errors import ConfigError

LOOK_S = 1.0
"""Seconds between two checks whether files have changed. A check makes one system call per file."""

_REPLACED_MOST = 10
"""Most attempts to read files that change while they are read. A renewal replaces them once or twice."""

T = TypeVar("T")

Stamp: TypeAlias = tuple[tuple[int, int, int, int] | None, ...]
"""For each file its inode, size and times of change; None for one that cannot be found."""

log = logging.getLogger(__name__)

_unusable: WeakSet[FromFiles[Any]] = WeakSet()
_unusable_lock = threading.Lock()


def unusable_files() -> Counter[str]:
    """Count, by name, the values for which this process still uses the previous content because their files are broken."""
    with _unusable_lock:
        return Counter(value.what for value in _unusable)


class FromFiles(Generic[T]):
    """A value made from files. `current` returns the value of at most `LOOK_S` ago.

    When a file changes, the value is made again. If that fails, the last good value stays. If the files are still broken at the next
    check, a warning says why, and `unusable_files` counts the value. The first failure is ignored because one of several files may be
    written a moment after the others.

    Checks and reads block the calling thread, so the files should be on a disk that always answers: a local one, or memory.

    Args:
        what: Name of the value in log lines.
        files: The files that it is made from.
        make: Makes the value. It gets the value so far, or None at first.
        clock: Monotonic seconds.

    Attributes:
        what: Its name.

    Raises:
        ConfigError: if the first value cannot be made.
    """

    def __init__(
        self,
        what: str,
        files: Sequence[Path],
        make: Callable[[T | None], T],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self._files, self._make, self._clock = what, tuple(files), make, clock
        self._stamp, self._value = self._first()
        self._looked_s = clock()
        self._broken: Stamp | None = None
        self._warned: Stamp | None = None

    def _first(self) -> tuple[Stamp, T]:
        """Make the first value. Repeat this if the files were replaced meanwhile, since the contents may be of two different versions."""
        for _ in range(_REPLACED_MOST):
            stamp = _stamp(self._files)
            try:
                value = self._make(None)
            except (ConfigError, OSError):
                if _stamp(self._files) == stamp:
                    raise
            else:
                if _stamp(self._files) == stamp:
                    return stamp, value
        return _stamp(self._files), self._make(None)

    def current(self) -> T:
        """Return the value. Check the files first, unless that was done less than `LOOK_S` ago."""
        if self._clock() - self._looked_s >= LOOK_S:
            self.look()
        return self._value

    def look(self) -> bool:
        """Check the files now, and return whether the value was made again."""
        self._looked_s = self._clock()
        stamp = _stamp(self._files)
        if stamp == self._stamp:
            self._restored()
            return False
        try:
            value = self._make(self._value)
        except (ConfigError, OSError) as error:
            if self._broken == stamp != self._warned:
                self._warned = stamp
                with _unusable_lock:
                    _unusable.add(self)
                log.warning(
                    "the files of %s changed and cannot be used; what was read before stays in use: %s",
                    self.what,
                    error,
                )
            self._broken = stamp
            return False
        if _stamp(self._files) != stamp:  # replaced meanwhile: the contents may be of two versions
            return False
        self._stamp, self._value = stamp, value
        self._restored()
        log.info("the files of %s changed and were read again: %s", self.what, ", ".join(map(str, self._files)))
        return True

    def _restored(self) -> None:
        """Note that the files are good."""
        self._broken = self._warned = None
        with _unusable_lock:
            _unusable.discard(self)


def _stamp(files: Sequence[Path]) -> Stamp:
    return tuple(_stamp_of(path) for path in files)


def _stamp_of(path: Path) -> tuple[int, int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
