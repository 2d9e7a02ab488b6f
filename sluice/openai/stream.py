"""Server-sent events: chunks of one or several prompts as they are sampled, and what happens when the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sluice.openai.errors import error_body
from sluice.openai.responses import Responses, StopStringFilter, usage
from sluice.rpc import SluiceError
from sluice.v1 import rollout_pb2

__all__ = ["DisconnectedError", "EventStream", "Events", "merged", "while_connected"]

BACKLOG = 64
"""Maximum number of messages that wait for a slow client. Then tokens wait in the engine, where max_tokens is the bound."""

DONE = b"data: [DONE]\n\n"

Message = rollout_pb2.GenerateStreamResponse
Numbered = tuple[int, Message]
Result = TypeVar("Result")


class DisconnectedError(Exception):
    """The client closed its connection."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work of a request whose body was read. If the client disconnects, cancel the work and wait until it has ended.

    Raises:
        DisconnectedError: if the client disconnected.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise DisconnectedError
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait({working, leaving})
        if not working.cancelled():
            working.exception()  # nobody reads an error that the work raised while it was cancelled


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merged(sources: Sequence[AsyncGenerator[Message, None]]) -> AsyncGenerator[Numbered, None]:
    """Yield the messages of several streams as they come, each with the number of its stream. Closing it closes all streams."""
    queue: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(BACKLOG)

    async def pump(number: int, source: AsyncGenerator[Message, None]) -> None:
        try:
            async with contextlib.aclosing(source):
                async for message in source:
                    await queue.put((number, message))
        except Exception as error:  # noqa: BLE001 - whatever it is, the reader raises it
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(number, source)) for number, source in enumerate(sources)]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Events:
    """Writes the messages of a request's streams as the chunks of one endpoint.

    Args:
        head: Fields of every chunk: id, object, created, model.
        responses: Writes the choices of the endpoint.
        samples: Samples per prompt.
        stops: Stop strings, which are removed from the text.
        include_usage: Whether a last chunk has the usage.
    """

    def __init__(
        self, head: Mapping[str, Any], responses: Responses, samples: int, stops: Sequence[str], *, include_usage: bool
    ) -> None:
        self._head, self._responses, self._samples, self._stops = head, responses, samples, stops
        self._include_usage = include_usage
        self._prompts: dict[int, list[int]] = {}
        self._texts: dict[int, StopStringFilter] = {}
        self._completion_tokens = 0

    async def encode(self, messages: AsyncGenerator[Numbered, None]) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events of a response. After the first one the HTTP status is sent, so that an error is an event, too."""
        async with contextlib.aclosing(messages):
            try:
                async for number, message in messages:
                    for chunk in self._chunks(number, message):
                        yield _event(chunk)
            except SluiceError as error:
                yield _event(error_body(error))
                return
        if self._include_usage:
            prompt_tokens = sum(len(ids) for ids in self._prompts.values())
            yield _event({**self._head, "choices": [], "usage": usage(prompt_tokens, self._completion_tokens)})
        yield DONE

    def _chunks(self, number: int, message: Message) -> list[dict[str, Any]]:
        if message.HasField("opening"):
            self._prompts[number] = list(message.opening.prompt_token_ids)
            extras = self._responses.response_fields(self._prompts[number])
            first = range(number * self._samples, (number + 1) * self._samples)
            openings = [each for each in map(self._responses.first_chunk, first) if each is not None]
            return [self._chunk(each, extras if not place else {}) for place, each in enumerate(openings)]
        new = message.chunk.delta
        index = number * self._samples + new.index
        self._completion_tokens += len(new.token_ids)
        extras = {}
        if index not in self._texts:
            self._texts[index] = StopStringFilter(self._stops)
            extras = self._responses.choice_fields(self._prompts[number])
        visible = self._texts[index].after(new.text, new.stop_string, last=bool(new.finish_reason))
        return [self._chunk(self._responses.chunk(index, new, visible) | extras, {})]

    def _chunk(self, choice: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
        no_usage = {"usage": None} if self._include_usage else {}
        return {**self._head, "choices": [choice], **no_usage, **extras}


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Sends events until they end or the client disconnects, then closes their source.

    Starlette's own StreamingResponse leaves a source that is waiting at that moment to the garbage collector.

    Args:
        events: Encoded events.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the response."""
        del scope
        with contextlib.suppress(DisconnectedError):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
