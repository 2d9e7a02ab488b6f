"""How an episode runs: a task in, trajectories out, sampled by an engine that hides replicas and versions.

`SingleTurn` asks one question and takes n answers; `MultiTurn` talks to an environment turn by turn. With `retry`
a question is asked again until its answer is good enough. Settings may name any other class with `arun_episode`, which is constructed with the
environment's processes and the settings.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import grpc
import structlog
import xxhash

from orchestrator_svc.config import EXTERNAL, EpisodeConfig, FilterConfig, RetryConfig
from orchestrator_svc.journal.episodes import JournaledEpisodes
from orchestrator_svc.journal.facts import Reason
from orchestrator_svc.journal.records import Beginning, SharedRecord, note_sampled
from orchestrator_svc.journal.segments import JournalError
from sluice.config import ConfigError
from sluice.environments.base import Message, Task, Turn
from sluice.environments.episode import OpenEpisode, ReplayDiffersError
from sluice.environments.processes import EnvironmentProcesses
from sluice.environments.wire import chat_messages, plain_message, tool_messages
from sluice.environments.worker import EnvironmentFailedError
from sluice.environments.worker import Reason as EnvironmentReason
from sluice.loading import load_attribute
from sluice.rpc import SluiceError
from sluice.sampling.generation import derived_seed
from sluice.sampling.policy import PolicyEngine
from sluice.sampling.served import OverdueError, ServedDeadline
from sluice.template_arguments import set_template_arguments
from sluice.v1 import orchestrator_pb2, rollout_pb2, tokens_pb2
from sluice.versions import Version, append_spans

log = structlog.get_logger(__name__)

_Answer = TypeVar("_Answer")

GroupFilter: TypeAlias = Callable[[Sequence[orchestrator_pb2.TrajectoryRecord]], bool]
"""Returns whether the trajectories of a group are trained."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an episode is sampled.

    Attributes:
        temperature: Softmax temperature; 0 is greedy, for evaluation only.
        max_tokens: Most tokens per turn, if the task does not set its own limit.
        chat_template_kwargs: Arguments of the chat template that take precedence over the run's.
    """

    temperature: float
    max_tokens: int
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    seeded: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def params(self, max_tokens: int | None) -> tokens_pb2.SamplingParams:
        """Return the parameters in the form of the contracts; `max_tokens` is the task's own limit, None if it has none."""
        return tokens_pb2.SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_tokens if max_tokens is None else max_tokens,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True, slots=True)
class EpisodeData:
    """The episodes that a workflow is asked to run.

    Attributes:
        task: The task.
        group_id: Group that its episodes belong to.
        episodes: Attempts wanted.
        sampling: How to sample.
        version: Oldest version that may sample.
        request_prefix: Prefix of the ids of all requests, unique to the group; empty lets the server choose the ids. The rest of an id
            names attempt, episode and turn, so that a repeated request is answered once.
        seed: Seed of the group's random numbers.
        log: Keeps what was sampled; None if a restart does not continue the episodes, such as in an evaluation.
    """

    task: Task
    group_id: str
    episodes: int
    sampling: Sampling
    version: Version
    request_prefix: str
    seed: int
    log: JournaledEpisodes | None = None


def loss(error: Exception) -> str:
    """Return the reason, as in GetRun, why an episode or a group that ended with an error has nothing to train."""
    if isinstance(error, OverdueError):
        return Reason.EPISODE_DEADLINE
    # If another call ended the process of this call, that says nothing about the task.
    if isinstance(error, EnvironmentFailedError) and error.culprit:
        return error.reason
    # If a replica will never accept a request, for example because its prompt is too long, the task is the cause.
    if isinstance(error, SluiceError) and error.code is grpc.StatusCode.INVALID_ARGUMENT:
        return Reason.REQUEST_REFUSED
    return Reason.EPISODE_FAILED


class RolloutWorkflow(Protocol):
    """Runs the episodes of one task. The name of the method is AReaL's, whose workflows have the same form."""

    async def arun_episode(
        self, engine: PolicyEngine, data: EpisodeData
    ) -> Sequence[orchestrator_pb2.TrajectoryRecord | SharedRecord]:
        """Run `data.episodes` attempts.

        Returns:
            One record per trajectory, with tokens and conversation, named ``group_id-...``; with the reward if the workflow
            knows it, else the environment scores the last message. Fewer than wanted if some attempts failed: run each attempt within
            `engine.episode()`, so that a late one does not fail the others. A `SharedRecord` names a beginning that it shares with others,
            which is then kept once.

        Raises:
            SluiceError: if the group as a whole cannot be run.
        """
        ...


def choose_filter(config: FilterConfig) -> GroupFilter | None:
    """Return the function that the settings name, which says whether a group is trained; None if they name none.

    Raises:
        ConfigError: if it is not found.
    """
    found: GroupFilter | None = load_attribute(config.should_accept, "filter") if config.should_accept else None
    return found


def choose_workflow(config: EpisodeConfig, environment: EnvironmentProcesses) -> RolloutWorkflow:
    """Return the workflow that the settings name; ``auto`` chooses by what the environment can do.

    Raises:
        ConfigError: if the workflow does not fit the environment, or is not found.
    """
    name = config.workflow if config.workflow != "auto" else "single_turn" if environment.single_turn else "multi_turn"
    if name == EXTERNAL or not (environment.single_turn or environment.multi_turn):
        raise ConfigError(
            f"only external agents can run episodes of environment {environment.name} as it is set, and this needs episodes of its own:"
            ' set orchestrator.workflow = "auto", and give the environment messages(task) with score(task, completion), or'
            " reset(task, seed)"
        )
    workflow: RolloutWorkflow
    if name == "single_turn" and environment.single_turn:
        workflow = SingleTurn(environment)
    elif name == "multi_turn" and environment.multi_turn:
        workflow = MultiTurn(environment, config.max_turns)
    elif name == "retry" and environment.single_turn:
        return MultiTurn(RetriedQuestions(environment, config.retry), config.max_turns)
    elif name in {"single_turn", "multi_turn", "retry"}:
        raise ConfigError(
            f'workflow {name} does not fit environment {environment.name}: set orchestrator.workflow = "auto"'
        )
    else:
        make = load_attribute(name, "workflow")
        try:
            workflow = make(environment, config)
        except TypeError as error:
            raise ConfigError(
                f"workflow {name} is constructed with the environment and the settings: {error}"
            ) from error
    if not hasattr(workflow, "arun_episode"):
        raise ConfigError(f"workflow {name} has no method arun_episode(engine, data): add it, or name another class")
    return Scored(workflow, environment) if environment.single_turn else workflow


@dataclass(frozen=True, slots=True)
class GroupRunner:
    """Runs groups of episodes, for training and for evaluation.

    Attributes:
        seed: Seed of the environments' and the requests' random numbers.
        request_prefix: Prefix of the ids of all requests, unique to the run; empty lets the server choose the ids, so that no
            request is answered from memory.
        should_accept: Returns whether a group is trained; None trains all groups.
    """

    workflow: RolloutWorkflow
    engine: PolicyEngine
    seed: int
    request_prefix: str
    should_accept: GroupFilter | None = None

    async def run(
        self,
        task: Task,
        group_id: str,
        episodes: int,
        sampling: Sampling,
        version: Version,
        *,
        episode_log: JournaledEpisodes | None = None,
        deadline: ServedDeadline | None = None,
    ) -> list[SharedRecord]:
        """Run `episodes` attempts at a task, sampled by `version` or newer ones; the caller sets the deadline.

        A caller that waits within `deadline.limit()` passes that deadline: it runs only while the group is served.

        Raises:
            SluiceError: if the group as a whole cannot be run, or the workflow gives trajectories names that others may have.
        """
        prefix = f"{self.request_prefix}/{group_id}" if self.request_prefix else ""
        data = EpisodeData(task, group_id, episodes, sampling, version, prefix, self.seed, episode_log)
        engine = self.engine if deadline is None else self.engine.timed(deadline)
        found = await self.workflow.arun_episode(engine, data)
        records = [each if isinstance(each, SharedRecord) else SharedRecord(each) for each in found]
        names = {each.trajectory.trajectory_id for each in records}
        if len(names) < len(records) or not all(name.startswith(f"{group_id}-") for name in names):
            raise SluiceError.aborted(
                "NAMES_CLASH",
                f"the workflow gave its trajectories the names {', '.join(sorted(names))}: give each one of its own that begins"
                f" with group_id and a hyphen, such as {group_id}-0; the journal knows trajectories by their names alone",
            )
        return records


class Scored:
    """Runs episodes with another workflow and scores those without a reward. If scoring fails, the reward stays missing."""

    def __init__(self, workflow: RolloutWorkflow, environment: EnvironmentProcesses) -> None:
        self._workflow, self._environment = workflow, environment

    async def arun_episode(
        self, engine: PolicyEngine, data: EpisodeData
    ) -> Sequence[orchestrator_pb2.TrajectoryRecord | SharedRecord]:
        """Run and score all episodes."""
        found = await self._workflow.arun_episode(engine, data)
        records = [each.own if isinstance(each, SharedRecord) else each for each in found]
        unscored = [each for each in records if not each.trajectory.HasField("reward")]
        answers = [each.conversation.messages[-1].content for each in unscored]
        with engine.scoring():
            scores = await self._environment.judge(data.task, answers) if unscored else []
        for record, score in zip(unscored, scores, strict=True):
            if score.reward is not None:
                record.trajectory.reward = score.reward
            record.metrics.update(score.metrics)
        return found


class SingleTurn:
    """Asks once. Every sample is an episode, which the environment scores.

    The whole group travels in one request, so that the replica shares the prompt among its samples.
    """

    def __init__(self, environment: EnvironmentProcesses) -> None:
        self._environment = environment

    async def arun_episode(self, engine: PolicyEngine, data: EpisodeData) -> list[SharedRecord]:
        """Sample all episodes at once."""
        messages = chat_messages(await self._environment.messages(data.task))

        async def sample(attempt: int) -> rollout_pb2.GenerateResponse:
            request = rollout_pb2.GenerateRequest(
                request_id=f"{data.request_prefix}/{attempt}" if data.request_prefix else "",
                conversation=_conversation(data, messages),
                sampling=sampling_params(data, turn=0),
                n=data.episodes,
                min_policy_version=data.version.to_proto(),
                return_text=True,
            )
            return await _generate(engine, data, request, (attempt, 0, range(data.episodes)))

        response = await _until_it_fits(data, 0, sample)
        asked = Beginning.of(response.prompt_token_ids, tokens_pb2.Conversation(messages=messages))
        records = [SharedRecord(self._record(data, asked.tokens, sample), asked) for sample in response.samples]
        for each in records:
            note_sampled(each.own, response)
        return records

    @staticmethod
    def _record(
        data: EpisodeData, prompt_tokens: int, sample: rollout_pb2.GeneratedSample
    ) -> orchestrator_pb2.TrajectoryRecord:
        """Return what one sample adds to the prompt. Repeated fields are copied whole, never token by token."""
        record = _new_record(data, sample.index)
        trajectory = record.trajectory
        trajectory.token_ids.extend(sample.token_ids)
        trajectory.mask_runs.extend((prompt_tokens, len(sample.token_ids)))
        trajectory.logprobs.extend(sample.logprobs)
        trajectory.version_spans.extend(sample.version_spans)
        trajectory.finish_reason = sample.finish_reason
        record.conversation.messages.add(role="assistant", content=sample.text)
        return record


class MultiTurn:
    """Runs the episodes of a group side by side, turn by turn, each with a deadline of its own.

    Sampled ids are never encoded again: what follows is appended to them.

    Args:
        max_turns: Most assistant turns; an episode that needs more is truncated.
    """

    def __init__(self, environment: EnvironmentProcesses | RetriedQuestions, max_turns: int) -> None:
        self._environment, self._max_turns = environment, max_turns

    async def arun_episode(self, engine: PolicyEngine, data: EpisodeData) -> list[orchestrator_pb2.TrajectoryRecord]:
        """Run all episodes; those that fail or are late are left out.

        Raises:
            EnvironmentFailedError: if all fail, and one of them because of the environment's answer to this task, or because it was given
                up.
            OverdueError: if all fail, and at least one because it was late.
            SluiceError: if all fail for other reasons.
        """
        lost = () if data.log is None else data.log.lost  # lost in an earlier process
        left = [each for each in range(data.episodes) if each not in lost]
        if not left:
            raise _most_telling([], data.group_id)
        with engine.side_by_side(len(left)) as ended:

            async def run(index: int) -> orchestrator_pb2.TrajectoryRecord:
                try:
                    async with engine.episode() as own:
                        return await _until_it_fits(data, index, partial(self._attempt, own, data, index))
                except JournalError:
                    raise
                except Exception as error:
                    log.warning("an episode is lost", group=data.group_id, episode=index, error=repr(error))
                    if data.log is not None:
                        data.log.keep_loss(index, loss(error))
                    raise
                finally:
                    ended()

            outcomes = await asyncio.gather(*map(run, left), return_exceptions=True)
        for each in outcomes:
            if isinstance(each, JournalError) or not isinstance(each, (Exception, orchestrator_pb2.TrajectoryRecord)):
                raise each
        records = [each for each in outcomes if isinstance(each, orchestrator_pb2.TrajectoryRecord)]
        if not records:
            raise _most_telling([each for each in outcomes if isinstance(each, Exception)], data.group_id)
        return records

    async def _attempt(
        self, engine: PolicyEngine, data: EpisodeData, index: int, attempt: int
    ) -> orchestrator_pb2.TrajectoryRecord:
        """Run one episode; turns that were sampled before are replayed."""
        async with self._environment.episode(data.task, data.seed + index) as episode:
            transcript = _Transcript(data, index, attempt, tool_messages(getattr(episode, "tools", ())))
            await transcript.append_messages(engine, episode.messages)
            for turn in range(self._max_turns):
                said = await transcript.sample_turn(engine, turn)
                if await self._ended(engine, transcript, episode, said, turn):
                    break
        return transcript.record()

    async def _ended(
        self,
        engine: PolicyEngine,
        transcript: _Transcript,
        episode: OpenEpisode | RetriedQuestion,
        said: str | Message,
        turn: int,
    ) -> bool:
        """Let the environment answer a turn; return whether the episode has ended."""
        last = transcript.finish_reason == tokens_pb2.FINISH_REASON_LENGTH or turn == self._max_turns - 1
        # A step of a `RetriedQuestion` is its scoring, which has limits of its own.
        with engine.scoring() if isinstance(episode, RetriedQuestion) else contextlib.nullcontext():
            answer = await episode.step(said, last=last)
        transcript.keep_turn(turn, answer)
        if answer.reward is not None:
            transcript.rewards.append(tokens_pb2.TurnReward(turn=turn, reward=answer.reward))
        if answer.done or last:
            if answer.truncated or not answer.done:
                transcript.finish_reason = tokens_pb2.FINISH_REASON_LENGTH
            return True
        await transcript.append_messages(engine, answer.messages)
        return False


@dataclass
class _Transcript:
    """One episode's tokens and messages as they grow."""

    data: EpisodeData
    index: int
    attempt: int
    tools: Sequence[tokens_pb2.Tool] = ()
    ids: list[int] = field(default_factory=list)
    mask_runs: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tokens_pb2.VersionSpan] = field(default_factory=list)
    turn_runs: list[int] = field(default_factory=list)
    rewards: list[tokens_pb2.TurnReward] = field(default_factory=list)
    messages: list[tokens_pb2.ChatMessage] = field(default_factory=list)
    finish_reason: tokens_pb2.FinishReason.ValueType = tokens_pb2.FINISH_REASON_UNSPECIFIED
    metrics: dict[str, float] = field(default_factory=dict)
    responses: list[rollout_pb2.GenerateResponse] = field(default_factory=list)
    """Only who sampled the turns, and when; the rest of the answers is not kept."""
    sampled_messages: int = 0
    """Number of messages that `ids` cover, if there are tools."""

    async def append_messages(self, engine: PolicyEngine, messages: Iterable[Message]) -> None:
        """Append messages of the environment, up to where the assistant begins."""
        new = chat_messages(messages)
        if self.tools:  # the template needs the whole conversation: it becomes tokens with the next turn
            self.messages.extend(new)
            return
        request = rollout_pb2.TokenizeRequest(conversation=_conversation(self.data, new), add_generation_prompt=True)
        if self.ids:
            request.continues.ids.extend(self.ids)
        ids = await engine.tokenize(request)
        if ids[: len(self.ids)] != self.ids:
            raise SluiceError.data_loss(
                "NOT_APPENDED",
                "Tokenize changed the token ids that it had to continue: a replica runs another release; update it",
            )
        self.mask_runs.append(len(ids) - len(self.ids))
        self.ids = ids
        self.messages.extend(new)

    async def sample_turn(self, engine: PolicyEngine, turn: int) -> str | Message:
        """Sample one turn of the assistant and append it; return its text, or its message if there are tools."""
        prefix = self.data.request_prefix
        request = rollout_pb2.GenerateRequest(
            request_id=f"{prefix}/{self.attempt}/{self.index}.{turn}" if prefix else "",
            sampling=sampling_params(self.data, turn, self.index),
            n=1,
            min_policy_version=self.data.version.to_proto(),
            return_text=True,
        )
        if self.tools:
            request.conversation.CopyFrom(_conversation(self.data, self.messages, self.tools))
            request.return_message = True
            if self.ids:
                request.continues.token_ids.extend(self.ids)
                request.continues.messages = self.sampled_messages
        else:
            request.token_ids.ids.extend(self.ids)
        response = await _generate(engine, self.data, request, (self.attempt, turn, (self.index,)))
        prompt = list(response.prompt_token_ids)
        if prompt[: len(self.ids)] != self.ids or not (self.tools or prompt == self.ids):
            raise ReplayDiffersError(
                f"turn {turn} of episode {self.index} has another prompt than the one that was sampled"
                + (", or the chat template cannot continue the turns before it" if self.tools else "")
            )
        if self.tools:
            self.mask_runs.append(len(prompt) - len(self.ids))
            self.ids = prompt
        sample = response.samples[0]
        append_spans(self.spans, sample.version_spans, len(self.logprobs))
        self.ids.extend(sample.token_ids)
        self.mask_runs.append(len(sample.token_ids))
        self.turn_runs.append(len(sample.token_ids))
        self.logprobs.extend(sample.logprobs)
        self.finish_reason = sample.finish_reason
        self.responses.append(
            rollout_pb2.GenerateResponse(replicas=response.replicas, sample_time=response.sample_time)
        )
        if not self.tools:
            self.messages.append(tokens_pb2.ChatMessage(role="assistant", content=sample.text))
            return sample.text
        message = tokens_pb2.ChatMessage()
        message.CopyFrom(sample.message)
        for number, call in enumerate(message.tool_calls):
            call.id = call.id or f"call-{turn}-{number}"  # if the model's format has none
        self.messages.append(message)
        self.sampled_messages = len(self.messages)
        return plain_message(message)

    def keep_turn(self, turn: int, answer: Turn) -> None:
        """Keep the environment's answer, and the last value of each of its measures.

        Raises:
            ReplayDiffersError: if it gave another answer when the turn was sampled.
        """
        self.metrics |= answer.metrics
        if self.data.log is None:
            return
        content = tokens_pb2.Conversation(messages=chat_messages(answer.messages)).SerializeToString(deterministic=True)
        digest = xxhash.xxh3_128_digest(content)
        if not self.data.log.keep_turn(self.attempt, turn, self.index, answer.reward, digest):
            raise ReplayDiffersError(
                f"the environment answers turn {turn} of episode {self.index} otherwise than before"
            )

    def record(self) -> orchestrator_pb2.TrajectoryRecord:
        """Return the trajectory; its reward is the sum of its turns' rewards, missing if no turn had one."""
        record = _new_record(self.data, self.index)
        trajectory = record.trajectory
        trajectory.token_ids.extend(self.ids)
        trajectory.mask_runs.extend(self.mask_runs)
        trajectory.logprobs.extend(self.logprobs)
        trajectory.version_spans.extend(self.spans)
        trajectory.finish_reason = self.finish_reason
        if self.rewards:
            trajectory.reward = sum(each.reward for each in self.rewards)
        trajectory.turn_rewards.extend(self.rewards)
        trajectory.turn_runs.extend(self.turn_runs)
        record.conversation.messages.extend(self.messages)
        record.conversation.tools.extend(self.tools)
        record.metrics.update(self.metrics)
        for each in self.responses:
            note_sampled(record, each)
        record.score_time.GetCurrentTime()
        return record


def _most_telling(errors: Sequence[Exception], group_id: str) -> Exception:
    """Return the error to report for a group whose episodes are all lost. Prefer an error that its task may have caused."""
    failed = [each for each in errors if isinstance(each, EnvironmentFailedError)]
    faults = [each for each in failed if each.culprit]
    late = [each for each in errors if isinstance(each, OverdueError)]
    given_up = [each for each in failed if each.reason == EnvironmentReason.GIVEN_UP]
    other = SluiceError.aborted("EPISODES_FAILED", f"every episode of group {group_id} failed; see the log")
    return [*faults, *late, *given_up, other][0]


_ATTEMPTS = 4
"""Most attempts at an episode in one process. The second has nothing to replay, so it fails only if request names collide."""


async def _until_it_fits(data: EpisodeData, episode: int, attempt: Callable[[int], Awaitable[_Answer]]) -> _Answer:
    """Continue an episode at its present attempt. If the replay differs, begin the next attempt.

    Raises:
        SluiceError: if the replay differs in every attempt.
    """
    first = data.log.attempt(episode) if data.log else 0
    for number in range(first, first + _ATTEMPTS):
        try:
            return await attempt(number)
        except ReplayDiffersError as difference:
            log.warning("an episode begins again", group=data.group_id, attempt=number + 1, reason=str(difference))
    raise SluiceError.aborted(
        "REPLAY_DIFFERS",
        f"group {data.group_id} began {_ATTEMPTS} times and differed each time from what was kept of it: two runs may have"
        " the same name, or the environment changes its answers",
    )


async def _generate(
    engine: PolicyEngine, data: EpisodeData, request: rollout_pb2.GenerateRequest, place: tuple[int, int, Sequence[int]]
) -> rollout_pb2.GenerateResponse:
    """Return the answer that was kept for this attempt, turn and episodes; if there is none, sample and keep it.

    Raises:
        ReplayDiffersError: if a replica answered another request under this name before.
        SluiceError: as `PolicyEngine.agenerate`.
    """
    if data.log is not None and (kept := await data.log.generation(*place)) is not None:
        return kept
    try:
        # The prompt of a turn begins with the turns before it, and all prompts of a group begin alike.
        episode = [f"{data.group_id}-{place[2][0]}"] if len(place[2]) == 1 else []
        response = await engine.agenerate(request, [*episode, data.group_id])
    except SluiceError as error:
        if error.code is not grpc.StatusCode.ALREADY_EXISTS:
            raise
        raise ReplayDiffersError(error.message) from error
    if data.log is not None:
        data.log.keep_generation(*place, request.request_id, response)
    return response


def _new_record(data: EpisodeData, index: int) -> orchestrator_pb2.TrajectoryRecord:
    """Return the record of one episode, without what was sampled."""
    record = orchestrator_pb2.TrajectoryRecord()
    trajectory = record.trajectory
    trajectory.trajectory_id = trajectory.episode_id = f"{data.group_id}-{index}"
    trajectory.task_id, trajectory.group_id = data.task.task_id, data.group_id
    trajectory.temperature = data.sampling.temperature
    return record


def _conversation(
    data: EpisodeData, messages: Iterable[tokens_pb2.ChatMessage], tools: Iterable[tokens_pb2.Tool] = ()
) -> tokens_pb2.Conversation:
    """Return a conversation of an episode with the template arguments of its environment."""
    conversation = tokens_pb2.Conversation(messages=messages, tools=tools)
    set_template_arguments(conversation, data.sampling.chat_template_kwargs)
    return conversation


def sampling_params(data: EpisodeData, turn: int, episode: int = 0) -> tokens_pb2.SamplingParams:
    """Return the sampling of one request; the samples of one request use consecutive seeds."""
    params = data.sampling.params(data.task.max_tokens)
    if data.sampling.seeded:
        params.seed = derived_seed(data.seed, data.group_id, episode, turn)
    return params


class RetriedQuestions:
    """The workflow `retry`: opens an episode for each question, which is asked again until its answer is good enough.

    The reward of an episode is the score of its last answer, times `discount` to the power of the tries before it.

    Args:
        environment: Poses the questions and scores the answers.
        rule: The reply to a wrong answer, and how much a later answer is worth.
    """

    def __init__(self, environment: EnvironmentProcesses, rule: RetryConfig) -> None:
        self._environment, self._rule = environment, rule

    @contextlib.asynccontextmanager
    async def episode(self, task: Task, seed: int) -> AsyncIterator[RetriedQuestion]:
        """Pose a question. It is not random, so the seed is not used.

        Raises:
            EnvironmentFailedError: if the environment fails.
        """
        del seed
        yield RetriedQuestion(await self._environment.messages(task), task, self._environment, self._rule)


@dataclass
class RetriedQuestion:
    """A question with the answers that it got.

    Attributes:
        messages: The question.
        answers: Number of answers so far.
        worth: Worth of the last answer.
    """

    messages: Sequence[Message]
    task: Task
    environment: EnvironmentProcesses
    rule: RetryConfig
    answers: int = 0
    worth: float = 0.0

    async def step(self, completion: str | Message, *, last: bool = False) -> Turn:
        """Score an answer; ask again if it is not good enough. Every answer is scored, so `last` makes no difference.

        The reward of a turn is how much more its answer is worth than the previous one: an episode's reward is the sum of its turns'
        rewards.
        Without a score the episode ends, and its reward is missing.

        Raises:
            EnvironmentFailedError: if the environment is given up.
        """
        text = completion if isinstance(completion, str) else str(completion["content"])
        (scored,) = await self.environment.judge(self.task, [text])
        if (score := scored.reward) is None:
            return Turn(done=True)
        before, self.worth = self.worth, score * self.rule.discount**self.answers
        self.answers += 1
        again = [] if score >= self.rule.enough else [{"role": "user", "content": self.rule.message}]
        return Turn(messages=again, reward=self.worth - before, done=not again, metrics=scored.metrics)
