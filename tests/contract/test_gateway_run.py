"""Agents of three dialects train a run through a gateway: the real gateway, orchestrator and journal, a scripted replica and trainer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from orchestrator_doubles import RolloutDouble, Sampled
from prometheus_client import REGISTRY
from test_external_episodes import EXTERNAL, trained_ids
from test_orchestrator_run import DEADLINE_S, Scene, make_scene, trained

from gateway_svc.app import serve
from gateway_svc.config import GatewayConfig
from orchestrator_svc.commands.audit_compare import audit
from orchestrator_svc.journal import DATABASE
from orchestrator_svc.journal.facts import Place
from orchestrator_svc.journal.segments import read_payload
from orchestrator_svc.journal.store import read_facts
from sluice.cli.main import main
from sluice.config import CommonConfig, PeersConfig, SecurityConfig
from sluice.rpc import connect
from sluice.v1 import episode_pb2, episode_pb2_grpc, rollout_pb2, session_pb2, tokens_pb2
from sluice.versions import Lineage

pytestmark = pytest.mark.slow

SCHEMA: Any = {"type": "object", "properties": {"place": {"type": "string"}}}
QUESTION: Any = {"role": "user", "content": "Where is it?"}


@dataclass
class ToolReplica(RolloutDouble):
    """Calls the tool, then answers; each token that it samples or renders is another one."""

    sampled: list[list[int]] = field(default_factory=list)
    numbers: Any = field(default_factory=lambda: itertools.count(1000))

    async def _sample(self, request):
        self.calls.append(Sampled(request, self.version))
        await self.gate.wait()
        conversation = request.conversation
        known = request.continues.messages if request.HasField("continues") else 0
        prompt = [*request.continues.token_ids, *(next(self.numbers) for _ in conversation.messages[known:])]
        ids = [next(self.numbers) for _ in range(3)]
        self.sampled.append(ids)
        message = self.says(conversation)
        sample = rollout_pb2.GeneratedSample(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            version_spans=[tokens_pb2.VersionSpan(start=0, policy_version=self.version.to_proto())],
            finish_reason=tokens_pb2.FINISH_REASON_STOP,
            text=message.content,
            message=message,
        )
        return rollout_pb2.GenerateResponse(
            prompt_token_ids=prompt, samples=[sample], tokenizer_digest=self.digest, continued=bool(known)
        )

    def says(self, conversation: tokens_pb2.Conversation) -> tokens_pb2.ChatMessage:
        if conversation.messages[-1].role == "tool":
            return tokens_pb2.ChatMessage(content="It said a cat.")
        return tokens_pb2.ChatMessage(reasoning="Look.", tool_calls=[{"name": "look", "arguments": '{"place":"a"}'}])


LARGE = 440 << 10
"""Characters of a reply of which eight make a recording of more than 6 MiB: each is there as text and as a message."""


@dataclass
class VerboseReplica(ToolReplica):
    """Says the same long text in each sample, in a message of the stream of its own, and answers nothing twice from memory."""

    asked: int = 0

    async def _messages(self, request):
        self.asked += 1
        answer = await self._sample(request)
        yield rollout_pb2.GenerateStreamResponse(
            opening={"prompt_token_ids": answer.prompt_token_ids, "tokenizer_digest": answer.tokenizer_digest}
        )
        for index in range(request.n):
            sample = rollout_pb2.GeneratedSample()
            sample.CopyFrom(answer.samples[0])
            sample.index, sample.token_ids[0] = index, 7 + index
            chunk = {
                "deltas": [{"tokens": sample}],
                "stage": rollout_pb2.REQUEST_STAGE_RUNNING,
                "engine_steps": 1 + index,
            }
            yield rollout_pb2.GenerateStreamResponse(chunk=chunk)

    def says(self, conversation: tokens_pb2.Conversation) -> tokens_pb2.ChatMessage:
        return tokens_pb2.ChatMessage(content="x" * LARGE)


async def play_chat(session: dict[str, Any]) -> str:
    messages: list[Any] = [QUESTION]
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}}]
    async with openai.AsyncOpenAI(base_url=session["openai_base_url"], api_key=session["key"]) as client:
        while True:
            async with client.chat.completions.stream(model="m", messages=messages, tools=tools) as stream:
                message = (await stream.get_final_completion()).choices[0].message
            messages.append(message.model_dump(exclude_unset=True))
            if not message.tool_calls:
                return message.content or ""
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "a cat"} for call in message.tool_calls]


async def play_responses(session: dict[str, Any]) -> str:
    given: Any = {"model": "m", "tools": [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}]}
    asked: Any = [QUESTION]
    async with openai.AsyncOpenAI(base_url=session["openai_base_url"], api_key=session["key"]) as client:
        while True:
            reply = await client.responses.create(**given, input=asked)
            calls = [item for item in reply.output if item.type == "function_call"]
            if not calls:
                return reply.output_text
            given["previous_response_id"] = reply.id
            asked = [{"type": "function_call_output", "call_id": call.call_id, "output": "a cat"} for call in calls]


async def play_messages(session: dict[str, Any]) -> str:
    messages: list[Any] = [QUESTION]
    body = {"model": "m", "max_tokens": 50, "tools": [{"name": "look", "input_schema": SCHEMA}]}
    headers = {"x-api-key": session["key"]}
    async with httpx.AsyncClient(base_url=session["anthropic_base_url"], headers=headers, timeout=20) as http:
        while True:
            content = (await http.post("/v1/messages", json=body | {"messages": messages})).json()["content"]
            calls = [block for block in content if block["type"] == "tool_use"]
            if not calls:
                return str(content[-1]["text"])
            results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "a cat"} for call in calls]
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]


@contextlib.asynccontextmanager
async def served_gateway(
    scene: Scene, security: SecurityConfig | None = None, **settings: Any
) -> AsyncIterator[tuple[str, str]]:
    """Run a gateway; give its gRPC target and the URL of its HTTP port."""
    peers, security = PeersConfig(orchestrator=scene.target), security or SecurityConfig()
    common = CommonConfig(run="test", output_dir=scene.directory, model="double", peers=peers, security=security)
    config = GatewayConfig.model_validate({"server": {"port": 0, "http_port": 0}, **settings})
    listening: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(common, config, lambda *addresses: listening.set_result(addresses)))
    try:
        await asyncio.wait({serving, listening}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving
        yield listening.result()
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


@contextlib.asynccontextmanager
async def running_gateway(scene: Scene, **settings: Any) -> AsyncIterator[str]:
    """Run a gateway; give the URL of its HTTP port."""
    async with served_gateway(scene, **settings) as (_, url):
        yield url


async def opened(http: httpx.AsyncClient, request_id: str = "") -> dict[str, Any]:
    """Open a session; wait until gateway, orchestrator and replica have found each other."""
    while True:
        with contextlib.suppress(httpx.ConnectError):
            response = await http.post("/rl/sessions", json={"wait_s": 5, "request_id": request_id})
            if response.status_code == 200:
                return dict(response.json())
            assert response.status_code in {429, 503}, response.text
        await asyncio.sleep(0.05)


async def test_agents_of_each_dialect_train_a_run_and_each_token_is_trained_once(tmp_path, capsys) -> None:
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        scene = await make_scene(tmp_path, stack, [ToolReplica()])
        running = scene.start(**{**EXTERNAL, "max_steps": 1})
        url = await stack.enter_async_context(running_gateway(scene))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20))
        ended: list[str] = []
        for play in (play_chat, play_responses, play_messages, play_chat):
            session = await opened(http)
            by_its_key_alone = {"openai_base_url": f"{url}/v1"} if ended else {}
            assert await play(session | by_its_key_alone) == "It said a cat."
            headers = {"authorization": f"Bearer {session['settling_key']}"}
            path = f"/rl/sessions/{session['id']}"
            reward = await http.post(f"{path}/reward", json={"reward": len(ended) % 2}, headers=headers)
            assert reward.status_code == 200, reward.text
            ended += (await http.post(f"{path}/end", json={}, headers=headers)).json()["trajectory_ids"]
        await running
    assert sorted(trained(scene)) == sorted(ended)
    assert len(ended) == 4, "no history forked"
    assert trained_ids(scene) == dict.fromkeys(itertools.chain.from_iterable(scene.replicas[0].sampled), 1)
    assert (scene.run_dir / DATABASE).exists()
    assert not audit(read_facts(scene.run_dir), scene.trainer.record, Lineage()).differences
    shown = traced(scene.run_dir, capsys)
    assert [line.split()[0] for line in shown if line.startswith("g")] == ["g1-0-0", "g1-1-0", "g2-0-0", "g2-1-0"]
    shown = traced(scene.run_dir, capsys, "g1-1")
    assert len([line for line in shown if "  replica 127.0.0.1:" in line]) == 2
    assert "prompt 5 tokens: continues #1 (4), 1 new" in [line.strip() for line in shown], "\n".join(shown)
    assert shown[-1].startswith("trajectory g1-1: #1 -> #2: trained in step 1")


def traced(run_dir: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Return what `sluice trace` prints."""
    assert main(["trace", str(run_dir), *words]) == 0
    return capsys.readouterr().out.splitlines()


async def test_agents_that_wait_for_a_task_take_no_place_of_one_that_works(tmp_path) -> None:
    limit = 4
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        scene = await make_scene(tmp_path, stack, [ToolReplica()])
        server = {"host": scene.target, "max_concurrent_rpcs": limit}
        running = scene.start(**EXTERNAL, batch_size=1, group_size=2, max_concurrent=1, server=server)
        url = await stack.enter_async_context(running_gateway(scene))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=DEADLINE_S))
        session, _ = await opened(http), await opened(http)  # both episodes that are on offer
        scene.replicas[0].gate.clear()
        headers = {"authorization": f"Bearer {session['key']}"}
        body = {"model": "m", "messages": [QUESTION]}
        working = asyncio.create_task(http.post("/v1/chat/completions", json=body, headers=headers))
        await scene.until(lambda: len(scene.replicas[0].calls) == 1)
        idle = [asyncio.create_task(http.post("/rl/sessions", json={"wait_s": 60})) for _ in range(2 * limit)]
        await scene.until(lambda: leases_under_way() >= limit or any(each.done() for each in idle))
        scene.replicas[0].gate.set()
        reply = await working
        assert reply.status_code == 200, reply.text
        headers = {"authorization": f"Bearer {session['settling_key']}"}
        reward = await http.post(f"/rl/sessions/{session['id']}/reward", json={"reward": 1}, headers=headers)
        assert reward.status_code == 200, reward.text
        for each in (*idle, running):
            each.cancel()
        await asyncio.wait({*idle, running})
    recorded = [fact for _, fact in read_facts(scene.run_dir) if fact.HasField("session_generation_recorded")]
    assert len(recorded) == len(scene.replicas[0].calls) == 1


async def test_a_recording_that_is_larger_than_a_message_is_kept_and_given_again(tmp_path) -> None:
    replica = VerboseReplica()
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        scene = await make_scene(tmp_path, stack, [replica])
        running = scene.start(**EXTERNAL)
        url = await stack.enter_async_context(running_gateway(scene))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=DEADLINE_S))
        session = await opened(http)
        http.headers["authorization"] = f"Bearer {session['key']}"
        body: dict[str, Any] = {"model": "m", "messages": [QUESTION], "n": 8}
        first = await http.post("/v1/chat/completions", json=body)
        assert first.status_code == 200, first.text[:500]
        again = await http.post("/v1/chat/completions", json=body, headers={"x-stainless-retry-count": "1"})
        assert again.json() | {"created": 0} == first.json() | {"created": 0}
        assert replica.asked == 1
        # The conversation up to its end is read back, too.
        name = first.json()["id"]
        following = {"model": "m", "previous_response_id": name, "input": "and?", "max_output_tokens": 9}
        reply = await http.post("/v1/responses", json=following)
        assert reply.status_code == 200, reply.text[:500]
        assert [each.content[:3] for each in replica.calls[-1].request.conversation.messages] == ["Whe", "xxx", "and"]
        running.cancel()
        await asyncio.wait({running})
    recorded = [fact for _, fact in read_facts(scene.run_dir) if fact.HasField("session_generation_recorded")]
    assert [fact.session_generation_recorded.payload_bytes > 6 << 20 for fact in recorded] == [True, False]


async def test_a_recording_that_no_session_has_room_for_is_refused_by_the_name_of_its_limit(tmp_path) -> None:
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        scene = await make_scene(tmp_path, stack, [VerboseReplica()])
        running = scene.start(**EXTERNAL, external={"session_mb": 2})
        url = await stack.enter_async_context(running_gateway(scene))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=DEADLINE_S))
        session = await opened(http)
        http.headers["authorization"] = f"Bearer {session['key']}"
        for content, samples, calls in (("Where is it?", 8, 1), ("x" * (3 << 20), 1, 1), ("Where is it?", 1, 2)):
            body = {"model": "m", "messages": [{"role": "user", "content": content}], "n": samples}
            reply = await http.post("/v1/chat/completions", json=body)
            assert scene.replicas[0].asked == calls
            if samples == 1 and len(content) < 100:
                assert reply.status_code == 200, reply.text[:500]
                continue
            assert reply.status_code == 400
            assert reply.json()["error"]["code"] == "SESSION_FULL"
            assert "orchestrator.external.session_mb" in reply.json()["error"]["message"]
        running.cancel()
        await asyncio.wait({running})


async def test_a_gateway_says_how_late_its_event_loop_is(tmp_path) -> None:
    def looks() -> float:
        return REGISTRY.get_sample_value("sluice_loop_lag_seconds_count") or 0.0

    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        scene = await make_scene(tmp_path, stack, [ToolReplica()])
        before = looks()
        await stack.enter_async_context(running_gateway(scene))  # without an orchestrator, which looks, too
        await scene.until(lambda: looks() > before)


def leases_under_way() -> float:
    """Return how many calls of LeaseTasks this process serves."""
    labels = {"service": "sluice.v1.EpisodeService", "method": "LeaseTasks"}
    return REGISTRY.get_sample_value("sluice_rpc_in_flight", labels) or 0.0


async def test_any_gateway_serves_any_session(tmp_path) -> None:
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        scene = await make_scene(tmp_path, stack, [ToolReplica()])
        running = scene.start(**EXTERNAL)
        first = contextlib.AsyncExitStack()
        urls = [await first.enter_async_context(running_gateway(scene))]
        urls.append(await stack.enter_async_context(running_gateway(scene)))
        one, two = [await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30)) for url in urls]
        session = await opened(one)
        for http in (one, two):
            http.headers["authorization"] = f"Bearer {session['key']}"
        tools = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
        body: dict[str, Any] = {"model": "m", "messages": [QUESTION], "tools": tools, "return_token_ids": True}

        async def ask(http: httpx.AsyncClient, **headers: str) -> dict[str, Any]:
            return dict((await http.post("/v1/chat/completions", json=body, headers=headers)).raise_for_status().json())

        # A reply that was lost is given again by the other gateway.
        reply = await ask(one)
        assert await ask(two, **{"x-stainless-retry-count": "1"}) | {"created": 0} == reply | {"created": 0}
        # The same request at both, marked at one of them as a retry of the other, is sampled once.
        message = reply["choices"][0]["message"]
        answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a cat"}
        body["messages"] = [QUESTION, message, answer]
        scene.replicas[0].gate.clear()
        first_one = asyncio.create_task(ask(one))
        await scene.until(lambda: len(scene.replicas[0].calls) == 2)
        asking = [first_one, asyncio.create_task(ask(two, **{"x-stainless-retry-count": "1"}))]
        scene.replicas[0].gate.set()
        turns = await asyncio.gather(*asking)
        assert turns[0]["id"] == turns[1]["id"]
        whole = [*reply["prompt_token_ids"], *reply["choices"][0]["token_ids"]]
        assert turns[0]["prompt_token_ids"][: len(whole)] == whole
        # Equal requests at both are two samples; what the client of one has left is for the next request at the other.
        turn, body["messages"] = body["messages"], [{"role": "user", "content": "Guess."}]
        scene.replicas[0].gate.clear()
        gone, *asking = [asyncio.create_task(ask(http)) for http in (one, one, two)]
        await scene.until(lambda: len(scene.replicas[0].calls) == 5)
        gone.cancel()
        await asyncio.wait({gone})
        asking.append(
            asyncio.create_task(ask(two))
        )  # sampled again only if it is faster than the news that its twin has left
        scene.replicas[0].gate.set()
        assert len({(await each)["id"] for each in asking}) == 3
        assert len(scene.replicas[0].calls) <= 6
        # A request of a gateway that ends is sampled by the other one.
        body["messages"] = [*turn, turns[0]["choices"][0]["message"], QUESTION]
        scene.replicas[0].gate.clear()
        asked = len(scene.replicas[0].calls)
        left = asyncio.create_task(ask(one))
        await scene.until(lambda: len(scene.replicas[0].calls) == asked + 1)
        await first.aclose()
        scene.replicas[0].gate.set()
        with contextlib.suppress(httpx.HTTPError):
            await left
        last = await ask(two, **{"x-stainless-retry-count": "1"})
        assert last["prompt_token_ids"][: len(turns[0]["prompt_token_ids"])] == turns[0]["prompt_token_ids"]
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


COLD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": [QUESTION]},
    "/v1/completions": {"model": "m", "prompt": "Where is it?"},
    "/v1/responses": {"model": "m", "input": "Where is it?"},
    "/v1/messages": {"model": "m", "max_tokens": 8, "messages": [QUESTION]},
    "/inference/v1/generate": {"token_ids": [5, 6]},
}


@pytest.mark.parametrize("unsupported", ["override", "reject", "not_trained"])
async def test_a_temperature_that_is_no_sampling_trains_nothing_at_any_door(tmp_path, unsupported) -> None:
    temperatures = (0.0, 1e-45, 1e-6, 0.0099)
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        scene = await make_scene(tmp_path, stack, [RolloutDouble()])
        running = scene.start(**EXTERNAL, sampling={"temperature": 0.7})
        capture = {"on_unsupported": unsupported}
        target, url = await stack.enter_async_context(served_gateway(scene, capture=capture))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=DEADLINE_S))
        session = await opened(http)
        stub = episode_pb2_grpc.EpisodeServiceStub(
            await stack.enter_async_context(connect(target, SecurityConfig(), role="agent"))
        )
        answers, said = set(), set()
        for temperature in temperatures:
            for route, body in COLD.items():
                given = {"temperature": temperature}
                asked = body | ({"sampling_params": given} if "token_ids" in body else given)
                response = await http.post(f"/sessions/{session['id']}{route}", json=asked)
                answers.add(response.status_code)
                said.add(response.json()["error"]["message"] if response.is_error else "")
            request = episode_pb2.EpisodeServiceGenerateRequest(
                episode_id=session["id"],
                conversation={"messages": [tokens_pb2.ChatMessage(**QUESTION)]},
                sampling=tokens_pb2.SamplingParams(temperature=temperature),
            )
            try:
                await stub.Generate(request)
                answers.add(200)
            except grpc.aio.AioRpcError as error:
                answers.add(400 if error.code() is grpc.StatusCode.INVALID_ARGUMENT else 500)
                said.add(error.details())
        running.cancel()
        await asyncio.wait({running})
    calls = len(temperatures) * (len(COLD) + 1)
    facts = [fact for _, fact in read_facts(scene.run_dir)]
    payloads = [fact.session_generation_recorded for fact in facts if fact.HasField("session_generation_recorded")]
    made = [
        session_pb2.RecordedGeneration.FromString(read_payload(scene.run_dir / "journal", Place.from_proto(each.place)))
        for each in payloads
    ]
    if unsupported == "reject":
        assert (answers, made, scene.replicas[0].calls) == ({400}, [], [])
        assert all("need at least 0.01" in each for each in said), said
        return
    assert (answers, len(made)) == ({200}, calls)
    # As float32, in which they travel.
    travelled = [tokens_pb2.SamplingParams(temperature=each).temperature for each in (0.7, *temperatures)]
    expected = {("", travelled[0])} if unsupported == "override" else {("TEMPERATURE", each) for each in travelled[1:]}
    assert {(each.not_trained, each.temperature) for each in made} == expected
