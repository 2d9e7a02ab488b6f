"""A replica's engine and the versions of its weights: restarts the engine if it dies, and keeps it on the version that its policy asks for.

The receiver stages a version, `EngineSupervisor.apply` gives it to the engine, and the engine's status says which version serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import grpc
import structlog

from rollout_svc.config import RolloutConfig
from rollout_svc.engines.adapters import AdaptersFullError, LoraEngine
from rollout_svc.engines.base import (
    EngineError,
    EngineTimeoutError,
    InferenceEngine,
    UncheckedWeights,
    UnfitVersionError,
)
from sluice.config import CommonConfig, FailedForGoodError
from sluice.rpc import SluiceError, connect
from sluice.v1 import rollout_pb2
from sluice.versions import BASE, Version
from weightsync.receiver import PolicyMode, PullLimits, ReceiverOptions, ReceiverStatus, WeightReceiver
from weightsync.staged import ApplyError, ApplyReport, HeldVersions, StagedAdapter, StagedVersion, VersionRefusedError

T = TypeVar("T")

log = structlog.get_logger(__name__)

CHECK_S = 0.25
"""Seconds between two checks of the engine. Reading its status is cheap."""

BACKOFF_S = 1.0

MODES = {
    rollout_pb2.WEIGHT_POLICY_MODE_FOLLOW: PolicyMode.FOLLOW,
    rollout_pb2.WEIGHT_POLICY_MODE_HOLD: PolicyMode.HOLD,
    rollout_pb2.WEIGHT_POLICY_MODE_TARGET: PolicyMode.TARGET,
}
_APPLY_STEPS = 3
"""Steps of an apply (prepare; pause and load; go back if that fails), each of which may take `deadlines.apply_s`."""


class EngineSupervisor:
    """Restarts one engine whenever it dies. The receiver of weights uses it as its engine (`weightsync.staged.Engine`).

    Args:
        engine: A started engine.
        restarts: Maximum number of restarts in a row.
        on_change: Called with True when the engine serves again, and with False when it has died.
    """

    def __init__(self, engine: InferenceEngine, restarts: int, on_change: Callable[[bool], object]) -> None:
        self.current = engine
        self.restarts = 0
        """Number of restarts."""
        self.failures = 0
        """Deaths and failed starts since it was last healthy."""
        self._allowed = restarts
        self._on_change = on_change
        self._recovering = False
        self._applied = asyncio.Event()  # set, and replaced, when another version serves

    @property
    def recovering(self) -> bool:
        """Return whether the engine died and has not been restarted yet."""
        return self._recovering

    @property
    def ready(self) -> InferenceEngine:
        """Return the engine if it can take requests.

        Raises:
            SluiceError: UNAVAILABLE while it restarts.
        """
        if self.held() is None:
            raise SluiceError.unavailable("ENGINE_RECOVERING", "the engine restarts; retry", BACKOFF_S)
        return self.current

    # --- weights --------------------------------------------------------------------------------------------------

    @property
    def serves_adapters(self) -> bool:
        """Return whether the engine serves LoRA adapters."""
        return isinstance(self.current, LoraEngine) and self.current.lora_limits is not None

    @property
    def lora(self) -> LoraEngine:
        """Return the engine if it serves adapters and can take requests.

        Raises:
            SluiceError: FAILED_PRECONDITION if it serves no adapters; UNAVAILABLE while it restarts.
        """
        engine = self.ready
        if not isinstance(engine, LoraEngine) or engine.lora_limits is None:
            raise SluiceError.failed_precondition(
                "NO_ADAPTERS", "this replica serves no adapters: start it with rollout.lora.enabled = true"
            )
        return engine

    def held(self) -> HeldVersions | None:
        """Return the versions that the engine holds; None while it restarts."""
        return None if self._recovering else self.current.held()

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        """Switch the engine to a staged version.

        Raises:
            VersionRefusedError: if it does not fit the model or the settings.
            ApplyError: if it does not serve.
        """
        with _apply_errors(staged.version):
            return await self._tell(self.ready.apply(staged))

    async def apply_adapter(self, staged: StagedAdapter) -> ApplyReport:
        """Use an adapter for new requests.

        Raises:
            VersionRefusedError: if it does not fit the model or the settings.
            ApplyError: if it does not serve.
        """
        with _apply_errors(staged.version):
            return await self._tell(self.lora.apply_adapter(staged))

    async def _tell(self, applying: Awaitable[ApplyReport]) -> ApplyReport:
        try:
            return await applying
        finally:
            self._applied.set()
            self._applied = asyncio.Event()

    async def until_serving(self, version: Version, most_s: float) -> None:
        """Wait until the engine serves this version or a newer one, at most `most_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                while self.current.status().version < version:
                    await self._applied.wait()

    # --- restarts -------------------------------------------------------------------------------------------------

    async def watch_forever(self, restart: Callable[[Callable[[], Awaitable[Version]]], Awaitable[Version]]) -> None:
        """Check the engine regularly, and restart it when it has died.

        Args:
            restart: Runs the given restart while no version is being applied.

        Raises:
            EngineError: if it died more often in a row than the maximum number of restarts.
        """
        while True:
            await asyncio.sleep(CHECK_S)
            if self.current.held() is not None:
                self.failures = 0
                continue
            self.failures += 1
            if self.failures > self._allowed:
                raise EngineError(
                    f"the engine died {self.failures} times in a row; see the log above for the first cause"
                )
            self._recovering = True
            self._on_change(False)
            log.error("engine died; restarting it", attempt=self.failures)
            try:
                version = await restart(self.current.restart)
            except EngineError as error:
                log.error("engine did not restart", error=str(error))  # noqa: TRY400 - the message says it all
                version = self.current.status().version
                if self.current.held() is None:  # it may serve the base model if the version failed to load
                    await asyncio.sleep(BACKOFF_S * self.failures)
                    continue
            self.restarts += 1
            self._recovering = False
            self._on_change(True)
            log.info("engine serves again", version=str(version))


@contextmanager
def _apply_errors(version: Version) -> Iterator[None]:
    """Turn errors of an engine into the receiver's ApplyError."""
    try:
        yield
    except UnfitVersionError as error:
        raise VersionRefusedError(f"version {version} was not applied: {error}") from error
    except (EngineError, SluiceError) as error:
        raise ApplyError(f"version {version} was not applied: {error}") from error


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of a comparison of the live weights with their files: tensors that differ, and tensors that could not be compared."""

    different: list[str]
    unchecked: tuple[UncheckedWeights, ...]


class ReplicaWeights:
    """Keeps the engine on the version that its policy asks for."""

    def __init__(self, common: CommonConfig, config: RolloutConfig, engine: EngineSupervisor) -> None:
        self._config, self._engine, self._run = config, engine, common.run
        self._channel: grpc.aio.Channel | None = None
        self._receiver: WeightReceiver | None = None
        if config.follow_weights:
            self._channel = connect(common.peers.weightsync, common.security, role="replica")
            self._receiver = WeightReceiver(
                self._channel,
                common.run,
                config.replica,
                config.stage_dir,
                engine,
                options=ReceiverOptions(
                    apply_deadline_s=_APPLY_STEPS * config.deadlines.apply_s,
                    pull=PullLimits(deadline_s=config.deadlines.pull_s, copy_wait_s=config.deadlines.pull_s),
                    local_files=config.local_files,
                    connect_to=partial(connect, security=common.security, role="replica")
                    if config.use_relays
                    else None,
                ),
            )

    async def run_forever(self) -> None:
        """Follow weight sync until cancelled. A replica that does not follow only waits.

        Raises:
            FailedForGoodError: if the first version of the run does not fit the replica's model or settings, so that no version would.
        """
        if self._receiver is None:
            await asyncio.Event().wait()
        else:
            try:
                await self._receiver.run_forever()
            except VersionRefusedError as error:
                raise FailedForGoodError(
                    f"{error}; no version of run {self._run} can be served: give trainer and replicas the same model"
                ) from error

    async def close(self) -> None:
        """Close the connection and remove staged files."""
        if self._receiver is not None:
            await self._receiver.close()
        if self._channel is not None:
            await self._channel.close()

    async def set_policy(
        self, wire_mode: rollout_pb2.WeightPolicyMode.ValueType, version: Version | None, owner: str, ttl_s: float
    ) -> Version:
        """Set which versions the replica takes.

        Returns:
            The version that serves now.

        Raises:
            SluiceError: INVALID_ARGUMENT, or FAILED_PRECONDITION while another owner holds the policy.
        """
        mode = MODES.get(wire_mode)
        if mode is None:
            raise SluiceError.invalid_argument("mode", "set FOLLOW, HOLD or TARGET")
        self._following.set_policy(mode, version, owner=owner, ttl_s=ttl_s or None)
        return self._engine.current.status().version

    async def update_to(self, version: Version | None) -> ApplyReport:
        """Fetch and apply a version now; None means the newest one.

        Raises:
            SluiceError: as `WeightReceiver.update_to`; FAILED_PRECONDITION while another owner holds the policy.
        """
        deadlines = self._config.deadlines
        return await self._following.update_to(version, deadlines.pull_s + _APPLY_STEPS * deadlines.apply_s)

    async def reload_base(self) -> ApplyReport:
        """Return to the base model on disk as version (0, 0).

        Raises:
            SluiceError: UNAVAILABLE if the engine could not.
        """
        try:
            return await self._exclusively(self._engine.ready.reload_base)
        except EngineError as error:
            raise SluiceError.unavailable("RELOAD_FAILED", str(error)) from error

    async def verify(self, fraction: float) -> tuple[Version, Verification]:
        """Compare the engine's live weights, or a fraction of their tensors, with the files of their version.

        Returns:
            The version of the weights, and the result of the comparison.

        Raises:
            SluiceError: FAILED_PRECONDITION if the files are not on this host or the engine cannot compare them,
                DEADLINE_EXCEEDED if the comparison takes too long, UNAVAILABLE if the engine failed.
        """

        async def compare(staged: StagedVersion | None) -> Verification:
            engine = self._engine.ready
            different = await engine.verify_weights(staged, fraction)
            return Verification(different, engine.status().unchecked)

        try:
            if self._receiver is None:
                return BASE, await compare(None)
            version, found = await self._receiver.verify(compare)
        except EngineTimeoutError as error:
            raise SluiceError(grpc.StatusCode.DEADLINE_EXCEEDED, "VERIFY_DEADLINE", str(error)) from error
        except EngineError as error:
            if not self._engine.current.status().healthy:
                raise SluiceError.unavailable("VERIFY_FAILED", f"{error}; retry when it serves again") from error
            raise SluiceError.failed_precondition("VERIFY_REFUSED", str(error)) from error
        if found.different:
            log.error("live weights differ from their files", version=str(version), tensors=found.different[:3])
        return version, found

    async def load_adapter(self, name: str, version: Version) -> None:
        """Fetch an adapter version and give it a name for requests. Idempotent.

        Raises:
            SluiceError: NOT_FOUND, or FAILED_PRECONDITION if it cannot be served beside the present weights.
        """
        engine, deadlines = self._engine.lora, self._config.deadlines
        try:
            await self._following.with_adapter(
                version, partial(engine.load_named, name), deadlines.pull_s + deadlines.apply_s
            )
        except AdaptersFullError as error:
            raise SluiceError.failed_precondition("ADAPTERS_FULL", str(error)) from error
        except EngineError as error:
            if not self._engine.current.status().healthy:
                raise SluiceError.unavailable("ADAPTER_FAILED", f"{error}; retry") from error
            raise SluiceError.failed_precondition("ADAPTER_REFUSED", str(error)) from error

    async def unload_adapter(self, name: str) -> None:
        """Remove the name of an adapter and end its requests. Idempotent.

        Raises:
            SluiceError: FAILED_PRECONDITION if this replica serves no adapters, UNAVAILABLE if the engine failed.
        """
        try:
            await self._engine.lora.unload_named(name)
        except EngineError as error:
            raise SluiceError.unavailable("ADAPTER_FAILED", f"{error}; its requests end with the engine") from error

    async def restart_engine(self, restart: Callable[[], Awaitable[Version]]) -> Version:
        """Restart the engine while no version is being applied."""
        return await self._exclusively(restart)

    def waits_for(self) -> Iterator[str]:
        """Yield why the replica waits for the run's weights, if it follows them."""
        if self._receiver is None:
            return
        status = self._receiver.status()
        serving = self._engine.current.status().version
        if serving == BASE:
            if status.newest is None:
                yield "the first version of the run's weights: the trainer has published none"
            else:
                yield f"version {status.newest} of the run's weights, the first one of this replica"

    def status(self) -> ReceiverStatus:
        """Return the state of the weights."""
        return ReceiverStatus() if self._receiver is None else self._receiver.status()

    @property
    def _following(self) -> WeightReceiver:
        if self._receiver is None:
            raise SluiceError.failed_precondition(
                "WEIGHTS_FIXED", "this replica serves its base model alone: start it with follow_weights = true"
            )
        return self._receiver

    async def _exclusively(self, action: Callable[[], Awaitable[T]]) -> T:
        return await (self._receiver.run_exclusive(action) if self._receiver is not None else action())
