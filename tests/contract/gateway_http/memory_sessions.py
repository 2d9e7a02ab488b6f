"""Sessions in memory, as the gateway's core keeps them: trees of generations, joined retries, waiting, and a model that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from gateway_svc.canonical import conversation_keys, extended_key
from gateway_svc.orchestrator import Opened, ServedModel, SessionRef
from gateway_svc.recording import RequestIdentity
from sluice.openai.answers import Begun, Delta, Result, visible_message
from sluice.openai.bodies import ClientRequest
from sluice.rpc import SluiceError
from sluice.rpc.access import SESSION_KEY, SETTLING_KEY
from sluice.v1 import episode_pb2, rollout_pb2, session_pb2, tokens_pb2

END = 2
MAX_MODEL_LEN = 200_000


def encoded(text: str) -> list[int]:
    return [byte + 3 for byte in text.encode()]


def rendered(message: tokens_pb2.ChatMessage) -> str:
    parts = "".join(part.text or "<image>" for part in message.parts)
    calls = "".join(f"<call>{call.name}{call.arguments}</call>" for call in message.tool_calls)
    return f"<think>{message.reasoning}</think>{message.content}{parts}{calls}"


def prompt_ids(conversation: tokens_pb2.Conversation, first: int = 0) -> list[int]:
    ids: list[int] = []
    if not first:
        ids += encoded("".join(tool.name for tool in conversation.tools))
    for message in conversation.messages[first:]:
        ids += [1, *encoded(f"{message.role}:{rendered(message)}"), END]
    return [*ids, 1, *encoded("assistant:")]


def look_then_tell(conversation: tokens_pb2.Conversation) -> tokens_pb2.ChatMessage:
    """Calls the first tool, if there is one, until it was answered; then says what the answer was."""
    last = conversation.messages[-1]
    if last.role == "tool":
        return tokens_pb2.ChatMessage(role="assistant", reasoning="It answered.", content=f"It said {last.content}.")
    if conversation.tools:
        turn = len(conversation.messages)
        call = tokens_pb2.ToolCall(id=f"call_{turn}", name=conversation.tools[0].name, arguments='{"place":"home"}')
        return tokens_pb2.ChatMessage(role="assistant", reasoning="I must look.", tool_calls=[call])
    return tokens_pb2.ChatMessage(role="assistant", content=f"You said: {last.content}")


@dataclass
class Generation:
    parent: str
    prompt: list[int]
    sampled: list[int]
    conversation: tokens_pb2.Conversation


@dataclass
class MemorySession:
    found: session_pb2.FindSessionResponse
    key: str
    settling_key: str
    generations: dict[str, Generation] = field(default_factory=dict)
    keys: dict[bytes, str] = field(default_factory=dict)
    requests: list[ClientRequest] = field(default_factory=list)
    running: dict[bytes, asyncio.Task[Result]] = field(default_factory=dict)
    answered: dict[bytes, Result] = field(default_factory=dict)
    rewards: list[episode_pb2.RecordRewardRequest] = field(default_factory=list)
    ended: Any = None


class MemorySessions:
    """What the HTTP port asks of `gateway_svc.recording.RecordedSessions`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew: no sessions, and a replica that serves."""
        self.all: dict[str, MemorySession] = {}
        self.serving = asyncio.Event()
        self.serving.set()
        self.offered = asyncio.Event()
        self.offered.set()
        self.say: Callable[[tokens_pb2.Conversation], tokens_pb2.ChatMessage] = look_then_tell
        self.finish = tokens_pb2.FINISH_REASON_STOP
        self.stop_string = ""
        self.failure: SluiceError | None = None
        self.failures: list[SluiceError] = []

    def new(self, *, evaluation: bool = False) -> MemorySession:
        name = f"e{len(self.all)}"
        found = session_pb2.FindSessionResponse(episode_id=name, evaluation=evaluation)
        self.all[name] = MemorySession(found, f"{SESSION_KEY}{name}", f"{SETTLING_KEY}{name}")
        return self.all[name]

    async def model(self) -> ServedModel:
        return ServedModel("small", MAX_MODEL_LEN)

    def _known(self, ref: SessionRef, *, settles: bool) -> MemorySession:
        by_key = next((each for each in self.all.values() if ref.key in {each.key, each.settling_key}), None)
        session = self.all.get(ref.episode_id) if ref.episode_id else by_key
        if session is None or (ref.key and session is not by_key):
            raise SluiceError.not_found("NO_SUCH_SESSION", "no session of yours has this name or key")
        if ref.key and settles != (ref.key == session.settling_key):
            raise SluiceError(grpc.StatusCode.PERMISSION_DENIED, "OTHER_KEY", "this takes the session's other key")
        return session

    async def find(self, ref: SessionRef) -> session_pb2.FindSessionResponse:
        session = self._known(ref, settles=False)
        if session.ended is not None:
            raise SluiceError.failed_precondition("SESSION_ENDED", "the session ended: open another one")
        return session.found

    async def find_ended(self, ref: SessionRef) -> session_pb2.FindSessionResponse:
        return self._known(ref, settles=True).found

    async def generate(
        self, session: session_pb2.FindSessionResponse, request: ClientRequest, identity: RequestIdentity
    ) -> AsyncGenerator[Begun | Delta | Result, None]:
        kept = self.all[session.episode_id]
        if self.failures:
            raise self.failures.pop(0)
        if identity.is_retry and identity.digest in kept.answered:
            yield kept.answered[identity.digest]
            return
        if identity.digest in kept.running:
            yield await asyncio.shield(kept.running[identity.digest])
            return
        request_id = f"{session.episode_id}-r{len(kept.requests)}"
        kept.requests.append(request)
        task = kept.running[identity.digest] = asyncio.create_task(
            self._sample(kept, request, request_id, identity.digest)
        )
        task.add_done_callback(lambda _: kept.running.pop(identity.digest))
        await self.serving.wait()
        if self.failure is None:
            _parent, prompt = self._prompt(kept, request)
            yield Begun(request_id, len(prompt))
            if not request.generate.conversation.tools and request.generate.WhichOneof("prompt") == "conversation":
                for index in range(request.generate.n):
                    message = self.say(request.generate.conversation)
                    yield Delta(index, reasoning=message.reasoning[:2])
                    yield Delta(index, content=message.content[:2] if len(message.reasoning) <= 2 else "")
        yield await asyncio.shield(task)

    async def _sample(self, kept: MemorySession, request: ClientRequest, request_id: str, digest: bytes) -> Result:
        """Sample and record, whether the client is still there or not."""
        await self.serving.wait()
        if self.failure is not None:
            raise self.failure
        parent, prompt = self._prompt(kept, request)
        conversation = request.generate.conversation
        result = Result(prompt_token_ids=prompt, parent=parent)
        for index in range(request.generate.n):
            said = self.say(conversation) if conversation.messages else tokens_pb2.ChatMessage(content="more text")
            ids = [*encoded(rendered(said)), END]
            sample = rollout_pb2.GeneratedSample(
                index=index,
                token_ids=ids,
                logprobs=[-0.25] * len(ids),
                finish_reason=self.finish,
                stop_string=self.stop_string,
                message=said,
            )
            name = f"{request_id}/{index}"
            message = visible_message(sample, name)
            generation = result.generations.add(generation_id=name, message=message, sample=sample)
            whole = tokens_pb2.Conversation()
            whole.CopyFrom(conversation)
            whole.messages.append(message)
            kept.generations[generation.generation_id] = Generation(parent, prompt, ids, whole)
            key = extended_key(conversation_keys(conversation).whole, message)
            kept.keys.setdefault(key, generation.generation_id)
        kept.answered[digest] = result
        return result

    def _prompt(self, kept: MemorySession, request: ClientRequest) -> tuple[str, list[int]]:
        """The generation that is continued, and the ids of the prompt."""
        generate = request.generate
        match generate.WhichOneof("prompt"):
            case "text":
                return "", encoded(generate.text)
            case "token_ids":
                ids = list(generate.token_ids.ids)
                ends = {name: each.prompt + each.sampled for name, each in kept.generations.items()}
                parents = [name for name, each in ends.items() if ids[: len(each)] == each]
                return max(parents, key=lambda name: len(ends[name]), default=""), ids
        for prefix in conversation_keys(generate.conversation).prefixes:
            name = kept.keys.get(prefix.key)
            if name is not None:
                known = kept.generations[name]
                return name, known.prompt + known.sampled + prompt_ids(generate.conversation, prefix.messages)
        return "", prompt_ids(generate.conversation)

    async def conversation(
        self, session: session_pb2.FindSessionResponse, generation_id: str
    ) -> tokens_pb2.Conversation:
        generations = self.all[session.episode_id].generations
        if generation_id not in generations:
            raise SluiceError.not_found("NO_SUCH_GENERATION", f"the session has no generation {generation_id!r}")
        return generations[generation_id].conversation

    async def count_tokens(
        self, session: session_pb2.FindSessionResponse, conversation: tokens_pb2.Conversation
    ) -> int:
        return len(prompt_ids(conversation))

    async def open(self, request_id: str, wait_s: float) -> Opened:
        if request_id == "nothing is on offer":
            raise SluiceError.resource_exhausted("NOTHING_ON_OFFER", f"no task within {wait_s:g} s", 3.0)
        await self.offered.wait()
        session = self.new()
        name = session.found.episode_id
        task = episode_pb2.LeasedTask(task=episode_pb2.Task(task_id="t1", data={"question": "1+1"}), group_id="g1")
        episode = episode_pb2.OpenEpisodeResponse(
            episode_id=name, session_key=session.key, settling_key=session.settling_key
        )
        return Opened(task, episode)

    async def renew(self, ref: SessionRef) -> float:
        self._known(ref, settles=True)
        return 600.0

    async def reward(self, ref: SessionRef, request: episode_pb2.RecordRewardRequest) -> None:
        self._known(ref, settles=True).rewards.append(request)

    async def submit(
        self, ref: SessionRef, request: episode_pb2.SubmitTrajectoryRequest
    ) -> episode_pb2.SubmitTrajectoryResponse:
        session = self._known(ref, settles=True)
        if isinstance(session.ended, episode_pb2.AbandonEpisodeRequest):
            raise SluiceError(grpc.StatusCode.ALREADY_EXISTS, "SESSION_ENDED", "the session was given up")
        session.ended = request
        parents = {each.parent for each in session.generations.values()}
        leaves = [name for name in session.generations if name not in parents]
        return episode_pb2.SubmitTrajectoryResponse(trajectory_ids=leaves)

    async def abandon(self, ref: SessionRef, request: episode_pb2.AbandonEpisodeRequest) -> None:
        self._known(ref, settles=True).ended = request
