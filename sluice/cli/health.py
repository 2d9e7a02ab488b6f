"""`sluice health HOST:PORT`: the container healthcheck."""

from __future__ import annotations

import asyncio
import sys

import grpc
from grpc_health.v1 import health_pb2

from sluice.config import Command, Options, load_run, seconds
from sluice.rpc import SluiceError
from sluice.rpc.channel import health_status

__all__ = ["COMMAND"]


def _run(argv: list[str]) -> int:
    parser = Options(
        prog="sluice health",
        description="Ask a server by grpc.health.v1 whether it serves. Further words are settings (`@ file.toml`,"
        " `--security.tls-ca ca.pem`).",
    )
    parser.add_argument("target", help="host:port, dns:///name:port or unix:/path")
    parser.add_argument("--service", default="", help="fully qualified service name; empty asks for the whole server")
    parser.add_argument("--timeout", type=seconds, default=5.0, help="seconds to wait for the answer (default: 5)")
    arguments, settings = parser.parse_known_args(argv)
    security = load_run(settings).security
    try:
        status = asyncio.run(health_status(arguments.target, security, arguments.service, arguments.timeout))
    except grpc.aio.AioRpcError as error:
        print(f"{arguments.target}: {SluiceError.from_rpc(error)}", file=sys.stderr)
        return 1
    print(f"{arguments.target}: {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}")
    return 0 if status == health_pb2.HealthCheckResponse.SERVING else 1


COMMAND = Command("health", "ask a server by grpc.health.v1 whether it serves; exit code 0 or 1", _run)
