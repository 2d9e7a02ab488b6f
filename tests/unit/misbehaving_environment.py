"""Environments that fail in every way that the tests of their processes need. An answer names an action: they print it, then do it."""

import asyncio
import ctypes
import decimal
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from sluice.environments.base import Task, Turn


def loop():
    while True:
        pass


def stay():
    """Say that the memory is taken, and keep it."""
    print("has the memory")
    time.sleep(3600)


def hog():
    _kept = filled(bytearray(300 << 20))
    stay()


def filled(memory):
    memory[:: 1 << 12] = b"x" * (len(memory) >> 12)  # each page
    return memory


def hog_shared_memory():
    _kept = filled(mmap.mmap(-1, 300 << 20))
    stay()


def share_with_forks():
    """Have 50 MiB of one's own and 50 MiB of shared memory beside three forks, until a signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    _own, _shared = filled(bytearray(50 << 20)), filled(mmap.mmap(-1, 50 << 20))
    forks, (ready, says_ready) = [], os.pipe()
    for _ in range(3):
        if not (fork := os.fork()):
            for place in range(0, len(_own), 1 << 12):
                _ = _own[place], _shared[place]  # read, so that its pages are mapped here too
            os.write(says_ready, b"x")
            time.sleep(3600)
        forks.append(fork)
    for _ in forks:
        os.read(ready, 1)
    print("shares the memory")
    signal.sigwait({signal.SIGUSR1})
    for fork in forks:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)


def flood():
    for _ in range(100_000):
        print("x" * 80)


def raise_key_error():
    raise KeyError("no such key")


def fork_bomb():
    for _ in range(5):  # 32 processes
        os.fork()
    time.sleep(3600)


def spawn():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    time.sleep(3600)


def start_in_a_session(variables=None):
    sleep = [sys.executable, "-c", "import time; time.sleep(3600)", f"of-{os.getpid()}"]
    subprocess.Popen(sleep, start_new_session=True, env=variables)


def spawn_in_a_session():
    start_in_a_session()
    time.sleep(3600)


def daemonise():
    """Start a process whose parent ends, in a session of its own: nothing of it is below the environment's process."""
    mark = f"of-{os.getpid()}"
    code = "import os, sys, time; os.fork() and os._exit(0); os.setsid(); time.sleep(3600)"
    subprocess.run([sys.executable, "-c", code, mark], check=True)


def daemonise_and_exit():
    daemonise()
    os._exit(3)


def has_secrets():
    return float("JUDGE_API_KEY" in os.environ) + 2.0 * ("ANOTHER_TOKEN" in os.environ)


DEEDS = {
    "loop": loop,
    "regex": lambda: re.match(r"(a+)+$", "a" * 64 + "b"),
    "hold the GIL": lambda: ctypes.PyDLL(None).sleep(3600),
    "sleep": lambda: time.sleep(3600),
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hog": hog,
    "flood": flood,
    "raise": raise_key_error,
    "sys.exit": lambda: sys.exit(4),
    "fork bomb": fork_bomb,
    "fork and return": lambda: float(bool(os.fork()) or True),
    "spawn": spawn,
    "spawn in a session": spawn_in_a_session,
    "start in a session without variables": lambda: start_in_a_session({}),
    "start a daemon": daemonise,
    "start a daemon and exit": daemonise_and_exit,
    "hog shared memory": hog_shared_memory,
    "share with forks": share_with_forks,
    "nan": lambda: float("nan"),
    "object": object,
    "pid": lambda: float(os.getpid()),
    "thread": lambda: float(threading.get_ident() == threading.main_thread().ident),
    "secret": has_secrets,
}


def act(word):
    """Print the action that a word names, then do it. Return a number that describes the result, else the length of the word."""
    if word in DEEDS:
        print(f"does {word}")
    found = DEEDS[word]() if word in DEEDS else None
    return float(len(word)) if found is None else found


CIRCLE = []
CIRCLE.append(CIRCLE)

ODD_MESSAGES = {
    "decimal": lambda: [{"role": "user", "content": "", "weight": [decimal.Decimal(1)]}],
    "large": lambda: [{"role": "user", "content": "", "weight": "x" * (65 << 20)}],
    "itself": lambda: [{"role": "user", "content": "", "weight": CIRCLE}],
    "text": lambda: "what is it?",
    "field": lambda: [{"role": "user", "content": "hi", "thinking": "so"}],
    "number": lambda: [{"role": "user", "content": 7}],
    "nothing": list,
}


class Single:
    """Acts in `score` on the completion, in `messages` on the text of the task, and in `tasks` on the name of the split."""

    name = "single"

    def tasks(self, split, seed):
        act(split)
        if split == "wrong id":
            return [Task(7)]
        if split == "wrong data":
            return [Task("t", {"when": {1: 2}})]
        return [Task(f"{split}-{seed + number}", {"number": number, "pair": (1, 2)}) for number in range(2500)]

    def messages(self, task):
        word = task.data.get("do", "")
        if word in ODD_MESSAGES:
            return ODD_MESSAGES[word]()
        return [{"role": "user", "content": f"\ud800 {act(word)}"}]

    def score(self, task, completion):
        return float(task.max_tokens) if completion == "limit" else act(completion)


class Limited(Single):
    """Declares that it stops a scoring by itself after 40 s, or after the seconds in its arguments."""

    def __init__(self, scoring_s=40.0):
        self.scoring_s = scoring_s


class Several:
    """Acts in `reset` on the text of the task, and in `step` on the completion. Adds up the letters of an episode."""

    name = "several"

    def __init__(self, forgetful=False):
        self.forgetful = forgetful

    def tasks(self, split, seed):
        return [Task("t")]

    def reset(self, task, seed):
        opened = Letters(seed if not self.forgetful else os.getpid())
        if task.data.get("do") == "unfit":
            opened.messages = [{"role": "user", "content": 5}]
            return opened
        act(task.data.get("do", ""))
        return opened


class Letters:
    open = 0

    def __init__(self, count):
        self.count = count
        self.messages = [{"role": "user", "content": "go"}]
        Letters.open += 1

    def step(self, completion):
        if completion == "wrong reward":
            return Turn(reward="much")
        if completion == "unfit":
            return Turn(messages="what is it?")
        if completion == "open":
            return Turn(reward=float(Letters.open))
        self.count += act(completion)
        messages = [{"role": "user", "content": f"{self.count:.0f}"}]
        return Turn(messages=messages, reward=1.0, done=completion == "end", metrics={"n": 1})

    def close(self):
        Letters.open -= 1


class Coroutines:
    """Both kinds of environment in one, as coroutines. `score` waits until two calls are in progress; `messages` waits for ever unless it acts."""

    name = "coroutines"

    def __init__(self):
        self.both = None
        self.waiting = 0

    def tasks(self, split, seed):
        return [Task("t")]

    async def messages(self, task):
        if task.data["do"] == "loop":
            act("loop")
        if task.data["do"] == "cancel itself":
            raise asyncio.CancelledError("by a library")
        await asyncio.Event().wait()

    async def score(self, task, completion):
        if self.both is None:
            self.both = asyncio.Event()
        self.waiting += 1
        if self.waiting == 2:
            self.both.set()
        await self.both.wait()
        return float(os.getpid())


class HalfPlain:
    """Only the list of tasks is a coroutine."""

    name = "half plain"

    async def tasks(self, split, seed):
        return [Task("t")]

    def messages(self, task):
        return [{"role": "user", "content": f"{act(task.data['do'])}"}]

    def score(self, task, completion):
        return act(completion)


class HalfCoroutine(Several):
    """Only the step is a coroutine."""

    def reset(self, task, seed):
        return HalfStep()


class HalfStep:
    messages = ()

    async def step(self, completion):
        return Turn()


class RaisesAtStart(Single):
    def __init__(self, key):
        raise LookupError(f"no server takes {key}")


class ExitsAtStart(Single):
    def __init__(self):
        print("cannot go on")
        os._exit(7)


class HogsAtStart(Single):
    def __init__(self):
        hog()


class HangsAtStart(Single):
    def __init__(self):
        act("sleep")


class DiesAgain(Single):
    """Is constructed once; further processes end at once. `first` names a file that tells them."""

    def __init__(self, first):
        if Path(first).exists():
            os._exit(5)
        Path(first).touch()
