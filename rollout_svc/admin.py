"""RolloutAdminService and the metrics of one replica: weight versions, pauses, adapters, status."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import REGISTRY, Collector, CollectorRegistry

from rollout_svc.engines.base import EngineError, PauseMode
from rollout_svc.pauses import PauseHeldError, Pauses
from rollout_svc.servicer import RolloutServicer
from rollout_svc.supervision import EngineSupervisor
from rollout_svc.weights import ReplicaWeights
from rollout_svc.wire import MAX_NAME, loaded_adapters
from sluice.rpc import SluiceError
from sluice.v1 import rollout_pb2, rollout_pb2_grpc
from sluice.versions import Version

__all__ = ["ReplicaMetrics", "RolloutAdminServicer"]

PAUSE_MODES = {
    rollout_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
    rollout_pb2.PAUSE_MODE_WAIT: PauseMode.WAIT,
    rollout_pb2.PAUSE_MODE_KEEP: PauseMode.KEEP,
}

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

LOOK_S = 0.1
"""Seconds between two checks whether a pause is over."""

MAX_ABORTED = 16_384
"""Maximum number of request ids in one AbortRequests call."""

log = structlog.get_logger()


class RolloutAdminServicer(rollout_pb2_grpc.RolloutAdminServiceServicer):
    """Lets an operator control one replica.

    Args:
        replica: The name of the replica.
        engine: The supervised engine.
        weights: Keeps the engine on a weight version.
        requests: The service that samples.
    """

    def __init__(
        self, replica: str, engine: EngineSupervisor, weights: ReplicaWeights, requests: RolloutServicer
    ) -> None:
        self._replica, self._engine, self._weights, self._requests = replica, engine, weights, requests
        self._pauses = Pauses()
        self._started = Timestamp()
        self._started.GetCurrentTime()
        self._restarts_seen = engine.restarts

    async def expire_pauses_forever(self) -> None:
        """Resume whenever a pause's time to live is over."""
        while True:
            await asyncio.sleep(LOOK_S)
            owner = self._pauses.owner
            if self._pauses.expire(time.monotonic()):
                log.warning("pause ended by its time to live", owner=owner)
                await self._resume_engine()
            elif owner and self._engine.restarts != self._restarts_seen:
                await self._pause_again(owner)
            self._restarts_seen = self._engine.restarts

    async def _resume_engine(self) -> None:
        """Resume the engine if it is alive. One that was restarted samples anyway."""
        try:
            await self._engine.current.resume()
        except EngineError as error:
            log.warning("the engine could not resume", error=str(error))

    async def _pause_again(self, owner: str) -> None:
        """Pause the restarted engine: a pause lasts longer than the engine that it began on."""
        try:
            await self._engine.serving.pause(PauseMode.KEEP)
        except (EngineError, SluiceError) as error:
            log.warning("the pause was lost with the engine", owner=owner, error=str(error))
            self._pauses.release()

    async def SetWeightPolicy(  # noqa: N802 - gRPC's name
        self,
        request: rollout_pb2.SetWeightPolicyRequest,
        context: grpc.aio.ServicerContext[rollout_pb2.SetWeightPolicyRequest, rollout_pb2.SetWeightPolicyResponse],
    ) -> rollout_pb2.SetWeightPolicyResponse:
        """Set which versions the replica applies."""
        del context
        version = Version.from_proto(request.version) if request.HasField("version") else None
        ttl_s = request.ttl.ToNanoseconds() / 1e9
        present = await self._weights.set_policy(request.mode, version, request.owner, ttl_s)
        return rollout_pb2.SetWeightPolicyResponse(policy_version=present.to_proto())

    async def UpdateWeights(  # noqa: N802 - gRPC's name
        self,
        request: rollout_pb2.UpdateWeightsRequest,
        context: grpc.aio.ServicerContext[rollout_pb2.UpdateWeightsRequest, rollout_pb2.UpdateWeightsResponse],
    ) -> rollout_pb2.UpdateWeightsResponse:
        """Fetch and apply a version now."""
        del context
        version = Version.from_proto(request.version) if request.HasField("version") else None
        return await self.update(version)

    async def update(self, version: Version | None) -> rollout_pb2.UpdateWeightsResponse:
        """Handle the RPC; the HTTP port calls this, too."""
        report = await self._weights.update_to(version)
        return rollout_pb2.UpdateWeightsResponse(
            policy_version=report.version.to_proto(), pause=_duration(report.pause_s)
        )

    async def ReloadWeights(  # noqa: N802 - gRPC's name
        self,
        request: rollout_pb2.ReloadWeightsRequest,
        context: grpc.aio.ServicerContext[rollout_pb2.ReloadWeightsRequest, rollout_pb2.ReloadWeightsResponse],
    ) -> rollout_pb2.ReloadWeightsResponse:
        """Return to the base model."""
        del request, context
        return await self.reload()

    async def reload(self) -> rollout_pb2.ReloadWeightsResponse:
        """Handle the RPC; the HTTP port calls this, too."""
        report = await self._weights.reload_base()
        return rollout_pb2.ReloadWeightsResponse(policy_version=report.version.to_proto())

    async def VerifyWeights(  # noqa: N802 - gRPC's name
        self,
        request: rollout_pb2.VerifyWeightsRequest,
        context: grpc.aio.ServicerContext[rollout_pb2.VerifyWeightsRequest, rollout_pb2.VerifyWeightsResponse],
    ) -> rollout_pb2.VerifyWeightsResponse:
        """Compare the engine's live weights with the files of their version."""
        del context
        fraction = request.fraction if request.HasField("fraction") else 1.0
        if not 0 < fraction <= 1:
            raise SluiceError.invalid_argument("fraction", "above 0 and at most 1")
        version, different = await self._weights.verify(fraction)
        return rollout_pb2.VerifyWeightsResponse(policy_version=version.to_proto(), different=different)

    async def Pause(  # noqa: N802 - gRPC's name
        self,
        request: rollout_pb2.PauseRequest,
        context: grpc.aio.ServicerContext[rollout_pb2.PauseRequest, rollout_pb2.PauseResponse],
    ) -> rollout_pb2.PauseResponse:
        """Stop sampling until Resume or the end of the time to live."""
        del context
        mode = PAUSE_MODES.get(request.mode)
        if mode is None:
            raise SluiceError.invalid_argument("mode", "set ABORT, WAIT or KEEP")
        if len(request.owner) > MAX_NAME:
            raise SluiceError.invalid_argument("owner", f"at most {MAX_NAME} characters")
        engine = self._engine.serving
        try:
            self._pauses.begin(request.owner, request.ttl.ToNanoseconds() / 1e9, time.monotonic())
        except PauseHeldError as error:
            raise SluiceError.aborted("PAUSE_HELD", f"{error}: wait, or ask its owner to resume") from error
        except ValueError as error:
            raise SluiceError.invalid_argument("owner" if not request.owner else "ttl", str(error)) from error
        try:
            await engine.pause(mode)
        except BaseException as error:  # also when the caller disconnects: the engine must not stay half paused
            self._pauses.release()
            await asyncio.shield(asyncio.create_task(self._resume_engine()))
            if isinstance(error, EngineError):
                raise SluiceError.unavailable("PAUSE_FAILED", f"{error}; the replica keeps sampling") from error
            raise
        frozen = self._requests.samples if mode is PauseMode.KEEP else 0
        return rollout_pb2.PauseResponse(frozen_requests=frozen)

    async def Resume(  # noqa: N802 - gRPC's name
        self,
        request: rollout_pb2.ResumeRequest,
        context: grpc.aio.ServicerContext[rollout_pb2.ResumeRequest, rollout_pb2.ResumeResponse],
    ) -> rollout_pb2.ResumeResponse:
        """End a pause of the same owner."""
        del context
        try:
            if self._pauses.end(request.owner, time.monotonic()):
                await self._engine.serving.resume()
        except PauseHeldError:
            return rollout_pb2.ResumeResponse(running=False)
        except EngineError as error:
            raise SluiceError.unavailable("RESUME_FAILED", f"{error}; the engine restarts") from error
        return rollout_pb2.ResumeResponse(running=True)

    async def LoadAdapter(  # noqa: N802 - gRPC's name
        self,
        request: rollout_pb2.LoadAdapterRequest,
        context: grpc.aio.ServicerContext[rollout_pb2.LoadAdapterRequest, rollout_pb2.LoadAdapterResponse],
    ) -> rollout_pb2.LoadAdapterResponse:
        """Give an adapter version a name that requests can use."""
        del context
        if not ADAPTER_NAME.fullmatch(request.adapter):
            raise SluiceError.invalid_argument("adapter", f"a name of the form {ADAPTER_NAME.pattern}")
        if not request.HasField("version"):
            raise SluiceError.invalid_argument("version", "name the adapter version to load")
        await self._weights.load_adapter(request.adapter, Version.from_proto(request.version))
        return rollout_pb2.LoadAdapterResponse()

    async def UnloadAdapter(  # noqa: N802 - gRPC's name
        self,
        request: rollout_pb2.UnloadAdapterRequest,
        context: grpc.aio.ServicerContext[rollout_pb2.UnloadAdapterRequest, rollout_pb2.UnloadAdapterResponse],
    ) -> rollout_pb2.UnloadAdapterResponse:
        """Remove the name of an adapter."""
        del context
        await self._weights.unload_adapter(request.adapter)
        return rollout_pb2.UnloadAdapterResponse()

    async def AbortRequests(  # noqa: N802 - gRPC's name
        self,
        request: rollout_pb2.AbortRequestsRequest,
        context: grpc.aio.ServicerContext[rollout_pb2.AbortRequestsRequest, rollout_pb2.AbortRequestsResponse],
    ) -> rollout_pb2.AbortRequestsResponse:
        """End requests in progress."""
        del context
        if len(request.request_ids) > MAX_ABORTED:
            raise SluiceError.invalid_argument("request_ids", f"at most {MAX_ABORTED} in one call")
        engine = self._engine.serving
        names = list(request.request_ids) or self._requests.request_ids
        try:
            aborted = [await engine.abort(name) for name in names]
        except EngineError as error:
            raise SluiceError.unavailable("ABORT_FAILED", f"{error}; its requests end with it") from error
        return rollout_pb2.AbortRequestsResponse(aborted=sum(aborted))

    async def GetStatus(  # noqa: N802 - gRPC's name
        self,
        request: rollout_pb2.GetStatusRequest,
        context: grpc.aio.ServicerContext[rollout_pb2.GetStatusRequest, rollout_pb2.GetStatusResponse],
    ) -> rollout_pb2.GetStatusResponse:
        """Report version, load and health."""
        del request, context
        status, weights = self._engine.current.status(), self._weights.status()
        response = rollout_pb2.GetStatusResponse(
            replica=self._replica,
            state=self._state(paused=status.paused, healthy=status.healthy),
            policy_version=status.version.to_proto(),
            running=status.running,
            queued=status.queued,
            kv_cache_usage=status.kv_cache_usage,
            generated_tokens=status.generated_tokens,
            prompt_tokens=status.prompt_tokens,
            updates_applied=weights.updates_applied,
            last_pause=_duration(weights.last_pause_s),
            weight_policy=weights.policy,
            weight_policy_owner=weights.policy_owner,
            last_error=weights.last_error,
            start_time=self._started,
            max_running=status.max_running,
            engine_restarts=self._engine.restarts,
            adapters=loaded_adapters(self._engine.current),
        )
        if weights.last_update is not None:
            response.last_update.CopyFrom(weights.last_update.to_proto())
        if weights.staged is not None:
            response.staged_version.CopyFrom(weights.staged.to_proto())
        return response

    def _state(self, *, paused: bool, healthy: bool) -> rollout_pb2.ReplicaState.ValueType:
        if self._requests.draining:
            return rollout_pb2.REPLICA_STATE_DRAINING
        if self._engine.recovering or not healthy:
            return rollout_pb2.REPLICA_STATE_RECOVERING
        return rollout_pb2.REPLICA_STATE_PAUSED if paused else rollout_pb2.REPLICA_STATE_SERVING


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


class ReplicaMetrics(Collector):
    """Prometheus metrics of the engine and of weight updates; a fleet is scaled by `sluice_rollout_queued`.

    Args:
        engine: The supervised engine.
        weights: Keeps the engine on a weight version.
        registry: Where the metrics are registered.
    """

    def __init__(
        self, engine: EngineSupervisor, weights: ReplicaWeights, registry: CollectorRegistry = REGISTRY
    ) -> None:
        self._engine, self._weights, self._registry = engine, weights, registry
        registry.register(self)

    def close(self) -> None:
        """Remove the metrics from the registry."""
        self._registry.unregister(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the current values (prometheus_client's interface)."""
        status, weights = self._engine.current.status(), self._weights.status()
        for name, text, value in (
            ("running", "Samples being generated.", status.running),
            ("queued", "Samples waiting for a place.", status.queued),
            ("max_running", "Most samples that are generated at a time.", status.max_running),
            ("kv_cache_usage", "Share of the KV cache in use, 0 to 1.", status.kv_cache_usage),
            ("paused", "Whether sampling is paused.", status.paused),
            ("healthy", "Whether the engine samples.", status.healthy and not self._engine.recovering),
            ("policy_epoch", "Epoch of the version that serves.", status.version.epoch),
            ("policy_number", "Number of the version that serves.", status.version.number),
            ("last_pause_seconds", "Pause of the last update.", weights.last_pause_s),
        ):
            yield GaugeMetricFamily(f"sluice_rollout_{name}", text, value=float(value))
        for name, text, value in (
            ("generated_tokens", "Tokens sampled.", status.generated_tokens),
            ("prompt_tokens", "Prompt tokens processed.", status.prompt_tokens),
            ("updates_applied", "Weight updates applied.", weights.updates_applied),
            ("engine_restarts", "Engine restarts.", self._engine.restarts),
        ):
            yield CounterMetricFamily(f"sluice_rollout_{name}", text, value=float(value))
