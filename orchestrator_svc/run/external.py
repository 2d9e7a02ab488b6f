"""The workflow of external episodes: offer a group, wait for its end, and make trajectories of what was sampled.

An evaluation does the same in a temporary journal of its own: its facts do not belong to the run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import structlog

from orchestrator_svc.config import ExternalConfig
from orchestrator_svc.journal.external import EPISODE, ExternalEpisodes, Session, Target
from orchestrator_svc.journal.ledger import Group
from orchestrator_svc.journal.records import SharedRecord
from orchestrator_svc.run.report import NOT_TRAINED
from orchestrator_svc.run.workflows import EpisodeData
from orchestrator_svc.sessions.desk import Desk, NoAgentError, Posed, may_be_put_off
from orchestrator_svc.sessions.trajectories import Built, TreeError, build, episode_reward
from sluice.environments.processes import EnvironmentProcesses
from sluice.environments.wire import chat_messages
from sluice.rpc import SluiceError
from sluice.sampling.policy import PolicyEngine
from sluice.v1 import journal_pb2, orchestrator_pb2, session_pb2, tokens_pb2

log = structlog.get_logger(__name__)

EVALUATED = "EVALUATED"
"""Reason for dropping the group of an evaluation: nothing of it is trained."""


class External:
    """Lets external agents run the episodes of a group.

    Leases, sessions and rewards outlast a restart, so a group continues where its episodes stand.

    Args:
        environment: Poses the task if it has `messages`, and scores episodes without a reward if it has `score`.
        desk: Where the episodes are offered.
        limits: Times and bounds.
    """

    def __init__(self, environment: EnvironmentProcesses, desk: Desk, limits: ExternalConfig) -> None:
        self._environment, self._desk, self._limits = environment, desk, limits

    async def arun_episode(self, engine: PolicyEngine, data: EpisodeData) -> list[SharedRecord]:
        """Offer the episodes, and return the trajectories of those that were submitted.

        Raises:
            SluiceError: if no agents can be asked, as in an evaluation.
        """
        if data.log is None:
            raise SluiceError.failed_precondition(
                "NO_EXTERNAL_EPISODES",
                "evaluations between the steps of a run offer external agents nothing: evaluate its weights with sluice eval --agent",
            )
        number = int(data.group_id.removeprefix("g"))
        submitted = await self.submitted(number, data)
        built = await asyncio.gather(*(self._trajectories(engine, data, each) for each in submitted))
        return [record for records in built for record in records]

    async def submitted(self, number: int, data: EpisodeData) -> list[Session]:
        """Offer the episodes of a running group, and return those that were submitted when all have ended.

        Raises:
            NoAgentError: if the group was put off before an agent came.
        """
        posed = chat_messages(await self._environment.messages(data.task)) if self._environment.poses else []
        self._desk.offer(number, tokens_pb2.Conversation(messages=posed))
        try:
            external = await self._ended(number)
        finally:
            self._desk.withdraw(number)
        return [each for each in external.sessions if each.submission is not None]

    async def _ended(self, number: int) -> ExternalEpisodes:
        """Wait until all episodes of a group have ended, or its time is over. Episodes that were submitted by then are trained."""
        desk, groups = self._desk, self._desk.journal.ledger.groups
        until: float | None = None
        while True:
            external = groups[number].external
            if external is not None and external.complete:
                return external
            if desk.take_put_off(number) and may_be_put_off(groups[number]):
                raise NoAgentError
            now = desk.clock()
            if until is None and external is not None:  # it waits for its first agent without a limit
                until = now + self._limits.group_s
            if external is not None and until is not None and now >= until:
                left = sum(not each.settled for each in external.slots)
                log.warning(
                    "episodes of external agents are given up: their group's time is over", group=number, episodes=left
                )
                desk.lending.close(number)
                return external
            await desk.waiting.until(number, None if until is None else until - now)

    async def _trajectories(self, engine: PolicyEngine, data: EpisodeData, session: Session) -> list[SharedRecord]:
        """Return the trajectories of a session; empty ones, which count as failed, if it cannot be built or scored."""
        try:
            built = await self.built(engine, data, session)
        except (SluiceError, TreeError) as error:
            log.error("an external episode is left out", session=session.name, error=str(error))  # noqa: TRY400 - the message is complete
            return [_empty(session, each) for each in session.trajectory_ids]
        for reason, tokens in built.not_trained.items():
            engine.counts[f"{NOT_TRAINED}{reason}"] += tokens
        return built.records

    async def built(self, engine: PolicyEngine, data: EpisodeData, session: Session) -> Built:
        """Return the trajectories of a session, scored by the environment where the agent gave no reward.

        Raises:
            SluiceError: DATA_LOSS if what was sampled in it was damaged.
            TreeError: if what was recorded does not fit together.
        """
        made = [await self._desk.generation(session, each) for each in session.requests.values()]
        rewards = session.rewards
        if episode_reward(session.submitted_branches, rewards) is None and self._environment.scores:
            rewards = await self._scored(data, session, made)
        engine.counts["requests"] += len(made)
        engine.counts["tokens"] += sum(len(sample.token_ids) for each in made for sample in each.response.samples)
        return await asyncio.to_thread(build, session, made, dict(rewards), data.task.task_id)

    async def _scored(
        self, data: EpisodeData, session: Session, made: list[session_pb2.RecordedGeneration]
    ) -> dict[Target, float]:
        """Return the rewards of a session, together with the environment's reward for the last message of each branch."""
        said = {
            f"{each.request_id}/{index}": sample.message.content if sample.HasField("message") else sample.text
            for each in made
            for index, sample in enumerate(each.response.samples)
        }
        branches = session.submitted_branches
        values = await self._environment.score(data.task, [said[each[-1]] for each in branches])
        targets = [EPISODE] if len(branches) == 1 else [Target(branch=each[-1]) for each in branches]
        return session.rewards | {
            target: value for target, value in zip(targets, values, strict=True) if value is not None
        }


def _empty(session: Session, trajectory_id: str) -> SharedRecord:
    """Return a trajectory without tokens. With it the journal records that the episode has a trajectory and why it is not trained."""
    trajectory = tokens_pb2.Trajectory(
        trajectory_id=trajectory_id, group_id=f"g{session.group}", episode_id=f"g{session.group}-{session.episode}"
    )
    return SharedRecord(orchestrator_pb2.TrajectoryRecord(trajectory=trajectory))


class EvaluationGroups:
    """The offered groups of evaluations, which the desk of an evaluation asks for."""

    def __init__(self) -> None:
        self._posed: dict[int, Posed] = {}

    def posed(self, group: Group) -> Posed | None:
        """Return the task of a group and how it is sampled."""
        return self._posed.get(group.number)

    @contextlib.contextmanager
    def drawn(self, desk: Desk, environment: str, data: EpisodeData) -> Iterator[int]:
        """Make a group in the journal of the desk, and drop it when the block ends; yield its number."""
        number = desk.journal.ledger.next_group
        self._posed[number] = Posed(
            data.task,
            data.sampling.params(data.task.max_tokens),
            evaluation=True,
            chat_template_kwargs=data.sampling.chat_template_kwargs,
        )
        drawn = journal_pb2.TaskDrawn(
            environment=environment,
            task_id=data.task.task_id,
            group=number,
            episodes=data.episodes,
            policy_version=data.version.to_proto(),
        )
        desk.journal.record_fact(journal_pb2.Fact(task_drawn=drawn))
        try:
            yield number
        finally:
            dropped = journal_pb2.GroupDropped(group=number, reason=EVALUATED)
            desk.journal.record_fact(journal_pb2.Fact(group_dropped=dropped))
            del self._posed[number]


class ExternalEvaluation:
    """Lets external agents run the episodes of an evaluation.

    Args:
        name: Name of the environment.
        environment: As for `External`.
        desk: Has a journal of its own.
        groups: The groups that the desk asks for.
    """

    def __init__(self, name: str, environment: EnvironmentProcesses, desk: Desk, groups: EvaluationGroups) -> None:
        self._name, self._desk, self._groups = name, desk, groups
        self._external = External(environment, desk, desk.limits)

    async def arun_episode(self, engine: PolicyEngine, data: EpisodeData) -> list[SharedRecord]:
        """Offer the episodes, and return the trajectories of those that were submitted.

        Raises:
            SluiceError: DATA_LOSS if what was sampled was damaged.
            TreeError: if what was recorded does not fit together.
        """
        with self._groups.drawn(self._desk, self._name, data) as number:
            sessions = await self._external.submitted(number, data)
            built = [await self._external.built(engine, data, each) for each in sessions]
        records = [record for each in built for record in each.records]
        for trajectory in (each.trajectory for each in records):
            trajectory.group_id = data.group_id
            trajectory.episode_id = data.group_id + trajectory.episode_id.removeprefix(f"g{number}")
            trajectory.trajectory_id = data.group_id + trajectory.trajectory_id.removeprefix(f"g{number}")
        return records
