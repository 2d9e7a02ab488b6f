"""Clients that are slow or hostile: connections that are opened and left, streams that nobody reads, connections that are reset."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from benchmarks.fuzz.findings import Findings
from benchmarks.fuzz.routes import ANSWER_S, HOST_HEADER
from benchmarks.fuzz.stack import Load, Stack, Watched
from sluice.rpc.server import LOOPBACK
from sluice.v1 import common_pb2, orchestrator_pb2, rollout_pb2, tokens_pb2

IDLE = 1000
"""Number of open connections that send nothing."""

STREAMS = 200
"""Number of streams that nobody reads, and of calls whose message never comes."""

RESETS = 300

GROWTH_BYTES = 64 << 20
"""Most memory that a process may keep after any of these attacks, or that a stream without a reader may take."""

MORE_FILES = 16
"""Open files that a process may have more than before."""

_NO_LINGER = struct.pack("ii", 1, 0)
"""SO_LINGER with 0 s: `close` sends RST."""


def attack(stack: Stack, watched: Watched, findings: Findings) -> dict[str, int]:
    """Run all attacks against one service; return how many clients of each kind there were."""
    kinds: dict[str, Callable[[Stack, Watched, Findings], int]] = {"idle connections": _idle, "resets": _resets}
    kinds["calls without a message"] = _silent_calls
    kinds["streams without a reader"] = _unread
    done = {}
    for kind, act in kinds.items():
        before = watched.load()
        done[kind] = act(stack, watched, findings)
        after = watched.settled(before.calls, before.files + MORE_FILES)
        _compare(f"{watched.name} {kind}", before, after, findings)
        for what, excerpt in watched.exceptions():
            findings.add(f"{watched.name} {kind}", what, excerpt[-2000:])
    return done


def _compare(place: str, before: Load, after: Load, findings: Findings) -> None:
    for what, grown in grew(before, after).items():
        findings.add(place, f"{what} grew", f"{grown}: {before} -> {after}")


def grew(before: Load, after: Load) -> dict[str, str]:
    """Return the resources that grew more than the inputs explain: memory, files, calls in progress."""
    found = {}
    if after.rss > before.rss + GROWTH_BYTES:
        found["memory"] = f"{(after.rss - before.rss) >> 20} MiB"
    if after.files > before.files + MORE_FILES:
        found["files"] = str(after.files - before.files)
    if after.threads > before.threads + 64:
        found["threads"] = str(after.threads - before.threads)
    if after.calls > before.calls:
        found["calls in progress"] = str(after.calls - before.calls)
    return found


def answers(watched: Watched, tokens: dict[str, str]) -> bool:
    """Return whether a sound call is answered in time, on a connection of its own."""
    with grpc.insecure_channel(watched.target) as channel:
        call = channel.unary_unary(
            "/sluice.v1.ServerInfoService/GetServerInfo",
            common_pb2.GetServerInfoRequest.SerializeToString,
            common_pb2.GetServerInfoResponse.FromString,
        )
        try:
            call(
                common_pb2.GetServerInfoRequest(),
                timeout=ANSWER_S,
                metadata=(("authorization", f"Bearer {tokens['admin']}"),),
            )
        except grpc.RpcError:
            return False
    return True


def _ports(watched: Watched) -> list[int]:
    return [watched.port, *([watched.http_port] if watched.http_port else [])]


def _idle(stack: Stack, watched: Watched, findings: Findings) -> int:
    """Hold connections to each port that send nothing; others must be served meanwhile."""
    made = 0
    for port in _ports(watched):
        with contextlib.ExitStack() as held:
            for _ in range(IDLE):
                held.enter_context(contextlib.closing(socket.create_connection((LOOPBACK, port), timeout=ANSWER_S)))
                made += 1
            if not answers(watched, stack.tokens):
                findings.add(f"{watched.name} idle connections", f"no answer beside {IDLE} idle connections", str(port))
    return made


def _resets(stack: Stack, watched: Watched, findings: Findings) -> int:
    """Reset connections at each point of a request."""
    token, path = stack.tokens["agent"], "/v1/chat/completions"
    body = json.dumps(
        {"model": str(stack.model), "messages": [{"role": "user", "content": "a"}], "stream": True}
    ).encode()
    head = (
        f"POST {path} HTTP/1.1\r\n{HOST_HEADER}\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n"
    )
    request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    for number in range(RESETS):
        for port in _ports(watched):
            data = request if port == watched.http_port else preface + b"\x00\x40\x00\x01\x04\x00\x00\x00\x01"
            connection = socket.create_connection((LOOPBACK, port), timeout=ANSWER_S)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            with contextlib.suppress(OSError):
                connection.sendall(data[: len(data) * (number % 11) // 10])
            connection.close()
    if not answers(watched, stack.tokens):
        findings.add(f"{watched.name} resets", "no answer after connections were reset", "")
    return RESETS * len(_ports(watched))


def _silent_calls(stack: Stack, watched: Watched, findings: Findings) -> int:
    """Begin calls and send no message. Calls without a known principal must end at once."""
    with grpc.insecure_channel(watched.target) as channel:
        method: Any = channel.stream_stream("/sluice.v1.ServerInfoService/GetServerInfo", None, None)
        calls = [method(_nothing(), timeout=60) for _ in range(STREAMS)]
        end = time.monotonic() + ANSWER_S
        while not all(call.done() for call in calls) and time.monotonic() < end:
            time.sleep(0.05)
        left = sum(not call.done() for call in calls)
        if left:
            findings.add(f"{watched.name} calls without a message", f"{left} calls of nobody known stay open", "")
        for call in calls:
            call.cancel()
    return STREAMS


def _nothing() -> Iterator[bytes]:
    time.sleep(ANSWER_S / 2)
    yield from ()


_STREAMED = {
    "orchestrator": ("/sluice.v1.OrchestratorService/WatchRun", orchestrator_pb2.WatchRunRequest(run="runs/fuzz")),
    "rollout": (
        "/sluice.v1.RolloutService/GenerateStream",
        rollout_pb2.GenerateStreamRequest(
            request=rollout_pb2.GenerateRequest(
                token_ids=tokens_pb2.TokenIds(ids=[5, 6, 7]),
                n=4,
                sampling=tokens_pb2.SamplingParams(max_tokens=400, ignore_eos=True, top_logprobs=5),
            )
        ),
    ),
}
"""A method of each service that streams a lot, and its request."""


def _unread(stack: Stack, watched: Watched, findings: Findings) -> int:
    """Open streams and read nothing. The data that waits for the client must be bounded."""
    if watched.name not in _STREAMED:
        return 0
    path, request = _STREAMED[watched.name]
    before = watched.load().rss
    with grpc.insecure_channel(watched.target) as channel:
        method: Any = channel.unary_stream(path, type(request).SerializeToString, None)
        metadata = (("authorization", f"Bearer {stack.tokens['admin']}"),)
        calls = [method(request, timeout=60, metadata=metadata) for _ in range(STREAMS)]
        time.sleep(3)
        held = watched.load().rss - before
        if held > GROWTH_BYTES:
            findings.add(f"{watched.name} streams without a reader", "memory is kept for them", f"{held >> 20} MiB")
        if not answers(watched, stack.tokens):
            findings.add(f"{watched.name} streams without a reader", "no answer beside them", "")
        for call in calls:
            call.cancel()
    return STREAMS
