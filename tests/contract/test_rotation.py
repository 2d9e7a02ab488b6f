"""Certificates, authorities and tokens are replaced while servers and clients run."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from pathlib import Path

import grpc
import httpx
import pytest
from simulated_clock import SimulatedClock
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from trainer_double import start_double
from weightsync_stack import eventually

from benchmarks.rotation import RENEWED, REPLACED, measure
from sluice import certificates
from sluice.client import TrainerClient
from sluice.config import SecurityConfig
from sluice.doctor import peers
from sluice.openai.requests import Door, RequestBounds, RequestGuard
from sluice.openai.server import CERTIFICATE, HttpServer
from sluice.rpc import SluiceError, connect, from_files
from sluice.rpc import server as rpc_server
from sluice.rpc.access import GATEWAY_HTTP, Access
from sluice.rpc.metrics_server import start_metrics_server
from sluice.rpc.principals import add_token, digest_of, new_token, replace_private
from sluice.v1 import trainer_pb2, trainer_pb2_grpc

DEADLINE_S = 60.0
AGE_S = 1.0


@pytest.fixture(autouse=True)
def what_changes_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_files, "LOOK_S", 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    certificates.begin(tmp_path / "certs", [], domain="sluice", days=1, now=certificates.now_utc())
    return tmp_path / "certs"


def renew(folder: Path) -> None:
    certificates.renew(folder, certificates.now_utc(), every=True)


@pytest.mark.slow
async def test_no_call_is_lost_while_everything_is_replaced(tmp_path: Path) -> None:
    counted, old = await measure(tmp_path, step_s=AGE_S, apart_s=0, age_s=AGE_S, clients=2, calls=100)
    assert len(counted) == 6
    assert [counts.lost for counts in counted.values()] == [[]] * 6
    assert all(counts.calls > 0 for counts in counted.values())
    assert all(counted[step].calls >= 100 and counted[step].rotations for step in (RENEWED, REPLACED))
    assert old == "UNAVAILABLE"


async def test_a_call_in_progress_ends_on_the_connection_that_it_began_on(folder: Path) -> None:
    server, double = await start_double(SecurityConfig(certs_dir=folder).of_service("trainer"))
    async with connect(server.target, SecurityConfig(certs_dir=folder)) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        slow = asyncio.ensure_future(stub.SaveCheckpoint(trainer_pb2.SaveCheckpointRequest(), timeout=DEADLINE_S))
        watch = stub.WatchSteps(trainer_pb2.WatchStepsRequest(from_number=2, run="wait"), timeout=DEADLINE_S)
        await eventually(lambda: double.calls == 2)
        certificates.add_authority(folder, certificates.now_utc())
        certificates.use_authority(folder, certificates.now_utc())
        certificates.drop_authority(folder)
        answer = await stub.GetTrainerState(trainer_pb2.GetTrainerStateRequest(run="new"), timeout=DEADLINE_S)
        assert answer.last_error == "new"
        assert len(double.peers) == 2, "the call in progress stays where it is"
        double.release.set()
        await slow
        assert [each.step.sequence_no async for each in watch] == [0, 1]
    await server.stop(0)


@pytest.mark.slow
async def test_a_watch_is_ended_at_its_age_and_the_client_library_resumes_it(folder: Path) -> None:
    security = SecurityConfig(certs_dir=folder, connection_age_s=AGE_S)
    server, double = await start_double(security.of_service("trainer"))
    async with connect(server.target, security) as channel:
        watch = trainer_pb2_grpc.TrainerServiceStub(channel).WatchSteps(trainer_pb2.WatchStepsRequest(run="wait"))
        with pytest.raises(Exception, match="connection_age_s") as ended:
            await asyncio.wait_for(watch.read(), DEADLINE_S)
        assert SluiceError.from_rpc(ended.value).reason == "CONNECTION_TOO_OLD"
    async with TrainerClient(server.target, security) as client:
        watching = asyncio.ensure_future(anext(client.watch_steps("wait")))
        for _ in range(3):
            double.entered.clear()
            await asyncio.wait_for(double.entered.wait(), DEADLINE_S)
        assert not watching.done()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    await server.stop(0)


async def test_a_watch_ends_once_its_token_is_no_longer_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two tokens of a principal goes, then the principal: the client library goes on while it has one that is known."""
    monkeypatch.setattr(rpc_server, "RECHECK_S", 0.02)
    file, token = tmp_path / "principals.toml", tmp_path / "token"
    token.write_text(add_token(file, "dashboard", "viewer"))
    old = file.read_text()
    new = new_token()
    add_token(file, "operator", "admin")
    both = f'{file.read_text()}[[principal]]\nname = "dashboard"\nrole = "viewer"\ntoken_sha256 = "{digest_of(new)}"\n'
    server, double = await start_double(SecurityConfig(principals_file=file))

    async def watch() -> None:
        async with TrainerClient(server.target, SecurityConfig(token_file=token)) as client:
            await anext(client.watch_steps("wait"))

    replace_private(file, both.encode())  # two tokens of one principal
    watching = asyncio.ensure_future(watch())
    await asyncio.wait_for(double.entered.wait(), DEADLINE_S)
    double.entered.clear()
    replace_private(token, new.encode())
    replace_private(file, both.replace(old, "").encode())  # the first one is gone
    await asyncio.wait_for(double.entered.wait(), DEADLINE_S)
    assert (double.callers, watching.done()) == (["dashboard"] * 2, False)
    replace_private(file, file.read_bytes().rpartition(b"[[principal]]")[0])  # and so is the second
    with pytest.raises(SluiceError) as refused:
        await asyncio.wait_for(watching, DEADLINE_S)
    assert refused.value.reason == "TOKEN_REQUIRED"
    await server.stop(0)


async def test_a_watch_whose_token_goes_while_its_request_is_on_its_way_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_server, "RECHECK_S", 0.02)
    file = tmp_path / "principals.toml"
    stays = add_token(file, "operator", "admin")
    kept = file.read_bytes()
    goes = add_token(file, "dashboard", "viewer")
    server, double = await start_double(SecurityConfig(principals_file=file))
    calls = server._calls
    request = trainer_pb2.WatchStepsRequest(run="wait").SerializeToString()

    async with grpc.aio.insecure_channel(server.target) as channel:
        watch = channel.stream_stream("/sluice.v1.TrainerService/WatchSteps")
        first = watch(metadata=(("authorization", f"Bearer {stays}"),))
        await first.write(request)
        await asyncio.wait_for(double.entered.wait(), DEADLINE_S)
        second = watch(metadata=(("authorization", f"Bearer {goes}"),))
        await eventually(lambda: calls.waiting("sluice.v1.TrainerService/WatchSteps").taken == 2)
        replace_private(file, kept)
        await eventually(lambda: calls._admitted_under is calls.access.state())
        await second.write(request)
        with pytest.raises(grpc.aio.AioRpcError, match="no longer valid"):
            await asyncio.wait_for(second.read(), DEADLINE_S)
        first.cancel()
    assert double.callers == ["operator"]
    await server.stop(0)


@pytest.mark.slow
async def test_a_broken_certificate_leaves_the_last_good_one_in_use(folder: Path) -> None:
    security = SecurityConfig(certs_dir=folder, connection_age_s=AGE_S)
    server, double = await start_double(security.of_service("trainer"))
    async with TrainerClient(server.target, security) as client:
        for name in ("trainer.pem", "operator.key"):
            (folder / name).write_text("no PEM")
        (folder / "ca.pem").unlink()
        async with asyncio.timeout(DEADLINE_S):
            while len(double.peers) < 3:  # connections, all but the first of which begin while the files are broken
                assert await client.state("r1")
                await asyncio.sleep(0.01)
    await server.stop(0)


async def test_a_token_file_is_replaced_while_calls_run(tmp_path: Path) -> None:
    """One file for server and clients of a machine: neither knows when the other one reads it."""
    token = tmp_path / "admin.token"
    token.write_text("first\n")
    security = SecurityConfig(admin_token_file=token, token_file=token)
    server, double = await start_double(security)
    replaced = asyncio.Event()

    async def call() -> int:
        made = 0
        async with TrainerClient(server.target, security) as client:
            while not replaced.is_set():
                await client.state("r1")
                made += 1
        return made

    callers = [asyncio.ensure_future(call()) for _ in range(4)]

    def sent() -> set[str | None]:
        return {each.get("authorization") for each in double.metadata}

    await eventually(lambda: sent() == {"Bearer first"})
    for number in range(5):
        replace_private(token, f"token-{number}\n".encode())
        await eventually(lambda newest=f"Bearer token-{number}": newest in sent())
    replaced.set()
    assert sum(await asyncio.gather(*callers)) == double.calls
    assert sent() == {"Bearer first", *(f"Bearer token-{number}" for number in range(5))}
    await server.stop(0)


# HTTPS.


async def echo(request: Request) -> JSONResponse:
    return JSONResponse(sorted(request.scope["state"].get(CERTIFICATE, ())))


def trusting(folder: Path, authorities: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authorities or folder / "ca.pem")
    context.load_cert_chain(folder / "operator.pem", folder / "operator.key")
    return context


async def test_an_https_port_shows_and_trusts_what_is_newest(folder: Path, tmp_path: Path) -> None:
    security = SecurityConfig(certs_dir=folder).of_service("gateway")
    server = HttpServer(Starlette(routes=[Route("/", echo)]), "127.0.0.1", 0, security)
    url = f"https://127.0.0.1:{await server.start()}/"

    async def shown(context: ssl.SSLContext) -> bytes:
        async with (
            httpx.AsyncClient(verify=context, timeout=DEADLINE_S) as client,
            client.stream("GET", url) as response,
        ):
            assert await response.aread() == b'["operator","spiffe://sluice/operator"]'
            connection = response.extensions["network_stream"].get_extra_info("ssl_object")
            return connection.getpeercert(binary_form=True)

    first = await shown(trusting(folder))
    assert first == ssl.PEM_cert_to_DER_cert((folder / "gateway.pem").read_text())
    renew(folder)
    assert await shown(trusting(folder)) == ssl.PEM_cert_to_DER_cert((folder / "gateway.pem").read_text()) != first

    old = shutil.copytree(folder, tmp_path / "old")
    certificates.add_authority(folder, certificates.now_utc())
    await shown(trusting(old, folder / "ca.pem"))
    certificates.use_authority(folder, certificates.now_utc())
    await shown(trusting(old, folder / "ca.pem"))
    await shown(trusting(folder))
    certificates.drop_authority(folder)
    await shown(trusting(folder))
    with pytest.raises(httpx.TransportError):
        await shown(trusting(old, folder / "ca.pem"))
    await server.stop(0)


async def test_an_old_https_connection_is_closed_after_a_response(folder: Path) -> None:
    security = SecurityConfig(certs_dir=folder, connection_age_s=AGE_S).of_service("gateway")
    clock = SimulatedClock()
    server = HttpServer(Starlette(routes=[Route("/", echo)]), "127.0.0.1", 0, security, clock=clock)
    url = f"https://127.0.0.1:{await server.start()}/"
    async with httpx.AsyncClient(verify=trusting(folder), timeout=DEADLINE_S) as client:
        assert (await client.get(url)).headers.get("connection") is None
        clock.now += AGE_S * 0.8
        assert (await client.get(url)).headers.get("connection") is None
        clock.now += AGE_S
        assert (await client.get(url)).headers["connection"] == "close"
        assert (await client.get(url)).headers.get("connection") is None
    await server.stop(0)


def test_the_port_of_the_metrics_knows_certificates_and_follows_their_files(folder: Path, tmp_path: Path) -> None:
    security = SecurityConfig(certs_dir=folder).of_service("trainer")
    token = add_token(folder / "principals.toml", "prometheus", "viewer")
    server = start_metrics_server(0, "127.0.0.1", security)
    url = f"https://127.0.0.1:{server.server_port}/metrics"

    def status(context: ssl.SSLContext, **headers: str) -> int:
        return httpx.get(url, verify=context, headers=headers, timeout=DEADLINE_S).status_code

    nobody = ssl.create_default_context(cafile=folder / "ca.pem")
    assert status(trusting(folder)) == 200
    assert status(nobody, authorization=f"Bearer {token}") == 200
    assert status(nobody) == 401
    old = shutil.copytree(folder, tmp_path / "old")
    certificates.add_authority(folder, certificates.now_utc())
    certificates.use_authority(folder, certificates.now_utc())
    certificates.drop_authority(folder)
    assert status(trusting(folder)) == 200
    with pytest.raises(httpx.TransportError):
        status(trusting(old, folder / "ca.pem"))
    server.shutdown()
    server.server_close()


@pytest.mark.slow
async def test_every_port_follows_the_principals_file_and_keeps_the_last_good_one(tmp_path: Path) -> None:
    file, token = tmp_path / "principals.toml", tmp_path / "token"
    token.write_text(add_token(file, "gone", "admin"))
    first = file.read_text()
    add_token(file, "stays", "viewer")
    security = SecurityConfig(principals_file=file)
    rpc, _ = await start_double(security)
    door, bounds = Door(Access(security)), RequestBounds(8)
    guard = Middleware(RequestGuard, door=door, port=GATEWAY_HTTP, host="127.0.0.1", bounds=bounds)
    http = HttpServer(Starlette(routes=[Route("/metrics", echo)], middleware=[guard]), "127.0.0.1", 0, security)
    await http.start()
    metrics = start_metrics_server(0, "127.0.0.1", security)

    async def statuses() -> list[object]:
        headers = {"authorization": f"Bearer {token.read_text()}"}
        async with TrainerClient(rpc.target, SecurityConfig(token_file=token)) as client:
            try:
                found: list[object] = [bool(await client.state("r1"))]
            except SluiceError as error:
                found = [error.reason]
        async with httpx.AsyncClient(headers=headers, timeout=DEADLINE_S) as client:
            for port in (http.port, metrics.server_port):
                found.append((await client.get(f"http://127.0.0.1:{port}/metrics")).status_code)
        return found

    assert await statuses() == [True, 200, 200]
    for broken in (first[:-20], "", None):  # half of a table, nothing yet, and no file
        file.unlink() if broken is None else file.write_text(broken)
        assert await statuses() == [True, 200, 200]
    replace_private(file, first.replace("gone", "another").encode())
    assert await statuses() == [True, 200, 200]
    new = add_token(file, "other", "admin")
    replace_private(file, file.read_text().replace(first.replace("gone", "another"), "").encode())
    assert await statuses() == ["TOKEN_REQUIRED", 401, 401]
    token.write_text(new)
    assert await statuses() == [True, 200, 200]
    metrics.shutdown()
    metrics.server_close()
    await http.stop(0)
    await rpc.stop(0)


# What `sluice doctor` says.


async def test_the_doctor_names_what_a_server_has_against_a_client_certificate(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "ANSWER_S", DEADLINE_S)
    server, _ = await start_double(SecurityConfig(certs_dir=folder).of_service("trainer"))
    past = certificates.now_utc() - certificates.timedelta(days=3)
    certificates.issue(folder, "late", ["localhost"], days=1, now=past)
    certificates.begin(tmp_path / "other", [], domain="sluice", days=1, now=certificates.now_utc())

    async def found(directory: Path, name: str) -> str:
        security = SecurityConfig(
            tls_ca=folder / "ca.pem", tls_cert=directory / f"{name}.pem", tls_key=directory / f"{name}.key"
        )
        finding = await peers.check_peer("trainer", server.target, security)
        return f"{finding.found} -> {finding.remedy}"

    assert (await found(folder, "operator")).endswith("serves -> ")
    expired = await found(folder, "late")
    assert "expired" in expired
    assert "sluice certs renew" in expired
    foreign = await found(tmp_path / "other", "operator")
    assert "authority" in foreign
    nothing = await peers.check_peer("trainer", server.target, SecurityConfig(tls_ca=folder / "ca.pem"))
    assert "client certificate" in nothing.found
    await server.stop(0)
