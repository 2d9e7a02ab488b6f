"""Confines its own process, then runs the code that it was given: what `sandbox.py` starts.

Landlock keeps it from all files but those of the interpreter. A seccomp filter keeps it from everything that changes files, from sockets,
further processes, signals to others, and calls of the kernel that a program which computes does not need; it asks `sandbox.py` about each
thread. The filter alone stops what Landlock learned after its first version, so that all kernels with Landlock confine alike. Privileges
are given up. Nothing of that can be taken back by the code. Numbers and structures: the kernel's headers (landlock.h, seccomp.h, filter.h,
capability.h). Standard library only; imported by `sandbox.py` for what both know.
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

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from typing import Any

READY = b"\x1dconfined\x1d"
"""Written to standard error when the code begins."""

NOT_CONFINED = "not confined: "

_SELF = "<code>"

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP, _PR_SET_DUMPABLE = 1, 38, 24, 4

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_VERSION = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All rights on files by the version of Landlock that has them first."""

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Where the tables below have the numbers of a machine, and what seccomp calls it."""

_Numbers = tuple[int | None, int | None]

_REFUSED: dict[str, _Numbers] = {
    # files: what changes them; `_rules` refuses to open one for writing
    "creat": (85, None), "truncate": (76, 45), "ftruncate": (77, 46), "fallocate": (285, 47), "mkdir": (83, None),
    "mkdirat": (258, 34), "mknod": (133, None), "mknodat": (259, 33), "rename": (82, None), "renameat": (264, 38),
    "renameat2": (316, 276), "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
    "unlink": (87, None), "unlinkat": (263, 35), "rmdir": (84, None), "chmod": (90, None), "fchmod": (91, 52),
    "fchmodat": (268, 53), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11),
    "llistxattr": (195, 12), "flistxattr": (196, 13), "flock": (73, 32), "sync": (162, 81), "syncfs": (306, 267),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "inotify_init": (253, None), "inotify_init1": (294, 26),
    "fanotify_init": (300, 262), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "quotactl": (179, 60), "quotactl_fd": (443, 443), "uselib": (134, None),
    # sockets, beside a pair of its own
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242),
    # other processes, and what they share
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "kcmp": (312, 272), "setpriority": (141, 140), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "ioprio_set": (251, 30), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "setpgid": (109, 154), "setsid": (112, 157), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193), "semtimedop": (220, 192), "semctl": (66, 191),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180),
    "mq_unlink": (241, 181), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # memory that its limit does not count, and the kernel
    "memfd_create": (319, 279), "io_setup": (206, 0), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "userfaultfd": (323, 282), "bpf": (321, 280), "perf_event_open": (298, 241),
    "unshare": (272, 97), "setns": (308, 268), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "sethostname": (170, 161), "setdomainname": (171, 162),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "acct": (163, 89), "syslog": (103, 116), "personality": (135, 92), "iopl": (172, None), "ioperm": (173, None),
    "modify_ldt": (154, None), "vhangup": (153, 58), "lookup_dcookie": (212, 18),

}  # fmt: skip
"""Calls that answer EPERM; None where a machine does not have them."""

_MISSING: dict[str, _Numbers] = {"clone3": (435, 435), "openat2": (437, 437)}
"""Calls that answer ENOSYS, since a filter cannot see their arguments. Programs then use those that came before."""

_UNKNOWN = 447
"""So does every call from this number on: none is in Linux 5.13, with which programs have to work, and what a later one does is not known."""

_CLONE_THREAD = 0x00010000
_WRITING = 0o3 | 0o100 | 0o1000
"""Bits of the flags of open: the access mode, of which 3 is neither reading nor writing and needs no right of Landlock, O_CREAT, and O_TRUNC,
which also empties what is opened for reading."""

_WHOLE = 0xFFFFFFFF
_EPERM, _EACCES, _ENOSYS = 1, 13, 38

_LD_WORD, _AND, _JUMP, _JEQ, _JGE, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_ALLOW, _ASK, _ERRNO, _KILL = 0x7FFF0000, 0x7FC00000, 0x00050000, 0x80000000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
"""Offsets in what a filter sees of a call."""

_SECCOMP: _Numbers = (317, 277)
_CAPSET: _Numbers = (126, 91)
_SET_MODE_FILTER, _NEW_LISTENER = 1, 1 << 3

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


def confine(readable: Iterable[str], landlock: int) -> int:
    """Confine this process for good.

    Args:
        readable: Directories and files that it may read, if they are there.
        landlock: Version of Landlock to use; 0 uses none.

    Returns:
        A descriptor on which the kernel asks whether another thread may start (seccomp_unotify(2)).

    Raises:
        NotConfinedError: if the kernel refuses.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise NotConfinedError(f"there is no filter of system calls for {platform.machine()}")
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)
    _drop_privileges(_CAPSET[machine[0]])
    if landlock:
        _restrict_files(readable, landlock)
    return _filter_calls(*machine)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, *arguments: object) -> None:
    if _libc().prctl(option, *arguments, *(0,) * (4 - len(arguments))):
        raise NotConfinedError(f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def _drop_privileges(capset: int | None) -> None:
    """Give up all capabilities; root stays the owner of its files, and is nothing more."""
    libc = _libc()
    for capability in range(64):
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            break  # no such capability, or one that was not to be had
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if libc.syscall(capset, ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())):
        raise NotConfinedError(f"capset: {os.strerror(ctypes.get_errno())}")


def _restrict_files(readable: Iterable[str], abi: int) -> None:
    """Leave what is readable, by Landlock; with version 4 also refuse TCP, with 6 signals and abstract sockets of others."""
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


_Rule = tuple[_Numbers, int, int, tuple[tuple[int, int, tuple[int, ...], bool], ...]]
"""Numbers of a call; the answer if all conditions hold, the errno otherwise; the conditions: a position of an argument, the bits of it that count,
values, and whether it must have one of them or none."""


def _rules(own: int) -> tuple[_Rule, ...]:
    """Return the calls about which the arguments decide. `own` is this process."""
    return (
        ((2, None), _ALLOW, _EACCES, ((1, _WRITING, (0,), True),)),  # open
        ((257, 56), _ALLOW, _EACCES, ((2, _WRITING, (0,), True),)),  # openat
        # fcntl: duplicates and flags of descriptors. Not F_SETOWN, F_SETOWN_EX, F_SETSIG, leases and notices, by which the kernel signals others
        # or makes them wait; nor locks, nor larger pipes.
        ((72, 25), _ALLOW, _EPERM, ((1, _WHOLE, (0, 1, 2, 3, 4, 9, 1030, 1032), True),)),
        # ioctl: what isatty and the size of a terminal ask, FIONREAD, FIONBIO, FIOCLEX and FIONCLEX. FIOSETOWN is F_SETOWN.
        ((16, 29), _ALLOW, _EPERM, ((1, _WHOLE, (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451), True),)),
        # socketpair: AF_UNIX, SOCK_STREAM, as asyncio has it. A pair of datagrams could send to any address.
        ((53, 199), _ALLOW, _EPERM, ((0, _WHOLE, (1,), True), (1, 0xF, (1,), True))),
        ((62, 129), _ALLOW, _EPERM, ((0, _WHOLE, (own,), True),)),  # kill
        ((234, 131), _ALLOW, _EPERM, ((0, _WHOLE, (own,), True),)),  # tgkill
        ((302, 261), _ALLOW, _EPERM, ((0, _WHOLE, (0, own), True),)),  # prlimit64
        ((203, 122), _ALLOW, _EPERM, ((0, _WHOLE, (0, own), True),)),  # sched_setaffinity
        # prctl: not PR_SET_PDEATHSIG, with which it would outlive its parent, PR_SET_DUMPABLE and PR_SCHED_CORE.
        ((157, 167), _ALLOW, _EPERM, ((0, _WHOLE, (1, 4, 62), False),)),
        (
            (56, 220),
            _ASK,
            _EPERM,
            ((0, _CLONE_THREAD, (_CLONE_THREAD,), True),),
        ),  # clone: threads alone, and not too many
    )


_Steps = list[tuple[int, int, int, int]]


def _steps(rule: _Rule, machine: int) -> _Steps:
    """Return the part of the filter for a rule."""
    numbers, answer, error, conditions = rule
    number = numbers[machine]
    if number is None:
        return []
    body: _Steps = []
    for argument, bits, values, holds in conditions:
        body += [(_LD_WORD, 0, 0, _ARGUMENTS + 8 * argument), (_AND, 0, 0, bits)]
        body += [(_JEQ, len(values) - index, 0, value) for index, value in enumerate(values)]
        body += [(_RETURN, 0, 0, _ERRNO | error)] if holds else [(_JUMP, 0, 0, 1), (_RETURN, 0, 0, _ERRNO | error)]
    return [(_JEQ, 0, len(body) + 1, number), *body, (_RETURN, 0, 0, answer)]


def _answered(calls: dict[str, _Numbers], machine: int, error: int) -> _Steps:
    """Return the part of the filter that answers calls with an error."""
    numbers = [each[machine] for each in calls.values() if each[machine] is not None]
    jumps = [(_JEQ, len(numbers) - index, 0, int(number or 0)) for index, number in enumerate(numbers)]
    return [*jumps, (_JUMP, 0, 0, 1), (_RETURN, 0, 0, _ERRNO | error)]


def _filter(machine: int, architecture: int, own: int) -> _Steps:
    """Return the filter: it sees the number and the arguments of each call. `own` is the process that it is for."""
    return [
        (_LD_WORD, 0, 0, _ARCH),
        (_JEQ, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LD_WORD, 0, 0, _NUMBER),
        (_JGE, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        (_JGE, 0, 1, _UNKNOWN),
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
        *_answered(_REFUSED, machine, _EPERM),
        *_answered(_MISSING, machine, _ENOSYS),
        *(step for rule in _rules(own) for step in _steps(rule, machine)),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _filter_calls(machine: int, architecture: int) -> int:
    """Install the filter; return the descriptor on which it asks."""
    steps = _filter(machine, architecture, os.getpid())
    program = (_Instruction * len(steps))(*(_Instruction(*step) for step in steps))
    whole = _Program(len(steps), program)
    descriptor: int = _libc().syscall(_SECCOMP[machine], _SET_MODE_FILTER, _NEW_LISTENER, ctypes.byref(whole))
    if descriptor < 0:
        raise NotConfinedError(
            f"seccomp: {os.strerror(ctypes.get_errno())}. It needs Linux 5.5 or newer, and a container whose calls no other program answers"
        )
    return descriptor


def _hand_over(descriptor: int, link: int) -> None:
    """Give a descriptor to the process that started this one, by a socket, and close both here."""
    import _socket  # noqa: PLC0415 - without the module around it, which is slow to import

    there = _socket.socket(fileno=link)
    there.sendmsg([b"!"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptor.to_bytes(4, sys.byteorder))])
    there.close()
    os.close(descriptor)


def _read_exactly(count: int) -> bytes:
    found = b""
    while len(found) < count:
        chunk = os.read(0, count - len(found))
        if not chunk:
            raise EOFError("the process that started this one has ended")
        found += chunk
    return found


def _asked() -> dict[str, Any]:
    """Read what to run; what follows on standard input is the code's."""
    length = b""
    while not length.endswith(b"\n"):
        length += _read_exactly(1)
    asked: dict[str, Any] = json.loads(_read_exactly(int(length)))
    return asked


def main() -> None:
    """Confine this process and run the code in it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    asked = _asked()
    sys.path += asked["packages"]
    memory, cpu_s = asked["memory_mib"] << 20, asked["cpu_s"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (max(1, round(cpu_s)), max(1, round(cpu_s)) + 1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if asked["confined"]:
        try:
            _hand_over(confine(asked["readable"], asked["landlock"]), asked["link"])
        except NotConfinedError as error:
            sys.stderr.write(f"{NOT_CONFINED}{error}")
            sys.exit(1)
    sys.stderr.flush()
    os.write(2, READY)
    code = compile(asked["code"], _SELF, "exec", dont_inherit=True)
    sys.argv = [_SELF]
    del asked
    exec(code, {"__name__": "__main__", "__builtins__": __builtins__})  # noqa: S102 - what this is for


if __name__ == "__main__":
    main()
