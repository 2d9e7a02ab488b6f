"""What operators see of a run: its state, its events, its load."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TypeAlias

from google.protobuf.timestamp_pb2 import Timestamp

from orchestrator_svc.events import EventLog
from orchestrator_svc.replicas import Replica, ReplicaPool
from orchestrator_svc.scheduler import Scheduler, Stage
from orchestrator_svc.waiting_shares import HeldTime, ShareSince, bottleneck
from sluice.v1 import orchestrator_pb2
from sluice.versions import Version

__all__ = ["RunStatus"]

RunState: TypeAlias = orchestrator_pb2.RunState.ValueType


class RunStatus:
    """Keeps the run's state and tells its events.

    Args:
        run: Name of the run.
        scheduler: Its groups and batches.
        max_steps: Batches to apply in all.
        start: Number of this process among those of the run, from 1.
    """

    def __init__(self, run: str, scheduler: Scheduler, max_steps: int, start: int) -> None:
        self.events = EventLog(start)
        self.state: RunState = orchestrator_pb2.RUN_STATE_STARTING
        self.error = ""
        self.metrics: dict[str, float] = {}
        self.max_staleness_seen = 0
        self.running_episodes = 0
        now = time.monotonic()
        self.trainer_idle, self.dispatch_blocked, self.rollout_idle = (HeldTime(now) for _ in range(3))
        self._load_shares = self.shares()
        self._run, self._scheduler, self._max_steps = run, scheduler, max_steps
        self._started = Timestamp()
        self._started.GetCurrentTime()
        self._pool: ReplicaPool | None = None
        self._bottleneck = ""
        self._last_load = (now, 0)

    def watch_pool(self, pool: ReplicaPool) -> None:
        """The pool whose replicas are described."""
        self._pool = pool

    def shares(self) -> tuple[ShareSince, ShareSince, ShareSince]:
        """Shares of time since one looked last: trainer idle, dispatch blocked, rollout idle."""
        now = time.monotonic()
        return (
            ShareSince(self.trainer_idle, now),
            ShareSince(self.dispatch_blocked, now),
            ShareSince(self.rollout_idle, now),
        )

    def enter(self, state: RunState, message: str = "") -> None:
        """The run changed its state."""
        if state == self.state and not message:
            return
        self.state = state
        changed = orchestrator_pb2.RunStateChanged(state=state, message=message)
        self.events.append(orchestrator_pb2.RunEvent(state_changed=changed))

    def group_scored(self, group_id: str, task_id: str, rewards: list[float]) -> None:
        """A group was scored."""
        scored = orchestrator_pb2.GroupScored(group_id=group_id, task_id=task_id, rewards=rewards)
        self.events.append(orchestrator_pb2.RunEvent(group_scored=scored))

    def step_finished(self, version: Version, metrics: Mapping[str, float]) -> None:
        """A batch was applied."""
        self.metrics = dict(metrics)
        self.max_staleness_seen = max(self.max_staleness_seen, int(metrics.get("staleness/max", 0)))
        finished = orchestrator_pb2.StepFinished(
            step=version.number, policy_version=version.to_proto(), metrics=self.metrics
        )
        self.events.append(orchestrator_pb2.RunEvent(step_finished=finished))

    def evaluation_finished(self, version: Version, environment: str, metrics: Mapping[str, float]) -> None:
        """An evaluation ended."""
        finished = orchestrator_pb2.EvaluationFinished(
            policy_version=version.to_proto(), environment=environment, metrics=metrics
        )
        self.events.append(orchestrator_pb2.RunEvent(evaluation_finished=finished))

    def checkpoint_written(self, name: str, version: Version) -> None:
        """A checkpoint is complete."""
        written = orchestrator_pb2.CheckpointWritten(name=name, policy_version=version.to_proto())
        self.events.append(orchestrator_pb2.RunEvent(checkpoint_written=written))

    def replica_changed(self, replica: Replica) -> None:
        """A replica came, went or changed its version."""
        changed = orchestrator_pb2.ReplicaChanged(replica=replica.describe())
        self.events.append(orchestrator_pb2.RunEvent(replica_changed=changed))

    def report_load(self) -> None:
        """Tell the load since the last report."""
        now = time.monotonic()
        tokens = self._pool.generated_tokens() if self._pool is not None else 0
        then, before = self._last_load
        self._last_load = (now, tokens)
        idle, blocked, rollout_idle = (share.take(now) for share in self._load_shares)
        self._bottleneck = bottleneck(idle, rollout_idle)
        scheduler = self._scheduler
        load = orchestrator_pb2.LoadReport(
            # A replica that restarts counts from 0 again.
            generated_tokens_per_s=max(0, tokens - before) / (now - then) if now > then and before else 0.0,
            live_groups=len(scheduler.groups),
            max_live_groups=scheduler.bound.capacity,
            ready_groups=scheduler.count(Stage.READY),
            queued_batches=len(scheduler.batches),
            trainer_idle=idle,
            dispatch_blocked=blocked,
            bottleneck=self._bottleneck,
        )
        self.events.append(orchestrator_pb2.RunEvent(load=load))

    def describe(self) -> orchestrator_pb2.Run:
        """The run as it stands."""
        scheduler, accounting = self._scheduler, self._scheduler.accounting
        return orchestrator_pb2.Run(
            name=f"runs/{self._run}",
            state=self.state,
            step=scheduler.applied,
            max_steps=self._max_steps,
            policy_version=Version(scheduler.epoch, scheduler.applied).to_proto(),
            live_groups=len(scheduler.groups),
            max_live_groups=scheduler.bound.capacity,
            running_episodes=self.running_episodes,
            max_staleness=scheduler.bound.max_staleness,
            max_staleness_seen=self.max_staleness_seen,
            trajectories_accepted=accounting.accepted,
            trajectories_trained=accounting.trained,
            trajectories_dropped=dict(accounting.dropped),
            replicas=[each.describe() for each in self._pool.replicas] if self._pool is not None else [],
            error=self.error,
            start_time=self._started,
            metrics=self.metrics,
            bottleneck=self._bottleneck,
        )
