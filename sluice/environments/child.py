"""A process of the environment: constructs the environment and answers the orchestrator's calls until the connection closes.

``python -P -m sluice.environments.child`` with the connection as standard input. Plain methods run one after the other in the main
thread, or in threads if several calls may run at a time. If the environment has coroutine methods, all calls run on one event loop.
Imports as little as possible, so that a process starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import math
import os
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from sluice.environments import base, loading
from sluice.environments.base import MultiTurnEnvironment, Score, SingleTurnEnvironment, Task, number
from sluice.environments.framing import MAX_FRAME_BYTES, FrameReader, NotPlainError, encode
from sluice.environments.message_fields import UnfitMessagesError, message_fields
from sluice.environments.message_fields import __file__ as message_file
from sluice.errors import ConfigError
from sluice.loading import without_values

if TYPE_CHECKING:
    import asyncio

_RECEIVE_BYTES = 1 << 16
_PAGE_TASKS = 1000
"""Number of tasks per answer, so that the orchestrator reads a page in milliseconds."""

_PAGE_CHARACTERS = MAX_FRAME_BYTES // 16
"""Maximum number of characters of a page of several tasks. In JSON a character takes up to 12 bytes."""

_TRACE_FRAMES = 8
_TRACE_CHARACTERS = 4000
_MESSAGE_CHARACTERS = 2000
"""Limits on the text of an error that is sent to the orchestrator."""

_SLUICE = base.__file__.rpartition("environments")[0]
"""Directory of this package."""

_OOM_SCORE = 500
"""Makes the kernel end environments before the trainer or the engine when memory runs out."""

Answer = dict[str, Any]


class Connection:
    """Frames on a socket; several threads may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._reader, self._lock = connection, FrameReader(), threading.Lock()
        self._process = os.getpid()

    def receive(self) -> list[Answer]:
        """Wait for messages. Return an empty list at the end of the connection."""
        while data := self._socket.recv(_RECEIVE_BYTES):
            if messages := self._reader.feed(data):
                return messages
        return []

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. If it is not plain data, send the reason instead."""
        if os.getpid() != self._process:
            os._exit(0)  # the environment forked, and its child returned to here: only the parent may answer
        try:
            frame = encode(message)
        except NotPlainError as error:
            raised = {"type": "NotPlainError", "message": f"in what was returned, {error}", "trace": ""}
            frame = encode({"id": message["id"], "raised": raised})
        with self._lock:
            self._socket.sendall(frame)


class Server:
    """Answers calls with an environment and its open episodes.

    Args:
        on_loop: Whether an event loop runs. Then plain methods run in threads beside it. Without a loop, nothing waits.
    """

    def __init__(self, environment: Any, *, on_loop: bool = False) -> None:  # noqa: ANN401 - a user's class
        self._environment, self._on_loop = environment, on_loop
        self._episodes: dict[str, Any] = {}
        self._listings: dict[str, Sequence[Task]] = {}

    async def answer(self, call: Mapping[str, Any]) -> Answer:
        """Return the answer to a call, or the error that it raised."""
        try:
            value = await getattr(self, f"_{call['method']}")(**call["arguments"])
        except BaseException as error:  # noqa: BLE001 - also SystemExit of foreign code
            self._check_cancelled(error)
            return {"id": call["id"], "raised": _described(error)}
        return {"id": call["id"], "value": value}

    def _check_cancelled(self, error: BaseException) -> None:
        """Raise the error again if the orchestrator cancelled the call."""
        if self._on_loop:
            from asyncio import CancelledError, current_task  # noqa: PLC0415 - imported already where a loop runs

            task = current_task()
            if isinstance(error, CancelledError) and task is not None and task.cancelling():
                raise error

    async def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401 - those of any method
        if self._on_loop and not _is_coroutine(method):
            from asyncio import CancelledError, get_running_loop, wait  # noqa: PLC0415 - imported already where a loop runs

            # The time limit cannot stop a thread. The orchestrator kills the process a moment later.
            thread = get_running_loop().run_in_executor(None, _without_stop_iteration, method, *arguments)
            while not thread.done():
                with contextlib.suppress(CancelledError):
                    await wait({thread})
            return thread.result()
        value = method(*arguments)
        if not inspect.isawaitable(value):
            return value
        if not self._on_loop:
            raise TypeError("only an episode's method is a coroutine: write tasks or reset as `async def` too")
        return await value

    async def _tasks(self, listing: str, split: str, seed: int, start: int) -> Answer:
        """Return a page of the tasks of a split. Listing happens with the first page."""
        if not start:
            found = await self._call(self._environment.tasks, split, seed)
            self._listings[listing] = found if isinstance(found, Sequence) else list(found)
        tasks = self._listings[listing]
        page: list[Answer] = []
        size = 0
        while start + len(page) < len(tasks) and len(page) < _PAGE_TASKS:
            fields = _task_fields(tasks[start + len(page)])
            size += len(repr(fields))
            if page and size > _PAGE_CHARACTERS:
                break
            page.append(fields)
        if start + len(page) >= len(tasks):
            del self._listings[listing]
        return {"tasks": page, "count": len(tasks)}

    async def _messages(self, task: Answer) -> list[Any]:
        found = _conversation(
            await self._call(self._environment.messages, Task(**task)), "messages(task)", UnfitMessagesError
        )
        if not found:
            raise UnfitMessagesError("messages(task) gave no message: give at least what the user says")
        return found

    async def _score(self, task: Answer, completions: list[str]) -> list[Any]:
        """Return rewards; for a missing reward, the error that the call raised."""
        asked = Task(**task)
        if (together := getattr(self._environment, "score_batch", None)) is not None:
            rewards = list(await self._call(together, asked, completions))
            if len(rewards) != len(completions):
                raise ValueError(f"score_batch gave {len(rewards)} rewards for {len(completions)} completions")
            return [_given(reward) for reward in rewards]
        if not self._on_loop:
            return [await self._reward(asked, completion) for completion in completions]
        from asyncio import gather  # noqa: PLC0415 - imported already where a loop runs

        return await gather(*(self._reward(asked, completion) for completion in completions))

    async def _reward(self, task: Task, completion: str) -> Answer:
        try:
            return _score_fields(await self._call(self._environment.score, task, completion), "score")
        except BaseException as error:  # noqa: BLE001 - the user's function may raise anything
            self._check_cancelled(error)
            return _described(error)

    async def _reset(self, episode: str, task: Answer, seed: int) -> Answer:
        opened = self._episodes[episode] = await self._call(self._environment.reset, Task(**task), seed)
        try:
            messages = _conversation(opened.messages, "messages of reset")
            return {"messages": messages, "tools": list(getattr(opened, "tools", None) or ())}
        except BaseException:
            await self._close(episode)
            raise

    async def _step(self, episode: str, completion: str | Answer, last: bool) -> Answer:
        step = self._episodes[episode].step
        told = "last" in inspect.signature(step).parameters
        turn = await self._call(partial(step, last=last) if told else step, completion)
        if turn.done:
            await self._close(episode)
        return {
            "messages": _conversation(turn.messages, "messages of a turn"),
            "reward": None if turn.reward is None else number(turn.reward, "the reward of a turn"),
            "done": bool(turn.done),
            "truncated": bool(turn.truncated),
            "metrics": {name: float(value) for name, value in turn.metrics.items()},
        }

    async def _run(self, data: Answer, base_url: str, api_key: str) -> Any:  # noqa: ANN401 - checked by who asked
        """Let the environment play an episode itself. Its return value is treated like the outcome of an agent."""
        return await self._call(partial(self._environment.run, data=data, base_url=base_url, api_key=api_key))

    async def _close(self, episode: str) -> None:
        opened = self._episodes.pop(episode, None)
        if callable(close := getattr(opened, "close", None)):
            await self._call(close)


def _task_fields(task: Task) -> Answer:
    if not isinstance(task.task_id, str) or not isinstance(task.data, Mapping):
        raise TypeError(f"a task needs a task_id of type str and data that is a mapping; this one is {task!r:.200}")
    return {"task_id": task.task_id, "data": task.data, "max_tokens": task.max_tokens}


def _conversation(messages: Any, what: str, unfit: type[ValueError] = ValueError) -> list[Any]:  # noqa: ANN401 - whatever was returned
    """Check the messages of an environment, and return them as a list.

    Raises:
        ValueError: of the class `unfit`, if the run would refuse the messages later without naming task or method. Messages from `reset` and
            `step` depend on more than the task, such as what the model wrote, so another attempt may give other messages.
    """
    listed = isinstance(messages, Iterable) and not isinstance(messages, str | Mapping)
    found = list(messages) if listed else []
    if not listed or not all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in found):
        raise unfit(
            f'{what}: give a list of messages such as {{"role": "user", "content": "..."}}, not {messages!r:.200}'
        )
    for each in found:
        try:
            message_fields(each)
        except ValueError as error:
            raise unfit(str(error)) from None
    return found


def _given(score: float | Score | None) -> Answer:
    """Return one of several scores; if it is missing or not a number, the reason."""
    try:
        return _score_fields(score, "score_batch")
    except (TypeError, ValueError) as error:
        return _described(error)


def _score_fields(score: Any, method: str) -> Answer:  # noqa: ANN401 - whatever was returned
    """Return a score in the form that is sent.

    Raises:
        ValueError: if it has no reward, or the reward is not finite.
        TypeError: if it is not a number.
    """
    found = score if isinstance(score, Score) else Score(score)
    if found.reward is None:
        raise ValueError(f"{method} gave no reward")
    metrics = {name: number(value, f"the metric {name}") for name, value in found.metrics.items()}
    return {"reward": number(found.reward, f"a reward of {method}"), "metrics": metrics}


def _described(error: BaseException) -> Answer:
    """Return type, message and the environment's own lines of the traceback, each limited in length.

    For a wrong setting, leave out the traceback: the message is enough.
    """
    ours = {__file__, loading.__file__, base.__file__, message_file}
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in ours and not frame.filename.startswith("<frozen importlib")
    ]
    if isinstance(error, ConfigError):
        frames = []
    # If an environment of ours calls a user's function, only the lines of that function are useful.
    frames = [frame for frame in frames if not frame.filename.startswith(_SLUICE)] or frames[-1:]
    # One line per entry, without the marks below the code: a log shows the first and the last line.
    lines = [f'  File "{each.filename}", line {each.lineno}, in {each.name}: {each.line}\n' for each in frames]
    trace = "".join(lines[-_TRACE_FRAMES:])[-_TRACE_CHARACTERS:]
    try:
        message = "; ".join((str(error), *getattr(error, "__notes__", ())))[:_MESSAGE_CHARACTERS]
    except Exception as second:  # noqa: BLE001 - foreign code again
        message = f"(its message cannot be had: {type(second).__name__})"
    return {"type": type(error).__name__, "message": message, "trace": trace}


def _finished(answer: Coroutine[Any, Any, Answer]) -> Answer:
    """Run a coroutine that waits for nothing, since there is no event loop."""
    try:
        answer.send(None)
    except StopIteration as end:
        done: Answer = end.value
        return done
    raise RuntimeError("a call waited where no event loop runs")


def _serve_one_by_one(connection: Connection, environment: Any) -> None:  # noqa: ANN401 - a user's class
    server = Server(environment)
    while messages := connection.receive():
        for call in messages:
            connection.send(_finished(server.answer(call)))


def _serve_in_threads(connection: Connection, environment: Any, threads: int) -> None:  # noqa: ANN401 - a user's class
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - only where it is needed

    server = Server(environment)

    def answer(call: Answer) -> None:
        connection.send(_finished(server.answer(call)))

    with ThreadPoolExecutor(threads) as executor:
        while messages := connection.receive():
            for call in messages:
                executor.submit(answer, call)


class LoopCalls:
    """The calls that run on an event loop, and which the orchestrator may cancel. Construct it in the loop."""

    def __init__(self, connection: Connection, environment: Any) -> None:  # noqa: ANN401 - a user's class
        from asyncio import get_running_loop  # noqa: PLC0415 - only where it is needed

        self._connection, self._loop = connection, get_running_loop()
        self._server = Server(environment, on_loop=True)
        self._running: dict[int, asyncio.Task[None]] = {}

    def take(self, message: Answer) -> None:
        """Begin a call, or cancel one that is late."""
        if "cancel" in message:
            if (late := self._running.get(message["cancel"])) is not None:
                late.cancel()
            return
        number = message["id"]
        task = self._running[number] = self._loop.create_task(self._answer(message))
        task.add_done_callback(lambda _: self._end(number))

    async def _answer(self, call: Answer) -> None:
        self._connection.send(await self._server.answer(call))

    def _end(self, number: int) -> None:
        if self._running.pop(number).cancelled():
            self._connection.send({"id": number, "hung": True})


def _serve_on_a_loop(connection: Connection, environment: Any) -> None:  # noqa: ANN401 - a user's class
    import asyncio  # noqa: PLC0415 - only where it is needed

    async def serve() -> None:
        calls, loop = LoopCalls(connection, environment), asyncio.get_running_loop()

        def read() -> None:
            while messages := connection.receive():
                for message in messages:
                    loop.call_soon_threadsafe(calls.take, message)
            os._exit(0)

        threading.Thread(target=read, daemon=True).start()
        await loop.create_future()

    asyncio.run(serve())


def _start(connection: Connection, settings: Answer) -> Any:  # noqa: ANN401 - a user's class
    """Construct the environment and describe it. If that fails, send the reason."""
    own = sys.path[:] if settings["python"] else []
    sys.path[:] = [*own, *settings["path"]]
    try:
        environment = loading.load_environment(settings["environment"], settings["arguments"])
        _scoring_s(environment)
    except ConfigError as error:
        connection.send({"refused": str(error)})
        sys.exit(1)
    except BaseException as error:  # noqa: BLE001 - importing foreign code may raise anything
        raised = _described(error)
        why = f"{raised['type']}: {raised['message']}\n{raised['trace']}".rstrip()
        why = without_values(why, settings["arguments"])
        connection.send({"refused": f"environment {settings['environment']} cannot be constructed: {why}"})
        sys.exit(1)
    return environment


def main() -> None:
    """Serve until the orchestrator closes the connection or ends."""
    connection = Connection(socket.socket(fileno=os.dup(0)))
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - pathlib is not loaded
        os.dup2(nothing.fileno(), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()  # prints the stacks after a crash, or after a hang: then the orchestrator sends SIGABRT
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:  # noqa: PTH123
        score.write(str(_OOM_SCORE))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what is printed before a crash is the clue
    settings = connection.receive()[0]
    environment = _start(connection, settings)
    methods = (
        getattr(environment, name, None) for name in ("tasks", "messages", "score", "score_batch", "reset", "run")
    )
    coroutines = any(map(_is_coroutine, methods))
    connection.send(
        {
            "name": str(getattr(environment, "name", settings["environment"])),
            "single_turn": isinstance(environment, SingleTurnEnvironment),
            "multi_turn": isinstance(environment, MultiTurnEnvironment),
            "poses": hasattr(environment, "messages"),
            "scores": hasattr(environment, "score"),
            "plays": hasattr(environment, "run"),
            "coroutines": coroutines,
            "scoring_s": _scoring_s(environment),
            "scores_together": _scores_together(environment),
        }
    )
    if coroutines:
        _serve_on_a_loop(connection, environment)
    elif settings["threads"] > 1:
        _serve_in_threads(connection, environment, settings["threads"])
    else:
        _serve_one_by_one(connection, environment)


def _scoring_s(environment: Any) -> float:  # noqa: ANN401 - a user's class
    """Return the maximum seconds that the environment takes to score one completion; 0 if it has no such limit.

    Raises:
        ConfigError: if its value is not a number of seconds.
    """
    found = getattr(environment, "scoring_s", 0.0)
    if not isinstance(found, int | float) or not 0 <= found < math.inf:
        raise ConfigError(f"the environment's scoring_s is {found!r:.200}: give seconds, 0 for no limit")
    return float(found)


def _scores_together(environment: Any) -> bool:  # noqa: ANN401 - a user's class
    """Return whether the completions of a group are scored at the same time."""
    if isinstance(said := getattr(environment, "scores_together", None), bool):  # a server's environment reports it
        return said
    return not hasattr(environment, "score_batch") and _is_coroutine(getattr(environment, "score", None))


def _is_coroutine(method: object) -> bool:
    return inspect.iscoroutinefunction(method.func if isinstance(method, partial) else method)


def _without_stop_iteration(method: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401 - those of any method
    """Call a method, and replace StopIteration, because a future can hold any other error."""
    try:
        return method(*arguments)
    except StopIteration as error:
        raise RuntimeError("the method raised StopIteration, as next() does at the end of an iterator") from error


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # the orchestrator has ended, or is about to kill this process
        main()
