"""Who may call, over what, and where a server may listen."""

from __future__ import annotations

import contextlib
from pathlib import Path

import grpc
import pytest
from certificates import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc
from trainer_double import start_double

from sluice.config import ConfigError, SecurityConfig, ServerConfig
from sluice.rpc import RpcServer, SluiceError, connect
from sluice.v1 import common_pb2, common_pb2_grpc, trainer_pb2, trainer_pb2_grpc


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
    server, double = await start_double(tokens, role=needed)
    path = None if sent is None else token_file(tmp_path, f"sent-{sent}", sent)
    assert await outcome(server.target, SecurityConfig(admin_token_file=path)) == code
    assert double.calls == (code == "OK")
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


async def test_tls_is_served_to_those_who_trust_the_authority(tmp_path):
    authority, stranger = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    certificate, key = authority.issue("server")
    server, _ = await start_double(SecurityConfig(tls_cert=certificate, tls_key=key))
    assert await outcome(server.target, SecurityConfig(tls_ca=authority.path)) == "OK"
    assert await outcome(server.target, SecurityConfig(tls_ca=stranger.path)) == "UNAVAILABLE"
    assert await outcome(server.target, SecurityConfig()) == "UNAVAILABLE"
    await server.stop(0)


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
