"""Checks of the services that a run talks to: name, port, TLS, token, versions, health and clock of each, in this order."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Mapping
from importlib import metadata

import grpc
from grpc_health.v1 import health_pb2

from sluice.certificates import now_utc, read_leaf
from sluice.config import ConfigError, RunConfig, SecurityConfig
from sluice.config.tables import environments_of
from sluice.doctor.finding import Finding, ok, warning, wrong
from sluice.rpc import SluiceError, connect
from sluice.rpc.channel import DNS, UNIX, health_status
from sluice.rpc.server import CONTRACT_VERSION
from sluice.v1 import common_pb2, common_pb2_grpc

ANSWER_S = 5.0
"""Deadline of each question to a peer, in seconds."""

APART_S = 2.0
"""Most seconds by which clocks may differ. Journals, certificates and logs of several machines are compared by their clocks."""


def peers_of(run: RunConfig) -> Mapping[str, str]:
    """Return the addresses that the settings name, by service."""
    peers = run.peers
    several = len(peers.rollout) > 1
    replicas = {f"rollout {number}" if several else "rollout": each for number, each in enumerate(peers.rollout)}
    found = {"weightsync": peers.weightsync, "trainer": peers.trainer, **replicas, "orchestrator": peers.orchestrator}
    external = any(each.workflow == "external" for each in environments_of(run))
    return found | ({"gateway": peers.gateway} if external else {})


async def check_peers(addresses: Mapping[str, str], security: SecurityConfig) -> list[Finding]:
    """Ask all services at the same time."""
    found = await asyncio.gather(*(check_peer(name, target, security) for name, target in addresses.items()))
    return list(found)


async def check_peer(name: str, target: str, security: SecurityConfig) -> Finding:
    """Check a service step by step, and return the first problem."""
    what = f"peer {name}"
    problem = await _unreachable(what, name, target, security)
    if problem is not None:
        return problem
    try:
        async with connect(target, security, role="agent") as channel:
            before = time.time()
            stub = common_pb2_grpc.ServerInfoServiceStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
            info: common_pb2.GetServerInfoResponse = await stub.GetServerInfo(
                common_pb2.GetServerInfoRequest(), timeout=ANSWER_S
            )
            after = time.time()
        status = await health_status(target, security, timeout_s=ANSWER_S)
    except ConfigError as error:
        return wrong(what, str(error), "correct the table [security]")
    except grpc.aio.AioRpcError as error:
        return _refused(what, target, SluiceError.from_rpc(error))
    return _judged(what, name, target, info, (before, after), serving=status == health_pb2.HealthCheckResponse.SERVING)


async def _unreachable(what: str, name: str, target: str, security: SecurityConfig) -> Finding | None:
    """Return why no connection can be made; None if one can."""
    if target.startswith(UNIX):
        return None
    host, _, port = target.removeprefix(DNS).rpartition(":")
    service = name.partition(" ")[0]
    setting = f"peers.{service}"
    if not port.isdigit():
        return wrong(what, f"{target!r} has no port", f"write {setting} as host:port")
    host = host.strip("[]")
    try:
        async with asyncio.timeout(ANSWER_S):
            _, writer = await asyncio.open_connection(host, int(port))
        writer.close()
    except socket.gaierror as error:
        problem = f"the name {host!r} cannot be resolved: {error.strerror}"
        return wrong(what, problem, f"correct {setting}, or the DNS of this machine")
    except OSError as error:  # TimeoutError among them
        remedy = (
            f"see that `sluice {service}` runs there, listens on more than loopback, and that {setting} has its port"
        )
        return wrong(what, f"{target}: {_why(error)}", remedy)
    if security.tls_ca is None and security.tls_cert is None:
        return None
    return await _tls_problem(what, target, (host, int(port)), security)


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer: a firewall drops the packets, or the host is down"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    return os.strerror(error.errno) if error.errno else str(error)


async def _tls_problem(what: str, target: str, address: tuple[str, int], security: SecurityConfig) -> Finding | None:
    """Return what is wrong with a certificate, the server's or ours. gRPC says UNAVAILABLE for all of it."""
    remedy = "its certificate must be valid now, name this host, and be issued by an authority in security.tls_ca"
    try:
        context = ssl.create_default_context(cafile=security.tls_ca)
        context.set_alpn_protocols(["h2"])
        if security.tls_cert is not None:
            context.load_cert_chain(security.tls_cert, security.tls_key)
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(*address, ssl=context)
            # A server checks the client's certificate after the client's part of the handshake. If it refuses it, it just closes the connection.
            refused = not await reader.read(1)
        writer.close()
    except ssl.SSLCertVerificationError as error:
        return wrong(what, f"{target}: TLS fails: {error.verify_message}", remedy)
    except TimeoutError:
        return wrong(what, f"{target}: TLS fails: no answer to the handshake", remedy)
    except ConnectionError:
        refused = True
    except OSError as error:  # SSLError among them
        problem = f"{getattr(error, 'reason', None) or error.strerror or error}: does the server have TLS at all?"
        return wrong(what, f"{target}: TLS fails: {problem}", remedy)
    return _refused_certificate(what, target, security) if refused else None


def _refused_certificate(what: str, target: str, security: SecurityConfig) -> Finding:
    """Return why a server may refuse our certificate. The server itself gives no reason."""
    if security.tls_cert is None:
        return wrong(
            what,
            f"{target} wants a client certificate, and these settings have none",
            "set security.tls_cert and tls_key, or security.certs_dir; `sluice certs` issues a client certificate",
        )
    leaf = read_leaf(security.tls_cert)
    now = now_utc()
    if not leaf.begins <= now < leaf.expires:
        state = f"expired at {leaf.expires:%Y-%m-%d %H:%M} UTC"
        if now < leaf.begins:
            state = f"is not valid before {leaf.begins:%Y-%m-%d %H:%M} UTC"
        return wrong(
            what,
            f"{target} refuses the client certificate {security.tls_cert}: it {state}",
            "issue it again (`sluice certs renew` where the authority is), and see that the clocks are right",
        )
    return wrong(
        what,
        f"{target} refuses the client certificate {security.tls_cert} of the authority {leaf.issuer!r}",
        "that server must have this authority in its security.tls_ca; or have the certificate issued by an authority that is there",
    )


def _refused(what: str, target: str, error: SluiceError) -> Finding:
    if error.code is grpc.StatusCode.UNAUTHENTICATED:
        return wrong(
            what,
            f"{target} does not know the token: {error.message}",
            "set security.token_file to the file with the token of a principal of that server",
        )
    if error.code is grpc.StatusCode.UNAVAILABLE:
        return wrong(
            what,
            f"{target} ends the connection: {error.message}",
            "it has TLS and these settings have none (security.tls_ca), or it wants a client certificate, or it is no server of Sluice",
        )
    return wrong(what, f"{target}: {error}", "see the log of that service")


def _judged(
    what: str,
    name: str,
    target: str,
    info: common_pb2.GetServerInfoResponse,
    asked: tuple[float, float],
    *,
    serving: bool,
) -> Finding:
    ours, service = metadata.version("sluice"), name.partition(" ")[0]
    text = f"{target}: {info.service} {info.software_version}"
    if info.service != service:
        return wrong(what, f"{text} answers where {service} should", f"correct peers.{service}")
    if info.HasField("time"):
        there = info.time.ToNanoseconds() / 1e9
        apart = there - asked[0] if there < asked[0] else max(0.0, there - asked[1])
        if abs(apart) > APART_S:
            return wrong(
                what,
                f"{text}: its clock is {abs(apart):.0f} s {'ahead' if apart > 0 else 'behind'}",
                "let NTP (chrony, systemd-timesyncd) keep the time of both machines",
            )
    if (info.contract_version, info.software_version) != (CONTRACT_VERSION, ours):
        theirs = f"{text} with version {info.contract_version} of the contracts"
        return warning(
            what, f"{theirs}, here are {ours} and {CONTRACT_VERSION}", "install the same release on both sides"
        )
    if not serving:
        return warning(what, f"{text} does not serve yet", "wait: it loads, or drains; its log says which")
    return ok(what, f"{text} serves")
