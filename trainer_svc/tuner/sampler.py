"""Samples of adapters: publish an adapter as a version, load that into a replica under its own name, and sample.

Each publication has its own name, so that samples come from exactly one version. A replica keeps at most
`rollout.lora.max_loras` adapters; if it is full, an adapter from which nobody samples is unloaded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import grpc
import structlog
import torch

from sluice.backoff import Backoff
from sluice.config import CommonConfig
from sluice.rpc import SluiceError, connect
from sluice.v1 import rollout_pb2, rollout_pb2_grpc, tokens_pb2, weightsync_pb2, weightsync_pb2_grpc
from sluice.versions import BASE, Version
from trainer_svc.tuner.config import DeadlinesConfig
from weightsync.publisher import AdapterPublisher

OWNER = "tuner"
"""Name under which the tuner sets the weight policy of the replicas."""

HOLD_S = 120.0
"""Seconds that a replica keeps serving its base model after each request to do so. Clients select adapters by name, not by policy."""

CALL_S = 10.0
"""Deadline of a short call in seconds."""

PUBLISH_S = 120.0
"""Deadline in seconds of publishing an adapter, and of loading one into a replica or unloading it."""

ATTEMPTS = 4
"""Attempts to sample a request. After the last one the request fails because its replica failed or gave its adapter up."""

log = structlog.get_logger(__name__)


@dataclass
class Replica:
    """One replica.

    Attributes:
        loaded: Versions that the replica has loaded, least recently used first, with the number of requests in progress for each.
        doubtful: Loaded versions that the replica may have lost because a call failed. They are loaded again before they are used.
        lock: Held while adapters are loaded and unloaded.
    """

    target: str
    channel: grpc.aio.Channel
    loaded: dict[Version, int] = field(default_factory=dict)
    doubtful: set[Version] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    freed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.agent = rollout_pb2_grpc.RolloutServiceStub(self.channel)
        self.admin = rollout_pb2_grpc.RolloutAdminServiceStub(self.channel)

    @property
    def running(self) -> int:
        """Number of requests in progress."""
        return sum(self.loaded.values())


class Sampler:
    """Publishes adapters and samples from them.

    Args:
        common: Run, addresses and security.
        deadlines: Deadlines.
        tokenizer_digest: Digest of the base model's tokenizer and template. A replica with another digest refuses requests.
    """

    def __init__(self, common: CommonConfig, deadlines: DeadlinesConfig, tokenizer_digest: str) -> None:
        self._run, self._deadlines, self._digest = common.run, deadlines, tokenizer_digest
        self._weights = connect(common.peers.weightsync, common.security, role="trainer")
        self._versions = weightsync_pb2_grpc.WeightSyncServiceStub(self._weights)
        self._publisher = AdapterPublisher(self._weights, common.run)
        self._replicas = [
            Replica(target, connect(target, common.security, role="dispatcher")) for target in common.peers.rollout
        ]
        self._publishing = asyncio.Lock()
        self._version: Version | None = None

    @property
    def newest(self) -> Version:
        """The version that was published last; `BASE` before the first publication."""
        return self._version or BASE

    async def close(self) -> None:
        """Close the connections."""
        for channel in (self._weights, *(each.channel for each in self._replicas)):
            await channel.close()

    async def keep_to_base(self) -> None:
        """Periodically tell the replicas to keep the base model, besides the named adapters. Runs until cancelled."""
        hold = rollout_pb2.SetWeightPolicyRequest(
            mode=rollout_pb2.WEIGHT_POLICY_MODE_HOLD, version=BASE.to_proto(), owner=OWNER
        )
        hold.ttl.FromSeconds(int(HOLD_S))

        async def tell(replica: Replica) -> None:
            try:
                await replica.admin.SetWeightPolicy(hold, timeout=CALL_S)
            except grpc.aio.AioRpcError as error:
                log.debug("a replica could not be told to hold", target=replica.target, error=error.details())

        while True:
            await asyncio.gather(*map(tell, self._replicas))
            await asyncio.sleep(HOLD_S / 4)

    async def publish(self, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, object]) -> Version:
        """Publish an adapter; return its version.

        Raises:
            SluiceError: as in WeightSyncService.PushWeights and CommitVersion, including UNAVAILABLE.
        """
        async with self._publishing:  # versions are committed in order
            before = self._version or Version(await self._epoch(), 0)
            version = Version(before.epoch, before.number + 1)
            await self._publisher.push(version, tensors, settings, deadline_s=PUBLISH_S)
            self._version = version
            return version

    async def _epoch(self) -> int:
        """Return an epoch that no version of the run has."""
        try:
            request = weightsync_pb2.ListVersionsRequest(run=f"runs/{self._run}", page_size=1)
            listed = await self._versions.ListVersions(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise SluiceError.from_rpc(error) from error
        return max((each.version.epoch for each in listed.versions), default=0) + 1

    async def sample(self, version: Version, request: rollout_pb2.GenerateRequest) -> rollout_pb2.GenerateResponse:
        """Sample from a published adapter, or from the base model if the version is `BASE`.

        Raises:
            SluiceError: as in RolloutService.Generate; UNAVAILABLE if no replica could answer.
        """
        backoff = Backoff(first_s=0.2, longest_s=2.0)
        async with _deadline(self._deadlines.operation_s):
            for left in range(ATTEMPTS - 1, -1, -1):
                replica = min(self._replicas, key=lambda each: each.running)
                try:
                    response = await self._sampled(replica, version, request)
                except SluiceError as error:
                    if not left or (
                        error.code is not grpc.StatusCode.UNAVAILABLE and error.reason != "ADAPTER_NOT_LOADED"
                    ):
                        raise
                    replica.doubtful.update(replica.loaded)  # the replica may have restarted
                    log.warning(
                        "a replica failed; the request is sampled again", target=replica.target, error=str(error)
                    )
                else:
                    if all(each.finish_reason != tokens_pb2.FINISH_REASON_VERSION_RETIRED for each in response.samples):
                        return response
                await asyncio.sleep(backoff.fail())
        raise SluiceError.unavailable(
            "ADAPTER_FAILED", f"replicas gave the adapter up {ATTEMPTS} times: raise rollout.lora.max_loras"
        )

    async def _sampled(
        self, replica: Replica, version: Version, request: rollout_pb2.GenerateRequest
    ) -> rollout_pb2.GenerateResponse:
        request.run, request.tokenizer_digest = f"runs/{self._run}", self._digest
        if version != BASE:
            await self._load(replica, version)
            request.adapter = adapter_name(version)
        replica.loaded[version] = replica.loaded.pop(version, 0) + 1
        try:
            return await replica.agent.Generate(request, timeout=self._deadlines.operation_s)
        except grpc.aio.AioRpcError as error:
            raise SluiceError.from_rpc(error) from error
        finally:
            if version in replica.loaded:
                replica.loaded[version] -= 1
            replica.freed.set()

    async def _load(self, replica: Replica, version: Version) -> None:
        """Load a version into a replica. If the replica is full, unload others."""
        async with replica.lock:
            request = rollout_pb2.LoadAdapterRequest(adapter=adapter_name(version), version=version.to_proto())
            while version not in replica.loaded or version in replica.doubtful:
                replica.freed.clear()
                try:
                    await replica.admin.LoadAdapter(request, timeout=PUBLISH_S)
                    replica.loaded.setdefault(version, 0)
                    replica.doubtful.discard(version)
                except grpc.aio.AioRpcError as error:
                    refused = SluiceError.from_rpc(error)
                    if refused.reason != "ADAPTERS_FULL":
                        raise refused from error
                    await self._make_room(replica, refused)

    async def _make_room(self, replica: Replica, refused: SluiceError) -> None:
        idle = next((each for each, running in replica.loaded.items() if not running and each != BASE), None)
        if idle is not None:
            replica.loaded.pop(idle)
            replica.doubtful.discard(idle)
            request = rollout_pb2.UnloadAdapterRequest(adapter=adapter_name(idle))
            try:
                await replica.admin.UnloadAdapter(request, timeout=PUBLISH_S)
            except grpc.aio.AioRpcError as error:
                raise SluiceError.from_rpc(error) from error
        elif replica.running:
            await replica.freed.wait()  # the deadline of the request ends this
        else:
            raise refused  # the replica is full of adapters that this service did not load


def adapter_name(version: Version) -> str:
    """Return the name under which replicas serve a publication."""
    return f"tuner-{version.epoch}-{version.number}"


@contextlib.asynccontextmanager
async def _deadline(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise SluiceError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "REQUEST_DEADLINE",
            f"no replica answered within {seconds:g} s (tuner.deadlines.operation_s)",
        ) from None
