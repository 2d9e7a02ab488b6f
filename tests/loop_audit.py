"""Sees work on files that a test's event loop does itself instead of a thread, by Python's audit events."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

_CHANGES = {
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.truncate",
    "os.mkdir",
    "os.link",
    "shutil.rmtree",
    "shutil.copyfile",
}
_watched: dict[int, list[str]] = {}


def _hear(event: str, args: tuple[object, ...]) -> None:
    found = _watched.get(threading.get_ident())
    if found is None:
        return
    written = event == "open" and isinstance(args[2], int) and args[2] & 0o3 != 0
    if event in _CHANGES or written:
        found.append(f"{event}{args} in\n{''.join(traceback.format_stack(limit=8)[:-1])}")


sys.addaudithook(_hear)  # cannot be taken back; costs nothing for threads that are not watched


@contextmanager
def file_changes_of_this_thread() -> Iterator[list[str]]:
    """Collect what this thread changes in the file system until the block ends, each with its stack."""
    _watched[threading.get_ident()] = found = []
    try:
        yield found
    finally:
        del _watched[threading.get_ident()]
