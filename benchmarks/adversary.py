"""Honest agents at a gateway, at first alone, then beside an adversary with sessions of its own: what they notice of it.

Gateway, orchestrator and replica are the real ones, each a process, with a small model on the CPU. The adversary is a process, too. All at
once it sends prompts of megabytes to be sampled and counted, as many samples as sessions may have, the same request many times, streams that
it does not read, half heads, half bodies, and bodies with made-up keys. Honest agents repeat a request as OpenAI's client does, twice; one
that is not answered then is lost, and none may be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from benchmarks.children import log_tail, make_model, program, scratch
from benchmarks.gateway import MIB, Doors, Opened, client, open_session, quantile, real_gateway
from sluice.cli.init_model import ModelShape
from sluice.config import Options, whole_number
from sluice.rpc.access import SESSION_KEY

MODEL = ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=4096)
ENGINE = ("--engine=transformers", "--dtype=float32", "--max-model-len=4096")

SESSIONS = 8
"""Sessions of the adversary."""

TOKENS = 8
"""Tokens of a reply to an honest agent."""

THINK_S = 0.5
"""Seconds between a reply and the next request of an honest agent: with 32 agents a small machine is not fully loaded."""

TRIES = 3
"""How often a request is sent at most, as by OpenAI's client."""

AGAIN = frozenset({408, 409, 429, 500, 502, 503, 504})
"""Statuses after which a request is sent again."""

ANSWER_S = 120.0
SAMPLED_S = 0.5
"""Seconds between two measurements of memory."""

CHAT = "/v1/chat/completions"

KINDS = (
    "half heads",
    "half bodies",
    "made-up keys",
    "large prompts",
    "large counts",
    "branches",
    "duplicates",
    "slow readers",
)
"""What the adversary sends."""


def run(argv: list[str]) -> Mapping[str, Any]:
    """Measure and print; return the content of the JSON line."""
    parser = Options(prog="sluice bench adversary", description=__doc__)
    parser.add_argument(
        "--seconds", type=whole_number(2), default=300, help="seconds of the adversary; a quarter of it alone before"
    )
    parser.add_argument("--agents", type=whole_number(1), default=32, help="honest agents")
    parser.add_argument("--half-heads", type=whole_number(0), default=2000, help="half heads at a time")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), help="what the adversary sends")
    parser.add_argument("--keep", type=Path, help="directory to keep logs and journals in")
    options = parser.parse_args(argv)
    with scratch(options.keep) as directory:
        return asyncio.run(_measure(options, directory))


async def _measure(options: argparse.Namespace, directory: Path) -> Mapping[str, Any]:
    seconds, agents = options.seconds, options.agents
    model = make_model(directory / "model", MODEL)
    async with real_gateway(directory, model, agents + SESSIONS, ENGINE) as doors, client(doors.url, agents) as http:
        honest = await asyncio.gather(*(open_session(http) for _ in range(agents)))
        theirs = await asyncio.gather(*(open_session(http) for _ in range(SESSIONS)))
        agents_of = Agents(http, honest)
        await agents_of.work(2.0)  # warm up what is made only once
        before = await _observed(doors, agents_of, max(2.0, seconds / 4))
        log = directory / "adversary.log"
        keys = ",".join(each.headers["authorization"].removeprefix("Bearer ") for each in theirs)
        words = [doors.url, keys, str(seconds), str(options.half_heads), *options.only]
        async with program("benchmarks.adversary", *words, log=log) as adversary:
            during = await _observed(doors, agents_of, seconds)
            ended = await asyncio.to_thread(_wait, adversary)
        sent = _counts(log) if ended else {}
        after = await _observed(doors, agents_of, max(2.0, seconds / 4))
    result: dict[str, Any] = {
        "ratios": {name: round(during.latency[name] / before.latency[name], 2) for name in ("p50_s", "p99_s")},
        "agents": agents,
        "seconds": seconds,
        "before": before.figures(),
        "during": during.figures(),
        "after": after.figures(),
        "sent": sent,
        "lost": before.lost + during.lost + after.lost,
        "failures": [
            f"{name}: {each.lost} requests of honest agents were lost: {each.why}"
            for name, each in (("before", before), ("during", during), ("after", after))
            if each.lost
        ],
    }
    if not sent:
        result["failures"].append(f"the adversary has told of nothing that it sent:\n{log_tail(log)}")
    for name in ("before", "during", "after"):
        print(f"{name:6}  {result[name]}", flush=True)
    for kind, outcomes in sent.items():
        print(f"sent {kind}: {outcomes}", flush=True)
    return result


# Honest agents.


@dataclass
class Seen:
    """What honest agents observed in some time, and the memory of processes.

    Attributes:
        seconds: Seconds of each answered request, repetitions included.
        lost: Requests that were not answered.
        why: Outcome of the last try of each lost request.
        mib: The most memory of each process.
    """

    seconds: list[float] = field(default_factory=list)
    lost: int = 0
    why: Counter[str] = field(default_factory=Counter)
    mib: dict[str, float] = field(default_factory=dict)

    @property
    def latency(self) -> dict[str, float]:
        """Return quantiles of the seconds."""
        given = self.seconds or [ANSWER_S]
        return {"p50_s": statistics.median(given), "p99_s": quantile(given, 0.99)}

    def figures(self) -> dict[str, Any]:
        """Return the figures to print."""
        latency = {name: round(value, 4) for name, value in self.latency.items()}
        return {"requests": len(self.seconds), **latency, "lost": self.lost, "mib": self.mib}


class Agents:
    """Agents that ask, think, and ask again.

    Args:
        http: The client of all agents.
        sessions: One session for each agent.
    """

    def __init__(self, http: httpx.AsyncClient, sessions: Sequence[Opened]) -> None:
        self._http, self._sessions = http, sessions
        self._numbers = itertools.count()

    async def work(self, seconds: float) -> Seen:
        """Let the agents work for a time; return what they observed."""
        seen, end = Seen(), time.monotonic() + seconds
        await asyncio.gather(*(self._one(each, index, end, seen) for index, each in enumerate(self._sessions)))
        return seen

    async def _one(self, session: Opened, index: int, end: float, seen: Seen) -> None:
        await asyncio.sleep(THINK_S * index / len(self._sessions))
        while time.monotonic() < end:
            content = f"Question {next(self._numbers)}: what comes after it?"
            body = {"model": "bench", "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS}
            begun, problem = time.perf_counter(), ""
            for number in range(TRIES):
                problem = await self._ask(session, body, number)
                if problem not in {str(status) for status in AGAIN} | {"no answer"}:
                    break
                await asyncio.sleep(0.5 * 2**number)
            if problem == "200":
                seen.seconds.append(time.perf_counter() - begun)
            else:
                seen.lost += 1
                seen.why[problem] += 1
            await asyncio.sleep(THINK_S)

    async def _ask(self, session: Opened, body: Mapping[str, Any], number: int) -> str:
        try:
            headers = {**session.headers, "x-stainless-retry-count": str(number)}
            return str((await self._http.post(CHAT, json=body, headers=headers, timeout=ANSWER_S)).status_code)
        except httpx.TransportError:
            return "no answer"


async def _observed(doors: Doors, agents: Agents, seconds: float) -> Seen:
    """Let honest agents work for a time, and measure the memory of the processes meanwhile."""
    most: dict[str, float] = {}

    async def look() -> None:
        while True:
            for name, size in doors.memory().items():
                most[name] = max(most.get(name, 0.0), round(size / MIB, 1))
            await asyncio.sleep(SAMPLED_S)

    looking = asyncio.create_task(look())
    try:
        seen = await agents.work(seconds)
    finally:
        looking.cancel()
        await asyncio.wait({looking})
    seen.mib = most
    return seen


# The adversary.


def _wait(process: psutil.Process) -> bool:
    """Wait until the adversary has ended by itself; return whether it has."""
    try:
        process.wait(ANSWER_S)
    except psutil.TimeoutExpired:
        return False
    return True


def _counts(log: Path) -> dict[str, dict[str, int]]:
    lines = log.read_text(errors="replace").splitlines()
    with contextlib.suppress(IndexError, ValueError):
        counts: dict[str, dict[str, int]] = json.loads(lines[-1])
        return counts
    return {}


class Adversary:
    """Sends all kinds of requests at once, for a time.

    Args:
        url: URL of the gateway's HTTP port.
        keys: Keys of its sessions.
        seconds: How long to send.
        half_heads: Number of simultaneous connections with half a head.
        only: The kinds that it sends.
    """

    def __init__(self, url: str, keys: Sequence[str], seconds: float, half_heads: int, only: Sequence[str]) -> None:
        place = urlsplit(url)
        self._host, self._port = str(place.hostname), int(place.port or 80)
        self._keys, self._half_heads, self._only = keys, half_heads, only
        self._end = time.monotonic() + seconds
        self._numbers = itertools.count()
        self.counts: dict[str, Counter[str]] = {}

    async def act(self) -> None:
        """Send until the end."""
        large, counts, other, *branches = self._keys
        acts: dict[str, tuple[int, Callable[[], Awaitable[str]]]] = {
            "half heads": (self._half_heads, lambda: self._unfinished(b"POST /v1/messages HTTP/1.1\r\nhost: ")),
            "half bodies": (64, lambda: self._unfinished(self._head(CHAT, other, 4_000_000) + b" " * 60_000)),
            "made-up keys": (16, self._stranger),
            "large prompts": (8, lambda: self._post(CHAT, large, self._chat("x" * 1_000_000))),
            "large counts": (4, lambda: self._post("/v1/messages/count_tokens", counts, self._chat("y" * 300_000))),
            "branches": (4, self._branches(branches)),
            "duplicates": (16, lambda: self._post(CHAT, other, self._chat("the same", number=int(time.monotonic())))),
            "slow readers": (32, lambda: self._unread(other)),
        }
        await asyncio.gather(*(self._again_and_again(kind, *acts[kind]) for kind in self._only))

    async def _again_and_again(self, kind: str, workers: int, once: Callable[[], Awaitable[str]]) -> None:
        counts = self.counts[kind] = Counter()

        async def work() -> None:
            while (left := self._end - time.monotonic()) > 0:
                outcome = "cut at the end"
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        try:
                            outcome = await once()
                        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                            outcome = type(error).__name__
                            await asyncio.sleep(0.05)
                counts[outcome] += 1

        await asyncio.gather(*(work() for _ in range(workers)))

    def _chat(self, content: str, *, number: int | None = None, **fields: Any) -> bytes:  # noqa: ANN401 - JSON
        text = f"{next(self._numbers) if number is None else number} {content}"
        body = {"model": "bench", "max_tokens": 4, "messages": [{"role": "user", "content": text}], **fields}
        return json.dumps(body).encode()

    @staticmethod
    def _head(path: str, key: str, length: int) -> bytes:
        lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", f"authorization: Bearer {key}"]
        lines += ["content-type: application/json", f"content-length: {length}", "connection: close", "", ""]
        return "\r\n".join(lines).encode()

    @contextlib.asynccontextmanager
    async def _connected(self) -> Any:  # noqa: ANN401 - a context manager
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def _post(self, path: str, key: str, body: bytes) -> str:
        """Make a request, and return its status."""
        async with self._connected() as (reader, writer):
            writer.write(self._head(path, key, len(body)) + body)
            line = await reader.readuntil(b"\r\n")
            await reader.read()
            return str(line.split()[1].decode())

    async def _stranger(self) -> str:
        """Begin a request with a body of a megabyte and an invalid key; return the status of the answer."""
        key = f"{SESSION_KEY}g1-0-{next(self._numbers)}.{'0' * 64}"
        async with self._connected() as (reader, writer):
            writer.write(self._head(CHAT, key, 1_000_000) + b" " * 60_000)
            return str((await reader.readuntil(b"\r\n")).split()[1].decode())

    def _branches(self, keys: Sequence[str]) -> Callable[[], Awaitable[str]]:
        which = itertools.cycle(keys)
        return lambda: self._post(CHAT, next(which), self._chat("many", n=256, max_tokens=1))

    async def _unfinished(self, sent: bytes) -> str:
        """Send a part of a request, and wait until the server closes the connection."""
        async with self._connected() as (reader, writer):
            writer.write(sent)
            answer = await reader.read()
            return answer.split()[1].decode() if answer else "closed"

    async def _unread(self, key: str) -> str:
        """Ask for a stream, and read nothing of it for a while."""
        async with self._connected() as (_, writer):
            body = self._chat("slowly", stream=True, max_tokens=64)
            writer.write(self._head(CHAT, key, len(body)) + body)
            await asyncio.sleep(5.0)
            return "left"


def main() -> None:
    """Be the adversary: URL, keys, seconds, half heads, kinds. The last line says what was sent, and with which results."""
    url, keys, seconds, half_heads, *only = sys.argv[1:]
    adversary = Adversary(url, keys.split(","), float(seconds), int(half_heads), only)
    asyncio.run(adversary.act())
    print(json.dumps(adversary.counts))


if __name__ == "__main__":
    main()
