"""Which file system a directory lies on, and what a run needs that it lacks: memory that processes share, locks between machines.

The journal is an SQLite database with a write-ahead log (https://sqlite.org/wal.html): its readers and its writer share memory
through a mapped file, and so must run on one machine. A second orchestrator is kept out by a file lock (flock(2)). `mounted_at` and
`problem_of` are pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePath

MOUNTS = Path("/proc/self/mountinfo")
"""What is mounted where, see proc(5); only Linux has it."""

_NETWORK = frozenset(
    {
        *(
            "nfs",
            "nfs4",
            "cifs",
            "smb3",
            "smbfs",
            "9p",
            "virtiofs",
            "vboxsf",
            "prl_fs",
            "afs",
            "ceph",
            "lustre",
            "gpfs",
            "beegfs",
        ),
        *("orangefs", "pvfs2", "ocfs2", "gfs2", "glusterfs"),
    }
)
"""Names of file systems that other machines write to, too."""

_SANDBOX_ROOTS = frozenset({"9p", "virtiofs"})
"""File systems at the root of sandboxes and light virtual machines. No other machine uses such a root."""

_LOCAL_FUSE = frozenset(
    {
        *(
            "fuse.fuse-overlayfs",
            "fuse.mergerfs",
            "fuse.bindfs",
            "fuse.encfs",
            "fuse.gocryptfs",
            "fuse.lxcfs",
            "fuse.ntfs-3g",
        ),
        "fuse.unionfs",
    }
)
"""FUSE file systems that keep their files on this machine. Files of other FUSE file systems may be anywhere."""

_OBJECT_STORES = frozenset(
    {"s3fs", "goofys", "mountpoint-s3", "mount-s3", "gcsfuse", "rclone", "blobfuse", "blobfuse2", "ossfs", "geesefs"}
)
"""Programs that show an object store as files. Such files cannot be written in place, mapped, or locked."""

_LOCAL_LOCKS = frozenset(
    {"nolock", "local_lock=all", "local_lock=flock", "local_lock=posix", "localflock", "noflock", "nobrl"}
)
"""Mount options (nfs(5), mount.cifs(8), mount.lustre(8)) with which other machines do not see a lock."""


@dataclass(frozen=True, slots=True)
class Mounted:
    """What is mounted where a directory lies.

    Attributes:
        kind: The kernel's name of the file system, such as ``nfs4`` or ``fuse.sshfs``.
        at: Where it is mounted.
        source: What is mounted, such as ``server:/export``.
        options: Options of the mount and of the file system.
    """

    kind: str
    at: PurePath
    source: str = ""
    options: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class FileSystemProblem:
    """What is wrong with a file system for a run's directory.

    Attributes:
        fatal: Whether no run can work there. Otherwise a run may work.
        found: What was found.
        remedy: What to do.
    """

    fatal: bool
    found: str
    remedy: str


def check_file_system(directory: Path, mounts: Path | None = None) -> FileSystemProblem | None:
    """Return what is wrong with the file system of a directory, which need not exist yet; None if no problem is known."""
    try:
        mountinfo = (mounts or MOUNTS).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None  # not Linux
    mounted = mounted_at(directory.resolve(), mountinfo)
    return None if mounted is None else problem_of(directory, mounted)


def mounted_at(path: PurePath, mountinfo: str) -> Mounted | None:
    """Return what is mounted where a path lies, None if nothing is. Pure.

    Args:
        path: Absolute, without symbolic links.
        mountinfo: Content of ``/proc/self/mountinfo``.
    """
    found = None
    for line in mountinfo.splitlines():
        mount, separator, file_system = line.partition(" - ")
        before, after = mount.split(" "), file_system.split(" ")
        if not separator or len(before) < 6 or len(after) < 3:
            continue
        at = PurePath(_unescaped(before[4]))
        # If two are mounted at one place, the later one hides the earlier one.
        if path.is_relative_to(at) and (found is None or len(at.parts) >= len(found.at.parts)):
            options = frozenset((*before[5].split(","), *after[2].split(",")))
            found = Mounted(after[0], at, _unescaped(after[1]), options)
    return found


def problem_of(directory: PurePath, mounted: Mounted) -> FileSystemProblem | None:
    """Return what is wrong with a file system for a run's directory; None if no problem is known. Pure."""
    kind = mounted.kind
    is_fuse = kind == "fuse" or kind.startswith("fuse.")
    where = f"{directory} is on {kind}, mounted at {mounted.at}"
    if is_fuse and {kind.removeprefix("fuse."), mounted.source} & _OBJECT_STORES:
        return FileSystemProblem(
            True,
            f"{where}: an object store, whose files cannot be appended to in place, mapped or locked, as the journal needs",
            "put the run's directory (output_dir) on a local disk; weightsync.mirror copies versions to an object store",
        )
    of_sandbox = kind in _SANDBOX_ROOTS and mounted.at == PurePath("/")
    if of_sandbox or (kind not in _NETWORK and not (is_fuse and kind not in _LOCAL_FUSE)):
        return None
    found = (
        f"{where}: a network file system. The journal's write-ahead log needs memory that processes share, which only those of one"
        " machine do"
    )
    remedy = (
        "put the run's directory (output_dir) on a local disk; or run the orchestrator on one machine only, and read the run"
        " (`sluice audit`, `report`, `trace`) on no other while it lives"
    )
    if without := sorted(mounted.options & _LOCAL_LOCKS):
        found += (
            f". It is mounted with {', '.join(without)}: a second orchestrator on another machine would not be noticed"
        )
        remedy += f"; mount it without {', '.join(without)}"
    return FileSystemProblem(False, found, remedy)


def no_locks(directory: PurePath, error: OSError) -> str:
    """Return the message that a file in this directory cannot be locked."""
    return (
        f"the file system of {directory} has no file locks ({error.strerror}), which keep a second process out of the run: put the run's"
        " directory (output_dir) on a local disk, or mount the file system with locks"
    )


def _unescaped(text: str) -> str:
    r"""Decode a path of mountinfo, in which spaces and some other characters are escaped, such as ``\040``."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
