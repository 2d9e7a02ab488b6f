"""Who may call, over what, and where a server may listen."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from certificates import Authority
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from trainer_double import start_double

import gateway_svc.http
import rollout_svc.http
from gateway_svc.config import CaptureConfig
from sluice.config import ConfigError, SecurityConfig, ServerConfig
from sluice.rpc import RpcServer, SluiceError, connect
from sluice.rpc.access import ACCESS, GATEWAY_HTTP, METRICS_HTTP, ROLLOUT_HTTP, Access, roles_for
from sluice.rpc.call_log import may_be_logged
from sluice.rpc.metrics_server import start_metrics_server
from sluice.rpc.principals import ROLES, add_token
from sluice.v1 import common_pb2, common_pb2_grpc, trainer_pb2, trainer_pb2_grpc

PROTOS = Path(__file__).parents[2] / "proto/sluice/v1"


def token_file(folder: Path, name: str, text: str | None = None) -> Path:
    path = folder / name
    path.write_text(f"{text or name}\n")
    return path


@pytest.fixture
def tokens(tmp_path):
    return SecurityConfig(token_file=token_file(tmp_path, "agent"), admin_token_file=token_file(tmp_path, "admin"))


async def outcome(target: str, security: SecurityConfig, role: str = "admin") -> str:
    """The code that a unary call ends with."""
    async with connect(target, security, role=role) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        try:
            await stub.GetTrainerState(trainer_pb2.GetTrainerStateRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


async def info_outcome(target: str, security: SecurityConfig) -> str:
    """The code that a call ends with which every principal may make."""
    async with connect(target, security) as channel:
        try:
            await common_pb2_grpc.ServerInfoServiceStub(channel).GetServerInfo(common_pb2.GetServerInfoRequest())
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


@pytest.mark.parametrize(
    ("needed", "sent", "code"),
    [
        ("agent", "agent", "OK"),
        ("agent", "admin", "OK"),
        ("admin", "admin", "OK"),
        ("admin", "agent", "PERMISSION_DENIED"),
        ("admin", "stranger", "UNAUTHENTICATED"),
        ("agent", "stranger", "UNAUTHENTICATED"),
        ("agent", None, "UNAUTHENTICATED"),
        ("admin", None, "UNAUTHENTICATED"),
    ],
)
async def test_each_token_grants_its_role_and_the_admin_token_grants_both(tmp_path, tokens, needed, sent, code):
    server, double = await start_double(tokens)
    path = None if sent is None else token_file(tmp_path, f"sent-{sent}", sent)
    call = outcome if needed == "admin" else info_outcome
    assert await call(server.target, SecurityConfig(admin_token_file=path)) == code
    assert double.calls == (code == "OK" and needed == "admin")
    await server.stop(0)


@pytest.mark.parametrize("role", sorted({*ROLES} - {"dispatcher"}))
async def test_of_two_tokens_that_of_the_agent_is_sent_only_for_what_an_agent_may_do(tokens, role):
    server, _ = await start_double(tokens)
    expected = "PERMISSION_DENIED" if role == "agent" else "OK"
    assert await outcome(server.target, tokens, role) == expected
    await server.stop(0)


def http_routes() -> set[str]:
    """The routes of every HTTP port, as the table names them."""
    access = Access(SecurityConfig())
    unused = cast("Any", None)  # what answers the requests, of which there are none
    servicer = cast("Any", SimpleNamespace(tokenizer=SimpleNamespace(token_text=None)))
    gateway = gateway_svc.http.create_app(unused, CaptureConfig(), access, "127.0.0.1").app
    rollout = rollout_svc.http.create_app(servicer, unused, "model", access, "127.0.0.1")
    return {
        *(f"{GATEWAY_HTTP}{route.path}" for route in gateway.routes),
        *(f"{ROLLOUT_HTTP}{route.path}" for route in rollout.routes),
        f"{METRICS_HTTP}/metrics",
    }


def rpcs() -> set[str]:
    """Every RPC that a server of ours may serve."""
    contracts = [
        importlib.import_module(f"sluice.v1.{path.stem}_pb2").DESCRIPTOR for path in sorted(PROTOS.glob("*.proto"))
    ]
    ours = [service.full_name for file in contracts for service in file.services_by_name.values()]
    pool = descriptor_pool.Default()
    return {
        f"{name}/{method}"
        for name in (*ours, health.SERVICE_NAME, reflection.SERVICE_NAME)
        for method in pool.FindServiceByName(name).methods_by_name
    }


def test_the_table_has_every_rpc_and_every_http_route_and_nothing_else():
    assert set(ACCESS) == rpcs() | http_routes()


def test_a_viewer_can_change_nothing_and_sample_nothing():
    may = {name for name in ACCESS if "viewer" in (roles_for(*name.split("/", 1)) or ())}
    assert may == {
        "sluice.v1.OrchestratorService/GetRun",
        "sluice.v1.OrchestratorService/WatchRun",
        "sluice.v1.OrchestratorService/ListTrajectories",
        "sluice.v1.TrainerService/GetTrainerState",
        "sluice.v1.TrainerService/WatchSteps",
        "sluice.v1.TrainerService/ListCheckpoints",
        "sluice.v1.RolloutService/GetModel",
        "sluice.v1.RolloutAdminService/GetStatus",
        "sluice.v1.WeightSyncService/ListVersions",
        "sluice.v1.WeightSyncService/GetManifest",
        "sluice.v1.ServerInfoService/GetServerInfo",
        f"{reflection.SERVICE_NAME}/ServerReflectionInfo",
        "http.gateway/metrics",
        "http.rollout/metrics",
        "http.rollout/v1/models",
        "http.rollout/v1/models/{name:path}",
        "http.metrics/metrics",
    }
    assert not [name for name in may if may_be_logged(name)], "what is logged changes something"


def test_the_page_on_security_has_the_same_table():
    page = (Path(__file__).parents[2] / "docs/security.md").read_text()
    shown = {}
    for service, methods, roles in re.findall(
        r"^\| `([A-Za-z0-9.]+)` \| ((?:`[^|`]+`(?:, )?)+) \| (.*?) ?\|$", page, re.MULTILINE
    ):
        said = None if roles == "needs no principal" else set(re.findall(r"`([a-z]+)`", roles))
        said = set(ROLES) if roles == "every role" else said
        for method in re.findall(r"`([^`]+)`", methods):
            full = service if service.startswith(("http.", "grpc.")) else f"sluice.v1.{service}"
            shown[f"{full}/{method.removeprefix('/')}"] = None if said is None else said - {"admin"}
    assert shown == {name: None if roles is None else {*roles} - {"admin"} for name, roles in ACCESS.items()}


@pytest.mark.parametrize(
    ("method", "roles"),
    [
        ("sluice.v1.RolloutService/Generate", {"agent", "gateway", "dispatcher"}),
        ("sluice.v1.RolloutAdminService/SetWeightPolicy", {"dispatcher"}),
        ("sluice.v1.RolloutAdminService/UpdateWeights", set()),
        ("sluice.v1.RolloutAdminService/Drain", set()),
        ("sluice.v1.WeightSyncService/PushWeights", {"trainer"}),
        ("sluice.v1.WeightSyncService/GetManifest", {"trainer", "replica", "viewer"}),
        ("sluice.v1.WeightDeliveryService/PullWeights", {"replica", "trainer"}),
        ("sluice.v1.OrchestratorService/RegisterReplica", {"replica"}),
        ("sluice.v1.OrchestratorService/SetRun", set()),
        ("sluice.v1.OrchestratorService/GetRun", {"viewer"}),
        ("sluice.v1.TrainerService/SubmitBatch", set()),
        (
            "sluice.v1.ServerInfoService/GetServerInfo",
            {"agent", "dispatcher", "gateway", "replica", "tenant", "trainer", "viewer"},
        ),
        ("sluice.v1.ServerAdminService/DrainServer", set()),
        ("unheard.of.Service/Method", set()),
    ],
)
def test_a_role_may_call_what_its_work_needs(method, roles):
    service, _, name = method.partition("/")
    assert roles_for(service, name) == roles | {"admin"}
    assert roles_for("grpc.health.v1.Health", "Check") is None


class Principals:
    """A principals file with one principal per role, and a quota for some."""

    def __init__(self, folder: Path, **quotas: str) -> None:
        self.file = folder / "principals.toml"
        self.tokens = {role: token_file(folder, f"{role}.token", add_token(self.file, role, role)) for role in ROLES}
        text = self.file.read_text()
        for role, quota in quotas.items():
            text = text.replace(f'role = "{role}"\n', f'role = "{role}"\nquota = {quota}\n')
        self.file.write_text(text)

    def server(self) -> SecurityConfig:
        return SecurityConfig(principals_file=self.file)

    def client(self, role: str) -> SecurityConfig:
        return SecurityConfig(token_file=self.tokens[role])


async def refusal(target: str, security: SecurityConfig) -> SluiceError:
    async with connect(target, security) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetTrainerState(trainer_pb2.GetTrainerStateRequest(), timeout=10)
    return SluiceError.from_rpc(caught.value)


async def test_each_principal_of_a_file_has_its_role(tmp_path):
    principals = Principals(tmp_path)
    server, double = await start_double(principals.server())
    for role in ROLES:
        assert await info_outcome(server.target, principals.client(role)) == "OK"
        code = "OK" if role in {"admin", "viewer"} else "PERMISSION_DENIED"
        assert await outcome(server.target, principals.client(role)) == code
    assert double.callers == ["admin", "viewer"]
    error = await refusal(server.target, principals.client("replica"))
    assert error.metadata == {"principal": "replica", "role": "replica", "needed": "viewer or admin"}
    assert "principal 'replica' has the role replica" in error.message
    assert principals.tokens["replica"].read_text().strip() not in error.message
    await server.stop(0)


async def test_a_quota_of_calls_a_second_is_refused_with_a_delay(tmp_path):
    principals = Principals(tmp_path, admin="{requests_per_s = 0.01, burst = 2}")
    server, double = await start_double(principals.server())
    assert [await outcome(server.target, principals.client("admin")) for _ in range(2)] == ["OK", "OK"]
    error = await refusal(server.target, principals.client("admin"))
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_RATE")
    assert 50 < error.retry_after_s <= 100
    assert await info_outcome(server.target, principals.client("replica")) == "OK"
    assert double.calls == 2
    await server.stop(0)


async def test_a_quota_of_calls_in_progress_counts_streams_until_they_end(tmp_path):
    principals = Principals(tmp_path, admin="{in_flight = 1}")
    server, double = await start_double(principals.server())
    async with connect(server.target, principals.client("admin")) as channel:
        stream = trainer_pb2_grpc.TrainerServiceStub(channel).WatchSteps(
            trainer_pb2.WatchStepsRequest(run="wait"), timeout=30
        )
        await asyncio.wait_for(double.entered.wait(), 10)
        error = await refusal(server.target, principals.client("admin"))
        assert (error.reason, error.retry_after_s) == ("QUOTA_IN_FLIGHT", 1.0)
        stream.cancel()
        await asyncio.wait_for(double.cancelled.wait(), 10)
    assert await outcome(server.target, principals.client("admin")) == "OK"
    await server.stop(0)


async def test_a_call_that_its_role_does_not_allow_uses_the_quota_up_too(tmp_path):
    principals = Principals(tmp_path, agent="{requests_per_s = 0.01, burst = 1}")
    server, _ = await start_double(principals.server())
    assert await outcome(server.target, principals.client("agent")) == "PERMISSION_DENIED"
    assert await outcome(server.target, principals.client("agent")) == "RESOURCE_EXHAUSTED"
    await server.stop(0)


@pytest.mark.parametrize("certificate", ["client", "spiffe://site/client"])
async def test_a_client_certificate_names_its_principal(tmp_path, certificate):
    authority = Authority(tmp_path / "a")
    own, own_key = authority.issue("server")
    client, client_key = authority.issue("client", uri="spiffe://site/client")
    stranger, stranger_key = authority.issue("stranger", uri="spiffe://site/stranger")
    file = tmp_path / "principals.toml"
    file.write_text(f'[[principal]]\nname = "op"\nrole = "admin"\ncertificate = "{certificate}"\n')
    tls = {"tls_cert": own, "tls_key": own_key, "tls_ca": authority.path, "require_client_cert": True}
    server, double = await start_double(SecurityConfig(principals_file=file, **tls))
    known = SecurityConfig(tls_ca=authority.path, tls_cert=client, tls_key=client_key)
    unknown = SecurityConfig(tls_ca=authority.path, tls_cert=stranger, tls_key=stranger_key)
    assert await outcome(server.target, known) == "OK"
    assert await outcome(server.target, unknown) == "UNAUTHENTICATED"
    assert double.callers == ["op"]
    await server.stop(0)


@pytest.mark.parametrize("header", ["admin", "Basic admin", "Bearer", "Bearer ", "Bearer admin x", "bearer  admin"])
async def test_a_malformed_authorization_is_refused(tokens, header):
    server, double = await start_double(tokens)
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetTrainerState(
                trainer_pb2.GetTrainerStateRequest(), metadata=[("authorization", header)], timeout=10
            )
    error = SluiceError.from_rpc(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_REQUIRED")
    assert "Bearer TOKEN" in error.message
    assert double.calls == 0
    await server.stop(0)


async def test_a_stream_is_refused_before_its_first_message(tokens):
    server, double = await start_double(tokens)
    async with connect(server.target, SecurityConfig()) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.WatchSteps(trainer_pb2.WatchStepsRequest(from_number=3), timeout=10).read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert double.calls == 0
    await server.stop(0)


@pytest.mark.parametrize("frames", [[], [b"\x0a\xff"]])
@pytest.mark.parametrize("method", ["GetTrainerState", "WatchSteps", "SubmitBatch"])
async def test_an_unknown_caller_is_refused_before_a_message_is_awaited_or_parsed(tokens, method, frames):
    server, double = await start_double(tokens)
    async with connect(server.target, SecurityConfig()) as channel:

        async def answer() -> grpc.StatusCode:
            call = channel.stream_stream(f"/sluice.v1.TrainerService/{method}")(timeout=20)
            for frame in frames:
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it may be refused by now
                    await call.write(frame)
            return await call.code()  # while the client's side of the stream is open

        for _ in range(50):
            code = await answer()
            if code is not grpc.StatusCode.INTERNAL:  # the client's own word for a write that meets the refusal
                break
        assert code is grpc.StatusCode.UNAUTHENTICATED
    assert double.calls == 0
    await server.stop(0)


async def test_health_is_open_while_server_info_asks_for_the_agent(tokens):
    server, _ = await start_double(tokens)
    async with connect(server.target, SecurityConfig()) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await common_pb2_grpc.ServerInfoServiceStub(channel).GetServerInfo(common_pb2.GetServerInfoRequest())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    async with connect(server.target, tokens, role="agent") as channel:
        info = await common_pb2_grpc.ServerInfoServiceStub(channel).GetServerInfo(common_pb2.GetServerInfoRequest())
        assert info.service == "trainer"
    await server.stop(0)


@pytest.mark.parametrize("text", ["", "two words", "two\nlines", "ümlaut"])
async def test_a_token_file_must_hold_one_word(tmp_path, text):
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(ConfigError, match="one line of ASCII"):
        await start_double(SecurityConfig(token_file=path, admin_token_file=path))


async def test_an_agent_token_alone_is_refused_at_start(tmp_path):
    with pytest.raises(ConfigError, match="set both"):
        await start_double(SecurityConfig(token_file=token_file(tmp_path, "agent")))


@pytest.mark.slow
async def test_tls_is_served_to_those_who_trust_the_authority(tmp_path):
    authority, stranger = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    certificate, key = authority.issue("server")
    server, _ = await start_double(SecurityConfig(tls_cert=certificate, tls_key=key))
    assert await outcome(server.target, SecurityConfig(tls_ca=authority.path)) == "OK"
    assert await outcome(server.target, SecurityConfig(tls_ca=stranger.path)) == "UNAVAILABLE"
    assert await outcome(server.target, SecurityConfig()) == "UNAVAILABLE"
    await server.stop(0)


@pytest.mark.slow
async def test_a_server_that_is_called_by_an_address_may_have_the_certificate_of_a_name(tmp_path):
    authority = Authority(tmp_path / "a")
    certificate, key = authority.issue("pod", address="10.0.0.1", hosts=["replicas"])
    server, _ = await start_double(SecurityConfig(tls_cert=certificate, tls_key=key))
    port = server.target.rpartition(":")[2]

    async def seen(target: str, name: str | None) -> str:
        return await outcome(target, SecurityConfig(tls_ca=authority.path, tls_address_name=name))

    assert await seen(server.target, "replicas") == "OK"
    assert await seen(server.target, None) == "UNAVAILABLE"
    assert await seen(server.target, "another") == "UNAVAILABLE"
    assert await seen(f"localhost:{port}", "replicas") == "UNAVAILABLE"  # called by a name, checked by that name
    await server.stop(0)


@pytest.mark.slow
async def test_mutual_tls_refuses_clients_without_a_certificate_of_the_authority(tmp_path):
    authority, stranger = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    certificate, key = authority.issue("server")
    server, _ = await start_double(
        SecurityConfig(tls_cert=certificate, tls_key=key, tls_ca=authority.path, require_client_cert=True)
    )
    own, own_key = authority.issue("client")
    foreign, foreign_key = stranger.issue("client")
    assert await outcome(server.target, SecurityConfig(tls_ca=authority.path, tls_cert=own, tls_key=own_key)) == "OK"
    assert await outcome(server.target, SecurityConfig(tls_ca=authority.path)) == "UNAVAILABLE"
    intruder = SecurityConfig(tls_ca=authority.path, tls_cert=foreign, tls_key=foreign_key)
    assert await outcome(server.target, intruder) == "UNAVAILABLE"
    await server.stop(0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_an_address_of_the_network_needs_tls_and_tokens(host, tokens, tmp_path):
    certificate, key = Authority(tmp_path / "a").issue("server")
    tls = {"tls_cert": certificate, "tls_key": key}
    for partial, missing in ((SecurityConfig(), "TLS"), (tokens, "TLS"), (SecurityConfig(**tls), "tokens")):
        with pytest.raises(ConfigError, match=f"refusing to listen on {host} without .*{missing}"):
            RpcServer("trainer", ServerConfig(host=host), partial)
    RpcServer("trainer", ServerConfig(host=host), tokens.model_copy(update=tls))
    RpcServer("trainer", ServerConfig(host=host), SecurityConfig(insecure=True))


def test_metrics_are_as_exposed_as_calls():
    with pytest.raises(ConfigError, match=r"refusing to listen on 0.0.0.0"):
        start_metrics_server(0, "0.0.0.0", SecurityConfig())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "unix:/tmp/x.sock"])
def test_a_local_address_needs_neither_tls_nor_tokens(host):
    RpcServer("trainer", ServerConfig(host=host), SecurityConfig())


async def test_a_unix_socket_serves_without_tls_even_where_tls_is_configured(tmp_path):
    authority = Authority(tmp_path / "a")
    certificate, key = authority.issue("server")
    security = SecurityConfig(tls_cert=certificate, tls_key=key, tls_ca=authority.path)
    server, _ = await start_double(security, host=f"unix:{tmp_path}/s")
    assert server.target == f"unix:{tmp_path}/s"
    assert await outcome(server.target, security) == "OK"
    await server.stop(0)


async def test_a_taken_port_is_an_error_at_start():
    server, _ = await start_double()
    with pytest.raises(ConfigError, match="is the port taken"):
        await start_double(port=int(server.target.rpartition(":")[2]))
    with contextlib.suppress(grpc.aio.AioRpcError):
        assert await outcome(server.target, SecurityConfig()) == "OK"
    await server.stop(0)
