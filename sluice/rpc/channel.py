"""Channels: every call has a deadline, a request id and a token, and only idempotent calls are retried.

Tokens and certificates are read again when their files change. gRPC cannot change the certificate of a channel. So new calls then use a
new channel, and the old one is closed when the calls in progress on it have ended.

This wraps the channel's callables and acts once per call. gRPC's own client interceptors would put another generator around every
message of a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import uuid
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from sluice.errors import ConfigError
from sluice.limits import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES
from sluice.rpc.client_security import read_token
from sluice.rpc.from_files import FromFiles
from sluice.rpc.tls import Pem, pem_files

if TYPE_CHECKING:  # a client needs grpcio and protobuf alone
    from sluice.rpc.client_security import Security
    from sluice.rpc.principals import Role

UNIX = "unix:"
"""Prefix of the address of a unix socket."""

DNS = "dns:///"
"""Prefix of a name that stands for all addresses to which it resolves."""

REQUEST_ID_KEY = "x-request-id"
"""Metadata with the id of a call, for the logs of both sides."""

TOO_OLD = "CONNECTION_TOO_OLD"
"""Reason with which a server ends a watch so that its client connects again."""

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the call that is being served. The calls that it makes carry it, too."""

_FRAMING_BYTES = 64 << 10
"""Room for field headers around a payload of the full size."""

TRANSPORT_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES + _FRAMING_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES + _FRAMING_BYTES),
    # gRPC's own 8 KiB drops the details of an error with a long list of field violations.
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    # A peer that disappears is noticed within 30 + 10 s, also on an idle watch stream.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)

_DAY_S = 24 * 3600.0

_POLL_S = 0.1
"""Pause between two health checks of a server that does not serve yet, in seconds."""

_ANSWER_S = 5.0
"""Deadline of one health check in seconds."""

Anything: TypeAlias = Any
"""An argument or a result of gRPC's callables: any message, any call."""

IDEMPOTENT_METHODS: dict[str, tuple[str, ...]] = {
    "sluice.v1.ServerInfoService": ("GetServerInfo",),
    "sluice.v1.RolloutService": ("GetModel", "Tokenize"),
    "sluice.v1.RolloutAdminService": (
        "SetWeightPolicy",
        "UpdateWeights",
        "ReloadWeights",
        "Pause",
        "Resume",
        "LoadAdapter",
        "UnloadAdapter",
        "AbortRequests",
        "Drain",
        "GetStatus",
    ),
    "sluice.v1.WeightSyncService": ("CommitVersion", "ListVersions", "GetManifest", "DeleteVersion"),
    "sluice.v1.WeightDeliveryService": ("ReportVersion",),
    "sluice.v1.TrainerService": (
        "BeginEpoch",
        "GetTrainerState",
        "SaveCheckpoint",
        "KeepCheckpoint",
        "ListCheckpoints",
    ),
    "sluice.v1.OrchestratorService": (
        "GetRun",
        "PauseRun",
        "ResumeRun",
        "StopRun",
        "SetRun",
        "RegisterReplica",
        "Heartbeat",
        "ListTrajectories",
    ),
    "sluice.v1.EpisodeService": (
        "LeaseTasks",
        "RenewLease",
        "OpenEpisode",
        "RecordReward",
        "SubmitTrajectory",
        "AbandonEpisode",
    ),
    "sluice.v1.SessionService": (
        "FindSession",
        "BeginGeneration",
        "RecordGeneration",
        "GetGeneration",
        "ReleaseGeneration",
    ),
    "sluice.v1.EnvironmentService": ("Describe", "ListTasks", "Reset", "Step", "Score", "CloseEpisode"),
}
"""The calls that may be sent twice, by fully qualified service: a channel retries only these, and only if the server was unavailable.

The contracts call each of them idempotent or free of side effects. Streams are left out: their callers continue where a stream broke (at
an offset, a sequence number, a batch id). Health checks and ListSources are left out because they ask about this moment. `Generate` is
left out because a caller who lost a replica wants to choose another one, and `VerifyWeights` because it takes minutes.
"""

_RETRY_POLICY = {
    "maxAttempts": 5,
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 2.5,
    "retryableStatusCodes": ["UNAVAILABLE"],
}


def service_config() -> str:
    """Return the gRPC service config: round robin over all addresses, retries for idempotent methods only."""
    names = [
        {"service": service, "method": name} for service, methods in IDEMPOTENT_METHODS.items() for name in methods
    ]
    return json.dumps(
        {"loadBalancingConfig": [{"round_robin": {}}], "methodConfig": [{"name": names, "retryPolicy": _RETRY_POLICY}]}
    )


_CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    *TRANSPORT_OPTIONS,
    ("grpc.service_config", service_config()),
    ("grpc.service_config_disable_resolution", 1),
    # A unary request of the full size can be repeated too.
    ("grpc.per_rpc_retry_buffer_size", MAX_MESSAGE_BYTES * 2),
    # Each channel has its own connections: bulk streams on one do not slow the others down.
    ("grpc.use_local_subchannel_pool", 1),
    # The services are peers in one cluster; a proxy for the outside world must not get their traffic.
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


_IDLE_OPTION = ("grpc.client_idle_timeout_ms", 60_000)
"""A channel without calls closes its connection. Otherwise it would open it again and again with a certificate that was replaced."""


def connect(
    target: str,
    security: Security,
    *,
    role: Role = "admin",
    default_deadline_s: float = 30.0,
    stream_deadline_s: float = _DAY_S,
) -> grpc.aio.Channel:
    """Open a channel; it connects on the first call.

    Args:
        target: ``host:port``, ``dns:///name:port`` (all addresses, round robin) or ``unix:/path``.
        security: Tokens and TLS; TLS is used when an authority or a certificate is configured, never on a unix socket.
        role: The role that the calls need; see `token_file` for the token that is sent.
        default_deadline_s: Deadline of a call with one response that has no ``timeout`` of its own.
        stream_deadline_s: The same for a call with a stream of responses.

    Raises:
        ConfigError: if a token, key or certificate file cannot be read.
    """
    path = token_file(security, role)
    tokens = None if path is None else FromFiles("the token", [path], lambda _: read_token(path))
    pem = None if target.startswith(UNIX) else pem_files(security)
    named = security.tls_address_name if _names_an_address(target) else None
    return _BoundedChannel(target, pem, tokens, default_deadline_s, stream_deadline_s, server_name=named)


def token_file(security: Security, role: Role) -> Path | None:
    """Return the file of the token to send with calls that need a role; None to send no token.

    If there are two tokens, send the admin's, unless an agent's is enough. Calls with the role dispatcher never send either of them,
    because orchestrator and gateways call addresses that replicas announced.

    Raises:
        ConfigError: if the role is dispatcher, and this process has tokens but no dispatcher's token.
    """
    agent, admin = security.token_file, security.admin_token_file
    if role == "dispatcher":
        if security.dispatcher_token_file is None and (agent or admin):
            raise ConfigError(
                "security.dispatcher_token_file is not set, and orchestrator and gateways send replicas no other token, since that"
                " would open the other services to them: add a principal with `sluice token new dispatcher --role dispatcher`"
                " and set it to the file with that token (without principals_file: to a file with a new token, at the"
                " replicas too)"
            )
        return security.dispatcher_token_file
    return (agent or admin) if role == "agent" else (admin or agent)


def _names_an_address(target: str) -> bool:
    """Return whether a target is an IP address with a port, not a name."""
    try:
        ipaddress.ip_address(target.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return True


class _Connection:
    """One channel of gRPC, and how many calls are in progress on it.

    Args:
        target: As for `connect`.
        pem: Certificate to present and authorities to trust; None for no TLS.
        server_name: Name that the server's certificate must have. None: the name in the target.
    """

    def __init__(self, target: str, pem: Pem | None, server_name: str | None = None) -> None:
        self.pem = pem
        if pem is None:
            self.channel = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(pem.authorities, pem.key, pem.certificate)
            options: tuple[tuple[str, int | str], ...] = (*_CHANNEL_OPTIONS, _IDLE_OPTION)
            if server_name is not None:
                options = (*options, ("grpc.ssl_target_name_override", server_name))
            self.channel = grpc.aio.secure_channel(target, credentials, options=options)
        self._calls = 0
        self._unused: Callable[[], None] | None = None

    def began(self, call: Anything) -> None:
        """Count a call until it ends."""
        self._calls += 1
        call.add_done_callback(self._ended)

    def _ended(self, _call: Anything) -> None:
        self._calls -= 1
        if self._unused is not None and not self._calls:
            self._unused()

    def when_unused(self, do: Callable[[], None]) -> None:
        """Call `do` once no call is in progress. No further call may begin."""
        self._unused = do
        if not self._calls:
            do()


class _BoundedChannel(grpc.aio.Channel):
    """A channel whose calls get a deadline, a request id, the bearer token, and a connection with the newest certificate."""

    def __init__(
        self,
        target: str,
        pem: FromFiles[Pem] | None,
        tokens: FromFiles[str] | None,
        deadline_s: float,
        stream_deadline_s: float,
        *,
        server_name: str | None = None,
    ) -> None:
        self._target, self._pem, self._tokens, self._server_name = target, pem, tokens, server_name
        self._deadline_s = deadline_s
        self._stream_deadline_s = stream_deadline_s
        self._connection = _Connection(target, None if pem is None else pem.current(), server_name)
        self._old: set[_Connection] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> _BoundedChannel:
        await self._connection.channel.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Close the connection; calls in progress get `grace` seconds."""
        connections = (self._connection, *self._old)
        await asyncio.gather(*(each.channel.close(grace) for each in connections), *self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._newest().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Return when the connectivity differs; the caller sets the deadline."""
        await self._connection.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Return when connected; the caller sets the deadline."""
        await self._newest().channel.channel_ready()

    def unary_unary(self, *args: Anything, **kwargs: Anything) -> Anything:
        return self._bounded("unary_unary", args, kwargs, self._deadline_s)

    def stream_unary(self, *args: Anything, **kwargs: Anything) -> Anything:
        return self._bounded("stream_unary", args, kwargs, self._deadline_s)

    def unary_stream(self, *args: Anything, **kwargs: Anything) -> Anything:
        return self._bounded("unary_stream", args, kwargs, self._stream_deadline_s)

    def stream_stream(self, *args: Anything, **kwargs: Anything) -> Anything:
        return self._bounded("stream_stream", args, kwargs, self._stream_deadline_s)

    def _newest(self) -> _Connection:
        """Return the connection for the next call: a new one if the certificate has changed."""
        if self._pem is None:
            return self._connection
        pem = self._pem.current()
        if pem is not self._connection.pem:
            old, self._connection = self._connection, _Connection(self._target, pem, self._server_name)
            self._old.add(old)
            old.when_unused(lambda: self._close_old(old))
        return self._connection

    def _close_old(self, old: _Connection) -> None:
        self._old.discard(old)
        task = asyncio.ensure_future(old.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _bounded(
        self, kind: str, args: tuple[Anything, ...], kwargs: dict[str, Anything], deadline_s: float
    ) -> Callable[..., Anything]:
        connection = self._connection
        call: Callable[..., Anything] = getattr(connection.channel, kind)(*args, **kwargs)
        counted, tokens = self._pem is not None, self._tokens

        def begin(
            request: Anything = None,
            *,
            timeout: float | None = None,
            metadata: Iterable[tuple[str, str | bytes]] | None = None,
            **options: Anything,
        ) -> Anything:
            nonlocal connection, call
            given = tuple(metadata or ())
            if all(key != REQUEST_ID_KEY for key, _ in given):
                given = (*given, (REQUEST_ID_KEY, _request_id()))
            if tokens is not None:
                given = (("authorization", f"Bearer {tokens.current()}"), *given)
            if counted and self._newest() is not connection:
                connection = self._connection
                call = getattr(connection.channel, kind)(*args, **kwargs)
            began = call(request, timeout=deadline_s if timeout is None else timeout, metadata=given, **options)
            if counted:
                connection.began(began)
            return began

        return begin


def _request_id() -> str:
    """Return the id of the call that is being served, so that a request keeps its id across services; else a new id."""
    return REQUEST_ID.get() or uuid.uuid4().hex


async def health_status(target: str, security: Security, service: str = "", timeout_s: float = _ANSWER_S) -> int:
    """Return a server's `HealthCheckResponse.ServingStatus`.

    Args:
        target: ``host:port``, ``dns:///name:port`` or ``unix:/path``.
        security: Tokens and TLS.
        service: Fully qualified name of a service; empty asks for the whole server.
        timeout_s: Seconds to wait for the answer.

    Raises:
        grpc.aio.AioRpcError: if the server does not answer.
    """
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: PLC0415 - agents do not ask

    async with connect(target, security, role="agent") as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)  # type: ignore[attr-defined]  # the stubs leave it out
        return int(answer.status)


async def waits_of(target: str, security: Security, timeout_s: float = _ANSWER_S) -> list[str]:
    """Return what a server waits for, as texts for people; an empty list if it is ready.

    Raises:
        grpc.aio.AioRpcError: if the server does not answer, or does not know the caller.
    """
    from sluice.v1 import common_pb2, common_pb2_grpc  # noqa: PLC0415 - agents do not ask

    async with connect(target, security, role="agent") as channel:
        stub = common_pb2_grpc.ServerInfoServiceStub(channel)
        answer = await stub.GetServerInfo(common_pb2.GetServerInfoRequest(), timeout=timeout_s)
        return list(answer.waits_for)


async def wait_until_serving(target: str, security: Security) -> None:
    """Return once a server answers SERVING. There is no deadline: the caller sets one.

    Args:
        target: ``host:port``, ``dns:///name:port`` or ``unix:/path``.
        security: Tokens and TLS.

    Raises:
        ConfigError: if a token, key or certificate file cannot be read.
    """
    from grpc_health.v1 import health_pb2  # noqa: PLC0415 - agents do not wait

    host, _, port = target.removeprefix(DNS).rpartition(":")
    while True:
        # An attempt to connect costs nothing, and avoids gRPC's back-off between its own attempts.
        if not target.startswith(UNIX):
            try:
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            except OSError:
                await asyncio.sleep(_POLL_S)
                continue
            writer.close()
        with contextlib.suppress(grpc.aio.AioRpcError):
            if await health_status(target, security) == health_pb2.HealthCheckResponse.SERVING:
                return
        await asyncio.sleep(_POLL_S)
