"""Server-sent events: tokens of one or several prompts as they come, and what happens when the reader leaves."""

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

__all__ = ["EventStream", "Events", "ReaderGoneError", "merged", "while_connected"]

BACKLOG = 64
"""Most messages that wait for a slow reader; beyond it sampled tokens wait in the engine, which max_tokens bounds."""

DONE = b"data: [DONE]\n\n"

Message = rollout_pb2.GenerateStreamResponse
Numbered = tuple[int, Message]
Result = TypeVar("Result")


class ReaderGoneError(Exception):
    """The client closed its connection."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work of a request whose body was read; when its client leaves, cancel the work and wait until it has ended.

    Raises:
        ReaderGoneError: if the client left.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ReaderGoneError
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait({working, leaving})
        if not working.cancelled():
            working.exception()  # what failed while it was given up is nobody's concern any more


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merged(sources: Sequence[AsyncGenerator[Message, None]]) -> AsyncGenerator[Numbered, None]:
    """Messages of several streams as they come, each with the number of its stream; closing it closes them all."""
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
    """Turns the messages of a request's streams into the chunks of one endpoint.

    Args:
        head: What every chunk begins with: id, object, created, model.
        responses: How the endpoint writes choices.
        samples: Samples per prompt.
        stops: Stop strings, which the text leaves out.
        include_usage: Whether a last chunk tells the usage.
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
        """The events of a response; a failure after the first one can only be told in an event of its own."""
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
            extras = self._responses.answer_extras(self._prompts[number])
            first = range(number * self._samples, (number + 1) * self._samples)
            openings = [opening for opening in map(self._responses.opening, first) if opening is not None]
            return [self._chunk(each, extras if not place else {}) for place, each in enumerate(openings)]
        new = message.chunk.delta
        index = number * self._samples + new.index
        self._completion_tokens += len(new.token_ids)
        extras = {}
        if index not in self._texts:
            self._texts[index] = StopStringFilter(self._stops)
            extras = self._responses.choice_extras(self._prompts[number])
        visible = self._texts[index].after(new.text, new.stop_string, last=bool(new.finish_reason))
        return [self._chunk(self._responses.delta(index, new, visible) | extras, {})]

    def _chunk(self, choice: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
        told = {"usage": None} if self._include_usage else {}
        return {**self._head, "choices": [choice], **told, **extras}


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Sends events until they end or the reader leaves, which closes their source.

    Starlette's own StreamingResponse leaves a source that is not at work at that moment to the garbage collector.

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
        with contextlib.suppress(ReaderGoneError):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
