"""Play episodes at several gateways, and break connections: requests are cut off, replies are lost, and both are retried.

A usual client marks a retry (`x-stainless-retry-count`, or the same `request_id` over gRPC) and sends it to a gateway that answers.
Some clients mark nothing. Each turn goes to any of the gateways.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict

from benchmarks.capture.agents import Agent, Turn
from benchmarks.capture.environment import question
from sluice.rpc import SluiceError
from sluice.v1 import episode_pb2, episode_pb2_grpc

FAULTS = {"none": 66, "cut": 10, "cut, no mark": 5, "reply lost": 8, "reply lost, no mark": 3, "sent twice": 8}
"""What goes wrong with a request, with weights."""

PATIENCE_S = 150.0
"""Seconds after which an agent gives up a request: longer than any fault takes."""

PAUSE_S = 0.2
LONGEST_CUT_S = 0.25
"""Most seconds between a request and the moment at which its connection is cut off."""

_AGAIN = frozenset({429, 500, 502, 503, 504})
_AGAIN_GRPC = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
)
_CALL_S = 60.0

Choose = Callable[[], int]
"""Chooses a gateway."""


class EndedError(Exception):
    """The session, or the run, has ended."""


class RefusedError(Exception):
    """A gateway refused a request, and a retry would not help."""


@dataclass
class Played:
    """An episode as its agent remembers it.

    Attributes:
        kind: The kind of agent.
        given: Every reply that was read to its end, in order. A reply that the agent got twice is listed twice.
        path: The generations that the agent continued, in order.
        appends: Whether each generation only appends to the previous one.
        called: Whether a reply had a tool call.
        reward: What the agent submitted.
        gateways: Gateways that its turns were sent to.
        submitted: Whether the gateway confirmed the submission.
    """

    id: str
    kind: str
    appends: bool
    given: list[Turn] = field(default_factory=list)
    path: list[str] = field(default_factory=list)
    called: bool = False
    reward: float = 0.0
    gateways: set[int] = field(default_factory=set)
    submitted: bool = False


@dataclass(frozen=True)
class Opened:
    """An episode that was opened."""

    id: str
    key: str
    settling_key: str
    data: Mapping[str, Any]
    question: str


@dataclass
class Fleet:
    """The gateways of a run, as agents reach them.

    Attributes:
        urls: URLs of their HTTP ports.
        stubs: Stubs of their gRPC ports.
        http: Sends requests.
        run: Name of the run.
        counts: How often each fault happened, and each reaction to it.
        failures: Problems that must not occur.
        slowest_s: Longest time that an agent waited for a reply, with all retries.
        open: Clear while no request may begin.
        busy: Requests in progress, by episode.
    """

    urls: Sequence[str]
    stubs: Sequence[episode_pb2_grpc.EpisodeServiceAsyncStub]
    http: httpx.AsyncClient
    run: str
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    open: asyncio.Event = field(default_factory=asyncio.Event)
    busy: Counter[str] = field(default_factory=Counter)

    async def play(self, kind: str, make: Callable[[str, random.Random], Agent], dice: random.Random) -> Played | None:
        """Open an episode, play it and submit it. Return None if it ended before its agent was done.

        Raises:
            EndedError: if the run has ended.
        """
        opened = await (self._lease if kind == "grpc" else self._open)(dice)
        agent = make(opened.question, dice)
        played = Played(opened.id, kind, agent.appends)
        try:
            await _Episode(self, opened, agent, played, dice).play()
            await self._submit(opened, played, dice)
        except EndedError:
            self.counts["ended before its agent was done"] += 1
            return None
        return played

    # Sessions.

    async def _open(self, dice: random.Random) -> Opened:
        body = {"request_id": uuid.uuid4().hex, "wait_s": 5}
        answer = await self.post("", "/rl/sessions", body, "", self._any(dice))
        question = answer["opening"]["messages"][0]["content"]
        return Opened(answer["id"], answer["key"], answer["settling_key"], answer["task"]["data"], question)

    async def _lease(self, dice: random.Random) -> Opened:
        name = uuid.uuid4().hex
        request = episode_pb2.LeaseTasksRequest(
            run=f"runs/{self.run}", request_id=name, max_tasks=1, max_episodes=1, wait=Duration(seconds=5)
        )
        task = (await self.call("", "LeaseTasks", request, self._any(dice))).tasks[0]
        opening = episode_pb2.OpenEpisodeRequest(lease_id=task.lease_id, request_id=name)
        opened = await self.call("", "OpenEpisode", opening, self._any(dice))
        data = MessageToDict(task.task.data)
        keys = opened.session_key, opened.settling_key
        return Opened(opened.episode_id, *keys, data, task.opening.messages[0].content)

    async def _submit(self, opened: Opened, played: Played, dice: random.Random) -> None:
        cuts = dice.random() < 0.1  # the answer is lost, and asked for again
        for _ in range(1 + cuts):
            if played.kind == "grpc":
                request = episode_pb2.SubmitTrajectoryRequest(episode_id=opened.id, reward=played.reward)
                await self.call(opened.id, "SubmitTrajectory", request, self._any(dice), key=opened.settling_key)
            else:
                path = f"/rl/sessions/{opened.id}/end"
                await self.post(opened.id, path, {"reward": played.reward}, opened.settling_key, self._any(dice))
        played.submitted = True

    def _any(self, dice: random.Random) -> Choose:
        return lambda: dice.randrange(len(self.urls))

    # Requests.

    @contextlib.asynccontextmanager
    async def under_way(self, episode: str) -> AsyncIterator[None]:
        """Count a request while the block runs. Wait first while no request may begin."""
        await self.open.wait()
        self.busy[episode] += 1
        try:
            yield
        finally:
            self.busy[episode] -= 1
            if not self.busy[episode]:
                del self.busy[episode]

    async def post(
        self, episode: str, path: str, body: Mapping[str, Any], key: str, choose: Choose, *, retries: int = 0
    ) -> dict[str, Any]:
        """Return the answer to a request; send it again, marked as a retry, while that can help."""
        until = time.monotonic() + PATIENCE_S
        while True:
            gateway = choose()
            try:
                async with self.under_way(episode):
                    return await self.send(gateway, path, body, key, retries)
            except httpx.TransportError as error:
                self.counts["connection lost"] += 1
                problem = repr(error)
            except _AgainError as error:
                problem = str(error)
            if time.monotonic() > until:
                raise RefusedError(f"{path} of {episode or 'no session'} got no answer for {PATIENCE_S:g} s: {problem}")
            retries += 1
            await asyncio.sleep(PAUSE_S)

    async def send(
        self, gateway: int, path: str, body: Mapping[str, Any], key: str, retries: int = 0
    ) -> dict[str, Any]:
        """Send a request once.

        Raises:
            EndedError: the session or the run has ended.
            RefusedError: the gateway refused it.
        """
        headers = {"x-stainless-retry-count": str(retries)} | ({"authorization": f"Bearer {key}"} if key else {})
        url = self.urls[gateway] + path
        if not body.get("stream"):
            response = await self.http.post(url, json=body, headers=headers)
            _check(response.status_code, response.content, path)
            return dict(response.json())
        async with self.http.stream("POST", url, json=body, headers=headers) as streamed:
            if streamed.status_code != 200:
                _check(streamed.status_code, await streamed.aread(), path)
            lines = [line.removeprefix("data: ") async for line in streamed.aiter_lines() if line.startswith("data: ")]
        return _joined([json.loads(line) for line in lines if line != "[DONE]"])

    async def call(self, episode: str, method: str, request: Any, choose: Choose, *, key: str = "") -> Any:  # noqa: ANN401 - any method
        """Make a call of EpisodeService, with a key of its episode; make it again, word for word, while that can help."""
        shown = (("session-key", key),) if key else ()
        until = time.monotonic() + PATIENCE_S
        while True:
            stub = self.stubs[choose()]
            try:
                async with self.under_way(episode):
                    return await getattr(stub, method)(request, timeout=_CALL_S, metadata=shown)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    self.counts["connection lost"] += 1
                refused = SluiceError.from_rpc(error)
                if refused.reason in {"SESSION_ENDED", "RUN_ENDED"}:
                    raise EndedError(refused.reason) from error
                if error.code() not in _AGAIN_GRPC or time.monotonic() > until:
                    raise RefusedError(f"{method} of {episode or 'no session'}: {refused}") from error
            await asyncio.sleep(PAUSE_S)


class _AgainError(Exception):
    """The gateway cannot answer now."""


def _check(status: int, content: bytes, path: str) -> None:
    if status == 200:
        return
    text = content.decode(errors="replace")[:500]
    if status == 410 or "RUN_ENDED" in text:
        raise EndedError(text)
    raise _AgainError(text) if status in _AGAIN else RefusedError(f"{path}: {status} {text}")


def _joined(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the whole response that the events of a stream add up to.

    Raises:
        _AgainError: if it ends with an error, or too early.
    """
    for event in events:
        if "error" in event or event.get("type") == "error":
            raise _AgainError(str(event)[:500])
        if event.get("type") in {"response.completed", "response.incomplete"}:
            return dict(event["response"])
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    whole: dict[str, Any] = {}
    for event in events:
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            if "tool_calls" in delta:
                message["tool_calls"] = delta["tool_calls"]
            if "token_ids" in choice:
                whole = {**event, "choices": [{**choice, "message": message}]}
    if not whole:
        raise _AgainError("the stream broke off")
    return whole


@dataclass
class _Episode:
    """One running episode."""

    fleet: Fleet
    opened: Opened
    agent: Agent
    played: Played
    dice: random.Random

    async def play(self) -> None:
        """Ask and answer for some turns: calls get their results, and an answer the next question."""
        prices: Mapping[str, str] = self.opened.data["prices"]
        turns, asked = self.dice.randint(3, 6), Counter[str]()
        for number in range(turns):
            reply = await self._ask()
            turn = self.agent.read(reply)
            self.played.path.append(turn.generation_id)
            asked.update(call.item for call in turn.calls)
            self.played.called |= bool(turn.calls)
            if number + 1 == turns:
                break
            self.agent.keep(reply)
            if turn.calls:
                self.agent.answer([(call.id, prices.get(call.item, "unknown")) for call in turn.calls])
            else:
                self.agent.say(question(self.dice)[2])
        # Any reward will do that differs between episodes and favours a policy that makes calls.
        self.played.reward = sum(asked[item] for item in prices) / turns

    async def _ask(self) -> Mapping[str, Any]:
        """Send the next request, with one of the faults, and return the reply that the agent continues with."""
        body, fault = self.agent.body(), self.dice.choices([*FAULTS], [*FAULTS.values()])[0]
        if self.agent.path == "":
            body["request_id"] = uuid.uuid4().hex
        self.fleet.counts[fault] += fault != "none"
        marked = not fault.endswith("no mark")
        again = self._again(body, marked=marked)
        retries = int(fault != "none" and marked)
        if fault.startswith("cut"):
            with contextlib.suppress(TimeoutError, _AgainError, httpx.TransportError):
                async with asyncio.timeout(self.dice.uniform(0.0, LONGEST_CUT_S)):
                    self._given(await self._once(body, 0))
        elif fault.startswith("reply lost"):
            lost = self._given(await self._one(body, 0))
            reply = await self._one(again, retries)
            same = self._given(reply).generation_id == lost.generation_id
            self.fleet.counts["sampled again"] += not same
            if marked and not same:
                self.fleet.failures.append(f"{self.played.id}: a retry of {lost.generation_id} got another reply")
            return reply
        elif fault == "sent twice":
            one, two = await asyncio.gather(self._one(body, 0), self._one(body, 0))
            same = self._given(one).generation_id == self._given(two).generation_id
            self.fleet.counts["joined" if same else "sampled again"] += 1
            return two
        reply = await self._one(again, retries)
        self._given(reply)
        return reply

    def _again(self, body: dict[str, Any], *, marked: bool) -> dict[str, Any]:
        """Return the body of a repetition: over gRPC a new name makes it another request."""
        return body | {"request_id": uuid.uuid4().hex} if self.agent.path == "" and not marked else body

    def _given(self, reply: Mapping[str, Any]) -> Turn:
        turn = self.agent.read(reply)
        self.played.given.append(turn)
        return turn

    def _choose(self) -> int:
        gateway = self.dice.randrange(len(self.fleet.urls))
        self.played.gateways.add(gateway)
        return gateway

    async def _one(self, body: dict[str, Any], retries: int) -> Mapping[str, Any]:
        began, reply = time.monotonic(), dict[str, Any]()
        if self.agent.path:
            path, key = self.agent.path, self.opened.key
            reply = await self.fleet.post(self.opened.id, path, body, key, self._choose, retries=retries)
        else:
            reply["reply"] = await self.fleet.call(self.opened.id, "Generate", self._request(body), self._choose)
        self.fleet.slowest_s = max(self.fleet.slowest_s, time.monotonic() - began)
        return reply

    async def _once(self, body: dict[str, Any], retries: int) -> Mapping[str, Any]:
        gateway = self._choose()
        async with self.fleet.under_way(self.opened.id):
            if self.agent.path:
                return await self.fleet.send(gateway, self.agent.path, body, self.opened.key, retries)
            try:
                return {"reply": await self.fleet.stubs[gateway].Generate(self._request(body), timeout=_CALL_S)}
            except grpc.aio.AioRpcError as error:
                raise _AgainError(str(error.details())) from error

    def _request(self, body: dict[str, Any]) -> episode_pb2.EpisodeServiceGenerateRequest:
        return episode_pb2.EpisodeServiceGenerateRequest(episode_id=self.opened.id, **body)
