r"""From the tree of a session to the trajectories of its episode.

Each branch is a trajectory: prompt and replies from the root to its last sample. A sampled token is trained in the first branch that
holds it; in the others it is context, like a prompt. So each token is in the loss once, however often the session forked.

    a ---- b ---- c      branch 0: a, b, c are trained
            \
             d           branch 1: a and b are context, d is trained

Rewards. The episode's own counts; else the mean of its branches' rewards; else the sum of its turns' rewards. If branches have
rewards, the advantage of a token follows from the mean reward of the branches that hold it (`Trajectory.branch_rewards`).

A beginning that several branches share is built once, and their records name it (`SharedRecord`).

A trajectory has one temperature, at which most of the session's tokens were sampled. Tokens sampled at another temperature are context,
counted as TEMPERATURE, because their log-probabilities are not those of the trained policy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchestrator_svc.journal.external import EPISODE, Session, Target
from orchestrator_svc.journal.records import Beginning, SharedRecord, note_sampled
from orchestrator_svc.sessions.claims import TokenIds, as_ids
from sluice.v1 import orchestrator_pb2, rollout_pb2, session_pb2, tokens_pb2
from sluice.versions import append_spans

TEMPERATURE = "TEMPERATURE"
"""Reason for not training tokens that were sampled at another temperature than most of their session."""

UNDELIVERED = "UNDELIVERED"
"""Reason for not training tokens that no client got: its connection broke, and it did not ask again."""


class TreeError(Exception):
    """What was recorded of a session does not fit together; the message says where."""


@dataclass(slots=True)
class Built:
    """The trajectories of an episode.

    Attributes:
        records: One per branch, in order.
        not_trained: Sampled tokens that no trajectory trains, by reason; not those of branches that a submission leaves out.
    """

    records: list[SharedRecord] = field(default_factory=list)
    not_trained: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Node:
    """One sample, with the request that it answers."""

    name: str
    made: session_pb2.RecordedGeneration
    sample: rollout_pb2.GeneratedSample


def build(
    session: Session,
    generations: Iterable[session_pb2.RecordedGeneration],
    rewards: Mapping[Target, float],
    task_id: str,
) -> Built:
    """Return the trajectories of a submitted session. Its time grows with what was recorded in it: not for an event loop.

    Args:
        session: The session.
        generations: What was sampled in it.
        rewards: Its rewards, with those that the environment gave.
        task_id: Task of the episode.

    Raises:
        TreeError: if a branch holds a sample that was not recorded, or a prompt does not begin with the tokens that it continues.
    """
    nodes = {
        (name := f"{made.request_id}/{index}"): _Node(name, made, sample)
        for made in generations
        for index, sample in enumerate(made.response.samples)
    }
    branches = session.submitted_branches
    held = list(dict.fromkeys(chain.from_iterable(branches)))
    if missing := [each for each in held if each not in nodes]:
        raise TreeError(f"session {session.name} holds generation {missing[0]}, of which nothing was recorded")
    temperature = _temperature([nodes[each] for each in held])
    why_not = {each: reason for each in held if (reason := _why_not(nodes[each], temperature))}
    built = Built()
    for each, reason in why_not.items():
        built.not_trained[reason] += len(nodes[each].sample.token_ids)
    built.not_trained.update(_undelivered(session, nodes, held))
    reward, by_turn = episode_reward(branches, rewards), _branch_rewards(branches, rewards)
    rest = _rest(reward, held, rewards) if any(Target(each) in rewards for each in held) else None
    context = set(why_not)
    tree = _Tree([nodes[each] for each in branch] for branch in branches)
    for trajectory_id, branch in zip(session.trajectory_ids, branches, strict=True):
        trained = [each for each in branch if each not in context and nodes[each].sample.token_ids]
        counts = set(trained)
        record = tree.record([nodes[each] for each in branch], [each in counts for each in branch])
        trajectory = record.trajectory
        trajectory.trajectory_id, trajectory.task_id = trajectory_id, task_id
        trajectory.group_id, trajectory.episode_id = f"g{session.group}", f"g{session.group}-{session.episode}"
        trajectory.temperature = temperature
        if session.submission is not None and session.submission.truncated:
            trajectory.finish_reason = tokens_pb2.FINISH_REASON_LENGTH
        if reward is not None:
            trajectory.reward = reward
            trajectory.branch_rewards.extend(by_turn.get(each, reward) for each in trained if by_turn)
        turns = {turn: rewards[target] for turn, each in enumerate(trained) if (target := Target(each)) in rewards}
        if len(branches) == 1:
            for turn, value in turns.items():
                trajectory.turn_rewards.add(turn=turn, reward=value)
        elif rest is not None:
            trajectory.token_rewards.extend(_token_rewards(trajectory, turns, rest))
        built.records.append(record)
        context.update(branch)
    return built


def _undelivered(session: Session, nodes: Mapping[str, _Node], held: Iterable[str]) -> Counter[str]:
    """Count the tokens that are in no branch because no client got them, by reason."""
    left = nodes.keys() - set(held)
    unread = [each for each in left if nodes[each].made.request_id in session.undelivered]
    return Counter({UNDELIVERED: sum(len(nodes[each].sample.token_ids) for each in unread)} if unread else {})


def episode_reward(branches: Sequence[Sequence[str]], rewards: Mapping[Target, float]) -> float | None:
    """Return the reward of an episode: its own, else the mean of its branches', else the sum of its turns'; None without any."""
    if EPISODE in rewards:
        return rewards[EPISODE]
    ends = [rewards[target] for branch in branches if (target := Target(branch=branch[-1])) in rewards]
    if ends:
        return math.fsum(ends) / len(ends)
    held = dict.fromkeys(chain.from_iterable(branches))
    turns = [rewards[target] for each in held if (target := Target(each)) in rewards]
    return math.fsum(turns) if turns else None


def _branch_rewards(branches: Sequence[Sequence[str]], rewards: Mapping[Target, float]) -> dict[str, float]:
    """Return for each sample the mean reward of the branches that hold it and have one; empty if no branch has one."""
    below: dict[str, list[float]] = {}
    for branch in branches:
        if (target := Target(branch=branch[-1])) in rewards:
            for each in branch:
                below.setdefault(each, []).append(rewards[target])
    return {each: math.fsum(values) / len(values) for each, values in below.items()}


class _Place(NamedTuple):
    """A place that branches pass: after the prompt of a request, or after a sample that answers it."""

    request_id: str
    sample: str = ""


@dataclass(slots=True)
class _Passed:
    """What the branches that pass a place have in common.

    Attributes:
        branches: Number of these branches.
        messages: Number of first messages that they share.
        same_tools: Whether they have the same tools and template arguments.
    """

    branches: int
    messages: int
    same_tools: bool


class _Tree:
    """The token ids and messages of branches. A shared beginning is stored once.

    Branches that pass a place share all token ids before it. A `Beginning` ends at each place where branches part.

    Args:
        paths: The branches, from the root to the last sample.

    Raises:
        TreeError: if the prompt of a request does not begin with the tokens that it continues.
    """

    def __init__(self, paths: Iterable[Sequence[_Node]]) -> None:
        self._prompts: dict[str, TokenIds] = {}
        self._joints: dict[tuple[str, str], tuple[int, bool]] = {}
        self._passed: dict[_Place, _Passed] = {}
        self._beginnings: dict[_Place, Beginning] = {}
        for path in paths:
            self._pass(path)

    def _pass(self, path: Sequence[_Node]) -> None:
        """Note which places a branch passes, from its end to its root, and what it has in common with others there."""
        messages, same = len(path[-1].made.conversation.messages), True
        for index in range(len(path) - 1, -1, -1):
            node = path[index]
            if index + 1 < len(path):
                alike, same_tools = self._joint(node, path[index + 1])
                messages, same = min(messages, alike), same and same_tools
                self._note(_Place(node.made.request_id, node.name), messages, same_tools=same)
            messages = min(messages, len(node.made.conversation.messages))
            self._note(_Place(node.made.request_id), messages, same_tools=same)

    def _note(self, place: _Place, messages: int, *, same_tools: bool) -> None:
        passed = self._passed.setdefault(place, _Passed(0, messages, same_tools))
        passed.branches += 1
        passed.messages = min(passed.messages, messages)
        passed.same_tools = passed.same_tools and same_tools

    def _joint(self, node: _Node, following: _Node) -> tuple[int, bool]:
        """Return how many messages a request shares with the one that it continues, and whether it has the same tools."""
        key = (node.name, following.made.request_id)
        if key not in self._joints:
            prompt, ids = self._prompt(following), self._prompt(node)
            sampled = as_ids(node.sample.token_ids)
            end = len(ids) + len(sampled)
            if not (np.array_equal(prompt[: len(ids)], ids) and np.array_equal(prompt[len(ids) : end], sampled)):
                raise TreeError(
                    f"the prompt of request {following.made.request_id} does not begin with the tokens that it continues"
                )
            had, has = node.made.conversation, following.made.conversation
            before = [*had.messages, _said(node)]
            pairs = enumerate(zip(before, has.messages, strict=False))
            alike = next((index for index, (one, other) in pairs if one != other), min(len(before), len(has.messages)))
            same_tools = had.tools == has.tools and had.template_arguments == has.template_arguments
            self._joints[key] = alike, same_tools
        return self._joints[key]

    def _prompt(self, node: _Node) -> TokenIds:
        """Return the prompt of a request, converted once."""
        made = node.made
        if made.request_id not in self._prompts:
            self._prompts[made.request_id] = as_ids(made.response.prompt_token_ids)
        return self._prompts[made.request_id]

    def record(self, path: Sequence[_Node], trained: Sequence[bool]) -> SharedRecord:
        """Return the token ids and messages of one of the branches; `trained` says which samples are trained."""
        own = orchestrator_pb2.TrajectoryRecord()
        trajectory = own.trajectory
        done = end = 0
        for node, counts in zip(path, trained, strict=True):
            begin = len(node.made.response.prompt_token_ids)
            end = begin + len(node.sample.token_ids)
            if counts:
                append_spans(trajectory.version_spans, node.sample.version_spans, len(trajectory.logprobs))
                trajectory.mask_runs.extend((begin - done, end - begin))
                trajectory.turn_runs.append(end - begin)
                trajectory.logprobs.extend(node.sample.logprobs)
                done = end
        if done < end:
            trajectory.mask_runs.append(end - done)
        last, beginning, messages = path[-1], None, 0
        same_tools = False
        for node, place in self._forks(path):
            passed = self._passed[place]
            if place not in self._beginnings:
                self._beginnings[place] = self._beginning(node, place, beginning, messages)
            same_tools = passed.same_tools if beginning is None else same_tools
            beginning, messages = self._beginnings[place], passed.messages
        trajectory.token_ids.extend(self._tokens(last, beginning, _Place(last.made.request_id, last.name)))
        trajectory.finish_reason = last.sample.finish_reason
        if not same_tools:
            own.conversation.MergeFrom(_setting(last.made.conversation))
        own.conversation.messages.extend(last.made.conversation.messages[messages:])
        own.conversation.messages.append(_said(last))
        for node in path:
            note_sampled(own, node.made.response)
        return SharedRecord(own, beginning)

    def _forks(self, path: Sequence[_Node]) -> list[tuple[_Node, _Place]]:
        """Return the places of a branch at which other branches leave it, in order, without its own end."""
        found = list[tuple[_Node, _Place]]()
        branches = 1
        for node in reversed(path):
            for place in (_Place(node.made.request_id, node.name), _Place(node.made.request_id)):
                ends = place.sample == path[-1].name
                if not ends and self._passed[place].branches > branches:
                    branches = self._passed[place].branches
                    found.append((node, place))
        return found[::-1]

    def _beginning(self, node: _Node, place: _Place, after: Beginning | None, messages: int) -> Beginning:
        """Return the common beginning of all branches through a place, without `after`, which has `messages` messages."""
        passed = self._passed[place]
        conversation = tokens_pb2.Conversation()
        if after is None and passed.same_tools:
            conversation.MergeFrom(_setting(node.made.conversation))
        conversation.messages.extend(node.made.conversation.messages[messages : passed.messages])
        if passed.messages > max(messages, len(node.made.conversation.messages)):
            conversation.messages.append(_said(node))
        return Beginning.of(self._tokens(node, after, place), conversation, after)

    def _tokens(self, node: _Node, after: Beginning | None, place: _Place) -> list[int]:
        """Return the token ids after `after`, up to a place."""
        had, prompt = after.tokens if after else 0, self._prompt(node)
        ids: list[int] = prompt[had:].tolist()
        return ids + list(node.sample.token_ids)[max(0, had - len(prompt)) :] if place.sample else ids


def _said(node: _Node) -> tokens_pb2.ChatMessage:
    """Return a sample as a message."""
    if node.sample.HasField("message"):
        return node.sample.message
    return tokens_pb2.ChatMessage(role="assistant", content=node.sample.text)


def _setting(conversation: tokens_pb2.Conversation) -> tokens_pb2.Conversation:
    """Return a conversation without its messages."""
    setting = tokens_pb2.Conversation(tools=conversation.tools)
    if conversation.HasField("template_arguments"):
        setting.template_arguments.CopyFrom(conversation.template_arguments)
    return setting


def _rest(reward: float | None, held: Iterable[str], rewards: Mapping[Target, float]) -> float:
    """Return the episode's reward without the rewards of its turns."""
    return 0.0 if reward is None else reward - math.fsum(rewards.get(Target(each), 0.0) for each in held)


def _token_rewards(trajectory: tokens_pb2.Trajectory, turns: Mapping[int, float], rest: float) -> NDArray[np.float64]:
    """Return the rewards of a branch's trained tokens: a turn's reward at its last token, the rest at the very last token.

    Turns that another branch trains have their rewards there. With `turn_rewards` they would count once more, in the rest.
    """
    values = np.zeros(len(trajectory.logprobs))
    ends = np.cumsum(trajectory.turn_runs, dtype=np.int64) - 1
    for turn, value in turns.items():
        values[ends[turn]] += value
    if len(values):
        values[-1] += rest
    return values


def _temperature(nodes: Iterable[_Node]) -> float:
    """Return the temperature of most of the tokens that may be trained; of two with equally many tokens, the first."""
    tokens: Counter[float] = Counter()
    for node in nodes:
        tokens[node.made.temperature] += 0 if node.made.not_trained else len(node.sample.token_ids)
    return tokens.most_common(1)[0][0] or 1.0


def _why_not(node: _Node, temperature: float) -> str:
    return node.made.not_trained or (TEMPERATURE if node.made.temperature != temperature else "")
