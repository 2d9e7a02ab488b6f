"""The contract of workflows: a task in, trajectories out, sampled by an engine that hides replicas and versions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator_svc.envs.base import Message, Task
from sluice.v1 import orchestrator_pb2, rollout_pb2, tokens_pb2
from sluice.versions import Version

__all__ = [
    "EpisodeData",
    "EpisodeEngine",
    "RolloutWorkflow",
    "Sampling",
    "chat_messages",
    "conversation",
    "derived_seed",
    "sampling_params",
]


class EpisodeEngine(Protocol):
    """What a workflow samples from."""

    async def agenerate(self, request: rollout_pb2.GenerateRequest) -> rollout_pb2.GenerateResponse:
        """Sample; fails over to other replicas by itself."""
        ...

    async def tokenize(self, request: rollout_pb2.TokenizeRequest) -> list[int]:
        """Token ids of text or messages, or of messages that continue given ids."""
        ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an episode is sampled.

    Attributes:
        temperature: Softmax temperature; 0 is greedy, for evaluation only.
        max_tokens: Most tokens per turn, where the task does not set its own limit.
        stop: Strings that end a turn.
        ignore_eos: Whether a turn goes on past the token that ends it.
        seeded: Whether requests carry a seed.
    """

    temperature: float
    max_tokens: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seeded: bool = False


@dataclass(frozen=True, slots=True)
class EpisodeData:
    """What a workflow is asked for.

    Attributes:
        task: The task.
        group_id: Group that its episodes belong to.
        episodes: Attempts wanted.
        sampling: How to sample.
        version: Oldest version that may sample.
        request_prefix: Unique for this attempt; begins the names of its requests; empty leaves them to the server.
        seed: Seed of the group's random numbers.
    """

    task: Task
    group_id: str
    episodes: int
    sampling: Sampling
    version: Version
    request_prefix: str
    seed: int


class RolloutWorkflow(Protocol):
    """Runs the episodes of one task."""

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> list[orchestrator_pb2.TrajectoryRecord]:
        """Run `data.episodes` attempts.

        Returns:
            One record per trajectory, with tokens and conversation; with the reward if the workflow knows it, else the
            environment scores the last message. Fewer than wanted if some attempts failed.

        Raises:
            SluiceError: if the group as a whole cannot be run.
        """
        ...


def sampling_params(data: EpisodeData, turn: int, episode: int = 0) -> tokens_pb2.SamplingParams:
    """The sampling of one request; the samples of one request use consecutive seeds."""
    params = tokens_pb2.SamplingParams(
        temperature=data.sampling.temperature,
        max_tokens=data.sampling.max_tokens if data.task.max_tokens is None else data.task.max_tokens,
        stop=data.sampling.stop,
        ignore_eos=data.sampling.ignore_eos,
    )
    if data.sampling.seeded:
        params.seed = derived_seed(data.seed, data.group_id, episode, turn)
    return params


def derived_seed(*parts: object) -> int:
    """Return a seed of 47 bits that the parts determine; seeds of different parts have nothing in common."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=6).digest()
    return int.from_bytes(digest) >> 1


_MESSAGE_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"}


def chat_messages(messages: Iterable[Message]) -> list[tokens_pb2.ChatMessage]:
    """Return messages in their wire form.

    Raises:
        ValueError: if a message has no role, a field that is not known, or one of another type.
    """
    return [_chat_message(message) for message in messages]


def _chat_message(message: Message) -> tokens_pb2.ChatMessage:
    unknown = sorted(set(message) - _MESSAGE_FIELDS)
    if unknown or "role" not in message:
        problem = f"the unknown fields {', '.join(unknown)}" if unknown else "no role"
        raise ValueError(f"a message of the environment has {problem}; known are {', '.join(sorted(_MESSAGE_FIELDS))}")
    texts: dict[str, Any] = {name: message.get(name) or "" for name in ("role", "content", "name", "tool_call_id")}
    texts["reasoning"] = message.get("reasoning") or message.get("reasoning_content") or ""
    for field, value in texts.items():
        if not isinstance(value, str):
            raise ValueError(f"field {field} of a message is {type(value).__name__}, not text")  # noqa: TRY004 - one kind
    return tokens_pb2.ChatMessage(**texts, tool_calls=[_tool_call(call) for call in message.get("tool_calls") or ()])


def _tool_call(call: Mapping[str, Any]) -> tokens_pb2.ToolCall:
    """Read a tool call, in the form of the OpenAI API or flat; arguments may be text or an object."""
    function = call.get("function", call)
    if not function.get("name"):
        raise ValueError("one of the tool_calls of a message has no name")
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return tokens_pb2.ToolCall(id=call.get("id") or "", name=function["name"], arguments=text)


def conversation(messages: Sequence[Message], answer: str) -> tokens_pb2.Conversation:
    """The messages and the assistant's answer to them."""
    return tokens_pb2.Conversation(
        messages=[*chat_messages(messages), tokens_pb2.ChatMessage(role="assistant", content=answer)]
    )
