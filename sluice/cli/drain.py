"""`sluice drain HOST:PORT`: let a service finish the calls in progress and end, and show how much is left until it is gone."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys

import grpc

from sluice.config import Options, SecurityConfig, load_run
from sluice.rpc import SluiceError, connect
from sluice.rpc.drain import describe_left
from sluice.v1 import common_pb2, common_pb2_grpc

POLL_S = 0.5
"""Seconds between two looks at the service."""

CALL_S = 5.0
"""Deadline of one look in seconds."""

END_S = 30.0
"""Seconds after the grace for the process to end: a replica stops its engine, a trainer its step."""

LONGEST_S = 3600.0
"""Seconds that a drain may take if the service's own grace applies."""

_GONE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


def run(argv: list[str]) -> int:
    """Drain a service; return 0 when it is gone, 1 if it cannot be reached or does not end."""
    parser = Options(
        prog="sluice drain",
        description=f"{__doc__} What is left of a replica at the end of the grace ends with the tokens so far, which another replica"
        " continues; other calls are made again by their callers. Further words are settings (`@ file.toml`, `--security.tls-ca ca.pem`).",
    )
    parser.add_argument("target", help="host:port of the service")
    parser.add_argument(
        "--grace",
        type=_grace,
        help="time for the calls in progress, such as 30s; 0s ends them at once (default: its server.drain_s)",
    )
    arguments, settings = parser.parse_known_args(argv)
    try:
        return asyncio.run(_drain(arguments.target, load_run(settings).security, arguments.grace))
    except SluiceError as error:
        print(f"{arguments.target}: {error}", file=sys.stderr)
        return 1


def _grace(text: str) -> float:
    try:
        value = float(text.removesuffix("s"))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"give seconds, such as 30s, not {text!r}")
    return value


async def _drain(target: str, security: SecurityConfig, grace_s: float | None) -> int:
    """Ask the server to drain, show what is left, and wait until it is gone."""
    async with connect(
        target, security, stream_deadline_s=LONGEST_S if grace_s is None else grace_s + END_S
    ) as channel:
        request = common_pb2.DrainServerRequest()
        if grace_s is not None:
            request.grace.FromNanoseconds(int(grace_s * 1e9))
        left_s, drains = grace_s or 0.0, False
        try:
            async for left in common_pb2_grpc.ServerAdminServiceStub(channel).DrainServer(request):
                left_s, drains = left.grace_left.ToNanoseconds() / 1e9, True
                kinds = f" ({describe_left(left.left_by_kind)})" if left.left_by_kind else ""
                print(f"{target}: draining, {left.left} left{kinds}, at most {left_s:.0f} s", flush=True)
        except grpc.aio.AioRpcError as error:
            failed = SluiceError.from_rpc(error)
            if failed.code not in _GONE or not drains:
                raise failed from error
        info = common_pb2_grpc.ServerInfoServiceStub(channel)
        try:
            async with asyncio.timeout(left_s + END_S):
                while True:
                    await info.GetServerInfo(common_pb2.GetServerInfoRequest(), timeout=CALL_S)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            print(
                f"{target}: still there {END_S:.0f} s after its grace; its log says what it waits for", file=sys.stderr
            )
            return 1
        except grpc.aio.AioRpcError as error:
            if error.code() not in _GONE:
                raise SluiceError.from_rpc(error) from error
    print(f"{target}: gone")
    return 0
