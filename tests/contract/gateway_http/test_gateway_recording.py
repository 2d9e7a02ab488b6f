# ruff: noqa: N802 - gRPC names the methods
"""Requests through a whole gateway: HTTP, the rules and the journal of sessions, a replica over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import openai
import pytest
from google.protobuf.duration_pb2 import Duration
from impatient_client import ImpatientTransport
from orchestrator_doubles import served
from scripted_replica import Cable, ScriptedReplica, connected
from simulated_clock import LIMIT_S, SimulatedClock

from gateway_svc.config import CaptureConfig
from gateway_svc.episodes import SESSION_KEY_METADATA, EpisodeServicer
from gateway_svc.http import create_app
from gateway_svc.recording import RecordedSessions
from orchestrator_svc.config import ExternalConfig
from orchestrator_svc.journal.store import Journal, JournalLimits
from orchestrator_svc.sessions.claims import Claimed, Claims, Recorded, Running
from orchestrator_svc.sessions.exchange import answer_exchange
from orchestrator_svc.sessions.lending import Lending
from sluice.config import SecurityConfig
from sluice.openai.server import HttpServer
from sluice.rpc import MAX_MESSAGE_BYTES, SluiceError, connect
from sluice.rpc.access import SESSION_KEY, Access
from sluice.sampling.config import ReplicasConfig
from sluice.sampling.policy import PolicyEngine
from sluice.sampling.pool import ReplicaPool
from sluice.v1 import episode_pb2, episode_pb2_grpc, rollout_pb2, session_pb2, session_pb2_grpc
from sluice.v1 import journal_pb2 as pb
from sluice.versions import BASE

CHAT = "/v1/chat/completions"
TOKENS = 30
USER: Any = [{"role": "user", "content": "Where is it?"}]
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
BODY: Any = {"model": "m", "messages": USER, "max_tokens": TOKENS}
RETRY = {"x-stainless-retry-count": "1"}

POOL = ReplicasConfig(progress_s=600.0)
"""A replica that a test holds back is not taken for one that hangs."""

LINGER_S = 5.0
STEP_S = 0.01
"""Simulated seconds between two looks at what real I/O brings."""


@dataclass
class HeldReplica(ScriptedReplica):
    """Begins requests, and samples nothing until `go` is set."""

    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def _stream(self, wanted):
        async for message in super()._stream(wanted):
            yield message
            await self.go.wait()


@dataclass
class SlowEnd(ScriptedReplica):
    """Sends its first tokens, and nothing more until `go` is set."""

    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def _stream(self, wanted):
        async for message in super()._stream(wanted):
            yield message
            if message.chunk.deltas:
                await self.go.wait()


class Verbose(ScriptedReplica):
    """Says 300 KiB of what JSON writes in six bytes each, so that eight of them are more than the kernel takes for a client."""

    async def _stream(self, wanted):
        async for message in super()._stream(wanted):
            for delta in message.chunk.deltas:
                if delta.tokens.HasField("message"):
                    delta.tokens.message.content = "\x01" * (300 << 10)
            yield message


class Orchestrator(session_pb2_grpc.SessionServiceServicer):
    """The rules of sessions and their journal, over gRPC: one open session of the principal `anyone`. Its time stands still."""

    def __init__(self, journal: Journal) -> None:
        limits = ExternalConfig()
        self._journal = journal
        self._lending = Lending(journal, limits, 0.0)
        self._claims = Claims(journal, self._lending, limits)
        task = pb.TaskDrawn(environment="e", task_id="t", group=1, episodes=1, policy_version=BASE.to_proto())
        journal.record_fact(pb.Fact(task_drawn=task))
        self._lending.offer(1)
        lease = episode_pb2.LeaseTasksRequest(request_id="r", max_tasks=1)
        (given,) = self._lending.lease("anyone", lease, 0.0)
        opening = episode_pb2.OpenEpisodeRequest(lease_id=given.lease_id, request_id="o")
        self.session = self._lending.open("anyone", opening, 0.0)
        self.recorded: dict[str, session_pb2.RecordedGeneration] = {}
        self.released = self.finding = 0
        self.began: list[session_pb2.BeginGenerationRequest] = []
        self.room = asyncio.Event()
        self.room.set()
        self.recording = 0
        self.refusals: list[SluiceError] = []
        self.refused = 0
        self.template_arguments = ""

    @property
    def key(self) -> str:
        return f"{SESSION_KEY}{self.session.name}"

    async def FindSession(self, request, context):
        self.finding += 1
        if request.session_key != self.key and request.episode_id != self.session.name:
            raise SluiceError.not_found("UNKNOWN_EPISODE", "the session key opens no episode of this run")
        return session_pb2.FindSessionResponse(
            episode_id=self.session.name,
            principal="anyone",
            group_id="g1",
            template_arguments_json=self.template_arguments,
            cacheable=Duration(seconds=60),
        )

    async def Exchange(self, requests, context):
        most_bytes = ExternalConfig().session_mb << 20
        await answer_exchange(requests, context.write, self._begin, self._record, self._get, most_bytes=most_bytes)

    async def _begin(self, principal, request, most_s):
        self.began.append(request)
        while True:
            answer = self._claims.begin_generation("anyone", request, 0.0, joined=request.joins)
            if request.held:
                return session_pb2.BeginGenerationResponse()
            if isinstance(answer, Running) and answer.gateway == request.gateway and answer.request_id != request.joins:
                return session_pb2.BeginGenerationResponse(running=answer.request_id)
            if isinstance(answer, Recorded):
                return session_pb2.BeginGenerationResponse(recorded=self.recorded[answer.request.request_id])
            if isinstance(answer, Claimed):
                response = session_pb2.BeginGenerationResponse(prefix=answer.prefix)
                if answer.parent is not None:
                    request_id, _, index = answer.parent.generation_id.rpartition("/")
                    made = self.recorded[request_id].response
                    response.parent = answer.parent.generation_id
                    response.continues.ids.extend([*made.prompt_token_ids, *made.samples[int(index)].token_ids])
                return response
            await asyncio.sleep(0.02)

    async def _record(self, principal, request):
        if self.refusals:
            self.refused += 1
            raise self.refusals.pop()
        names, parent = self._claims.record_generation("anyone", request, 0.0)
        self.recording += 1
        await self.room.wait()
        self.recorded.setdefault(request.generation.request_id, request.generation)
        await self._journal.durable()
        return session_pb2.RecordGenerationResponse(generation_ids=names, parent=parent)

    async def _get(self, principal, request):
        made = self.recorded[request.generation_id.rpartition("/")[0]]
        return session_pb2.GetGenerationResponse(generation=made)

    async def ReleaseGeneration(self, request, context):
        self._claims.release("anyone", request, 0.0)
        self.released += 1
        return session_pb2.ReleaseGenerationResponse()


@dataclass
class Stack:
    url: str
    orchestrator: Orchestrator
    cable: Cable
    replica: ScriptedReplica
    episodes: episode_pb2_grpc.EpisodeServiceAsyncStub
    sessions: RecordedSessions
    clock: SimulatedClock

    def http(self, transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.orchestrator.key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=LIMIT_S, transport=transport, verify=False)

    @property
    def readers(self) -> int:
        """How many requests wait for what is sampled."""
        return sum(each.sampling.readers for runs in self.sessions._running.values() for each in runs.values())

    async def asked_in_vain(self, http: httpx.AsyncClient, transport: ImpatientTransport, **headers: str) -> None:
        """Make a request whose client gives up while the replica holds it back."""
        asking = asyncio.create_task(http.post(CHAT, json=BODY, headers=headers))
        await until(lambda: self.readers == 1 and self.replica.open == 1)
        transport.give_up()
        with pytest.raises(httpx.ReadTimeout):
            await asking
        await until(lambda: self.readers == 0)


@contextlib.asynccontextmanager
async def stack(directory: Any, replica: ScriptedReplica, **deadlines: float) -> AsyncIterator[Stack]:
    """A gateway between a replica and an orchestrator whose cable can be cut. Time passes for the gateway when a test moves it."""
    capture = CaptureConfig.model_validate({"deadlines": deadlines})
    security, clock = SecurityConfig(), SimulatedClock()
    journal = Journal(directory, {"run": "test"}, limits=JournalLimits(fsync_interval_s=0.0))
    orchestrator = Orchestrator(journal)
    register = session_pb2_grpc.add_SessionServiceServicer_to_server
    async with contextlib.AsyncExitStack() as opened:
        opened.push_async_callback(journal.close)
        address, _ = await opened.enter_async_context(connected(replica))
        target = await opened.enter_async_context(served((register, orchestrator, "sluice.v1.SessionService")))
        cable = Cable(target)
        await cable.plug_in()
        opened.push_async_callback(cable.cut)
        pool = ReplicaPool([address], security, POOL, lambda _: None)
        following = asyncio.create_task(pool.run())
        opened.push_async_callback(_ended, following)
        channel = await opened.enter_async_context(connect(f"127.0.0.1:{cable.port}", security, role="gateway"))
        sessions = RecordedSessions(
            channel,
            PolicyEngine(pool, "test", 600.0),
            capture,
            run="test",
            base_url=lambda: "http://gateway",
            name="east",
            clock=clock,
        )
        app = create_app(sessions, capture, Access(security), "127.0.0.1", clock)
        server = HttpServer(app, "127.0.0.1", 0, security)
        port = await server.start()
        opened.push_async_callback(sessions.close)
        opened.push_async_callback(server.stop, 0)
        service = (episode_pb2_grpc.add_EpisodeServiceServicer_to_server, EpisodeServicer(sessions, capture))
        grpc_target = await opened.enter_async_context(served((*service, "sluice.v1.EpisodeService")))
        agent = await opened.enter_async_context(connect(grpc_target, security, role="agent"))
        episodes = episode_pb2_grpc.EpisodeServiceStub(agent)
        yield Stack(f"http://127.0.0.1:{port}", orchestrator, cable, replica, episodes, sessions, clock)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


async def until(condition: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.005)


class Episodes(episode_pb2_grpc.EpisodeServiceServicer):
    """Opens episodes with the keys that it is given."""

    def __init__(self, **keys: str) -> None:
        self._keys = keys

    async def OpenEpisode(self, request, context):
        return episode_pb2.OpenEpisodeResponse(episode_id="g1-0", **self._keys)


@pytest.mark.parametrize(
    ("keys", "settles"),
    [({"session_key": "one"}, "one"), ({"session_key": "one", "settling_key": "two"}, "two")],
    ids=["orchestrator of v0.1.0", "this version"],
)
async def test_an_episode_has_a_key_that_settles_it(keys, settles):
    episodes = (episode_pb2_grpc.add_EpisodeServiceServicer_to_server, Episodes(**keys), "sluice.v1.EpisodeService")
    pool = ReplicaPool([], SecurityConfig(), POOL, lambda _: None)
    async with served(episodes) as target, connect(target, SecurityConfig(), role="gateway") as channel:
        sessions = RecordedSessions(
            channel,
            PolicyEngine(pool, "test", 600.0),
            CaptureConfig(),
            run="test",
            base_url=lambda: "http://g",
            name="east",
        )
        opened = await sessions.open_episode(episode_pb2.OpenEpisodeRequest(lease_id="l", request_id="o"))
        await sessions.close()
    assert (opened.session_key, opened.settling_key) == ("one", settles)


async def test_turns_with_tools_continue_the_tokens_that_were_sampled(tmp_path):
    async with stack(tmp_path, ScriptedReplica("one", pace_s=0.0)) as gateway:
        messages = list(USER)
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.orchestrator.key) as client:
            for _ in range(2):
                reply = await client.chat.completions.create(
                    model="m", messages=messages, tools=TOOLS, max_tokens=TOKENS, extra_body={"return_token_ids": True}
                )
                message = reply.choices[0].message
                messages.append(message.model_dump(exclude_unset=True))
                messages += [
                    {"role": "tool", "tool_call_id": call.id, "content": "a cat"} for call in message.tool_calls
                ]
        first, second = gateway.replica.requests
        one, two = gateway.orchestrator.recorded.values()
    assert not first.HasField("continues")
    assert list(second.continues.token_ids) == [*one.response.prompt_token_ids, *one.response.samples[0].token_ids]
    assert (second.continues.messages, second.continues.only_as_rendered) == (2, False)
    assert reply.id == f"{two.request_id}/0"
    assert len({message["tool_call_id"] for message in messages if message["role"] == "tool"}) == 2


async def test_a_client_with_a_short_limit_gets_its_reply_when_it_asks_again(tmp_path):
    transport = ImpatientTransport()
    async with stack(tmp_path, HeldReplica("slow")) as gateway, gateway.http(transport) as http:
        await gateway.asked_in_vain(http, transport)
        for _ in range(3):
            await gateway.asked_in_vain(http, transport, **RETRY)
        asking = asyncio.create_task(http.post(CHAT, json=BODY, headers=RETRY))
        await until(lambda: gateway.readers == 1)
        gateway.replica.go.set()
        reply = await asking
        (recorded,) = gateway.orchestrator.recorded.values()
        assert reply.json()["id"] == f"{recorded.request_id}/0"
        assert len(gateway.replica.requests) == 1


@pytest.mark.slow
async def test_a_reply_whose_client_was_cut_off_is_given_to_the_same_request_without_a_mark(tmp_path):
    transport = ImpatientTransport()
    async with stack(tmp_path, HeldReplica("slow")) as gateway, gateway.http(transport) as http:
        await gateway.asked_in_vain(http, transport)
        gateway.replica.go.set()
        await until(lambda: gateway.orchestrator.recorded)
        session = gateway.orchestrator.session
        assert session.leaves() == [], "nobody has it"
        (recorded,) = session.samples
        replies = [(await http.post(CHAT, json=BODY)).json()["id"] for _ in range(2)]
        assert replies[0] == recorded
        assert replies[1] != recorded, "it was given once; the same body again is another sample"
        assert session.leaves() == replies
        assert len(gateway.replica.requests) == 2


async def test_a_request_that_nobody_asks_for_again_ends_and_gives_its_claim_back(tmp_path):
    transport = ImpatientTransport()
    async with stack(tmp_path, HeldReplica("slow"), linger_s=LINGER_S) as gateway, gateway.http(transport) as http:
        await gateway.asked_in_vain(http, transport)
        await gateway.clock.advance(LINGER_S + 1)
        await until(lambda: gateway.orchestrator.released)
        await until(lambda: not gateway.replica.open)
        assert not gateway.orchestrator.recorded


@pytest.mark.slow
async def test_what_no_replica_was_asked_for_ends_with_its_client(tmp_path):
    transport = ImpatientTransport()
    async with stack(tmp_path, ScriptedReplica("one")) as gateway, gateway.http(transport) as http:
        (await http.get("/v1/models")).raise_for_status()  # the session is known from now on
        await gateway.cable.cut()
        asking = asyncio.create_task(http.post(CHAT, json=BODY))
        await until(lambda: gateway.readers == 1)
        transport.give_up()
        with pytest.raises(httpx.ReadTimeout):
            await asking
        await gateway.clock.advance(0)
        await until(lambda: not gateway.sessions._running)
        assert not gateway.replica.requests


async def test_nobody_asks_for_a_session_when_all_who_wanted_it_have_left(tmp_path):
    async with stack(tmp_path, ScriptedReplica("one")) as gateway:
        await gateway.cable.cut()
        request = episode_pb2.RecordRewardRequest(episode_id=gateway.orchestrator.session.name, reward=1.0)
        key = ((SESSION_KEY_METADATA, gateway.orchestrator.key),)
        calls = [gateway.episodes.RecordReward(request, metadata=key, timeout=LIMIT_S) for _ in range(2)]
        await until(lambda: [each.waiting for each in gateway.sessions._found._asking.values()] == [2])
        for call in calls:
            call.cancel()
        await until(lambda: not gateway.sessions._found._asking)


async def test_what_settles_a_session_asks_for_it_once(tmp_path):
    async with stack(tmp_path, ScriptedReplica("one")) as gateway, gateway.http() as http:
        for _ in range(2):
            reply = await http.post(f"/rl/sessions/{gateway.orchestrator.session.name}/reward", json={"reward": 1.0})
            assert reply.status_code == 501, "this orchestrator takes no rewards"
        assert gateway.orchestrator.finding == 1


STREAMS: Any = {
    CHAT: (BODY, lambda event: (event["choices"] or [{"delta": {}}])[0]["delta"].get("content", "")),
    "/v1/messages": (BODY, lambda event: event.get("delta", {}).get("text", "")),
    "/v1/responses": (
        {"model": "m", "input": "Where is it?", "max_output_tokens": TOKENS},
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    ),
}
"""For each route: the body of a request, and the text in an event of a stream."""


@pytest.mark.parametrize("route", STREAMS)
async def test_a_stream_of_a_conversation_has_its_text_before_its_end(tmp_path, route):
    body, text_in = STREAMS[route]
    async with stack(tmp_path, SlowEnd("slow", pace_s=0.0)) as gateway, gateway.http() as http:
        texts = []
        async with asyncio.timeout(LIMIT_S), http.stream("POST", route, json=body | {"stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    texts.append(text_in(json.loads(line.removeprefix("data: "))))
                if any(texts):
                    gateway.replica.go.set()
        (recorded,) = gateway.orchestrator.recorded.values()
        said = recorded.response.samples[0].message.content
    assert len(said) == TOKENS
    assert "".join(texts) == said


async def test_over_grpc_a_stream_of_a_conversation_has_its_text_before_its_end(tmp_path):
    async with stack(tmp_path, SlowEnd("slow", pace_s=0.0)) as gateway, asyncio.timeout(LIMIT_S):
        asked = episode_pb2.EpisodeServiceGenerateRequest(
            episode_id=gateway.orchestrator.session.name,
            conversation={"messages": [{"role": "user", "content": "Where is it?"}]},
            sampling={"max_tokens": TOKENS},
        )
        text = ""
        async for part in gateway.episodes.GenerateStream(
            episode_pb2.EpisodeServiceGenerateStreamRequest(request=asked)
        ):
            text += "".join(delta.text for delta in part.deltas)
            if text:
                gateway.replica.go.set()
    assert part.result.generations[0].message.content == text


async def test_a_stream_whose_reply_another_gateway_recorded_otherwise_ends_with_an_error_and_its_repetition_gets_that(
    tmp_path,
):
    """The text that was shown is not that of the recorded reply, so that its rest cannot be sent."""
    async with stack(tmp_path, ScriptedReplica("one", pace_s=0.0)) as gateway, gateway.http() as http:
        record = gateway.orchestrator._record

        async def after_another(principal: str, request: Any) -> Any:
            twin = session_pb2.RecordGenerationRequest()
            twin.CopyFrom(request)
            twin.gateway = "west"
            twin.generation.response.samples[0].token_ids[0] += 1
            twin.generation.response.samples[0].message.content = "It is there."
            await record(principal, twin)
            return await record(principal, request)

        gateway.orchestrator._record = after_another
        cut = await http.post(CHAT, json=BODY | {"stream": True})
        assert "RECORDED_OTHERWISE" in cut.text
        assert "[DONE]" not in cut.text
        again = await http.post(CHAT, json=BODY | {"stream": True}, headers=RETRY)
        assert '"It is there."' in again.text
        assert len(gateway.replica.requests) == 1
        whole = await http.post(CHAT, json=BODY)  # no text was shown of it
        assert whole.json()["choices"][0]["message"]["content"] == "It is there."


@pytest.mark.parametrize("stream", [False, True])
async def test_equal_requests_at_one_time_are_as_many_samples(tmp_path, stream):
    async with stack(tmp_path, HeldReplica("slow")) as gateway, gateway.http() as http:
        asking = [asyncio.create_task(http.post(CHAT, json=BODY | {"stream": stream})) for _ in range(3)]
        await until(lambda: gateway.readers == 3 and gateway.replica.open == 3)
        gateway.replica.go.set()
        assert all(reply.status_code == 200 for reply in await asyncio.gather(*asking))
        assert len(gateway.replica.requests) == 3
        assert len(gateway.orchestrator.session.leaves()) == 3


async def test_a_marked_retry_joins_what_is_in_flight_and_its_twin_another_one(tmp_path):
    async with stack(tmp_path, HeldReplica("slow")) as gateway, gateway.http() as http:
        asking = [asyncio.create_task(http.post(CHAT, json=BODY)) for _ in range(2)]
        await until(lambda: gateway.replica.open == 2)
        asking += [asyncio.create_task(http.post(CHAT, json=BODY, headers=RETRY)) for _ in range(2)]
        await until(lambda: gateway.readers == 4)
        gateway.replica.go.set()
        replies = [(await each).json()["id"] for each in asking]
        assert sorted(replies[:2]) == sorted(replies[2:])
        assert len(gateway.replica.requests) == len(set(replies)) == 2


async def test_requests_with_one_idempotency_key_are_one(tmp_path):
    async with stack(tmp_path, HeldReplica("slow")) as gateway, gateway.http() as http:
        keys = ["one", "one", "two"]
        asking = [asyncio.create_task(http.post(CHAT, json=BODY, headers={"idempotency-key": key})) for key in keys]
        await until(lambda: gateway.readers == 3)
        gateway.replica.go.set()
        replies = [(await each).json()["id"] for each in asking]
        later = await http.post(CHAT, json=BODY, headers={"idempotency-key": "two"})
        assert replies[0] == replies[1] != replies[2] == later.json()["id"]
        assert len(gateway.replica.requests) == 2


@pytest.mark.parametrize("headers", [{}, RETRY])
async def test_the_retry_of_one_of_several_equal_requests_gets_the_reply_that_nobody_waits_for(tmp_path, headers):
    transport = ImpatientTransport()
    async with stack(tmp_path, HeldReplica("slow")) as gateway, gateway.http() as http, gateway.http(transport) as cut:
        others = [asyncio.create_task(http.post(CHAT, json=BODY)) for _ in range(2)]
        await until(lambda: gateway.replica.open == 2)
        lost = asyncio.create_task(cut.post(CHAT, json=BODY))
        await until(lambda: gateway.readers == gateway.replica.open == 3)
        transport.give_up()
        with pytest.raises(httpx.ReadTimeout):
            await lost
        await until(lambda: gateway.readers == 2)
        again = asyncio.create_task(http.post(CHAT, json=BODY, headers=headers))
        await until(lambda: gateway.readers == 3)
        gateway.replica.go.set()
        replies = [(await each).json()["id"] for each in (*others, again)]
        assert len(set(replies)) == len(gateway.replica.requests) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_whose_client_leaves_while_it_is_recorded_is_not_trained_as_read(tmp_path, stream):
    async with stack(tmp_path, ScriptedReplica("one", pace_s=0.0)) as gateway, gateway.http() as http:
        orchestrator = gateway.orchestrator
        orchestrator.room.clear()
        asking = asyncio.create_task(http.post(CHAT, json=BODY | {"stream": stream}))
        await until(lambda: orchestrator.recording)
        asking.cancel()  # closes the connection
        await asyncio.wait({asking})
        await until(lambda: gateway.readers == 0)
        orchestrator.room.set()
        await until(lambda: orchestrator.recorded and not orchestrator.session.leaves())
        again = await http.post(CHAT, json=BODY | {"stream": stream})
        assert again.status_code == 200
        await until(orchestrator.session.leaves)
        assert len(gateway.replica.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_whose_client_stops_reading_is_not_trained_as_read(tmp_path, stream):
    small = httpx.AsyncHTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
    async with stack(tmp_path, Verbose("one")) as gateway, gateway.http(small) as http:
        session = gateway.orchestrator.session
        async with http.stream("POST", CHAT, json=BODY | {"stream": stream, "n": 8}) as response:
            await until(lambda: gateway.orchestrator.recorded)
            assert response.status_code == 200
            assert len(session.leaves()) == 8, "as far as anybody knows"
        await until(lambda: not session.leaves())


async def test_a_named_request_that_two_gateways_record_is_the_first_one_s_reply(tmp_path):
    async with stack(tmp_path, HeldReplica("slow")) as gateway:
        orchestrator = gateway.orchestrator
        name = orchestrator.session.name
        asked = episode_pb2.EpisodeServiceGenerateRequest(
            episode_id=name,
            request_id="mine",
            conversation={"messages": [{"role": "user", "content": "Where is it?"}]},
            sampling={"max_tokens": TOKENS},
        )
        asking = gateway.episodes.Generate(asked)
        await until(lambda: gateway.replica.open == 1)
        (begun,) = orchestrator.began
        sample = {"token_ids": [2], "logprobs": [-1.0], "version_spans": [{"start": 0}]}
        made = session_pb2.RecordedGeneration(
            request_id=begun.request_id,
            response={"prompt_token_ids": [1], "samples": [sample]},
            keys=[b""],
            body_digest=begun.body_digest,
            temperature=1.0,
        )
        await orchestrator._record(
            "anyone", session_pb2.RecordGenerationRequest(episode_id=name, gateway="west", generation=made)
        )
        gateway.replica.go.set()
        reply = await asking
        assert list(reply.generations[0].sample.token_ids) == [2]
        assert orchestrator.session.leaves() == [f"{name}/mine/0"]


@pytest.mark.slow
async def test_a_reply_waits_for_an_orchestrator_that_is_away_and_is_recorded_before_its_end(tmp_path):
    async with stack(tmp_path, HeldReplica("one")) as gateway, gateway.http() as http:
        lines: list[str] = []

        async def read() -> None:
            async with http.stream("POST", CHAT, json=BODY | {"stream": True}) as response:
                async for line in response.aiter_lines():
                    lines.append(line)  # noqa: PERF401 - what is there so far is looked at

        reading = asyncio.create_task(read())
        await until(lambda: gateway.replica.open == 1)
        await gateway.cable.cut()
        gateway.replica.go.set()
        await until(lambda: gateway.replica.open == 0)
        await gateway.clock.until(lambda: ": waiting" in lines, step_s=STEP_S)
        assert not gateway.orchestrator.recorded
        assert "data: [DONE]" not in lines
        await gateway.cable.plug_in()
        await gateway.clock.until(reading.done, step_s=STEP_S)
        await reading
        assert "data: [DONE]" in lines
        assert len(gateway.orchestrator.recorded) == 1


@pytest.mark.slow
async def test_a_reply_waits_until_an_orchestrator_that_is_full_has_room_and_is_sampled_once(tmp_path):
    async with stack(tmp_path, ScriptedReplica("one", pace_s=0.0)) as gateway, gateway.http() as http:
        full = SluiceError.resource_exhausted("TOO_MANY_RPCS", "1024 calls are in progress", 2.0)
        gateway.orchestrator.refusals, began = [full, full], gateway.clock.now
        asking = asyncio.create_task(http.post(CHAT, json=BODY))
        await gateway.clock.until(asking.done, step_s=STEP_S)
        assert gateway.orchestrator.refused == 2
        assert gateway.clock.now - began >= 4.0, "not before the time that the orchestrator named"
        reply = await asking
        (recorded,) = gateway.orchestrator.recorded.values()
        assert reply.json()["id"] == f"{recorded.request_id}/0"
        assert len(gateway.replica.requests) == 1


@pytest.mark.slow
async def test_what_cannot_be_sampled_is_told_and_its_claim_given_back(tmp_path):
    class Refusing(ScriptedReplica):
        async def _stream(self, wanted):
            raise SluiceError.invalid_argument("conversation", "the template takes no tools")
            yield rollout_pb2.GenerateStreamResponse()

    async with stack(tmp_path, Refusing("one")) as gateway, gateway.http() as http:
        for stream in (False, False, True, True):  # the second one waits for nobody
            reply = await http.post(CHAT, json=BODY | {"stream": stream})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
        await until(lambda: gateway.orchestrator.released == 4)
        assert not any(each.held for each in gateway.orchestrator.began), (
            "what ended without a reply is not claimed again"
        )


async def test_over_grpc_a_reply_that_is_larger_than_a_message_comes_in_parts(tmp_path):
    async with stack(tmp_path, Verbose("one")) as gateway:
        asked = episode_pb2.EpisodeServiceGenerateRequest(
            episode_id=gateway.orchestrator.session.name,
            request_id="mine",
            conversation={"messages": [{"role": "user", "content": "Where is it?"}]},
            sampling={"max_tokens": TOKENS},
            n=8,
        )
        streamed = episode_pb2.EpisodeServiceGenerateStreamRequest(request=asked)
        with pytest.raises(grpc.aio.AioRpcError, match="repeat the request with GenerateStream"):
            await gateway.episodes.Generate(asked)
        with pytest.raises(grpc.aio.AioRpcError, match="repeat the request with GenerateStream"):
            _ = [each async for each in gateway.episodes.GenerateStream(streamed)]
        streamed.takes_parts = True
        parts = [each.result_part async for each in gateway.episodes.GenerateStream(streamed)]
    result = episode_pb2.EpisodeServiceGenerateResponse.FromString(b"".join(parts))
    assert result.ByteSize() > MAX_MESSAGE_BYTES
    assert [each.generation_id.rpartition("/")[2] for each in result.generations] == [str(each) for each in range(8)]
    assert all(len(each.message.content) == 300 << 10 for each in result.generations)
    assert len(gateway.replica.requests) == 1, "the reply was recorded, and sampled once"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "own", "sent"),
    [
        ("", {}, ""),
        ("", {"enable_thinking": False, "effort": 1}, '{"enable_thinking": false, "effort": 1}'),
        ('{"enable_thinking": true, "date": "May"}', {}, '{"enable_thinking": true, "date": "May"}'),
        (
            '{"enable_thinking": true, "date": "May"}',
            {"enable_thinking": False, "effort": 1},
            '{"enable_thinking": false, "date": "May", "effort": 1}',
        ),
    ],
)
async def test_a_request_s_template_arguments_take_precedence_over_the_environment_s(tmp_path, environment, own, sent):
    async with stack(tmp_path, ScriptedReplica("one")) as gateway, gateway.http() as http:
        gateway.orchestrator.template_arguments = environment
        reply = await http.post(CHAT, json=BODY | {"chat_template_kwargs": own})
        assert reply.status_code == 200, reply.text
    (request,) = gateway.replica.requests
    assert request.conversation.template_arguments_json == sent


@pytest.mark.slow
async def test_over_grpc_a_request_with_a_name_is_its_own_repetition_and_one_without_is_another_sample(tmp_path):
    async with stack(tmp_path, ScriptedReplica("slow", pace_s=0.02)) as gateway:
        conversation = {"messages": [{"role": "user", "content": "Where is it?"}]}
        name = gateway.orchestrator.session.name
        asked = episode_pb2.EpisodeServiceGenerateRequest(
            episode_id=name, conversation=conversation, sampling={"max_tokens": TOKENS}
        )
        unnamed = await asyncio.gather(*(gateway.episodes.Generate(asked) for _ in range(2)))
        asked.request_id = "mine"
        together = await asyncio.gather(*(gateway.episodes.Generate(asked) for _ in range(2)))
        later = await gateway.episodes.Generate(asked)
    names = [reply.generations[0].generation_id for reply in (*unnamed, *together, later)]
    assert len(set(names[:2])) == 2
    assert names[2:] == [f"{name}/mine/0"] * 3, "unique within the run, not only within the episode"
    assert len(gateway.replica.requests) == 3
