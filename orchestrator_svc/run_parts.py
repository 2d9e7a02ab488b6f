"""What the loops of a run share."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from orchestrator_svc.config import OrchestratorConfig
from orchestrator_svc.envs.calls import EnvironmentCalls
from orchestrator_svc.episodes import EpisodeRunner
from orchestrator_svc.journal import Journal
from orchestrator_svc.recorder import Recorder
from orchestrator_svc.replicas import PolicyEngine, ReplicaPool
from orchestrator_svc.scheduler import Scheduler
from orchestrator_svc.signals import Signal
from orchestrator_svc.status import RunStatus, TrajectoryHistory
from orchestrator_svc.task_stream import TaskStream
from orchestrator_svc.trainer_link import TrainerLink
from sluice.config import CommonConfig
from sluice.v1 import orchestrator_pb2

__all__ = ["RunParts", "group_name"]


@dataclass
class RunParts:
    """The parts of one run, built by `app`.

    Attributes:
        changed: Notified whenever something happened that a loop may wait for.
        recent: Trajectories whose fate is known.
        paused: Whether an operator stopped dispatch.
        began: Monotonic seconds at which this process took up the run.
        elapsed_before_s: Seconds that earlier processes of the run lasted.
        generated_before: What earlier processes of the run generated, by name.
    """

    common: CommonConfig
    config: OrchestratorConfig
    scheduler: Scheduler
    journal: Journal
    status: RunStatus
    pool: ReplicaPool
    engine: PolicyEngine
    episodes: EpisodeRunner
    tasks: TaskStream
    trainer: TrainerLink
    recorder: Recorder
    environment_calls: EnvironmentCalls
    changed: Signal
    recent: TrajectoryHistory = field(default_factory=TrajectoryHistory)
    paused: bool = False
    began: float = field(default_factory=time.monotonic)
    elapsed_before_s: float = 0.0
    generated_before: Counter[str] = field(default_factory=Counter)
    _records: dict[int, list[orchestrator_pb2.TrajectoryRecord]] = field(default_factory=dict)

    @property
    def elapsed_s(self) -> float:
        """Seconds that the run lasted so far, earlier processes included."""
        return self.elapsed_before_s + time.monotonic() - self.began

    def keep_records(self, group: int, records: list[orchestrator_pb2.TrajectoryRecord]) -> None:
        """Remember a live group's trajectories."""
        self._records[group] = records

    async def records(self, group: int) -> list[orchestrator_pb2.TrajectoryRecord]:
        """A live group's trajectories, from memory or the journal.

        Raises:
            JournalError: if the journal cannot read them.
        """
        if group not in self._records:
            self._records[group] = await self.journal.read_group(group)
        return self._records[group]

    def forget_records(self, group: int) -> list[orchestrator_pb2.TrajectoryRecord]:
        """A group is no longer live; returns what was in memory."""
        return self._records.pop(group, [])


def group_name(number: int) -> str:
    """Name of a group in messages."""
    return f"g{number}"
