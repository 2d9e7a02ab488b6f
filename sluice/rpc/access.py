"""Who may call which methods, over which transport, and where a server may listen.

`ACCESS` is the one table of roles and methods. `Access` applies it to the calls of one server, gRPC and HTTP together.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from urllib.parse import unquote

import grpc
import structlog
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from sluice.config import ConfigError, SecurityConfig, ServerConfig
from sluice.rpc.channel import REQUEST_ID, UNIX
from sluice.rpc.errors import SluiceError
from sluice.rpc.from_files import FromFiles
from sluice.rpc.principals import ANYONE, ROLES, Principal, Principals, Role, files_of, now_utc
from sluice.rpc.quota import Usage

INFO_SERVICE = "sluice.v1.ServerInfoService"
ADMIN_SERVICE = "sluice.v1.ServerAdminService"

GATEWAY_HTTP, ROLLOUT_HTTP, METRICS_HTTP = "http.gateway", "http.rollout", "http.metrics"
"""The HTTP ports as services of `ACCESS`; their methods are routes without the first slash."""

EVERY_ROLE: frozenset[Role] = frozenset(ROLES)

_ADMIN: frozenset[Role] = frozenset()
_VIEWER: frozenset[Role] = frozenset({"viewer"})
_AGENTS: frozenset[Role] = frozenset({"agent", "gateway"})
_SAMPLING: frozenset[Role] = _AGENTS | {"dispatcher"}
_ENVIRONMENT: frozenset[Role] = frozenset({"agent", "dispatcher"})
_DISPATCHER: frozenset[Role] = frozenset({"dispatcher"})
_GATEWAY: frozenset[Role] = frozenset({"gateway"})
_REPLICA: frozenset[Role] = frozenset({"replica"})
_TENANT: frozenset[Role] = frozenset({"tenant"})
_TRAINER: frozenset[Role] = frozenset({"trainer"})
# A relay has the role trainer, because engines load the weights that it sends, as they load those that a trainer pushes.
_WEIGHTS: frozenset[Role] = _REPLICA | _TRAINER


def _rows(table: Mapping[str, Mapping[str, frozenset[Role] | None]]) -> dict[str, frozenset[Role] | None]:
    return {
        f"{service}/{method}": roles
        for service, rows in table.items()
        for methods, roles in rows.items()
        for method in methods.split()
    }


ACCESS: Mapping[str, frozenset[Role] | None] = _rows(
    {
        "sluice.v1.OrchestratorService": {
            "GetRun WatchRun ListTrajectories": _VIEWER,
            "PauseRun ResumeRun StopRun SetRun": _ADMIN,
            "RegisterReplica Heartbeat": _REPLICA,
        },
        "sluice.v1.TrainerService": {
            "GetTrainerState WatchSteps ListCheckpoints": _VIEWER,
            "BeginEpoch SubmitBatch SaveCheckpoint KeepCheckpoint": _ADMIN,
        },
        "sluice.v1.RolloutService": {"Generate GenerateStream Tokenize": _SAMPLING, "GetModel": _SAMPLING | _VIEWER},
        "sluice.v1.RolloutAdminService": {
            "GetStatus": _DISPATCHER | _GATEWAY | _VIEWER,
            "SetWeightPolicy Pause Resume LoadAdapter UnloadAdapter": _DISPATCHER,
            "UpdateWeights ReloadWeights VerifyWeights AbortRequests Drain": _ADMIN,
        },
        "sluice.v1.EpisodeService": {
            "LeaseTasks RenewLease OpenEpisode Generate GenerateStream": _AGENTS,
            "RecordReward SubmitTrajectory AbandonEpisode": _AGENTS,
        },
        "sluice.v1.SessionService": {
            "FindSession BeginGeneration RecordGeneration Exchange": _GATEWAY,
            "GetGeneration ReleaseGeneration WatchReplicas": _GATEWAY,
        },
        "sluice.v1.EnvironmentService": {"Describe ListTasks Reset Step Score CloseEpisode": _ENVIRONMENT},
        "sluice.v1.WeightSyncService": {
            "PushWeights CommitVersion DeleteVersion": _TRAINER,
            "ListVersions": _TRAINER | _VIEWER,
            "GetManifest": _WEIGHTS | _VIEWER,
        },
        "sluice.v1.WeightDeliveryService": {
            "WatchVersions GetUpdatePath ListSources PullWeights ReportVersion": _WEIGHTS
        },
        "sluice.v1.TrainingService": {
            "CreateTraining ListTrainings DeleteTraining ForwardBackward OptimStep": _TENANT,
            "SaveState LoadState Sample WaitOperation": _TENANT,
        },
        INFO_SERVICE: {"GetServerInfo": EVERY_ROLE},
        ADMIN_SERVICE: {"DrainServer": _ADMIN},
        reflection.SERVICE_NAME: {"ServerReflectionInfo": EVERY_ROLE},
        health.SERVICE_NAME: {"Check List Watch": None},
        # The key of a session opens these routes too, except `rl/sessions` and `metrics`.
        GATEWAY_HTTP: {
            "rl/sessions": _AGENTS,
            "rl/sessions/{name}/renew rl/sessions/{name}/reward rl/sessions/{name}/end": _AGENTS,
            "v1/chat/completions v1/completions v1/responses v1/messages v1/messages/count_tokens": _AGENTS,
            "inference/v1/generate v1/models v1/models/{name:path}": _AGENTS,
            "metrics": _AGENTS | _VIEWER,
            "health ready": None,
        },
        ROLLOUT_HTTP: {
            "v1/chat/completions v1/completions": _SAMPLING,
            "v1/models v1/models/{name:path} metrics": _SAMPLING | _VIEWER,
            "update_weights reload_weights": _ADMIN,
            "health ready": None,
        },
        METRICS_HTTP: {"metrics": EVERY_ROLE},
    }
)
"""Roles besides admin that may call a method or use a route; an admin may do everything. None: no principal is needed.

Only an admin may call methods that are not listed here. A viewer reads and shows a run: its methods change nothing and do not sample.
"""

SESSION_KEY = "sk-sluice-"
"""Prefix of the keys of sessions, by which a gateway distinguishes them from tokens of principals."""

SETTLING_KEY = f"{SESSION_KEY}settle-"
"""Prefix of the keys that settle a session. The other keys sample."""

_caller: ContextVar[Principal] = ContextVar("caller", default=ANYONE)


def roles_for(service: str, method: str) -> frozenset[Role] | None:
    """Return the roles that may call a method; None if it needs no principal.

    Args:
        service: Fully qualified, such as ``sluice.v1.TrainerService``, or an HTTP port, such as `GATEWAY_HTTP`.
        method: Its name in the service, or a route without the first slash.
    """
    listed = ACCESS.get(f"{service}/{method}", _ADMIN)
    return None if listed is None else listed | {"admin"}


def name_request(request_id: str) -> None:
    """Set the id of the call that is being served. Its log lines and the calls that it makes carry this id."""
    REQUEST_ID.set(request_id)
    structlog.contextvars.bind_contextvars(request_id=request_id)


def caller() -> Principal:
    """Return the principal that makes the call being served; `ANYONE` if the server has no principals."""
    return _caller.get()


def require_role(*roles: Role) -> None:
    """Refuse the call that is being served unless its principal has one of the roles, or is an admin.

    Raises:
        SluiceError: PERMISSION_DENIED.
    """
    principal = caller()
    if principal.role != "admin" and principal.role not in roles:
        needed = " or ".join([*sorted({*roles} - {"admin"}), "admin"])
        raise SluiceError(
            grpc.StatusCode.PERMISSION_DENIED,
            "ROLE_REQUIRED",
            f"this call needs the role {needed}; principal {principal.name!r} has the role {principal.role}: call with the"
            " token or certificate of another principal",
            metadata={"principal": principal.name, "role": principal.role, "needed": needed},
        )


class Access:
    """Decides about the calls of one server.

    Args:
        security: Which principals there are.
        clock: Monotonic seconds, for quotas.

    Raises:
        ConfigError: if a file of principals or tokens cannot be used.
    """

    def __init__(self, security: SecurityConfig, clock: Callable[[], float] = time.monotonic) -> None:
        first = Principals.of(security)
        self._principals = None
        if first is not None:
            self._principals = FromFiles(
                "the list of principals", files_of(security), lambda before: Principals.of(security, before) or first
            )
        self._clock = clock
        self._usage: dict[str, Usage] = {}

    @property
    def open(self) -> bool:
        """Whether no principals are configured, so that every call passes."""
        return self._principals is None

    @property
    def knows_certificates(self) -> bool:
        """Whether a principal may be identified by a certificate."""
        return self._principals is not None and self._principals.current().know_certificates

    def identify(self, authorization: str | bytes | None, certificate: Collection[str]) -> Principal:
        """Return the principal that makes a call; `ANYONE` if no principals are configured.

        Args:
            authorization: The call's `authorization` metadata or header.
            certificate: Common name and URIs of the verified client certificate.

        Raises:
            SluiceError: UNAUTHENTICATED.
        """
        if self._principals is None:
            return ANYONE
        try:
            return self._principals.current().identify(authorization, certificate, now_utc())
        except SluiceError:
            # The caller may have read a new token that was written less than a second ago.
            if not self._principals.look():
                raise
        return self._principals.current().identify(authorization, certificate, now_utc())

    def state(self) -> object:
        """Return an object that identifies the present principals: another object after a change, or at each call if any may expire."""
        if self._principals is None:
            return None
        principals = self._principals.current()
        return object() if principals.expire else principals

    def admits(self, authorization: str | bytes | None, certificate: Collection[str], roles: frozenset[Role]) -> bool:
        """Return whether a call that was admitted before would still be admitted now. Quotas do not count."""
        try:
            return self.identify(authorization, certificate).role in roles
        except SluiceError:
            return False

    def admit(
        self, authorization: str | bytes | None, certificate: Collection[str], roles: frozenset[Role]
    ) -> Usage | None:
        """Admit one call, and make its principal the `caller` of this context. Each log line of the call names this principal.

        The quota is checked before the role, so calls that are refused for their role use it up, too.

        Args:
            authorization: The call's `authorization` metadata or header.
            certificate: Common name and URIs of the verified client certificate.
            roles: The roles that may make the call.

        Returns:
            The usage whose `end` must be called at the end of the call; None if calls are not counted.

        Raises:
            SluiceError: UNAUTHENTICATED, RESOURCE_EXHAUSTED beyond the quota, PERMISSION_DENIED.
        """
        if self._principals is None:
            return None
        principal = self.identify(authorization, certificate)
        _caller.set(principal)
        structlog.contextvars.bind_contextvars(principal=principal.name)
        usage = self._usage.get(principal.name)
        now = self._clock()
        if usage is None or usage.principal != principal:  # its quota may have changed
            names = self._principals.current().names  # so that there are at most as many entries as principals
            self._usage = {name: each for name, each in self._usage.items() if name in names}
            usage = self._usage[principal.name] = Usage(principal, now)
        usage.begin(now)
        try:
            require_role(*roles)
        except SluiceError:
            usage.end()
            raise
        return usage


def is_local(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    if host.startswith(UNIX) or host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def is_local_peer(peer: str) -> bool:
    """Return whether a caller is on this machine and calls by loopback or a unix socket.

    Args:
        peer: The caller's address, as gRPC writes it: ``ipv4:10.0.0.5:48122``, ``ipv6:%5B::1%5D:48122`` or ``unix:``.
    """
    kind, _, address = peer.partition(":")
    return kind == "unix" or (kind in {"ipv4", "ipv6"} and is_local(unquote(address).rpartition(":")[0]))


def check_exposure(server: ServerConfig, security: SecurityConfig) -> None:
    """Refuse to expose an unprotected server to the network.

    Raises:
        ConfigError: if the address is not local, and TLS or principals are missing, and `insecure` is not set.
    """
    if security.insecure or is_local(server.host):
        return
    missing = []
    if security.tls_cert is None:
        missing.append("TLS (security.tls_cert, security.tls_key)")
    if security.admin_token_file is None and security.principals_file is None:
        missing.append("tokens (security.principals_file, or security.token_file and security.admin_token_file)")
    if missing:
        raise ConfigError(
            f"refusing to listen on {server.host} without {' and '.join(missing)}:"
            " set them, bind 127.0.0.1, or say --insecure if the network is trusted"
        )
