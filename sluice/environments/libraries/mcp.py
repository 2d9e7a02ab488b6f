"""Questions of a data set, which the model answers with the tools of an MCP server.

MIT: https://github.com/modelcontextprotocol/python-sdk, the package `mcp`, 1.30 or 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from sluice.environments.base import Message, Score, Task, Turn
from sluice.environments.libraries.imports import library
from sluice.environments.question_answer import QuestionAnswer
from sluice.errors import ConfigError

_START_S = 60.0
"""Seconds for a server to start and to list its tools."""

_PING_S = 10.0
"""Seconds for a server to answer a ping, after a call that failed."""

_CLOSED = -32000
"""JSON-RPC code by which `mcp` reports that the connection is lost."""

_DEEPEST = 64
"""Maximum nesting of objects and lists in arguments. With some hundreds of levels, `mcp` fails to write them and loses the session."""


class McpTools:
    """Asks the questions of a data set, and lets the model call the tools of an MCP server.

    Args:
        server: Command of a server that speaks over its standard streams, such as ``python server.py``, or the URL of one that
            serves streamable HTTP.
        dataset: As for `question_answer`, like the next five arguments.
        question: Field of the question.
        answer: Field of the answer.
        reward: ``exact``, ``math``, or ``module:function`` of (completion, answer).
        system: System message.
        limit: Maximum number of tasks of a split.
        tools: Names of the tools to offer; all if empty.
        shared: Whether all episodes of a process use one session. Otherwise each episode has its own server, or for a URL its own
            session. That is necessary if tools keep state.
        variables: Environment variables of the command, in addition to those that `mcp` passes on.
    """

    name = "mcp"

    def __init__(
        self,
        server: str | Sequence[str],
        dataset: str,
        *,
        question: str = "question",
        answer: str = "answer",
        reward: str = "exact",
        system: str = "",
        limit: int | None = None,
        tools: Sequence[str] = (),
        shared: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        library("mcp", "mcp")
        words = shlex.split(server) if isinstance(server, str) else list(server)
        if not words:
            raise ConfigError("no MCP server is set: give its command or URL as environment_args.server")
        self._server, self._variables, self._offered = words, dict(variables or {}), set(tools)
        self._questions = QuestionAnswer(
            dataset, question=question, answer=answer, reward=reward, system=system, limit=limit
        )
        self._shared: _Session | None = None
        self._share = shared
        self._starting = asyncio.Lock()

    async def tasks(self, split: str, seed: int) -> Sequence[Task]:
        """Return the questions of a split."""
        return self._questions.tasks(split, seed)

    async def reset(self, task: Task, seed: int) -> McpEpisode:  # only the server uses randomness, without the seed
        """Begin an episode."""
        session = await self._session()
        return McpEpisode(self._questions, task, session, own=not self._share)

    async def _session(self) -> _Session:
        if not self._share:
            return await _Session.started(self._server, self._variables, self._offered)
        async with self._starting:
            if self._shared is None or self._shared.ended:
                self._shared = await _Session.started(self._server, self._variables, self._offered)
            return self._shared


class McpEpisode:
    """An episode: calls the tools that the model names, and ends with its first message without a call."""

    def __init__(self, questions: QuestionAnswer, task: Task, session: _Session, *, own: bool) -> None:
        self._questions, self._task, self._session, self._own = questions, task, session, own
        self.messages, self.tools = questions.messages(task), session.tools

    async def step(self, said: Any, last: bool = False) -> Turn:  # noqa: ANN401 - a message, or a text where the server has no tools
        """Answer a turn of the assistant. Score it if it has no call, or is the `last` one."""
        message: Message = {"role": "assistant", "content": said} if isinstance(said, str) else said
        calls = message.get("tool_calls")
        if calls and not last:
            return Turn(messages=[await self._result(call) for call in calls])
        said = message["content"] or ""
        questions = self._questions
        found = (
            await questions.awaited_score(self._task, said) if questions.awaits else questions.score(self._task, said)
        )
        score = found if isinstance(found, Score) else Score(found)
        return Turn(reward=score.reward, done=True, truncated=bool(calls), metrics=score.metrics)

    async def close(self) -> None:
        """End the session, unless other episodes use it."""
        if self._own:
            await self._session.close()

    async def _result(self, call: Mapping[str, Any]) -> Message:
        function = call["function"]
        try:
            arguments = _arguments(function["arguments"])
        except ValueError as error:
            content = f"error: {error}"
        else:
            content = await self._session.call(function["name"], arguments)
        return {"role": "tool", "tool_call_id": call["id"], "content": content}


class _Session:
    """A session with a server. A separate task holds it, since `mcp` requires that the same task enters and leaves it."""

    def __init__(self) -> None:
        self.tools: list[Mapping[str, Any]] = []
        self._client: Any = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._leave = asyncio.Event()
        self._holding: asyncio.Task[None] | None = None

    @classmethod
    async def started(cls, server: Sequence[str], variables: Mapping[str, str], offered: set[str]) -> _Session:
        """Start a session, and list the tools.

        Raises:
            RuntimeError: if the server does not start, or lacks one of the tools to offer.
        """
        session = cls()
        session._holding = asyncio.create_task(session._hold(server, variables, offered))
        try:
            async with asyncio.timeout(_START_S):
                await asyncio.shield(session._ready)
        except TimeoutError as error:
            await session.close()
            raise RuntimeError(f"the MCP server {shlex.join(server)} did not start within {_START_S:g} s") from error
        return session

    @property
    def ended(self) -> bool:
        """Whether it cannot be used any more."""
        return self._leave.is_set() or self._holding is None or self._holding.done()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool. Return its text, even if it fails or the server refuses the call.

        Raises:
            RuntimeError: if the connection is lost.
        """
        if name not in {tool["function"]["name"] for tool in self.tools}:
            return f"error: there is no tool {name}"
        try:
            result = await self._client.call_tool(name, dict(arguments))
        except Exception as error:
            if _answered(error) or await self._answers():
                return f"error: {error}"
            self._leave.set()  # a dead server answers no other episode either
            raise RuntimeError(f"the MCP server failed in {name}: {_innermost(error)}") from error
        text = "\n".join(getattr(each, "text", "") or f"({each.type})" for each in result.content)
        failed = getattr(result, "is_error", None) or getattr(result, "isError", None)
        return f"error: {text}" if failed else text

    async def _answers(self) -> bool:
        """Return whether the server still answers."""
        try:
            async with asyncio.timeout(_PING_S):
                await self._client.send_ping()
        except Exception as error:  # noqa: BLE001 - of the library, or of its streams
            return _answered(error)
        return True

    async def close(self) -> None:
        """End the session, and with it a server that was started for it."""
        self._leave.set()
        if self._holding is not None:
            await asyncio.wait({self._holding})

    async def _hold(self, server: Sequence[str], variables: Mapping[str, str], offered: set[str]) -> None:
        from mcp import ClientSession  # type: ignore[import-not-found]  # noqa: PLC0415 - an optional package

        try:
            async with contextlib.AsyncExitStack() as stack:
                read, write, *_ = await stack.enter_async_context(_streams(server, variables))
                self._client = await stack.enter_async_context(ClientSession(read, write))
                await self._client.initialize()
                self.tools = _offered((await self._client.list_tools()).tools, offered)
                self._ready.set_result(None)
                await self._leave.wait()
        except BaseException as error:
            if self._ready.done():
                raise
            problem = RuntimeError(f"the MCP server {shlex.join(server)} cannot be used: {_innermost(error)}")
            self._ready.set_exception(problem)


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call.

    Raises:
        ValueError: if they are not a JSON object that can be sent.
    """
    try:
        found = json.loads(text or "{}")
        json.dumps(found, ensure_ascii=False).encode()  # refuses half of a surrogate pair, which is not text
        deep = _depth(found) > _DEEPEST
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments are not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"the arguments are not a JSON object: {text:.80}")  # noqa: TRY004 - one kind of error for the model
    if deep:
        raise ValueError(f"the arguments have more than {_DEEPEST} levels")
    return found


def _depth(found: Any) -> int:  # noqa: ANN401 - anything that JSON has
    within = found.values() if isinstance(found, dict) else found if isinstance(found, list) else None
    return 0 if within is None else 1 + max(map(_depth, within), default=0)


def _answered(error: Exception) -> bool:
    """Return whether an error is an answer of the server, for instance JSON-RPC's -32602, and not the loss of the connection."""
    code = getattr(getattr(error, "error", None), "code", _CLOSED)
    return bool(code != _CLOSED)


def _streams(server: Sequence[str], variables: Mapping[str, str]) -> Any:  # noqa: ANN401 - a context of the library
    if server[0].startswith(("http://", "https://")):
        from mcp.client.streamable_http import streamable_http_client  # type: ignore[import-not-found]  # noqa: PLC0415 - an optional package

        return streamable_http_client(server[0])
    from mcp import StdioServerParameters  # noqa: PLC0415
    from mcp.client.stdio import stdio_client  # type: ignore[import-not-found]  # noqa: PLC0415

    command, *arguments = server
    return stdio_client(StdioServerParameters(command=command, args=arguments, env={**os.environ, **variables}))


def _offered(tools: Sequence[Any], names: set[str]) -> list[Mapping[str, Any]]:
    """Return the tools with these names, or all tools if there are no names.

    Raises:
        ConfigError: if the server has no tool of a name.
    """
    there = {tool.name for tool in tools}
    if names - there:
        raise ConfigError(f"it has no tools {sorted(names - there)}, but {sorted(there)}")
    return [_described(tool) for tool in tools if not names or tool.name in names]


def _described(tool: Any) -> Mapping[str, Any]:  # noqa: ANN401 - of the library
    schema = getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None) or {}
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description or "", "parameters": schema},
    }


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
