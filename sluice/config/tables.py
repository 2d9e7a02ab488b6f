"""The settings of services that decisions about several services read.

A service's table takes part in these decisions if its class derives from the class here. A service of another package need not take
part. The service's own declaration describes each setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from sluice.config.schema import CommonConfig, Section

_Table = TypeVar("_Table", bound=Section)


class ParallelTable(Section):
    """`trainer.parallel`."""

    dp_replicate: int
    dp_shard: int
    tp: int
    cp: int
    pp: int


class TrainedAdapterTable(Section):
    """`trainer.lora`."""

    rank: int
    merge: bool | str


class FrozenModelTable(Section):
    """`trainer.reference` and `trainer.teacher`."""

    model: str


class TrainerDeadlinesTable(Section):
    """`trainer.deadlines`."""

    step_s: float
    push_s: float
    save_s: float


class Objective(Protocol):
    """An objective of the trainer, with the defaults of its preset filled in."""

    @property
    def name(self) -> str:
        """The preset, or the import path of the user's own loss."""

    @property
    def advantage(self) -> str:
        """The advantage estimator; empty if none is read."""

    @property
    def runs_estimator(self) -> bool:
        """Whether the trainer estimates the advantages."""


class TrainerTable(Section):
    """`[trainer]`."""

    backend: str | None
    device: str
    dtype: str
    publish_dtype: str
    parallel: ParallelTable
    lora: TrainedAdapterTable
    reference: FrozenModelTable
    teacher: FrozenModelTable
    deadlines: TrainerDeadlinesTable

    @property
    def all_objectives(self) -> Mapping[str, Objective]:
        """All objectives, by the names that trajectories use."""
        raise NotImplementedError


class ServedAdaptersTable(Section):
    """`rollout.lora`."""

    enabled: bool
    max_rank: int


class RolloutTable(Section):
    """`[rollout]`."""

    backend: str | None
    engine: str
    engine_args: dict[str, Any]
    dtype: str
    follow_weights: bool
    max_model_len: int | None
    lora: ServedAdaptersTable


class SamplingTable(Section):
    """How training episodes of an environment are sampled."""

    max_tokens: int


class EnvironmentTable(Section):
    """An environment of the run."""

    name: str
    environment: str
    args: dict[str, Any]
    environment_processes: Section
    workflow: str
    advantage: str
    objective: str
    sampling: SamplingTable

    def plays(self) -> bool:
        """Return whether the environment plays its episodes itself, as an agent does."""
        return False


class OrchestratorDeadlinesTable(Section):
    """`orchestrator.deadlines`."""

    step_s: float


class OrchestratorTable(Section):
    """`[orchestrator]`."""

    max_steps: int
    deadlines: OrchestratorDeadlinesTable

    @property
    def mix(self) -> Sequence[EnvironmentTable]:
        """The environments of the run."""
        raise NotImplementedError


class AgentsTable(Section):
    """`[agents]`."""

    agent: str
    workers: int


def trainer_of(run: CommonConfig) -> TrainerTable | None:
    """Return the table of the trainer; None if its package is not installed or its class does not derive from `TrainerTable`."""
    return _table(run, "trainer", TrainerTable)


def rollout_of(run: CommonConfig) -> RolloutTable | None:
    """Return the table of the replicas; None as for `trainer_of`."""
    return _table(run, "rollout", RolloutTable)


def orchestrator_of(run: CommonConfig) -> OrchestratorTable | None:
    """Return the table of the orchestrator; None as for `trainer_of`."""
    return _table(run, "orchestrator", OrchestratorTable)


def agents_of(run: CommonConfig) -> AgentsTable | None:
    """Return the table of the agents; None as for `trainer_of`."""
    return _table(run, "agents", AgentsTable)


def _table(run: CommonConfig, service: str, kind: type[_Table]) -> _Table | None:
    table = getattr(run, service, None)
    return table if isinstance(table, kind) else None


def environments_of(run: CommonConfig) -> Sequence[EnvironmentTable]:
    """Return the environments of the run; empty without an orchestrator."""
    orchestrator = orchestrator_of(run)
    return () if orchestrator is None else orchestrator.mix
