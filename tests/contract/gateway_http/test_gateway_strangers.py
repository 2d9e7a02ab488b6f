"""What a gateway does for those whom nobody knows: it reads no body for them, and asks the orchestrator once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY
from scripted_replica import ScriptedReplica
from simulated_clock import LIMIT_S
from test_gateway_recording import BODY, CHAT, USER, Orchestrator, stack, until

from gateway_svc.config import CaptureConfig
from gateway_svc.orchestrator import STRANGER_S, Strangers
from sluice.rpc import SluiceError
from sluice.rpc.access import SESSION_KEY
from sluice.rpc.bounds import Room

KEY = f"{SESSION_KEY}made-up"
ROUTES = (
    CHAT,
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/inference/v1/generate",
)
OWN_ROUTES = ("/rl/sessions/x/reward", "/rl/sessions/x/end", "/rl/sessions/x/renew")


def head(path: str, key: str, length: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


async def status_of(url: str, *parts: bytes) -> int:
    """Send bytes, and return the status of the answer to them."""
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        async with asyncio.timeout(LIMIT_S):
            return int((await reader.readuntil(b"\r\n")).split()[1])
    finally:
        writer.close()


def asked(code: str) -> float:
    """How often the orchestrator was asked for a session, by its answer."""
    labels = {"service": "sluice.v1.SessionService", "method": "FindSession", "code": code}
    return REGISTRY.get_sample_value("sluice_rpc_total", labels) or 0.0


@pytest.mark.parametrize("route", [*ROUTES, *OWN_ROUTES])
async def test_no_body_is_read_for_a_key_that_opens_nothing(another_gateway, route) -> None:
    async with another_gateway() as gateway:
        # The answer comes although most of the body never does.
        assert await status_of(gateway.url, head(route, KEY, 4_000_000), b"{") == 404


@pytest.mark.parametrize("route", OWN_ROUTES)
async def test_bodies_of_our_own_routes_are_small(another_gateway, route) -> None:
    async with another_gateway() as gateway:
        own, key = route.replace("/x/", f"/{gateway.session.found.episode_id}/"), gateway.session.settling_key
        assert await status_of(gateway.url, head(own, key, 4_000_000), b" " * 40_000) == 413
        assert await status_of(gateway.url, head(own, key, 2), b"{}") in {200, 400}
        assert await status_of(gateway.url, head(route, KEY, 2), b"{}") == 404


@pytest.mark.slow
async def test_the_orchestrator_is_asked_once_for_a_made_up_key(tmp_path, monkeypatch) -> None:
    async with stack(tmp_path, ScriptedReplica("one", pace_s=0.0)) as gateway:
        before = asked("NOT_FOUND")

        async def knock() -> int:
            headers = {"authorization": f"Bearer {KEY}"}
            async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=LIMIT_S) as http:
                return (await http.post(CHAT, json=BODY)).status_code

        assert {*await asyncio.gather(*(knock() for _ in range(20)))} == {404}
        assert [await knock() for _ in range(3)] == [404] * 3
        assert asked("NOT_FOUND") == before + 1

        monkeypatch.setattr(Orchestrator, "key", KEY)  # now there is such a session
        assert await knock() == 404
        await gateway.clock.advance(STRANGER_S)
        assert await knock() == 200


def test_a_key_that_this_gateway_makes_is_no_stranger_any_more() -> None:
    strangers = Strangers()
    strangers.note(KEY, "the session key opens no episode of this run", now=0.0)
    strangers.note(KEY, "asked again by one that waited", now=STRANGER_S / 2)
    with pytest.raises(SluiceError, match="opens no episode"):
        strangers.check(KEY, now=STRANGER_S / 2)
    strangers.check(KEY, now=STRANGER_S)
    strangers.note(KEY, "opens nothing", now=STRANGER_S)
    strangers.forget(KEY)
    strangers.check(KEY, now=STRANGER_S)


def test_few_strangers_are_remembered(monkeypatch) -> None:
    monkeypatch.setattr("gateway_svc.orchestrator.MOST_STRANGERS", 4)
    strangers = Strangers()
    for number in range(8):
        strangers.note(f"{KEY}{number}", "opens nothing", now=0.0)
    for number in range(4):
        strangers.check(f"{KEY}{number}", now=1.0)
    for number in range(4, 8):
        with pytest.raises(SluiceError):
            strangers.check(f"{KEY}{number}", now=1.0)


async def test_bodies_in_progress_are_bounded_and_one_session_does_not_take_all_room(another_gateway) -> None:
    limits = CaptureConfig.model_validate({"limits": {"max_bodies_mb": 16}})
    async with another_gateway(capture=limits) as gateway:
        held: list[asyncio.StreamWriter] = []
        other = gateway.sessions.new()
        part, length = b" " * 3_900_000, 4_000_000

        async def begin(key: str) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection(*gateway.url.removeprefix("http://").split(":"))
            held.append(writer)
            writer.write(head(CHAT, key, length) + part)
            await writer.drain()
            return reader

        readers = [await begin(gateway.session.key) for _ in range(4)]
        heads = [asyncio.create_task(each.readuntil(b"\r\n\r\n")) for each in readers]
        async with asyncio.timeout(
            LIMIT_S
        ):  # one of four has no room: three quarters of it are for those that send much
            done, _ = await asyncio.wait(heads, return_when=asyncio.FIRST_COMPLETED)
        for answer in (each.result() for each in done):
            assert answer.startswith(b"HTTP/1.1 429")
            assert b"retry-after: 1" in answer
        async with gateway.http(authorization=f"Bearer {other.key}") as http:
            assert (await http.post(CHAT, json=BODY)).status_code == 200
        for writer in held:
            writer.close()
        await asyncio.gather(*heads, return_exceptions=True)
        async with gateway.http() as http:
            await until(lambda: gateway.server.in_progress == 0)
            assert (await http.post(CHAT, json=BODY)).status_code == 200


async def test_headers_that_do_not_say_who_calls_make_no_further_tenants(another_gateway, monkeypatch) -> None:
    tenants = set()
    monkeypatch.setattr(Room, "take", lambda _, tenant, size: tenants.add(tenant) or True)
    async with another_gateway() as gateway:
        for number in range(4):
            name = gateway.session.found.episode_id if number % 2 else ""
            async with gateway.http(**{"x-api-key": f"made up {number}", "x-session-id": name}) as http:
                assert (await http.post(CHAT, json=BODY)).status_code == 200
        assert len(tenants) == 1
        other = gateway.sessions.new()
        for headers in ({"x-api-key": other.key}, {"x-api-key": other.key, "authorization": "Basic made-up"}):
            async with gateway.http(**({"authorization": ""} | headers)) as http:
                assert (await http.post(CHAT, json=BODY)).status_code == 200
        assert len(tenants) == 2


@pytest.mark.parametrize("route", [CHAT, "/v1/completions", "/inference/v1/generate"])
async def test_a_priority_orders_a_session_s_own_requests_and_never_goes_before_others(another_gateway, route) -> None:
    bodies: dict[str, Any] = {
        CHAT: {"model": "m", "messages": USER},
        "/v1/completions": {"prompt": "x"},
        "/inference/v1/generate": {"token_ids": [5]},
    }
    async with another_gateway() as gateway, gateway.http() as http:
        for priority in (None, -(2**31), -1, 0, 7):
            body = json.dumps(bodies[route] | {"priority": priority, "seed": priority or 0})
            response = await http.post(route, content=body, headers={"content-type": "application/json"})
            assert response.status_code == 200, response.text
        given = [each.generate.priority for each in gateway.session.requests]
        told = [("overridden", "priority") in each.notices for each in gateway.session.requests]
    assert given == [0, 0, 0, 0, 7]
    assert told == [False, True, True, False, False]


@pytest.mark.slow
async def test_names_that_clients_choose_leave_metrics_small(another_gateway) -> None:
    async with another_gateway() as gateway, gateway.http() as http:
        long = "x" * 200_000
        for number in range(20):
            tools = [{"type": f"{number}.{index}{long}"[:20_000]} for index in range(100)]
            body = {"model": "m", "messages": USER, f"field {number}{long}": 1, "tools": tools, "tool_choice": long}
            await http.post(CHAT, json=body)
            await http.post("/v1/responses", json={"input": f"{number}", "tool_choice": f"{number}{long}"})
        async with gateway.http(authorization="") as scraper:
            text = (await scraper.get("/metrics")).text
    longest = max((line for line in text.splitlines() if line.startswith("sluice_capture_notices_total")), key=len)
    assert len(longest) < 200
    assert len(text) < 2_000_000
