"""Confines its own process, then runs the code that it was given: what `sandbox.py` starts.

Landlock keeps it from all files but those of the interpreter, and from TCP; a seccomp filter from sockets, further processes, signals
to others, and calls of the kernel that a program which computes does not need; the bounding set from privileges. Nothing of that can be
taken back by the code. Numbers and structures: the kernel's headers (landlock.h, seccomp.h, filter.h, capability.h). Standard library
only; imported by `sandbox.py` for what both know.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import sys
from collections.abc import Iterable

READY = b"\x1dconfined\x1d"
"""Written to standard error when the code begins."""

NOT_CONFINED = "not confined: "

_SELF = "<code>"

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_DUMPABLE = 1, 38, 22, 24, 4
_SECCOMP_MODE_FILTER = 2

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_VERSION = 1
_EXECUTE, _READ_FILE, _READ_DIR, _WRITE_FILE = 1 << 0, 1 << 2, 1 << 3, 1 << 1
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All rights on files by the version of Landlock that has them first."""

_CALLS = {
    "x86_64": {
        "arch": 0xC000003E,
        "capset": 126,
        "clone": 56,
        "clone3": 435,
        "kill": 62,
        "tgkill": 234,
        "prlimit64": 302,
        "refused": {
            "socket": 41, "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "ptrace": 101, "tkill": 200,
            "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "process_vm_readv": 310, "process_vm_writev": 311,
            "pidfd_open": 434, "pidfd_send_signal": 424, "pidfd_getfd": 438, "process_madvise": 440, "process_mrelease": 448,
            "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "memfd_create": 319, "memfd_secret": 447,
            "shmget": 29, "shmat": 30, "semget": 64, "msgget": 68, "mq_open": 240,
            "add_key": 248, "request_key": 249, "keyctl": 250, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
            "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308, "open_tree": 428,
            "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
            "open_by_handle_at": 304, "name_to_handle_at": 303, "inotify_init": 253, "inotify_init1": 294, "fanotify_init": 300,
            "kexec_load": 246, "kexec_file_load": 320, "init_module": 175, "finit_module": 313, "delete_module": 176,
            "reboot": 169, "swapon": 167, "swapoff": 168, "sethostname": 170, "setdomainname": 171, "settimeofday": 164,
            "clock_settime": 227, "adjtimex": 159, "clock_adjtime": 305, "acct": 163, "quotactl": 179, "syslog": 103,
            "personality": 135, "iopl": 172, "ioperm": 173, "setpriority": 141, "sched_setscheduler": 144, "sched_setattr": 314,
            "ioprio_set": 251, "migrate_pages": 256, "move_pages": 279, "vhangup": 153, "lookup_dcookie": 212, "kcmp": 312,
            "chmod": 90, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452, "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260,
            "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190,
            "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "flock": 73, "setpgid": 109, "setsid": 112,
        },
    },
    "aarch64": {
        "arch": 0xC00000B7,
        "capset": 91,
        "clone": 220,
        "clone3": 435,
        "kill": 129,
        "tgkill": 131,
        "prlimit64": 261,
        "refused": {
            "socket": 198, "execve": 221, "execveat": 281, "ptrace": 117, "tkill": 130, "rt_sigqueueinfo": 138,
            "rt_tgsigqueueinfo": 240, "process_vm_readv": 270, "process_vm_writev": 271, "pidfd_open": 434,
            "pidfd_send_signal": 424, "pidfd_getfd": 438, "process_madvise": 440, "process_mrelease": 448, "io_uring_setup": 425,
            "io_uring_enter": 426, "io_uring_register": 427, "memfd_create": 279, "memfd_secret": 447, "shmget": 194, "shmat": 196,
            "semget": 190, "msgget": 186, "mq_open": 180, "add_key": 217, "request_key": 218, "keyctl": 219, "bpf": 280,
            "perf_event_open": 241, "userfaultfd": 282, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97,
            "setns": 268, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
            "mount_setattr": 442, "open_by_handle_at": 265, "name_to_handle_at": 264, "inotify_init1": 26, "fanotify_init": 262,
            "kexec_load": 104, "kexec_file_load": 294, "init_module": 105, "finit_module": 273, "delete_module": 106, "reboot": 142,
            "swapon": 224, "swapoff": 225, "sethostname": 161, "setdomainname": 162, "settimeofday": 170, "clock_settime": 112,
            "adjtimex": 171, "clock_adjtime": 266, "acct": 89, "quotactl": 60, "syslog": 116, "personality": 92,
            "setpriority": 140, "sched_setscheduler": 119, "sched_setattr": 274, "ioprio_set": 30, "migrate_pages": 238,
            "move_pages": 239, "vhangup": 58, "lookup_dcookie": 18, "kcmp": 272, "fchmod": 52, "fchmodat": 53, "fchmodat2": 452,
            "fchown": 55, "fchownat": 54, "utimensat": 88, "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14,
            "lremovexattr": 15, "fremovexattr": 16, "flock": 32, "setpgid": 154, "setsid": 157,
        },
    },
}  # fmt: skip
"""Numbers of system calls by machine. `refused` answer EPERM; of the others it depends on the arguments."""

_CLONE_THREAD = 0x00010000
_EPERM, _ENOSYS = 1, 38

_LD_WORD, _JEQ, _JSET, _JGE, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
"""Offsets in what a filter sees of a call."""

_X32 = 0x40000000
"""Calls of the x32 ABI have this bit; they would slip past the numbers."""


class NotConfinedError(Exception):
    """The kernel refused a part of the confinement."""


def landlock_abi() -> int:
    """Return the version of Landlock that the kernel has; 0 if it has none."""
    if not sys.platform.startswith("linux"):
        return 0
    abi: int = _libc().syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_LANDLOCK_VERSION))
    return max(0, abi)


def confine(readable: Iterable[str]) -> None:
    """Confine this process for good.

    Args:
        readable: Directories and files that it may read, if they are there.

    Raises:
        NotConfinedError: if the kernel refuses.
    """
    calls = _CALLS.get(platform.machine())
    if calls is None:
        raise NotConfinedError(f"there is no filter of system calls for {platform.machine()}")
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)
    _drop_privileges(int(calls["capset"]))  # type: ignore[call-overload]  # a number, as its name says
    _restrict_files(readable)
    _filter_calls(calls)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, *arguments: object) -> None:
    if _libc().prctl(option, *arguments, *(0,) * (4 - len(arguments))):
        raise NotConfinedError(f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def _drop_privileges(capset: int) -> None:
    """Give up all capabilities; root stays the owner of its files, and is nothing more."""
    libc = _libc()
    for capability in range(64):
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            break  # no such capability, or one that was not to be had
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if libc.syscall(capset, ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())):
        raise NotConfinedError(f"capset: {os.strerror(ctypes.get_errno())}")


def _restrict_files(readable: Iterable[str]) -> None:
    """Leave what is readable, by Landlock; with version 4 also refuse TCP, with 6 signals and abstract sockets of others."""
    abi = landlock_abi()
    if not abi:
        return  # bubblewrap is around this process: `sandbox.py` has checked
    libc = _libc()
    rights = _FILE_RIGHTS[max(version for version in _FILE_RIGHTS if version <= abi)]
    attributes = [rights, *([3] if abi >= 4 else []), *([3] if abi >= 6 else [])]
    ruleset = (ctypes.c_uint64 * len(attributes))(*attributes)
    descriptor = libc.syscall(
        _LANDLOCK_CREATE, ctypes.byref(ruleset), ctypes.c_size_t(8 * len(attributes)), ctypes.c_uint32(0)
    )
    if descriptor < 0:
        raise NotConfinedError(f"landlock_create_ruleset: {os.strerror(ctypes.get_errno())}")
    for path in readable:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        allowed = _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)  # noqa: PTH112 - pathlib is not loaded
        rule = allowed.to_bytes(8, "little") + place.to_bytes(4, "little")
        if libc.syscall(_LANDLOCK_ADD, descriptor, 1, ctypes.c_char_p(rule), ctypes.c_uint32(0)):
            raise NotConfinedError(f"landlock_add_rule for {path}: {os.strerror(ctypes.get_errno())}")
        os.close(place)
    if libc.syscall(_LANDLOCK_RESTRICT, descriptor, ctypes.c_uint32(0)):
        raise NotConfinedError(f"landlock_restrict_self: {os.strerror(ctypes.get_errno())}")
    os.close(descriptor)


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


def _filter_calls(calls: dict[str, object]) -> None:
    """Install the filter: it sees the number and the arguments of each call."""
    own = os.getpid()
    steps: list[tuple[int, int, int, int]] = [
        (_LD_WORD, 0, 0, _ARCH),
        (_JEQ, 1, 0, int(calls["arch"])),  # type: ignore[call-overload]
        (_RETURN, 0, 0, _KILL),
        (_LD_WORD, 0, 0, _NUMBER),
        (_JGE, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for number in calls["refused"].values():  # type: ignore[attr-defined]
        steps += [(_JEQ, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    steps += [(_JEQ, 0, 1, int(calls["clone3"])), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]  # type: ignore[call-overload]  # glibc then clones
    steps += [
        (_JEQ, 0, 4, int(calls["clone"])),  # type: ignore[call-overload]
        (_LD_WORD, 0, 0, _ARGUMENTS),
        (_JSET, 0, 1, _CLONE_THREAD),  # threads alone
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
    ]
    for name, own_too in (("kill", 0), ("tgkill", 0), ("prlimit64", 1)):
        steps += [
            (_JEQ, 0, 4 + own_too, int(calls[name])),  # type: ignore[call-overload]
            (_LD_WORD, 0, 0, _ARGUMENTS),
            *([(_JEQ, 1, 0, 0)] if own_too else []),
            (_JEQ, 0, 1, own),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _ERRNO | _EPERM),
        ]
    steps.append((_RETURN, 0, 0, _ALLOW))
    program = (_Instruction * len(steps))(*(_Instruction(*step) for step in steps))
    whole = _Program(len(steps), program)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(whole))


def _read_exactly(count: int) -> bytes:
    found = b""
    while len(found) < count:
        chunk = os.read(0, count - len(found))
        if not chunk:
            raise EOFError("the process that started this one has ended")
        found += chunk
    return found


def _asked() -> dict[str, object]:
    """Read what to run; what follows on standard input is the code's."""
    length = b""
    while not length.endswith(b"\n"):
        length += _read_exactly(1)
    asked: dict[str, object] = json.loads(_read_exactly(int(length)))
    return asked


def main() -> None:
    """Confine this process and run the code in it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    asked = _asked()
    libraries = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
    readable = [os.path.dirname(os.__file__), sys.base_exec_prefix + "/lib", *libraries]  # noqa: PTH120 - pathlib is not loaded
    if asked["packages"]:
        packages = f"{sys.prefix}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        sys.path.append(packages)
        readable.append(packages)
    memory, cpu_s = int(str(asked["memory_mib"])) << 20, float(str(asked["cpu_s"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (max(1, round(cpu_s)), max(1, round(cpu_s)) + 1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if asked["confined"]:
        try:
            confine(readable)
        except NotConfinedError as error:
            sys.stderr.write(f"{NOT_CONFINED}{error}")
            sys.exit(1)
    sys.stderr.flush()
    os.write(2, READY)
    code = compile(str(asked["code"]), _SELF, "exec", dont_inherit=True)
    sys.argv = [_SELF]
    del asked
    exec(code, {"__name__": "__main__", "__builtins__": __builtins__})  # noqa: S102 - what this is for


if __name__ == "__main__":
    main()
