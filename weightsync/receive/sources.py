"""Keeps an engine on the nearest source of versions, and takes it back to the root when that source fails."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import structlog

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.host import host_id
from weightsync.receive.nearest import ROOT, Candidate, behind, choose

__all__ = ["SourceLimits", "Sources", "SwitchingChannel"]

Anything: TypeAlias = Any
"""What gRPC's callables take and give: any message, any call."""

_LONGEST_BAN_S = 300.0
"""Longest time in seconds for which a relay that failed is left alone."""

_FIXED = "/sluice.v1.WeightSyncService/"
"""Calls about all versions go to the root: a relay holds fewer of them."""

_WATCH = "/Watch"
"""Streams that never end by themselves; a switch ends them, so that their callers open them again."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SourceLimits:
    """How long sources are waited for.

    Attributes:
        look_s: Seconds between looks at what sources there are.
        answer_s: Seconds that a source has to answer.
        fallback_s: Seconds that the source in use may fail before it is left.
        retry_s: Seconds between questions to one that fails.
        ban_s: Seconds for which a source that was left is not taken again, at first; doubled each time.
        stall_s: Seconds that a relay may lack a version without any progress.
        probes: Relays that are asked at a time, those of this host and those with the fewest watchers.
    """

    look_s: float = 10.0
    answer_s: float = 2.0
    fallback_s: float = 3.0
    retry_s: float = 0.5
    ban_s: float = 10.0
    stall_s: float = 30.0
    probes: int = 4


class Sources:
    """The weight service and its relays, as one engine sees them: it uses one of them at a time.

    Args:
        root: To the service that the settings name.
        run: ``runs/{run}``.
        replica: The engine's name.
        connect: Opens a channel to a relay; None keeps the engine at the root.
        switched: Called when calls go to another source from now on.
        host: Identity of this host; None asks the kernel.
        limits: How long to wait.

    Attributes:
        channel: Where the engine's calls go.
        current: Address of the source in use, `ROOT` for the root.
    """

    def __init__(
        self,
        root: grpc.aio.Channel,
        run: str,
        replica: str,
        connect: Callable[[str], grpc.aio.Channel] | None,
        *,
        switched: Callable[[], object] = lambda: None,
        host: str | None = None,
        limits: SourceLimits | None = None,
    ) -> None:
        self.current = ROOT
        self._switched = switched
        self.channel = SwitchingChannel(root, self._call_failed)
        self._run, self._replica, self._connect = run, replica, connect
        self._host = host_id() if host is None else host
        self._limits = limits or SourceLimits()
        self._channels = {ROOT: root}
        self._listed: list[pb.WeightSource] = []
        self._settled = False
        self._failing_since: float | None = None
        self._bans: dict[str, tuple[float, float]] = {}
        self._progress: dict[str, tuple[Version | None, float]] = {}
        self._wake = asyncio.Event()

    async def settle(self) -> None:
        """Choose a source before the engine begins, so that it need not change; takes seconds at most."""
        if self._connect is not None and not self._settled:
            await self._look()

    async def run_forever(self) -> None:
        """Look for a nearer source regularly, and at once when the one in use fails, until cancelled."""
        if self._connect is None:
            return
        while True:
            limits = self._limits
            pause_s = limits.look_s * random.uniform(0.5, 1.5)  # noqa: S311 - spreads the fleet, no secret
            if self._failing_since is not None:
                pause_s = limits.retry_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            self._wake.clear()
            await self._look()

    def leave(self, reason: str) -> None:
        """Leave a relay for the root, and do not come back for a while. No effect at the root."""
        if self.current != ROOT:
            self._ban(self.current, reason)
            self._use(ROOT)

    async def close(self) -> None:
        """Close the channels that were opened here."""
        self._use(ROOT)
        for address in [address for address in self._channels if address != ROOT]:
            await self._channels.pop(address).close()

    async def _look(self) -> None:
        candidates = [each for each in await self._ask() if each is not None]
        now = time.monotonic()
        if self.current != ROOT and self.current not in {each.address for each in candidates}:
            self._failing_since = self._failing_since or now
            if now - self._failing_since < self._limits.fallback_s:
                return
            self._ban(self.current, "it does not answer")
        else:
            self._failing_since = None
        fit = [each for each in candidates if not self._is_banned(each.address, now)]
        for each in self._stalled(fit, now):
            self._ban(each.address, "it gets no new versions")
            fit.remove(each)
        draw = random.random()  # noqa: S311 - spreads the fleet, no secret
        current = self.current if self._settled else None
        chosen = choose(fit, current, host=self._host, replica=self._replica, draw=draw)
        self._settled = True
        if chosen != self.current:
            log.info("source of versions changed", source=chosen or "root", before=self.current or "root")
            self._use(chosen)
        await self._close_unused()

    def _use(self, address: str) -> None:
        self._failing_since = None
        self.current = address
        self._switched()
        self.channel.switch(self._channels[address])

    async def _ask(self) -> list[Candidate | None]:
        """Ask the root for its relays, and those worth asking for their state. Sources that do not answer are left out."""
        started = time.monotonic()
        listed = await self._list(ROOT)
        root = None
        if listed:
            root = _candidate(ROOT, listed[0], time.monotonic() - started)
            self._listed = listed[1:]
        return [root, *await asyncio.gather(*(self._probe(address) for address in self._worth_asking()))]

    def _worth_asking(self) -> list[str]:
        """Return relays of this host, then those with few watchers, and the one in use in any case."""
        ranked = sorted(self._listed, key=lambda each: (each.host != self._host, each.watchers))
        addresses = [each.address for each in ranked if each.address][: self._limits.probes]
        if self.current not in {ROOT, *addresses}:
            addresses.append(self.current)
        return addresses

    async def _probe(self, address: str) -> Candidate | None:
        started = time.monotonic()
        listed = await self._list(address)
        return _candidate(address, listed[0], time.monotonic() - started) if listed else None

    async def _list(self, address: str) -> list[pb.WeightSource]:
        """Return what a source says of itself and of its relays; empty if it does not answer."""
        if address not in self._channels and self._connect is not None:
            self._channels[address] = self._connect(address)
        stub = weightsync_pb2_grpc.WeightDeliveryServiceStub(self._channels[address])
        call: Awaitable[pb.ListSourcesResponse] = stub.ListSources(
            pb.ListSourcesRequest(run=self._run), timeout=self._limits.answer_s
        )
        try:
            return list((await call).sources)
        except grpc.aio.AioRpcError as error:
            log.debug("source does not answer", source=address or "root", reason=str(SluiceError.from_rpc(error)))
            return []

    def _stalled(self, candidates: list[Candidate], now: float) -> list[Candidate]:
        """Return relays that have lacked a version for too long without any progress."""
        newest = max((each.newest for each in candidates if each.newest is not None), default=None)
        found = []
        for each in candidates:
            version, since = self._progress.get(each.address, (None, now))
            if version != each.newest or not behind(each.newest, newest):
                since = now
            self._progress[each.address] = (each.newest, since)
            if each.address != ROOT and now - since > self._limits.stall_s:
                found.append(each)
        return found

    def _is_banned(self, address: str, now: float) -> bool:
        return now < self._bans.get(address, (0.0, 0.0))[0]

    def _ban(self, address: str, reason: str) -> None:
        """Leave a source alone for a time that doubles with each failure, and varies."""
        now = time.monotonic()
        ended, last_s = self._bans.get(address, (now, 0.0))
        again = now - ended < _LONGEST_BAN_S
        ban_s = min(_LONGEST_BAN_S, max(self._limits.ban_s, last_s * 2 if again else 0.0))
        until = now + ban_s * random.uniform(0.5, 1.5)  # noqa: S311 - jitter, not a secret
        self._bans[address] = (until, ban_s)
        self._progress.pop(address, None)
        log.warning("relay left", relay=address, reason=reason, seconds=round(ban_s))

    async def _close_unused(self) -> None:
        listed = {each.address for each in self._listed}
        for address in [each for each in self._channels if each not in {ROOT, self.current, *listed}]:
            await self._channels.pop(address).close()
        for book in (self._bans, self._progress):
            for address in [each for each in book if each not in {ROOT, self.current, *listed}]:
                del book[address]

    def _call_failed(self, channel: grpc.aio.Channel, code: grpc.StatusCode) -> None:
        """Leave a relay at once if it lacks what the engine wants; ask a relay that failed whether it is still there."""
        if self.current == ROOT or channel is not self._channels[self.current]:
            return
        if code in {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DATA_LOSS}:
            self.leave("it does not give the version that is wanted")
        elif code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
            self._wake.set()


def _candidate(address: str, source: pb.WeightSource, latency_s: float) -> Candidate:
    newest = Version.from_proto(source.newest) if source.HasField("newest") else None
    return Candidate(address, source.host, source.watchers, newest, latency_s)


class SwitchingChannel(grpc.aio.Channel):
    """A channel whose new calls go to the source in use. Calls under way stay where they began, except watches.

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
