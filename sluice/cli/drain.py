"""`sluice drain HOST:PORT`: let a replica finish its requests and end, and show how much is left until it is gone."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys

import grpc

from sluice.client import RolloutClient
from sluice.config import Options, SecurityConfig, load_run
from sluice.rpc import SluiceError
from sluice.v1 import rollout_pb2

POLL_S = 0.5
"""Seconds between two looks at the replica."""

END_S = 30.0
"""Seconds after the grace for the process to end: it stops its engine."""

_GONE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


def run(argv: list[str]) -> int:
    """Drain a replica; return 0 when it is gone, 1 if it cannot be reached or does not end."""
    parser = Options(
        prog="sluice drain",
        description=f"{__doc__} What is left at the end of the grace ends with the tokens so far, which another replica continues."
        " Further words are settings (`@ file.toml`, `--security.tls-ca ca.pem`).",
    )
    parser.add_argument("target", help="host:port of the replica")
    parser.add_argument(
        "--grace",
        type=_grace,
        help="time for the requests under way, such as 30s; 0s hands them over at once (default: its server.drain_s)",
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
    async with RolloutClient(target, security) as replica:
        begun = await replica.drain(grace_s)
        grace_left_s = begun.grace_left.ToNanoseconds() / 1e9
        print(f"{target}: draining, {begun.samples_left} samples left, at most {grace_left_s:.0f} s", flush=True)
        last = ""
        try:
            async with asyncio.timeout(grace_left_s + END_S):
                while (status := await _status(replica)) is not None:
                    line = f"{status.running} running, {status.queued} queued"
                    if line != last:
                        left_s = status.drain_left.ToNanoseconds() / 1e9
                        print(f"{target}: {line}, {left_s:.0f} s left", flush=True)
                    last = line
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            print(
                f"{target}: still there {END_S:.0f} s after its grace; its log says what it waits for", file=sys.stderr
            )
            return 1
    print(f"{target}: gone")
    return 0


async def _status(replica: RolloutClient) -> rollout_pb2.GetStatusResponse | None:
    """Return the status of a replica; None if it is gone."""
    try:
        return await replica.status()
    except SluiceError as error:
        if error.code in _GONE:
            return None
        raise
