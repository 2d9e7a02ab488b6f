"""The pool of rollout replicas: found by address or name, polled, chosen by load, evicted and taken back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration

from orchestrator_svc.config import ReplicasConfig
from orchestrator_svc.replica import Replica
from orchestrator_svc.resolve_targets import check_address, resolve_targets
from sluice.config import SecurityConfig
from sluice.rpc import SluiceError
from sluice.versions import Version

__all__ = ["ReplicaPool"]

_Answer = TypeVar("_Answer")

log = structlog.get_logger(__name__)


class ReplicaPool:
    """Knows which replicas there are and which of them may take work.

    Args:
        addresses: Configured addresses; names stand for all that they resolve to, looked up again and again.
        security: Tokens and TLS.
        config: Intervals and limits.
        on_change: Called when a replica's version or fitness changed.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        security: SecurityConfig,
        config: ReplicasConfig,
        on_change: Callable[[Replica], None],
    ) -> None:
        self._addresses = [each for each in addresses if _is_address(each)]
        self._security, self._config = security, config
        self._on_change = on_change
        self._replicas: dict[str, Replica] = {}
        self._pollers: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._hurry = asyncio.Event()
        self._wanted: Version | None = None
        self._leases: dict[str, tuple[str, float]] = {}

    @property
    def replicas(self) -> list[Replica]:
        """All that are known."""
        return list(self._replicas.values())

    async def run(self) -> None:
        """Find and poll replicas until cancelled, then close their channels.

        Raises:
            ExceptionGroup: with whatever the search for replicas or one of the polls raised.
        """
        try:
            async with asyncio.TaskGroup() as pollers:
                while True:
                    await self._follow_names(pollers)
                    await asyncio.sleep(self._config.resolve_s)
        finally:
            for replica in self._replicas.values():
                await replica.close()

    async def _follow_names(self, pollers: asyncio.TaskGroup) -> None:
        now = time.monotonic()
        self._leases = {name: lease for name, lease in self._leases.items() if lease[1] > now}
        targets = await resolve_targets([*self._addresses, *(target for target, _ in self._leases.values())])
        for target in targets:
            if target not in self._replicas:
                replica = Replica(target, self._security, self._config.evict_after)
                self._replicas[target] = replica
                self._pollers[target] = pollers.create_task(self._poll(replica), name=f"poll {target}")
        for target in [each for each in self._replicas if each not in targets]:
            # Gone from the name service, or its lease is over: forget it once it no longer answers either.
            if self._replicas[target].why_not():
                await self._forget(target)

    async def _forget(self, target: str) -> None:
        poller, replica = self._pollers.pop(target), self._replicas.pop(target)
        poller.cancel()
        await asyncio.gather(poller, return_exceptions=True)
        replica.cancel_calls()
        await replica.close()
        log.info("replica forgotten", replica=replica.name, target=target)

    async def _poll(self, replica: Replica) -> None:
        while True:
            before = (replica.version, replica.why_not())
            await replica.poll(self._config.poll_deadline_s)
            if (replica.version, replica.why_not()) != before:
                self._announce(replica)
                self._move_calls()
            await self._pause(replica)

    async def _pause(self, replica: Replica) -> None:
        """Wait for the next poll: briefly while someone waits for a version that this replica does not serve yet."""
        if self._wanted is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.poll_s):
                    await self._hurry.wait()
        elif not replica.why_not() and replica.version < self._wanted:
            await asyncio.sleep(self._config.waiting_poll_s)
        else:
            await asyncio.sleep(self._config.poll_s)

    def _move_calls(self) -> None:
        """Cancel what still waits for an evicted replica once another one may take it: it may never answer."""
        if any(not each.why_not() for each in self._replicas.values()):
            for replica in self._replicas.values():
                if replica.evicted:
                    replica.cancel_calls()

    def _announce(self, replica: Replica) -> None:
        reason = replica.why_not()
        log.debug("replica changed", replica=replica.name, version=str(replica.version), reason=reason)
        self._on_change(replica)
        self._changed.set()

    def register(self, name: str, target: str) -> float:
        """Use a replica that announced itself; return the seconds within which it has to send a heartbeat.

        Raises:
            ValueError: if its address cannot be one.
        """
        check_address(target)
        self._leases[name] = (target, time.monotonic() + self._config.lease_s)
        return self._config.lease_s

    def heartbeat(self, name: str) -> float:
        """Renew a lease; returns its seconds.

        Raises:
            KeyError: if the lease is unknown or over.
        """
        return self.register(name, self._leases[name][0])

    def wait_for(self, wanted: Version | None) -> None:
        """Say that dispatch waits for a version (polls become frequent), or no longer does."""
        self._wanted = wanted
        if wanted is None:
            self._hurry.clear()
        else:
            self._hurry.set()

    def pick(self, wanted: Version, avoid: frozenset[str] = frozenset()) -> Replica | None:
        """The least loaded replica that serves `wanted` or newer; those to avoid only if there is no other."""
        fit = [each for each in self._replicas.values() if not each.why_not(wanted)]
        preferred = [each for each in fit if each.target not in avoid] or fit
        return min(preferred, key=lambda each: each.in_flight + each.status.queued, default=None)

    async def choose(self, wanted: Version, avoid: frozenset[str] = frozenset()) -> Replica:
        """As `pick`, waiting until there is one; the caller sets the deadline."""
        while (replica := self.pick(wanted, avoid)) is None:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                # Cooldowns end without an announcement.
                async with asyncio.timeout(self._config.poll_s):
                    await self._changed.wait()
        return replica

    async def call(self, replica: Replica, samples: int, make: Callable[[Replica], Awaitable[_Answer]]) -> _Answer:
        """Make a call at a replica, which counts as so many samples under way there.

        Raises:
            SluiceError: what the replica answered, or UNAVAILABLE if it was evicted meanwhile.
        """
        call = asyncio.ensure_future(make(replica))
        replica.calls.add(call)
        replica.in_flight += samples
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise SluiceError.from_rpc(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            reason = f"replica {replica.name} was evicted ({replica.why_not()})"
            raise SluiceError.unavailable("REPLICA_EVICTED", reason) from None
        finally:
            replica.calls.discard(call)
            replica.in_flight -= samples

    def tokenizer_digest(self) -> str:
        """Digest of tokenizer and template that the replicas share; empty until one answered.

        Raises:
            ValueError: if they differ.
        """
        digests = {each.model.tokenizer_digest: each.name for each in self.replicas if each.model.tokenizer_digest}
        if len(digests) > 1:
            raise ValueError(
                f"replicas {' and '.join(digests.values())} have different tokenizers or templates: give all the same --model"
            )
        return next(iter(digests), "")

    def sampler_dtype(self) -> str:
        """Return the precision of the replicas' weights, such as ``bfloat16``; empty if it is not known or they differ."""
        dtypes = {each.model.dtype for each in self.replicas if each.model.dtype}
        return dtypes.pop() if len(dtypes) == 1 else ""

    def update_metrics(self, newest: Version) -> dict[str, float]:
        """What the replicas' last updates cost, the slowest of each part, and how many versions the last one is behind."""
        ready = [each for each in self.replicas if not each.why_not()]
        timings = [each.status.last_update for each in ready if each.status.HasField("last_update")]
        if not timings:
            return {}
        behind = (newest.number - each.version.number for each in ready)
        return {"weights/replica_lag": float(max(0, *behind, 0))} | {
            f"weights/{part}_s": max(_seconds(getattr(each, part)) for each in timings)
            for part in ("pull", "stage", "pause", "apply", "total")
        }

    def generated_tokens(self) -> int:
        """Tokens that the replicas sampled since each of them started."""
        return sum(each.status.generated_tokens for each in self.replicas)


def _seconds(duration: Duration) -> float:
    return duration.ToTimedelta().total_seconds()


def _is_address(text: str) -> bool:
    try:
        check_address(text)
    except ValueError as error:
        log.warning("a replica is left out (peers.rollout)", reason=str(error))
        return False
    return True
