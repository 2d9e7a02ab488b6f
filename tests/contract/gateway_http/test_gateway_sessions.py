"""Which session a request belongs to, how long it waits, which requests are the same, and what is refused and how."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, ClassVar

import grpc
import httpx
import openai
import pytest
from impatient_client import ImpatientTransport
from memory_sessions import MemorySession
from prometheus_client import REGISTRY
from simulated_clock import LIMIT_S

from gateway_svc.config import CaptureConfig
from sluice.config import SecurityConfig
from sluice.rpc import SluiceError
from sluice.rpc.access import SESSION_KEY
from sluice.rpc.call_log import CallLog
from sluice.rpc.principals import digest_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hello"}]
BODY = {"model": "m", "messages": USER}
ANTHROPIC = {"model": "m", "max_tokens": 8, "messages": USER}
ROUTES: dict[str, Any] = {
    CHAT: BODY,
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": ANTHROPIC,
    "/v1/messages/count_tokens": {"messages": USER},
    "/inference/v1/generate": {"token_ids": [5, 6]},
}


def capture(**settings: Any) -> CaptureConfig:
    return CaptureConfig.model_validate(settings)


def message_of(response: httpx.Response) -> str:
    """The message of an error, whose form is that of the route's dialect."""
    body = response.json()
    if response.request.url.path.endswith(("/messages", "/count_tokens")):
        assert (body["type"], set(body["error"])) == ("error", {"type", "message"})
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["message"])


class TestWhichSession:
    @pytest.mark.parametrize("route", ROUTES)
    async def test_it_is_found_by_its_key_in_either_header(self, gateway, route):
        for headers in ({}, {"authorization": "", "x-api-key": gateway.session.key}):
            async with gateway.http(**headers) as http:
                assert (await http.post(route, json=ROUTES[route])).status_code == 200

    async def test_it_is_found_by_its_path_and_by_its_header(self, gateway):
        other = gateway.sessions.new()
        name = other.found.episode_id
        async with gateway.http(authorization="Bearer anything") as http:
            assert (await http.post(f"/sessions/{name}{CHAT}", json=BODY)).status_code == 200
            assert (await http.post(CHAT, json=BODY, headers={"x-session-id": name})).status_code == 200
            assert (await http.get(f"/sessions/{name}/v1/models")).status_code == 200
        assert (len(other.requests), len(gateway.session.requests)) == (2, 0)

    @pytest.mark.slow
    async def test_the_path_precedes_the_header(self, gateway):
        other = gateway.sessions.new()
        async with gateway.http(authorization="") as http:
            headers = {"x-session-id": gateway.session.found.episode_id}
            await http.post(f"/sessions/{other.found.episode_id}{CHAT}", json=BODY, headers=headers)
        assert len(other.requests) == 1

    async def test_a_key_opens_its_own_session_alone(self, gateway):
        other = gateway.sessions.new()
        async with gateway.http() as http:
            response = await http.post(f"/sessions/{other.found.episode_id}{CHAT}", json=BODY)
        assert response.status_code == 404
        assert not other.requests

    @pytest.mark.parametrize("route", ROUTES)
    async def test_a_request_without_a_session_is_401_with_what_to_do(self, gateway, route):
        async with gateway.http(authorization="") as http:
            response = await http.post(route, json=ROUTES[route])
        assert response.status_code == 401
        assert "POST /rl/sessions opens one" in message_of(response)

    @pytest.mark.parametrize("route", ROUTES)
    async def test_unknown_is_404_and_ended_is_410(self, gateway, route):
        async with gateway.http(authorization="Bearer sk-sluice-none") as http:
            assert (await http.post(route, json=ROUTES[route])).status_code == 404
        async with gateway.http() as http:
            await http.post(
                f"/rl/sessions/{gateway.session.found.episode_id}/end", json={}, headers=settling(gateway.session)
            )
            response = await http.post(route, json=ROUTES[route])
        assert response.status_code == 410
        assert "open another one" in message_of(response)

    @pytest.mark.parametrize(("method", "path"), [("POST", "/rl/sessions%0A"), ("GET", "/metrics%0A")])
    async def test_an_invented_session_key_opens_nothing_that_belongs_to_no_session(
        self, another_gateway, tmp_path, method, path
    ):
        """The router takes a path with a line feed at its end for the one without it; so must the check of the caller."""
        async with (
            another_gateway(SecurityConfig(principals_file=principals(tmp_path))) as gateway,
            gateway.http(authorization=f"Bearer {SESSION_KEY}invented") as http,
        ):
            assert (await http.request(method, path, json={})).status_code == 401

    async def test_principals_need_their_token_and_sessions_only_their_key(self, another_gateway, tmp_path):
        security = SecurityConfig(principals_file=principals(tmp_path))
        async with another_gateway(security) as gateway:
            async with gateway.http() as http:
                assert (await http.post(CHAT, json=BODY)).status_code == 200
                assert (await http.post("/rl/sessions", json={})).status_code == 401
            async with gateway.http(authorization="Bearer wrong") as http:
                refused = await http.post(CHAT, json=BODY, headers={"x-session-id": "e0"})
            async with gateway.http(authorization="", **{"x-api-key": "token-of-ann"}) as http:
                assert (await http.post(CHAT, json=BODY, headers={"x-session-id": "e0"})).status_code == 200
                assert (await http.post("/rl/sessions", json={})).status_code == 200
            async with gateway.http(authorization="Bearer token-of-trainer") as http:
                assert (await http.post(CHAT, json=BODY, headers={"x-session-id": "e0"})).status_code == 403
        assert refused.status_code == 401

    async def test_a_viewer_reads_the_metrics_and_samples_nothing(self, another_gateway, tmp_path):
        async with (
            another_gateway(SecurityConfig(principals_file=principals(tmp_path))) as gateway,
            gateway.http(authorization="Bearer token-of-grafana") as http,
        ):
            assert (await http.get("/metrics")).status_code == 200
            for route, body in ROUTES.items():
                assert (await http.post(route, json=body, headers={"x-session-id": "e0"})).status_code == 403
            assert (await http.post("/rl/sessions", json={})).status_code == 403
        assert not gateway.session.requests

    async def test_what_an_admin_does_to_a_session_is_logged_without_its_key(self, another_gateway, tmp_path):
        path = tmp_path / "calls/gateway.jsonl"
        call_log = CallLog(path, SecurityConfig())
        async with another_gateway(SecurityConfig(principals_file=principals(tmp_path)), call_log=call_log) as gateway:
            name = gateway.session.found.episode_id
            async with gateway.http(authorization="Bearer token-of-root") as http:
                opened = (await http.post("/rl/sessions", json={"request_id": "a"})).json()
                assert (await http.post(f"/rl/sessions/{name}/reward", json={"reward": 0.5})).status_code == 200
                assert (await http.post("/rl/sessions/none/end", json={})).status_code == 404
            async with gateway.http(**settling(gateway.session)) as http:  # with the key of the session
                assert (await http.post(f"/rl/sessions/{name}/end", json={})).status_code == 200
        await call_log.close()
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [(line["principal"], line["method"], line["request"], line["code"]) for line in lines] == [
            ("root", "EpisodeService/OpenEpisode", {"request_id": "a"}, "OK"),
            ("root", "EpisodeService/RecordReward", {"episode_id": name, "reward": 0.5}, "OK"),
            ("root", "EpisodeService/SubmitTrajectory", {"episode_id": "none"}, "NOT_FOUND"),
        ]
        assert all(opened[key] not in path.read_text() for key in ("key", "settling_key"))


def principals(directory: Path) -> Path:
    path = directory / "principals.toml"
    entries = [
        f'[[principal]]\nname = "{name}"\nrole = "{role}"\ntoken_sha256 = "{digest_of("token-of-" + name)}"\n'
        for name, role in (("ann", "agent"), ("trainer", "trainer"), ("grafana", "viewer"), ("root", "admin"))
    ]
    path.write_text("\n".join(entries))
    path.chmod(0o600)
    return path


def settling(session: MemorySession) -> dict[str, str]:
    """Return the header of a call that settles a session."""
    return {"authorization": f"Bearer {session.settling_key}"}


class TestLife:
    async def test_open_reward_end(self, gateway):
        async with gateway.http(authorization="") as http:
            opened = (await http.post("/rl/sessions", json={"request_id": "a"})).json()
        session = gateway.sessions.all[opened["id"]]
        assert opened["task"] == {"task_id": "t1", "data": {"question": "1+1"}}
        async with gateway.http(authorization=f"Bearer {opened['key']}") as http:
            reply = (await http.post(CHAT, json=BODY)).json()
            http.headers["authorization"] = f"Bearer {opened['settling_key']}"
            path = f"/rl/sessions/{opened['id']}"
            await http.post(f"{path}/reward", json={"reward": 0.5, "generation_id": reply["id"]})
            await http.post(f"{path}/reward", json={"reward": 1, "branch": reply["id"]})
            await http.post(f"{path}/reward", json={"reward": -1})
            ended = await http.post(f"{path}/end", json={"reward_follows": True})
            late = await http.post(f"{path}/reward", json={"reward": 2})
        assert [each.WhichOneof("target") for each in session.rewards] == ["generation_id", "branch", None, None]
        assert (ended.json()["trajectory_ids"], late.status_code) == ([reply["id"]], 200)
        assert (session.ended.reward_follows, session.ended.HasField("reward")) == (True, False)

    async def test_a_session_can_be_given_up(self, gateway):
        async with gateway.http(**settling(gateway.session)) as http:
            path = f"/rl/sessions/{gateway.session.found.episode_id}/end"
            assert (await http.post(path, json={"abandon": "crashed", "requeue": True})).status_code == 200
            conflict = await http.post(path, json={"reward": 1.0})
        assert (gateway.session.ended.reason, gateway.session.ended.requeue) == ("crashed", True)
        assert conflict.status_code == 410

    async def test_nothing_on_offer_says_when_to_come_again(self, gateway):
        async with gateway.http(authorization="") as http:
            response = await http.post("/rl/sessions", json={"request_id": "nothing is on offer"})
        assert (response.status_code, response.headers["retry-after"]) == (429, "3")

    @pytest.mark.parametrize(
        "body", [{"reward": "x"}, {}, {"reward": 1, "turn": 3}, {"reward": 1, "branch": "a", "generation_id": "b"}]
    )
    async def test_a_reward_that_is_unclear_is_refused(self, gateway, body):
        async with gateway.http(**settling(gateway.session)) as http:
            response = await http.post(f"/rl/sessions/{gateway.session.found.episode_id}/reward", json=body)
        assert response.status_code == 400
        assert not gateway.session.rewards


class TestWaiting:
    @pytest.mark.parametrize("route", [route for route in ROUTES if "count" not in route and "inference" not in route])
    async def test_a_stream_that_waits_has_comments_and_then_its_reply(self, gateway, route):
        gateway.sessions.serving.clear()
        first: list[str] = []

        async def read() -> list[str]:
            async with (
                gateway.http() as http,
                http.stream("POST", route, json=ROUTES[route] | {"stream": True}) as response,
            ):
                lines = response.aiter_lines()
                while len(first) < 4:
                    first.append(await anext(lines))
                gateway.sessions.serving.set()
                return [line async for line in lines]

        reading = asyncio.create_task(read())
        await gateway.clock.until(gateway.sessions.serving.is_set, step_s=1.0)
        rest = await reading
        assert first == [": waiting", ""] * 2
        assert any("said: Hello" in line or "more text" in line for line in rest)
        assert not any("ping" in line for line in rest if "messages" not in route)

    async def test_a_client_that_gives_up_and_asks_again_gets_the_same_reply(self, gateway):
        gateway.sessions.serving.clear()
        transport = ImpatientTransport()
        async with openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1",
            api_key=gateway.session.key,
            max_retries=2,
            http_client=httpx.AsyncClient(transport=transport, timeout=LIMIT_S),
        ) as client:
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=USER))
            await until(lambda: gateway.session.requests)
            transport.give_up()
            await until(lambda: transport.sent == 2)
            gateway.sessions.serving.set()
            reply = await asking
        assert len(gateway.session.requests) == len(gateway.session.generations) == 1
        assert reply.id in gateway.session.generations

    async def test_a_reply_that_was_lost_is_given_again(self, gateway):
        async with gateway.http() as http:
            first = (await http.post(CHAT, json=BODY)).json()
            again = (await http.post(CHAT, json=BODY, headers={"x-stainless-retry-count": "1"})).json()
            another = (await http.post(CHAT, json=BODY)).json()
            streamed = await http.post(CHAT, json=BODY | {"stream": True})
            repeated = await http.post(CHAT, json=BODY | {"stream": True}, headers={"x-stainless-retry-count": "1"})
        assert first["id"] == again["id"] != another["id"]
        ids = [json.loads(each.text.split("\n")[0].removeprefix("data: "))["id"] for each in (streamed, repeated)]
        assert ids[0] == ids[1]

    async def test_beyond_the_deadline_it_is_504(self, gateway):
        gateway.sessions.serving.clear()
        async with gateway.http() as http:
            asking = asyncio.create_task(http.post(CHAT, json=BODY))
            await until(lambda: gateway.session.requests)
            await gateway.clock.advance(CaptureConfig().deadlines.request_s - 1)
            assert not asking.done()
            await gateway.clock.advance(2.0)
            response = await asking
        assert response.status_code == 504
        assert "capture.deadlines.request_s" in message_of(response)

    async def test_beyond_the_deadline_a_stream_ends_with_an_error(self, another_gateway):
        async with another_gateway(capture=capture(deadlines={"request_s": 20.0})) as gateway:
            gateway.sessions.serving.clear()

            async def waited(route: str, body: dict[str, Any]) -> httpx.Response:
                asking = asyncio.create_task(http.post(route, json=body | {"stream": True}))
                await gateway.clock.until(asking.done, step_s=1.0)
                return await asking

            async with gateway.http() as http:
                chats = await waited(CHAT, BODY)
                responses = await waited("/v1/responses", {"input": "Hello"})
                anthropic = await waited("/v1/messages", ANTHROPIC)
        events = [json.loads(each.text.rsplit("data: ", 1)[1]) for each in (chats, responses, anthropic)]
        assert events[0]["error"]["code"] == events[1]["code"] == "REQUEST_DEADLINE"
        assert (events[1]["type"], events[2]["error"]["type"]) == ("error", "timeout_error")

    async def test_only_above_the_limit_it_is_429(self, another_gateway):
        async with another_gateway(capture=capture(limits={"max_requests": 2})) as gateway:
            gateway.sessions.serving.clear()
            async with gateway.http() as http:
                waiting = [asyncio.create_task(http.post(CHAT, json=BODY | {"seed": seed})) for seed in range(2)]
                await until(lambda: len(gateway.session.requests) == 2)
                refused = await http.post(CHAT, json=BODY)
                gateway.sessions.serving.set()
                assert [(await each).status_code for each in waiting] == [200, 200]
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")

    async def test_agents_that_wait_for_a_session_keep_nobody_from_sampling(self, another_gateway):
        async with another_gateway(capture=capture(limits={"max_requests": 2})) as gateway:
            gateway.sessions.offered.clear()
            async with gateway.http() as http:
                opening = [asyncio.create_task(http.post("/rl/sessions", json={"wait_s": 60})) for _ in range(2)]
                await until(lambda: gateway.server.in_progress == 2)
                refused = await http.post("/rl/sessions", json={"wait_s": 60})
                sampled = await http.post(CHAT, json=BODY)
                gateway.sessions.offered.set()
                assert [(await each).status_code for each in opening] == [200, 200]
        assert (refused.status_code, sampled.status_code) == (429, 200)

    async def test_a_client_that_leaves_ends_its_request(self, gateway):
        gateway.sessions.serving.clear()
        for count, stream in enumerate((False, True), 1):
            transport = ImpatientTransport()
            async with gateway.http(transport) as http:
                asking = asyncio.create_task(http.post(CHAT, json=BODY | {"stream": stream}))
                await until(lambda count=count: len(gateway.session.requests) == count)
                transport.give_up()
                with pytest.raises(httpx.ReadTimeout):
                    await asking
                await until(lambda: gateway.server.in_progress == 0)
        gateway.sessions.serving.set()
        async with gateway.http() as http:
            assert (await http.post(CHAT, json=BODY)).status_code == 200


async def until(condition: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.005)


class TestRefusals:
    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"", "not JSON"),
            (b"{", "not JSON"),
            (b"[]", "an object"),
            (b'{"messages": [{"role": 1}], "prompt": {}, "input": 1, "token_ids": "a", "max_tokens": 1}', "valid"),
            (b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", "recursion limit"),
            (b'{"messages": "\xff"}', "not JSON"),
        ],
        ids=["empty", "torn", "a list", "wrong types", "deep", "not UTF-8"],
    )
    async def test_what_cannot_be_read_is_400_in_the_form_of_the_dialect(self, gateway, route, content, said):
        async with gateway.http(**{"content-type": "application/json"}) as http:
            response = await http.post(route, content=content)
        assert response.status_code == 400, response.text
        assert said in message_of(response)

    @pytest.mark.parametrize("route", ROUTES)
    async def test_too_large_a_body_is_413(self, another_gateway, route):
        async with another_gateway(capture=capture(limits={"max_body_bytes": 2048})) as gateway, gateway.http() as http:
            response = await http.post(route, json=ROUTES[route] | {"padding": "x" * 4096})
        assert response.status_code == 413
        assert "2048 bytes" in message_of(response)

    @pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages"])
    async def test_other_content_and_pages_of_other_sites_are_refused(self, gateway, route):
        async with gateway.http() as http:
            response = await http.post(route, content=b"{}", headers={"content-type": "text/plain"})
            page = await http.post(route, json=ROUTES[route], headers={"origin": "https://evil.example"})
        assert (response.status_code, page.status_code) == (415, 403)
        message_of(response)
        message_of(page)

    async def test_unknown_paths_and_methods_have_the_form_of_an_error(self, gateway):
        async with gateway.http() as http:
            unknown = await http.post("/v1/images", json={})
            method = await http.get("/v1/messages")
        assert (unknown.status_code, method.status_code) == (404, 405)
        message_of(unknown)
        message_of(method)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_what_the_template_refuses_is_400_even_for_a_stream(self, gateway, stream):
        gateway.sessions.failure = SluiceError.invalid_argument("conversation", "the template has no role 'judge'")
        async with gateway.http() as http:
            response = await http.post(CHAT, json=BODY | {"stream": stream})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")

    @pytest.mark.parametrize("code", ["aborted", "already_exists"])
    async def test_409_never_occurs(self, gateway, code):
        gateway.sessions.failure = getattr(SluiceError, code)("OVERTAKEN", "another request won")
        async with gateway.http() as http:
            assert (await http.post(CHAT, json=BODY)).status_code == 400

    async def test_a_session_that_is_full_is_no_429(self, gateway):
        gateway.sessions.failure = SluiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "SESSION_FULL", "submit it")
        async with gateway.http() as http:
            assert (await http.post(CHAT, json=BODY)).status_code == 400


class TestUnsupported:
    SAMPLING: ClassVar = {"top_p": 0.5, "temperature": 0.7, "logit_bias": {"5": 1}}

    async def ask(self, gateway: Any, **body: Any) -> httpx.Response:
        async with gateway.http() as http:
            return await http.post(CHAT, json=BODY | self.SAMPLING | body)

    async def test_override(self, gateway):
        before = noticed("overridden", "top_p")
        assert (await self.ask(gateway)).status_code == 200
        (request,) = gateway.session.requests
        assert {each.name for each, _ in request.generate.sampling.ListFields()} == {"temperature"}
        assert noticed("overridden", "top_p") == before + 1

    async def test_reject(self, another_gateway):
        async with another_gateway(capture=capture(on_unsupported="reject")) as gateway:
            response = await self.ask(gateway)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "top_p")
            assert not gateway.session.requests
            assert (await self.ask(gateway, top_p=1.0, logit_bias={})).status_code == 200

    async def test_not_trained(self, another_gateway):
        async with another_gateway(capture=capture(on_unsupported="not_trained")) as gateway:
            await self.ask(gateway)
            await self.ask(gateway, top_p=None, logit_bias=None)
            first, second = gateway.session.requests
        assert (first.not_trained, second.not_trained) == ("TOP_P", "")
        assert first.generate.sampling.top_p == 0.5

    async def test_evaluations_may_sample_as_they_like(self, gateway):
        gateway.session = gateway.sessions.new(evaluation=True)
        await self.ask(gateway)
        (request,) = gateway.session.requests
        assert request.generate.sampling.logit_bias[5] == 1
        assert not request.not_trained

    async def test_greedy_sampling_is_not_trained(self, gateway):
        await self.ask(gateway, temperature=0)
        assert not gateway.session.requests[0].generate.sampling.HasField("temperature")

    async def test_what_cannot_change_tokens_is_ignored_and_counted(self, gateway):
        before = noticed("ignored", "store")
        await self.ask(gateway, store=True, metadata={"a": "b"}, user="u", service_tier="flex", web_search_options=None)
        assert noticed("ignored", "store") == before + 1
        ignored = {what for kind, what in gateway.session.requests[0].notices if kind == "ignored"}
        assert ignored == {"store", "metadata", "user", "service_tier"}


def noticed(kind: str, what: str) -> float:
    labels = {"dialect": "openai.chat", "kind": kind, "what": what}
    return REGISTRY.get_sample_value("sluice_capture_notices_total", labels) or 0.0
