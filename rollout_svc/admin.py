"""RolloutAdminService and the metrics of one replica: weight versions, pauses, adapters, status."""
# ruff: noqa: N802  (gRPC names the methods)

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import REGISTRY, Collector, CollectorRegistry

from rollout_svc.engines.base import EngineError, EngineStatus, PauseMode
from rollout_svc.replica import EngineSupervisor, ReplicaWeights
from rollout_svc.servicer import MAX_NAME, RolloutServicer, loaded_adapters
from sluice.rpc import SluiceError
from sluice.rpc.drain import Drain
from sluice.v1 import rollout_pb2 as pb
from sluice.v1 import rollout_pb2_grpc
from sluice.versions import Version

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

PAUSE_MODES = {
    pb.PAUSE_MODE_ABORT: PauseMode.ABORT,
    pb.PAUSE_MODE_WAIT: PauseMode.WAIT,
    pb.PAUSE_MODE_KEEP: PauseMode.KEEP,
}

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

MAX_WAIT_S = 60.0
"""Maximum seconds that a status request waits for a version."""

MAX_TTL_S = 3600.0
"""Maximum time to live of a pause, in seconds. A forgotten pause must not stop a run for ever."""

PAUSE_CHECK_S = 0.1
"""Seconds between two checks of whether a pause is over."""

MAX_ABORTED = 16_384
"""Maximum number of request ids in one AbortRequests call."""

log = structlog.get_logger()


class PauseHeldError(Exception):
    """Another owner holds a pause."""


@dataclass
class Pauses:
    """Who paused the replica, and until when. A pure state machine: the caller passes the time.

    There is at most one pause at a time, with an owner and a time to live.

    Attributes:
        owner: Who paused; empty if nobody did.
        ends: When the pause ends by itself, on the caller's monotonic clock in seconds.
    """

    owner: str = field(default="", init=False)
    ends: float = field(default=0.0, init=False)

    def begin(self, owner: str, ttl_s: float, now: float) -> None:
        """Begin a pause, or extend the pause of the same owner.

        Raises:
            PauseHeldError: if another owner holds a pause.
            ValueError: if the owner or the time to live is invalid.
        """
        if not owner:
            raise ValueError("owner must be named")
        if not 0 < ttl_s <= MAX_TTL_S:
            raise ValueError(f"ttl must be above 0 and at most {MAX_TTL_S:.0f} s, not {ttl_s:g}")
        self._require(owner, now)
        self.owner, self.ends = owner, now + ttl_s

    def end(self, owner: str, now: float) -> bool:
        """End the pause of this owner. Return whether there was one.

        Raises:
            PauseHeldError: if another owner holds a pause.
        """
        self._require(owner, now)
        return self._clear()

    def expire(self, now: float) -> bool:
        """End a pause whose time to live is over. Return whether there was one."""
        return bool(self.owner) and now >= self.ends and self._clear()

    def forget(self, owner: str) -> None:
        """Forget the pause of this owner, if it still holds one."""
        if self.owner == owner:
            self._clear()

    def _require(self, owner: str, now: float) -> None:
        if self.owner and self.owner != owner and now < self.ends:
            raise PauseHeldError(f"{self.owner!r} holds a pause for {self.ends - now:.0f} s more")

    def _clear(self) -> bool:
        held, self.owner = bool(self.owner), ""
        return held


class RolloutAdminServicer(rollout_pb2_grpc.RolloutAdminServiceServicer):
    """Lets an operator control one replica.

    Args:
        drain: Makes the replica shut down.
        drain_s: Seconds for the requests in progress, if a drain request does not say.
    """

    def __init__(
        self,
        replica: str,
        engine: EngineSupervisor,
        weights: ReplicaWeights,
        requests: RolloutServicer,
        *,
        drain: Drain,
        drain_s: float,
    ) -> None:
        self._replica, self._engine, self._weights, self._requests = replica, engine, weights, requests
        self._drain, self._drain_s = drain, drain_s
        self._pauses = Pauses()
        self._started = Timestamp()
        self._started.GetCurrentTime()
        self._restarts_seen = engine.restarts

    async def expire_pauses_forever(self) -> None:
        """Resume whenever a pause's time to live is over."""
        while True:
            await asyncio.sleep(PAUSE_CHECK_S)
            owner = self._pauses.owner
            if self._pauses.expire(time.monotonic()):
                log.warning("pause ended by its time to live", owner=owner)
                await self._resume_engine()
            elif owner and self._engine.restarts != self._restarts_seen:
                await self._pause_again(owner)
            self._restarts_seen = self._engine.restarts

    async def _resume_engine(self) -> None:
        """Resume the engine if it is alive. A restarted engine samples anyway."""
        try:
            await self._engine.current.resume()
        except EngineError as error:
            log.warning("the engine could not resume", error=str(error))

    async def _pause_again(self, owner: str) -> None:
        """Pause the restarted engine, because a pause does not end when its engine dies."""
        try:
            await self._engine.ready.pause(PauseMode.KEEP)
        except (EngineError, SluiceError) as error:
            log.warning("the pause was lost with the engine", owner=owner, error=str(error))
            self._pauses.forget(owner)

    async def SetWeightPolicy(self, request: pb.SetWeightPolicyRequest, context: Context) -> pb.SetWeightPolicyResponse:
        """Set which versions the replica applies."""
        del context
        version = Version.from_proto(request.version) if request.HasField("version") else None
        ttl_s = request.ttl.ToNanoseconds() / 1e9
        present = await self._weights.set_policy(request.mode, version, request.owner, ttl_s)
        return pb.SetWeightPolicyResponse(policy_version=present.to_proto())

    async def UpdateWeights(
        self, request: pb.UpdateWeightsRequest, context: Context | None = None
    ) -> pb.UpdateWeightsResponse:
        """Fetch and apply a version now. The HTTP port calls this, too."""
        del context
        report = await self._weights.update_to(
            Version.from_proto(request.version) if request.HasField("version") else None
        )
        return pb.UpdateWeightsResponse(policy_version=report.version.to_proto(), pause=_duration(report.pause_s))

    async def ReloadWeights(
        self, request: pb.ReloadWeightsRequest, context: Context | None = None
    ) -> pb.ReloadWeightsResponse:
        """Return to the base model. The HTTP port calls this, too."""
        del request, context
        report = await self._weights.reload_base()
        return pb.ReloadWeightsResponse(policy_version=report.version.to_proto())

    async def VerifyWeights(self, request: pb.VerifyWeightsRequest, context: Context) -> pb.VerifyWeightsResponse:
        """Compare the engine's live weights with the files of their version."""
        del context
        fraction = request.fraction if request.HasField("fraction") else 1.0
        if not 0 < fraction <= 1:
            raise SluiceError.invalid_argument("fraction", "above 0 and at most 1")
        version, found = await self._weights.verify(fraction)
        return pb.VerifyWeightsResponse(
            policy_version=version.to_proto(),
            different=found.different,
            unchecked=[
                pb.UncheckedWeights(layers=each.layers, tensors=each.tensors, example=each.example)
                for each in found.unchecked
            ],
        )

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        """Stop sampling until Resume or the end of the time to live."""
        del context
        mode = PAUSE_MODES.get(request.mode)
        if mode is None:
            raise SluiceError.invalid_argument("mode", "set ABORT, WAIT or KEEP")
        if len(request.owner) > MAX_NAME:
            raise SluiceError.invalid_argument("owner", f"at most {MAX_NAME} characters")
        engine, ttl_s = self._engine.ready, request.ttl.ToNanoseconds() / 1e9
        try:
            self._pauses.begin(request.owner, ttl_s, time.monotonic())
        except PauseHeldError as error:
            raise SluiceError.aborted("PAUSE_HELD", f"{error}: wait, or ask its owner to resume") from error
        except ValueError as error:
            raise SluiceError.invalid_argument("owner" if not request.owner else "ttl", str(error)) from error
        try:
            async with asyncio.timeout(ttl_s):
                await engine.pause(mode)
        except BaseException as error:  # even if the caller disconnects, the engine must not stay half paused
            self._pauses.forget(request.owner)
            await asyncio.shield(asyncio.create_task(self._resume_engine()))
            if isinstance(error, TimeoutError):
                why = f"requests did not end within the pause's ttl of {ttl_s:g} s; the replica keeps sampling:"
                raise SluiceError(
                    grpc.StatusCode.DEADLINE_EXCEEDED, "PAUSE_DEADLINE", f"{why} raise ttl, or pause with KEEP"
                ) from error
            if isinstance(error, EngineError):
                raise SluiceError.unavailable("PAUSE_FAILED", f"{error}; the replica keeps sampling") from error
            raise
        frozen = self._requests.samples if mode is PauseMode.KEEP else 0
        return pb.PauseResponse(frozen_requests=frozen)

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        """End a pause of the same owner."""
        del context
        try:
            if self._pauses.end(request.owner, time.monotonic()):
                await self._engine.ready.resume()
        except PauseHeldError:
            return pb.ResumeResponse(running=False)
        except EngineError as error:
            raise SluiceError.unavailable("RESUME_FAILED", f"{error}; the engine restarts") from error
        return pb.ResumeResponse(running=True)

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        """Give an adapter version a name that requests can use."""
        del context
        if not ADAPTER_NAME.fullmatch(request.adapter):
            raise SluiceError.invalid_argument("adapter", f"a name of the form {ADAPTER_NAME.pattern}")
        if not request.HasField("version"):
            raise SluiceError.invalid_argument("version", "name the adapter version to load")
        await self._weights.load_adapter(request.adapter, Version.from_proto(request.version))
        return pb.LoadAdapterResponse()

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        """Remove the name of an adapter."""
        del context
        await self._weights.unload_adapter(request.adapter)
        return pb.UnloadAdapterResponse()

    async def AbortRequests(self, request: pb.AbortRequestsRequest, context: Context) -> pb.AbortRequestsResponse:
        """End requests in progress."""
        del context
        if len(request.request_ids) > MAX_ABORTED:
            raise SluiceError.invalid_argument("request_ids", f"at most {MAX_ABORTED} in one call")
        engine = self._engine.ready
        names = list(request.request_ids) or self._requests.request_ids
        try:
            aborted = [await engine.abort(name) for name in names]
        except EngineError as error:
            raise SluiceError.unavailable("ABORT_FAILED", f"{error}; its requests end with it") from error
        return pb.AbortRequestsResponse(aborted=sum(aborted))

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Take no new requests. End when the requests in progress have ended, or the grace is over."""
        del context
        grace_s = request.grace.ToNanoseconds() / 1e9 if request.HasField("grace") else self._drain_s
        if grace_s < 0:
            raise SluiceError.invalid_argument("grace", f"at least 0 s, not {grace_s:g} s")
        self._drain.begin(grace_s)
        log.info("draining", samples=self._requests.samples, grace_s=round(self._drain.left_s, 3))
        return pb.DrainResponse(samples_left=self._requests.samples, grace_left=_duration(self._drain.left_s))

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """Report version, load and health, at once or when an awaited version serves."""
        del context
        wait_s = request.wait.ToNanoseconds() / 1e9
        if not 0 <= wait_s <= MAX_WAIT_S:
            raise SluiceError.invalid_argument("wait", f"between 0 and {MAX_WAIT_S:.0f} s, not {wait_s:g} s")
        if request.HasField("awaited_version") and wait_s:
            await self._engine.until_serving(Version.from_proto(request.awaited_version), wait_s)
        status, weights = self._engine.current.status(), self._weights.status()
        engine_state = self._engine_state(status)
        response = pb.GetStatusResponse(
            replica=self._replica,
            state=pb.REPLICA_STATE_DRAINING if self._drain.begun.is_set() else engine_state,
            policy_version=status.version.to_proto(),
            running=status.running,
            queued=status.queued,
            kv_cache_usage=status.kv_cache_usage,
            generated_tokens=status.generated_tokens,
            prompt_tokens=status.prompt_tokens,
            updates_applied=weights.updates,
            last_pause=_duration(weights.last_update.pause_s if weights.last_update else 0.0),
            weight_policy=pb.WeightPolicyMode.Value(f"WEIGHT_POLICY_MODE_{weights.policy.mode.name}"),
            weight_policy_owner=weights.policy.owner,
            last_error=weights.last_error,
            start_time=self._started,
            max_running=status.max_running,
            engine_restarts=self._engine.restarts,
            adapters=loaded_adapters(self._engine.current),
            engine_steps=status.steps,
            preemptions=status.preemptions,
            engine_state=engine_state,
        )
        if self._drain.begun.is_set():
            response.drain_left.CopyFrom(_duration(self._drain.left_s))
        if weights.last_update is not None:
            response.last_update.CopyFrom(weights.last_update.to_proto())
        if weights.staged_version is not None:
            response.staged_version.CopyFrom(weights.staged_version.to_proto())
        return response

    def _engine_state(self, status: EngineStatus) -> pb.ReplicaState.ValueType:
        if self._engine.recovering or not status.healthy:
            return pb.REPLICA_STATE_RECOVERING
        if status.switching:
            return pb.REPLICA_STATE_SWITCHING
        return pb.REPLICA_STATE_PAUSED if status.paused else pb.REPLICA_STATE_SERVING


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


class ReplicaMetrics(Collector):
    """Prometheus metrics of the engine and of weight updates; a fleet is scaled by `sluice_rollout_queued`."""

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
            (
                "last_pause_seconds",
                "Pause of the last update.",
                weights.last_update.pause_s if weights.last_update else 0.0,
            ),
        ):
            yield GaugeMetricFamily(f"sluice_rollout_{name}", text, value=float(value))
        for name, text, value in (
            ("generated_tokens", "Tokens sampled.", status.generated_tokens),
            ("prompt_tokens", "Prompt tokens processed.", status.prompt_tokens),
            ("updates_applied", "Weight updates applied.", weights.updates),
            ("engine_restarts", "Engine restarts.", self._engine.restarts),
            ("engine_steps", "Steps of the engine.", status.steps),
            ("preemptions", "Samples that lost their place in the KV cache.", status.preemptions),
        ):
            yield CounterMetricFamily(f"sluice_rollout_{name}", text, value=float(value))
