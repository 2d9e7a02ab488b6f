"""Files that processes of one host share: the host's identity, file locks, removal of files of dead processes, files that a peer names.

Directories such as ``/dev/shm`` are writable by everybody, so a name in them proves nothing: before anything is read or
removed, the file itself is opened without following a symbolic link, and its type and owner are checked. All calls block.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import structlog

_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Follow no symbolic link, wait for no pipe, and do not pass to a program that this process starts."""

_open: set[int] = set()
"""Descriptors that a forked child closes. In an engine's process they would keep locks held and removed files in memory."""

log = structlog.get_logger(__name__)


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""The kernel's name of this boot. It is the same in all containers of a machine, unlike host names and machine ids."""


def host_id(boot_id: Path = BOOT_ID) -> str:
    """Return a name of this machine, equal in all its processes and different on every other machine: 32 hexadecimal digits.

    If the kernel gives no boot id (sandboxes, other systems), the name is derived from the host name instead.
    """
    try:
        seed = boot_id.read_text().strip()
    except OSError:
        seed = ""
    # A digest, because the boot id must not leave this machine.
    return hashlib.blake2b((seed or socket.gethostname()).encode(), digest_size=16, person=b"sluice-host").hexdigest()


class PeerFileError(Exception):
    """The file that a peer named must not be read here; the message says why."""


def open_private(path: Path | str, flags: int, *, directory: int | None = None) -> int:
    """Open a file; if it is created, only this user may use it. A forked child does not keep it. Close it with `close`.

    Args:
        path: The file.
        flags: As for `os.open`; a symbolic link at the end of the path is never followed.
        directory: Descriptor of the directory that a relative path starts from.
    """
    descriptor = os.open(path, flags | _SAFE, 0o600, dir_fd=directory)
    _open.add(descriptor)
    return descriptor


def close(descriptor: int) -> None:
    """Close what `open_private` opened; this releases its lock."""
    _open.discard(descriptor)
    os.close(descriptor)


def lock_now(descriptor: int, kind: int) -> bool:
    """Take a file lock (flock(2), which ends with its process) without waiting. Return False if another process holds it.

    Its kind is ``fcntl.LOCK_SH`` or ``fcntl.LOCK_EX``.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
            raise
        return False
    return True


def is_at(descriptor: int, path: Path | str, *, directory: int | None = None) -> bool:
    """Return whether the open file still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, dir_fd=directory, follow_symlinks=False))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def owned_directory(path: Path) -> Iterator[int | None]:
    """Open a directory to remove files in it by their names.

    Returns:
        Its descriptor, for ``dir_fd`` arguments. None if there is no such directory, if the path is a symbolic link, or if
        another user owns it: then remove nothing in it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFE)
    except OSError:
        yield None
        return
    try:
        yield descriptor if os.fstat(descriptor).st_uid == os.getuid() else None
    finally:
        os.close(descriptor)


def unlink_at(directory: int, name: str) -> None:
    """Remove a name from an open directory; do nothing if it is not there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)


def remove_unlocked(path: Path | str, *, directory: int | None = None) -> bool:
    """Remove a regular file of this user that no process has locked. Return whether it was removed.

    A relative path starts from the open `directory`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _SAFE, dir_fd=directory)
    except OSError:  # a symbolic link, another user's, or removed in the meantime
        return False
    try:
        if not _is_own_file(os.fstat(descriptor)) or not lock_now(descriptor, fcntl.LOCK_EX):
            return False
        if not is_at(descriptor, path, directory=directory):
            return False
        os.unlink(path, dir_fd=directory)
    finally:
        os.close(descriptor)
    return True


def remove_tree(path: Path) -> bool:
    """Remove a directory and everything in it. Symbolic links in it are removed, never followed.

    Two threads may remove the same directory. What cannot be removed is logged.

    Returns:
        Whether the directory is gone. A path that is a symbolic link or a file is not removed.
    """

    def note(
        _function: Callable[..., object], where: str, why: tuple[type[BaseException], BaseException, object]
    ) -> None:
        if not isinstance(why[1], FileNotFoundError):  # another thread was faster
            failures.append(f"{where}: {why[1]}")

    failures: list[str] = []
    shutil.rmtree(path, onerror=note)
    if failures:
        log.warning("a directory could not be removed", path=str(path), error=failures[0], failures=len(failures))
    return not failures


def open_peer_file(path: str, device: int, inode: int, size: int, *, below: Path | None = None) -> int:
    """Open a file that another process of this host named, to read it in place of a transfer.

    Args:
        path: Its name, which the peer may have chosen freely.
        device: Number of the device that it lies on.
        inode: Number of the file on that device. The two numbers distinguish the file from another file of the same name, such as one
            in another container.
        size: Bytes that it must have.
        below: Directory in which it must lie; None allows every directory.

    Returns:
        A descriptor; close it with `os.close`.

    Raises:
        PeerFileError: if it cannot be opened, is not a regular file of this user or of root, is not the file that was named,
            or lies elsewhere.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _SAFE)
    except (OSError, ValueError) as error:
        raise PeerFileError(f"{path} cannot be opened ({error})") from error
    status = os.fstat(descriptor)
    # Ask the kernel for the real path, because a directory on the path may be a symbolic link.
    found = Path(f"/proc/self/fd/{descriptor}").readlink()
    why_not = ""
    if (status.st_dev, status.st_ino) != (device, inode):
        why_not = "is another file on this host"
    elif not stat.S_ISREG(status.st_mode):
        why_not = "is not a regular file"
    elif status.st_uid not in {os.getuid(), 0}:
        why_not = f"belongs to user {status.st_uid}; only files of this user or of root are read"
    elif status.st_size != size:
        why_not = f"has {status.st_size} bytes, not {size}"
    elif below is not None and not found.is_relative_to(below.resolve()):
        why_not = f"does not lie below {below}"
    if why_not:
        os.close(descriptor)
        raise PeerFileError(f"{path} {why_not}")
    return descriptor


def rotate(paths: Sequence[Path]) -> None:
    """Make room for a new file at the first of these paths: each file takes the path after its own, and the last one is removed.

    Raises:
        OSError: if the directory cannot be written to.
    """
    if len(paths) == 1:
        paths[0].unlink(missing_ok=True)
    # A rotation that was killed leaves a gap. Files behind the gap stay where they are, so that the oldest is not removed too early.
    gap = next((number for number, path in enumerate(paths) if number and not path.exists()), len(paths))
    for newer, older in reversed(list(pairwise(paths[: gap + 1]))):
        newer.rename(older)


def write_whole(path: Path, text: str | Iterable[str]) -> None:
    """Write a text, given whole or in parts, to a file that appears complete or not at all.

    An existing file of this name, or of the name of the temporary file, is replaced.

    Raises:
        OSError: if the directory cannot be written to.
    """
    temporary = path.with_name(f".{path.name}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o644)
    with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor, not a path
        file.writelines((text,) if isinstance(text, str) else text)
    temporary.replace(path)


@contextlib.contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory beside the target. It is renamed when the block ends, and removed if the block raises.

    Raises:
        FileExistsError: if the target exists.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists: remove it or choose another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        yield staging
        for path in (staging, *staging.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)  # mkdtemp and safetensors write for the owner alone
        staging.rename(directory)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _is_own_file(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()


def _close_in_child() -> None:
    for descriptor in _open:
        os.close(descriptor)
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)
