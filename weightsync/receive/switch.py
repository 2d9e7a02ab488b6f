"""A channel whose calls go to whichever source is in use when they begin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc

__all__ = ["SwitchingChannel"]

Anything: TypeAlias = Any
"""What gRPC's callables take and give: any message, any call."""

_FIXED = "/sluice.v1.WeightSyncService/"
"""Questions about all versions go to the root: a relay holds fewer of them."""

_WATCH = "/Watch"
"""Streams that would never end by themselves; a switch ends them, so that their callers open them anew."""


class SwitchingChannel(grpc.aio.Channel):
    """Takes the place of a channel; calls under way stay where they began, but for watches.

    Args:
        root: The channel that is in use at first, and for calls of `WeightSyncService` always.
        failed: Told of each call on a channel that fails.
    """

    def __init__(self, root: grpc.aio.Channel, failed: Callable[[grpc.aio.Channel, grpc.StatusCode], None]) -> None:
        self.current = root
        self._root = root
        self._failed = failed
        self._watches: set[_Stream] = set()

    def switch(self, channel: grpc.aio.Channel) -> None:
        """Begin calls on another channel from now on."""
        self.current = channel
        for watch in list(self._watches):
            watch.leave()

    def unary_unary(self, method: str, *args: Anything, **kwargs: Anything) -> Anything:
        """A callable for a unary call."""
        choose = self._chooser("unary_unary", method, args, kwargs)

        async def begin(request: Anything, **options: Anything) -> Anything:
            channel, call = choose()
            try:
                return await call(request, **options)
            except grpc.aio.AioRpcError as error:
                self._failed(channel, error.code())
                raise
            except asyncio.CancelledError:
                if _wanted_by_caller():
                    raise
                raise grpc.aio.AioRpcError(
                    grpc.StatusCode.UNAVAILABLE,
                    grpc.aio.Metadata(),
                    grpc.aio.Metadata(),
                    details="the source of versions was left while it was asked: ask again",
                ) from None

        return begin

    def unary_stream(self, method: str, *args: Anything, **kwargs: Anything) -> Anything:
        """A callable for a call with a stream of responses."""
        choose = self._chooser("unary_stream", method, args, kwargs)

        def begin(request: Anything, **options: Anything) -> _Stream:
            channel, call = choose()
            stream = _Stream(call(request, **options), lambda code: self._failed(channel, code), self._watches.discard)
            if _WATCH in method:
                self._watches.add(stream)
            return stream

        return begin

    def stream_unary(self, method: str, *args: Anything, **kwargs: Anything) -> Anything:
        """Not for engines, which push nothing."""
        return self._root.stream_unary(method, *args, **kwargs)

    def stream_stream(self, method: str, *args: Anything, **kwargs: Anything) -> Anything:
        """Not for engines, which push nothing."""
        return self._root.stream_stream(method, *args, **kwargs)

    def _chooser(
        self, kind: str, method: str, args: Anything, kwargs: Anything
    ) -> Callable[[], tuple[grpc.aio.Channel, Anything]]:
        """The callable of the channel in use; gRPC's are made once per channel, not once per call."""
        made: dict[str, Anything] = {"channel": None, "call": None}

        def choose() -> tuple[grpc.aio.Channel, Anything]:
            channel = self._root if method.startswith(_FIXED) else self.current
            if made["channel"] is not channel:
                made.update(channel=channel, call=getattr(channel, kind)(method, *args, **kwargs))
            return channel, made["call"]

        return choose

    async def __aenter__(self) -> SwitchingChannel:
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Whoever opened the channels closes them."""

    async def close(self, grace: float | None = None) -> None:
        """Whoever opened the channels closes them."""

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Connectivity of the channel in use."""
        return self.current.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Return when the connectivity differs; the caller sets the deadline."""
        await self.current.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Return when connected; the caller sets the deadline."""
        await self.current.channel_ready()


class _Stream:
    """A call with a stream of responses that can be made to end."""

    def __init__(
        self, call: Anything, failed: Callable[[grpc.StatusCode], None], ended: Callable[[_Stream], None]
    ) -> None:
        self._call, self._failed, self._ended = call, failed, ended

    async def read(self) -> Anything:
        """The next response, or `grpc.aio.EOF`."""
        try:
            return await self._call.read()
        except grpc.aio.AioRpcError as error:
            self._ended(self)
            self._failed(error.code())
            raise
        except asyncio.CancelledError:
            if _wanted_by_caller():
                raise
            self._ended(self)
            return grpc.aio.EOF

    async def __aiter__(self) -> AsyncIterator[Anything]:
        while (response := await self.read()) is not grpc.aio.EOF:
            yield response

    def cancel(self) -> bool:
        """End the call."""
        self._ended(self)
        return bool(self._call.cancel())

    def leave(self) -> None:
        """End the call as if the server had."""
        self.cancel()


def _wanted_by_caller() -> bool:
    """Whether a cancellation is that of the task that waits.

    gRPC raises the same error where a call's channel is closed, and a task that let it through would end without a word.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
