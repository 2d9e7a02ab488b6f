"""Actions that code in the sandbox must not be able to do, and actions that it can do. Each program prints ESCAPED if it succeeds.

Fields in braces are filled in by the test: `victim` is a file, `link` a link to it, `readable` a file that the sandbox may read, `unix` and
`datagram` are sockets, `port` is a TCP server, `memory` the number of a shared memory segment.
"""

GROUPS = {
    "files": {
        "read a file of the machine": "print(open('/etc/passwd').read() and 'ESCAPED')",
        "read the environment of the process that started it": "import os; print(open('/proc/%d/environ' % os.getppid()).read() and 'ESCAPED')",
        "list a directory": "import os; print(os.listdir(os.path.dirname({victim!r})) and 'ESCAPED')",
        "write a file": "open('/tmp/sluice-escaped', 'w').write('x'); print('ESCAPED')",
        "write beside the interpreter's files": "import os; open(os.path.dirname(os.__file__) + '/escaped', 'w').write('x'); print('ESCAPED')",
        "empty a file": "import os; os.truncate({victim!r}, 0); print('ESCAPED')",
        "empty a file that it may read": "import os; os.open({readable!r}, os.O_RDONLY | os.O_TRUNC); print('ESCAPED')",
        "empty a file by opening it neither to read nor to write": "import os; os.open({victim!r}, os.O_ACCMODE | os.O_TRUNC); print('ESCAPED')",
        "enlarge a file": "import os; os.truncate({victim!r}, 1 << 20); print('ESCAPED')",
        "make a directory": "import os; os.mkdir('/tmp/sluice-directory'); print('ESCAPED')",
        "make a pipe with a name": "import os; os.mkfifo('/tmp/sluice-pipe'); print('ESCAPED')",
        "make a link": "import os; os.symlink('/etc/passwd', '/tmp/sluice-link'); print('ESCAPED')",
        "make a second name of a file": "import os; os.link({readable!r}, {readable!r} + '-2'); print('ESCAPED')",
        "rename a file": "import os; os.rename({victim!r}, {victim!r} + '-2'); print('ESCAPED')",
        "delete a file": "import os; os.unlink({victim!r}); print('ESCAPED')",
        "change the rights of a file": "import os; os.chmod({victim!r}, 0o777); print('ESCAPED')",
        "change the times of a file": "import os; os.utime({victim!r}); print('ESCAPED')",
        "set an extended attribute": "import os; os.setxattr({victim!r}, 'user.x', b'x'); print('ESCAPED')",
        "set an extended attribute by the call of Linux 6.13": "import ctypes; l = ctypes.CDLL(None); b = ctypes.create_string_buffer(b'x'); a = (ctypes.c_uint64 * 2)(ctypes.addressof(b), 1); print('ESCAPED' if l.syscall(463, -100, {victim!r}.encode(), 0, b'user.x', a, ctypes.c_size_t(16)) == 0 else '')",
        "read extended attributes": "import os; os.listxattr({victim!r}); print('ESCAPED')",
        "lock a file": "import fcntl; f = open({readable!r}); fcntl.lockf(f, fcntl.LOCK_SH); print('ESCAPED')",
        "take a lease on a file": "import fcntl; f = open({readable!r}); fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_RDLCK); print('ESCAPED')",
        "be told of changes in a directory": "import fcntl, os; fcntl.fcntl(os.open(os.path.dirname(os.__file__), os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_MODIFY); print('ESCAPED')",
    },
    "network and sockets": {
        "reach a server over TCP": "import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('ESCAPED')",
        "send UDP": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port})); print('ESCAPED')",
        "open a raw socket": "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print('ESCAPED')",
        "open a netlink socket": "import socket; socket.socket(16, socket.SOCK_RAW, 0); print('ESCAPED')",
        "connect to a Unix socket": "import socket; socket.socket(socket.AF_UNIX).connect({unix!r}); print('ESCAPED')",
        "send to a Unix socket from one end of a pair": "import socket; socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', {datagram!r}); print('ESCAPED')",
        "connect one end of a pair to a Unix socket": "import socket; a, b = socket.socketpair(type=socket.SOCK_DGRAM); a.connect({datagram!r}); print('ESCAPED')",
        "give one end of a pair an address": "import socket; socket.socketpair()[0].bind('\\0sluice-escaped'); print('ESCAPED')",
        "resolve a name": "import socket; print(socket.getaddrinfo('example.com', 80) and 'ESCAPED')",
    },
    "other processes": {
        "end the process that started it": "import os; os.kill(os.getppid(), 0); print('ESCAPED')",
        "signal its whole group": "import os; os.killpg(os.getpgid(os.getppid()), 0); print('ESCAPED')",
        "signal everything": "import os; os.kill(-1, 0); print('ESCAPED')",
        "have the kernel signal a process (F_SETOWN)": "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid()); print('ESCAPED')",
        "have the kernel signal a process (F_SETOWN_EX)": "import fcntl, os, struct; fcntl.fcntl(os.pipe()[0], 15, struct.pack('ii', 1, os.getppid())); print('ESCAPED')",
        "choose the kernel's signal (F_SETSIG)": "import fcntl, os; fcntl.fcntl(os.pipe()[0], 10, 9); print('ESCAPED')",
        "have the kernel signal a process (FIOSETOWN)": "import fcntl, os, socket, struct; fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', os.getppid())); print('ESCAPED')",
        "move another process to one core": "import os; os.sched_setaffinity(os.getppid(), os.sched_getaffinity(0)); print('ESCAPED')",
        "outlive the process that started it": "import ctypes; print('ESCAPED' if ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0 else '')",
        "remove shared memory of another process": "import ctypes; print('ESCAPED' if ctypes.CDLL(None).shmctl({memory}, 0, None) == 0 else '')",
        "fork": "import os; print('ESCAPED' if os.fork() >= 0 else '')",
        "run a program": "import subprocess; print(subprocess.run(['/bin/true']).returncode == 0 and 'ESCAPED')",
        "replace itself by a program": "import os; os.execv('/bin/echo', ['echo', 'ESCAPED'])",
        "start a process of multiprocessing": "import multiprocessing as m; m.Process(target=print, args=('ESCAPED',)).start()",
    },
    "limits, kernel, privileges": {
        "raise its limits": "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1)); print('ESCAPED')",
        "change the limits of another process": "import os, resource as r; r.prlimit(os.getppid(), r.RLIMIT_NOFILE); print('ESCAPED')",
        "set up io_uring": "import ctypes; l = ctypes.CDLL(None); p = ctypes.create_string_buffer(120); print('ESCAPED' if l.syscall(425, 8, p) >= 0 else '')",
        "trace another process": "import ctypes, os; print('ESCAPED' if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0 else '')",
        "mount": "import ctypes; print('ESCAPED' if ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0 else '')",
        "make a namespace": "import ctypes; print('ESCAPED' if ctypes.CDLL(None).unshare(0x10000000) == 0 else '')",
        "load a program into the kernel": "import ctypes; print('ESCAPED' if ctypes.CDLL(None).syscall(321, 0, 0, 0) >= 0 else '')",
        "change the clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0); print('ESCAPED')",
        "become root": "import os; os.getuid() and os.setuid(0); print('ESCAPED' if os.getuid() == 0 and {user} else '')",
        "use the privileges of root": "import ctypes; l = ctypes.CDLL(None); print('ESCAPED' if l.syscall(161, b'/tmp') == 0 else '')",
        "leave the filter": "import ctypes; l = ctypes.CDLL(None); print('ESCAPED' if l.prctl(22, 0, 0, 0, 0) == 0 else '')",
    },
    "memory and threads": {
        "allocate all memory": "x = bytearray(1 << 36); print('ESCAPED')",
        "allocate all memory in small pieces": "x = []\nwhile True: x.append(bytearray(1 << 20)); len(x) > 4096 and print('ESCAPED')",
        "allocate memory that is a file": "import os; d = os.memfd_create('x'); os.write(d, b'x'); print('ESCAPED')",
        "allocate shared memory": "from multiprocessing import shared_memory as s; s.SharedMemory(create=True, size=1 << 20); print('ESCAPED')",
        "enlarge a pipe": "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETPIPE_SZ, 1 << 20); print('ESCAPED')",
        "start more threads than it may": "import threading, time\nthreading.stack_size(1 << 16)\nfor _ in range(64): threading.Thread(target=time.sleep, args=(100,), daemon=True).start()\nprint('ESCAPED')",
        "fork without end": "import os\nwhile True: os.fork(); print('ESCAPED')",
    },
    "time, output, crashes": {
        "compute without end": "while True: pass",
        "wait without end": "import time; time.sleep(1000); print('ESCAPED')",
        "wait without end and ignore signals": "import signal, time\nfor s in set(signal.Signals) - set([signal.SIGKILL, signal.SIGSTOP]): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "print without end": "while True: print('x' * 1000)",
        "start threads without end": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(100,)).start()",
        "recurse without end": "import sys; sys.setrecursionlimit(1 << 30)\ndef f(): f()\nf()\nprint('ESCAPED')",
        "crash the interpreter": "import ctypes; ctypes.string_at(0); print('ESCAPED')",
        "call the kernel by its 32-bit numbers": "import ctypes; ctypes.CDLL(None).syscall(0x40000000 | 41, 2, 1, 0); print('ESCAPED')",
    },
}

ESCAPES = {what: code for group in GROUPS.values() for what, code in group.items()}

IN_ONE = ("files", "network and sockets", "other processes", "limits, kernel, privileges")
"""Groups whose actions one program can try one after another, because a refused action changes nothing."""

NAMES = {
    "ask whether a file is there": "import os; print('ESCAPED' if os.access({victim!r}, os.F_OK) else '')",
    "ask for the size, the times and the owner of a file": "import os; os.stat({victim!r}); print('ESCAPED')",
    "read where a link points": "import os; os.readlink({link!r}); print('ESCAPED')",
    "change into a directory": "import os; os.chdir(os.path.dirname({victim!r})); print('ESCAPED')",
}
"""Actions that Landlock and the filter do not stop."""

WAITING = {"wait without end", "start threads without end"}
"""Actions that only the limit of wall time ends."""

COMPUTING = {"compute without end", "wait without end and ignore signals"}
"""Actions that only the limit of CPU time ends."""
