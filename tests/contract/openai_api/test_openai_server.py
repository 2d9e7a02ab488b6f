"""The server of the OpenAI dialect: clients that leave, descriptions, weights, its start and its end."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest
from certificates import Authority
from engine_waits import first_tokens_only
from openai_dialect import PAST_THE_END, PROMPT, TOKENS, accepts, chat, client_of, complete, http_client, refusal
from rollout_stack import Replica, build_engine, until
from simulated_clock import LIMIT_S, SimulatedClock
from small_models import CONTEXT

from sluice.config import ConfigError, SecurityConfig
from sluice.openai import requests, server
from sluice.openai.server import HttpServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

REQUEST_S = 60.0


async def rest(stream: Any) -> list[Any]:
    """All further events of a stream."""
    return [event async for event in stream]


class TestLeaving:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("prompt", [PROMPT, [[5], [6], [7]]], ids=["one prompt", "three prompts"])
    async def test_a_client_that_leaves_before_the_first_token_ends_its_sampling(self, replica, client, stream, prompt):
        async with replica.frozen():
            call = asyncio.create_task(complete(client, prompt=prompt, stream=stream))
            await until(lambda: replica.servicer.samples == (1 if prompt is PROMPT else 3))
            call.cancel()
            await replica.until_idle()
        with pytest.raises(asyncio.CancelledError):
            await call

    async def test_a_reader_that_leaves_within_a_stream_ends_its_sampling(self, replica, client, engine):
        with first_tokens_only(engine):
            stream = await complete(
                client, prompt=[PROMPT, [6]], n=2, max_tokens=480, stream=True, extra_body=PAST_THE_END
            )
            async for _ in stream:
                break
            async with replica.frozen():
                assert replica.servicer.samples == 4
                await stream.close()
                await replica.until_idle()

    async def test_the_next_request_is_served(self, replica, client):
        assert (await chat(client, max_tokens=2)).usage.completion_tokens <= 2


class TestDeadline:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_request_that_samples_nothing_ends(self, model, engine, stream):
        clock = SimulatedClock()
        async with (
            Replica(model, engine, request_s=REQUEST_S, clock=clock) as served,
            client_of(served) as client,
            served.frozen(),
        ):
            asking = asyncio.create_task(chat(client, stream=stream))
            await until(lambda: served.servicer.samples == 1)
            await clock.until(asking.done, step_s=REQUEST_S / 10)
            with pytest.raises(openai.InternalServerError) as caught:
                await asking
            assert (caught.value.status_code, caught.value.code) == (504, "REQUEST_DEADLINE")
            assert served.servicer.samples == 0

    async def test_a_stream_that_stops_half_way_ends_with_an_error(self, model, engine):
        clock = SimulatedClock()
        async with Replica(model, engine, request_s=REQUEST_S, clock=clock) as served, client_of(served) as client:
            with first_tokens_only(engine):
                stream = await chat(client, max_tokens=480, stream=True, extra_body=PAST_THE_END)
                async for _ in stream:
                    break
                async with served.frozen():
                    reading = asyncio.create_task(rest(stream))
                    await clock.until(reading.done, step_s=REQUEST_S / 10)
                    with pytest.raises(openai.APIError, match=r"rollout\.deadlines\.request_s"):
                        await reading

    async def test_a_client_that_reads_nothing_is_disconnected(self, monkeypatch):
        monkeypatch.setattr(requests, "SEND_DEADLINE_S", 0.05)
        ended = asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            try:
                while True:
                    yield b"data"
            finally:
                ended.set()

        async def nothing_arrives() -> Any:
            await asyncio.Event().wait()

        async def nobody_reads(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        await asyncio.wait_for(requests.EventStream(events())({}, nothing_arrives, nobody_reads), LIMIT_S)
        assert ended.is_set()

    @pytest.mark.parametrize("reads_all", [True, False])
    async def test_what_follows_a_reply_is_asked_for_unless_its_client_left_before_it_was_sent(self, reads_all):
        """A client that has read all may close its connection at once."""
        asked, has_left = asyncio.Event(), asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            yield b"all of it"
            yield requests.SENT
            asked.set()

        async def leaves() -> Any:
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body" and bool(message["body"]) == reads_all:
                has_left.set()
                if not reads_all:
                    await asyncio.sleep(0)  # it waits for room, which the end of the connection makes

        await requests.EventStream(events())({}, leaves, send)
        assert asked.is_set() == reads_all

    @pytest.mark.slow
    async def test_the_kernel_cuts_off_a_connection_whose_client_reads_nothing(self, monkeypatch):
        monkeypatch.setattr(server, "SEND_DEADLINE_S", 1.0)

        async def more_than_the_kernel_holds(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": bytes(64 << 20), "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass

        served = HttpServer(more_than_the_kernel_holds, "127.0.0.1", 0, SecurityConfig())
        port = await served.start()
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            connections = served._uvicorn.server_state.connections
            await until(lambda: connections)
            await until(lambda: not connections)
        await served.stop(0)


class TestDescription:
    async def test_lists_the_model(self, client, model):
        listed = await client.models.list()
        assert [(each.id, each.object, each.max_model_len) for each in listed.data] == [(str(model), "model", CONTEXT)]
        assert (await client.models.retrieve("small")).id == str(model)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")

    async def test_health_tells_the_version(self, replica):
        async with http_client() as http:
            response = await http.get(f"{replica.url}/health")
        assert (response.status_code, response.json()) == (200, {"status": "ok", "version": "0.0"})

    async def test_a_dead_engine_is_told(self, model):
        engine = build_engine(model)
        await engine.start()
        async with Replica(model, engine) as served, client_of(served) as client, http_client() as http:
            await engine.stop()
            assert (await http.get(f"{served.url}/health")).status_code == 503
            with pytest.raises(openai.InternalServerError) as caught:
                await chat(client)
            assert (caught.value.status_code, caught.value.code) == (503, "ENGINE_RECOVERING")
            assert "retry-after" in caught.value.response.headers

    async def test_metrics_count_requests_by_path_and_status(self, replica, client):
        with pytest.raises(openai.BadRequestError):
            await chat(client, temperature=-1)
        async with http_client() as http:
            await http.get(f"{replica.url}/secret/path")
            metrics = (await http.get(f"{replica.url}/metrics")).text
        assert 'sluice_rpc_total{code="400",method="/v1/chat/completions",service="openai"}' in metrics
        assert "secret" not in metrics

    async def test_every_response_names_its_request(self, replica):
        async with http_client() as http:
            first = await http.get(f"{replica.url}/health")
            second = await http.get(f"{replica.url}/nowhere", headers={"x-request-id": "mine"})
            body = {"prompt": PROMPT, "max_tokens": 1, "stream": True}
            third = await http.post(f"{replica.url}/v1/completions", json=body, headers={"x-request-id": "x" * 500})
        assert len(first.headers["x-request-id"]) == 32
        assert second.headers["x-request-id"] == "mine"
        assert third.headers["x-request-id"] == "x" * 128


class TestWeights:
    async def test_reload_returns_to_the_base(self, replica):
        async with http_client() as http:
            response = await http.post(f"{replica.url}/reload_weights", json={})
        assert (response.status_code, response.json()) == (200, {"version": "0.0"})

    @pytest.mark.parametrize("version", ["", "1", "1.x", "-1.2", 5])
    async def test_a_version_has_two_numbers(self, replica, version):
        error = await refusal(replica, "/update_weights", {"version": version})
        assert error["param"] == "version"

    @pytest.mark.parametrize("content", [b"", b"{}", b'{"version": "1.5"}'])
    async def test_a_replica_that_follows_nobody_says_so(self, replica, content):
        async with http_client() as http:
            response = await http.post(
                f"{replica.url}/update_weights", content=content, headers={"content-type": "application/json"}
            )
        assert response.status_code == 400
        assert "follow_weights" in response.json()["error"]["message"]


class TestServer:
    async def test_requests_under_way_end_within_the_drain(self, model, engine):
        async with Replica(model, engine) as served, client_of(served) as client:
            async with served.frozen():
                waiting = asyncio.create_task(chat(client, extra_body=PAST_THE_END))
                await until(lambda: served.servicer.samples == 1)
                stopping = asyncio.create_task(served.http.stop(30))
                await until(lambda: not accepts(served.http_port))
            assert (await waiting).usage.completion_tokens == TOKENS
            await stopping

    async def test_requests_that_outlive_the_drain_may_be_made_again(self, model, engine):
        async with Replica(model, engine) as served, client_of(served) as client, served.frozen():
            waiting = asyncio.create_task(chat(client))
            await until(lambda: served.servicer.samples == 1)
            await served.http.stop(0)
            assert served.servicer.samples == 0
            with pytest.raises(openai.InternalServerError) as refused:
                await waiting
            assert (refused.value.status_code, refused.value.code) == (503, "DRAINING")

    async def test_a_taken_port_is_an_error_with_a_remedy(self, replica):
        async def app(*_: Any) -> None: ...

        with pytest.raises(ConfigError, match="http_port"):
            await HttpServer(app, "127.0.0.1", replica.http_port, SecurityConfig()).start()

    async def test_an_open_address_needs_protection(self):
        async def app(*_: Any) -> None: ...

        with pytest.raises(ConfigError, match="insecure"):
            HttpServer(app, "0.0.0.0", 0, SecurityConfig())

    async def test_serves_tls(self, model, engine, tmp_path):
        authority = Authority(tmp_path / "authority")
        certificate, key = authority.issue("server")
        security = SecurityConfig(tls_cert=certificate, tls_key=key, tls_ca=authority.path)
        async with Replica(model, engine, security) as served:
            context = ssl.create_default_context(cafile=str(authority.path))
            async with httpx.AsyncClient(verify=context) as http:
                response = await http.get(f"https://127.0.0.1:{served.http_port}/health")
            assert response.status_code == 200
