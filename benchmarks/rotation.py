"""`sluice bench rotation`: certificates, the authority and a token are replaced while calls and streams run; how many are lost.

Certificates, and the token, are replaced again and again until so many calls were made; the authority once, in its three steps.

A server and clients with mutual TLS have a folder of certificates each, as two machines do, and get new files at different times. No call
is repeated: one that does not end well is lost. Watches are meant to continue on another connection, so each may begin again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice import certificates
from sluice.certificates import Leaf
from sluice.config import Options, SecurityConfig, ServerConfig, seconds, whole_number
from sluice.rpc import RpcServer, connect
from sluice.rpc.principals import digest_of, new_token, replace_private
from sluice.v1 import rollout_pb2, rollout_pb2_grpc

PARTS = 10
"""Messages of one stream."""

CALL_S = 30.0


class Answers(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers after a while, like a replica.

    Args:
        call_s: Seconds of a call; a stream takes `PARTS` times as long.
    """

    def __init__(self, call_s: float) -> None:
        self._call_s = call_s

    async def Generate(  # noqa: N802 - gRPC names the methods
        self, request: rollout_pb2.GenerateRequest, context: object
    ) -> rollout_pb2.GenerateResponse:
        """Answer with the id of the request."""
        del context
        await asyncio.sleep(self._call_s)
        return rollout_pb2.GenerateResponse(request_id=request.request_id)

    async def GenerateStream(  # noqa: N802 - gRPC names the methods
        self, request: rollout_pb2.GenerateStreamRequest, context: object
    ) -> AsyncIterator[rollout_pb2.GenerateStreamResponse]:
        """Answer with `PARTS` messages."""
        del request, context
        for _ in range(PARTS):
            await asyncio.sleep(self._call_s)
            yield rollout_pb2.GenerateStreamResponse()


@dataclass
class Counts:
    """Counts of the clients' calls in one step.

    Attributes:
        calls: Calls made.
        streams: Streams made.
        watches: Watches begun.
        rotations: How often something was replaced.
        lost: Why calls and streams did not end well.
    """

    calls: int = 0
    streams: int = 0
    watches: int = 0
    rotations: int = 0
    lost: list[str] = field(default_factory=list)


@dataclass
class Clients:
    """Callers of one server. `counts` may be replaced at any time; a call is counted in the one that is current when it ends.

    Attributes:
        made: Calls or streams that each caller has made.
    """

    counts: Counts = field(default_factory=Counts)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    made: Counter[str] = field(default_factory=Counter)

    async def all_have_called(self) -> None:
        """Wait until all calls that had begun before have ended, and each caller has made another one, however busy the machine is."""
        wanted = {name: made + 2 for name, made in self.made.items()}
        while any(self.made[name] < made for name, made in wanted.items()):  # noqa: ASYNC110 - calls end all the time
            await asyncio.sleep(0.005)

    async def call(self, channel: grpc.aio.Channel, number: int) -> None:
        """Call one after the other."""
        stub, name = rollout_pb2_grpc.RolloutServiceStub(channel), f"caller {number}"
        self.made[name] = 0
        while not self.ended.is_set():
            try:
                answer = await stub.Generate(rollout_pb2.GenerateRequest(request_id=str(number)), timeout=CALL_S)
                if answer.request_id != str(number):
                    self.counts.lost.append("another answer")
            except grpc.aio.AioRpcError as error:
                self.counts.lost.append(f"call: {error.code().name} {error.details()}")
                await asyncio.sleep(0.01)
            self.counts.calls += 1
            self.made[name] += 1

    async def stream(self, channel: grpc.aio.Channel, number: int) -> None:
        """Receive one stream after the other."""
        stub, name = rollout_pb2_grpc.RolloutServiceStub(channel), f"receiver {number}"
        self.made[name] = 0
        while not self.ended.is_set():
            parts = 0
            try:
                async for _ in stub.GenerateStream(rollout_pb2.GenerateStreamRequest(), timeout=CALL_S):
                    parts += 1
                if parts != PARTS:
                    self.counts.lost.append(f"stream: {parts} of {PARTS} messages")
            except grpc.aio.AioRpcError as error:
                self.counts.lost.append(f"stream: {error.code().name} {error.details()}")
                await asyncio.sleep(0.01)
            self.counts.streams += 1
            self.made[name] += 1

    async def watch(self, channel: grpc.aio.Channel) -> None:
        """Watch the health of the server until the end."""
        stub = health_pb2_grpc.HealthStub(channel)
        while not self.ended.is_set():
            self.counts.watches += 1
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for answer in stub.Watch(health_pb2.HealthCheckRequest()):  # type: ignore[attr-defined]  # the stubs leave it out
                    if answer.status != health_pb2.HealthCheckResponse.SERVING:
                        self.counts.lost.append("watch: the server does not serve")


@dataclass(frozen=True)
class Machines:
    """The folder in which certificates are issued, and the copies of a server and of its clients."""

    issuing: Path
    server: Path
    clients: Path

    def copy(self, to: Path, names: Sequence[str]) -> None:
        """Give one machine new files, each in one step."""
        for name in names:
            replace_private(to / name, (self.issuing / name).read_bytes())


CERTIFICATES = tuple(f"{name}.{kind}" for name in ("rollout", "operator") for kind in ("pem", "key"))
AUTHORITIES = (certificates.AUTHORITIES,)

RENEWED, REPLACED = "certificates renewed", "token replaced"
"""The steps that last for a number of calls."""


@dataclass
class Rotation:
    """Replaces certificates, authority and token step by step while clients call.

    Args:
        machines: Their certificate files.
        load: The clients.
        step_s: Seconds between two replacements, at least; every client also calls in between.
        apart_s: Seconds between the new files of the server and those of the clients, at least; as before.

    Attributes:
        counted: Counts of the clients' calls, by step.
        token: The valid token.
    """

    machines: Machines
    load: Clients
    step_s: float
    apart_s: float
    counted: dict[str, Counts] = field(default_factory=dict)
    token: str = field(default_factory=new_token)

    def __post_init__(self) -> None:
        """Let the server know the first token."""
        self._known = self.machines.server / certificates.PRINCIPALS
        self._file = self.machines.clients / "token"
        self._others = self._known.read_bytes()
        replace_private(self._known, self._others + _table(self.token))
        replace_private(self._file, self.token.encode())

    async def exchange(self, what: Callable[[], object], files: Sequence[str]) -> None:
        """Make new files, and give them to the server, then to the clients."""
        what()
        self.machines.copy(self.machines.server, files)
        await self._apart()
        self.machines.copy(self.machines.clients, files)
        self.load.counts.rotations += 1

    async def exchange_token(self) -> None:
        """Make two tokens of one principal valid until all callers send the new one."""
        old, self.token = self.token, new_token()
        replace_private(self._known, self._others + _table(old) + _table(self.token))
        replace_private(self._file, self.token.encode())
        await self._apart()
        replace_private(self._known, self._others + _table(self.token))
        self.load.counts.rotations += 1

    async def once(self, step: str, what: Callable[[], object], files: Sequence[str]) -> None:
        """Take one step."""
        await self.exchange(what, files)
        await self.rest(step, self.step_s - self.apart_s)

    async def until_called(self, step: str, calls: int, again: Callable[[], Awaitable[None]]) -> None:
        """Repeat a replacement until `calls` calls have ended."""
        while self.load.counts.calls < calls or not self.load.counts.rotations:
            await again()
            await asyncio.sleep(self.step_s - self.apart_s)
        await self.rest(step, 0)

    async def rest(self, step: str, for_s: float) -> None:
        """Let the clients call, and end the step."""
        await asyncio.sleep(for_s)
        await self.load.all_have_called()
        self.counted[step], self.load.counts = self.load.counts, Counts()

    async def _apart(self) -> None:
        await asyncio.sleep(self.apart_s)
        await self.load.all_have_called()


async def measure(
    directory: Path, *, step_s: float, apart_s: float, age_s: float, clients: int, calls: int, call_s: float = 0.02
) -> tuple[dict[str, Counts], str]:
    """Replace everything, one after the other.

    Args:
        directory: An empty folder.
        step_s: As for `Rotation`.
        apart_s: As for `Rotation`; above the second after which changed files are read, or the old token goes too early.
        age_s: Age at which the server ends connections.
        clients: Callers known by certificate, and as many by token.
        calls: Calls, besides streams, during which certificates are replaced, and then the token.
        call_s: Seconds of a call.

    Returns:
        Counts of the clients' calls by step, and how a call with a certificate of the old authority ends afterwards.
    """
    machines = Machines(directory / "issuing", directory / "server", directory / "clients")
    now = certificates.now_utc()
    certificates.begin(machines.issuing, [], domain="example.org", days=1, now=now)
    for each in (machines.server, machines.clients):
        each.mkdir()
        machines.copy(each, (*CERTIFICATES, *AUTHORITIES))
    machines.copy(machines.server, [certificates.PRINCIPALS])
    load = Clients()
    rotation = Rotation(machines, load, step_s, apart_s)
    security = SecurityConfig(certs_dir=machines.server, connection_age_s=age_s).of_service("rollout")
    server = RpcServer("rollout", ServerConfig(), security)
    answers = Answers(call_s)  # type: ignore[abstract]  # the other methods are not called
    server.add(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, answers, "sluice.v1.RolloutService")
    await server.start()

    by_certificate = SecurityConfig(certs_dir=machines.clients)
    by_token = SecurityConfig(certs_dir=machines.clients, token_file=machines.clients / "token")
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(connect(server.target, each, role="agent"))
            for each in (by_certificate, by_token) * clients
        ]
        running = [
            asyncio.create_task(each)
            for number, channel in enumerate(channels)
            for each in (load.call(channel, number), load.stream(channel, number), load.watch(channel))
        ]

        def renew() -> list[Leaf]:
            return certificates.renew(machines.issuing, certificates.now_utc(), every=True)

        await rotation.rest("nothing replaced", step_s)
        await rotation.until_called(RENEWED, calls, lambda: rotation.exchange(renew, CERTIFICATES))
        add = lambda: certificates.add_authority(machines.issuing, certificates.now_utc())  # noqa: E731 - a name for one step
        await rotation.once("next authority trusted", add, AUTHORITIES)
        for name in CERTIFICATES:
            shutil.copy(machines.clients / name, directory / name)
        shutil.copy(machines.issuing / certificates.AUTHORITIES, directory / certificates.AUTHORITIES)
        use = lambda: certificates.use_authority(machines.issuing, certificates.now_utc())  # noqa: E731 - as above
        await rotation.once("certificates of the next authority", use, CERTIFICATES)
        await rotation.once("old authority dropped", lambda: certificates.drop_authority(machines.issuing), AUTHORITIES)
        await rotation.until_called(REPLACED, calls, rotation.exchange_token)
        load.ended.set()
        for task in running[2::3]:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    old = await _refusal(server.target, SecurityConfig(certs_dir=directory, token_file=by_token.token_file))
    await server.stop(0)
    return rotation.counted, old


def _table(token: str) -> bytes:
    return f'\n[[principal]]\nname = "agent"\nrole = "agent"\ntoken_sha256 = "{digest_of(token)}"\n'.encode()


async def _refusal(target: str, security: SecurityConfig) -> str:
    """Return how a call ends, "OK" if it is accepted."""
    async with connect(target, security, role="agent") as channel:
        try:
            await rollout_pb2_grpc.RolloutServiceStub(channel).Generate(rollout_pb2.GenerateRequest(), timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


def run(argv: list[str]) -> Mapping[str, Any]:
    """Measure, print a table, and return the figures."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="sluice-rotation-") as directory:
        counted, old = asyncio.run(
            measure(
                Path(directory),
                step_s=arguments.step,
                apart_s=min(2.0, arguments.step / 2),
                age_s=arguments.age,
                clients=arguments.clients,
                calls=arguments.calls,
            )
        )
    print(f"{'while':<36}{'calls':>8}{'streams':>9}{'watches':>9}{'lost':>6}")
    for step, counts in counted.items():
        print(f"{step:<36}{counts.calls:>8}{counts.streams:>9}{counts.watches:>9}{len(counts.lost):>6}")
        for why in counts.lost[:3]:
            print(f"    {why}")
    for step in (RENEWED, REPLACED):
        done = counted[step]
        print(
            f"{step} {done.rotations} times during {done.calls} calls and {done.streams} streams: lost {len(done.lost)}"
        )
    print(f"a call with a certificate of the old authority ends with {old}")
    lost = sum(len(counts.lost) for counts in counted.values())
    made = sum(counts.calls + counts.streams for counts in counted.values())
    failures = [
        *(["calls were lost"] if lost else []),
        *(["a certificate of the old authority was accepted"] if old != "UNAVAILABLE" else []),
    ]
    rotated = {
        step: {"rotations": done.rotations, "calls": done.calls, "streams": done.streams, "lost": len(done.lost)}
        for step, done in counted.items()
        if step in {RENEWED, REPLACED}
    }
    return {"made": made, "lost": lost, "rotated": rotated, "failures": failures}


def _parser() -> argparse.ArgumentParser:
    parser = Options(prog="sluice bench rotation", description=__doc__)
    parser.add_argument("--step", type=seconds, default=8.0, help="seconds between two replacements (default: 8)")
    parser.add_argument(
        "--calls",
        type=whole_number(1),
        default=10_000,
        help="calls during which certificates are replaced, and then the token (default: 10000)",
    )
    parser.add_argument("--age", type=seconds, default=2.0, help="age at which connections are ended (default: 2)")
    parser.add_argument(
        "--clients",
        type=whole_number(1),
        default=4,
        help="callers known by certificate, and as many by token (default: 4)",
    )
    return parser
