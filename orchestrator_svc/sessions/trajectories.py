r"""From the tree of a session to the trajectories of its episode.

Each branch is a trajectory: prompt and replies from the root to its last sample. A sampled token is trained in the first branch that
holds it; in the others it is context, as a prompt is. So each is in the loss once, however often the session forked.

    a ---- b ---- c      branch 0: a, b, c are trained
            \
             d           branch 1: a and b are context, d is trained

Rewards. The episode's own counts; else the mean of its branches' rewards; else the sum of its turns' rewards. If branches have
rewards, the advantage of a token follows from the mean reward of the branches that hold it (`Trajectory.branch_rewards`).

A trajectory has one temperature: that of most of the session's sampled tokens. Those of another temperature are context, counted as
TEMPERATURE, because their log-probabilities are not those of the policy that is trained.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from orchestrator_svc.journal.external import EPISODE, Session, Target
from orchestrator_svc.sessions.claims import as_ids
from sluice.v1 import orchestrator_pb2, rollout_pb2, session_pb2, tokens_pb2
from sluice.versions import append_spans

TEMPERATURE = "TEMPERATURE"
"""Why tokens are not trained that were sampled at another temperature than most of their session."""

UNDELIVERED = "UNDELIVERED"
"""Why tokens are not trained that no client was given: its connection broke, and it did not ask again."""


class TreeError(Exception):
    """What was recorded of a session does not fit together; the message says where."""


@dataclass(slots=True)
class Built:
    """The trajectories of an episode.

    Attributes:
        records: One per branch, in order.
        not_trained: Sampled tokens that no trajectory trains, by reason; not those of branches that a submission leaves out.
    """

    records: list[orchestrator_pb2.TrajectoryRecord] = field(default_factory=list)
    not_trained: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Node:
    """One sample, with the request that it answers."""

    made: session_pb2.RecordedGeneration
    sample: rollout_pb2.GeneratedSample


def build(
    session: Session,
    generations: Iterable[session_pb2.RecordedGeneration],
    rewards: Mapping[Target, float],
    task_id: str,
) -> Built:
    """Return the trajectories of a submitted session. Its time grows with the tokens of all branches: not for an event loop.

    Args:
        session: The session.
        generations: What was sampled in it.
        rewards: Its rewards, with those that the environment gave.
        task_id: Task of the episode.

    Raises:
        TreeError: if a branch holds what was not recorded, or a prompt does not begin with the tokens that it continues.
    """
    nodes = {
        f"{made.request_id}/{index}": _Node(made, sample)
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
    for trajectory_id, branch in zip(session.trajectory_ids, branches, strict=True):
        trained = [each for each in branch if each not in context and nodes[each].sample.token_ids]
        counts = set(trained)
        record = _record([nodes[each] for each in branch], [each in counts for each in branch])
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
    """Return how many tokens nobody was given that no branch holds, by reason."""
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


def _record(path: Sequence[_Node], trained: Sequence[bool]) -> orchestrator_pb2.TrajectoryRecord:
    """Return the tokens and messages of one branch, from the root to its last sample; `trained` says which samples are.

    Raises:
        TreeError: if the prompt of one does not begin with the tokens of the one before it.
    """
    record = orchestrator_pb2.TrajectoryRecord()
    trajectory = record.trajectory
    ids = as_ids([])
    for node, counts in zip(path, trained, strict=True):
        prompt = as_ids(node.made.response.prompt_token_ids)
        if not np.array_equal(prompt[: len(ids)], ids):
            raise TreeError(
                f"the prompt of request {node.made.request_id} does not begin with the tokens that it continues"
            )
        if counts:
            done = sum(trajectory.mask_runs)
            append_spans(trajectory.version_spans, node.sample.version_spans, len(trajectory.logprobs))
            trajectory.mask_runs.extend((len(prompt) - done, len(node.sample.token_ids)))
            trajectory.turn_runs.append(len(node.sample.token_ids))
            trajectory.logprobs.extend(node.sample.logprobs)
        ids = np.concatenate([prompt, as_ids(node.sample.token_ids)])
    if rest := len(ids) - sum(trajectory.mask_runs):
        trajectory.mask_runs.append(rest)
    trajectory.token_ids.extend(ids)
    last = path[-1]
    trajectory.finish_reason = last.sample.finish_reason
    record.conversation.CopyFrom(last.made.conversation)
    said = tokens_pb2.ChatMessage(role="assistant", content=last.sample.text)
    record.conversation.messages.append(last.sample.message if last.sample.HasField("message") else said)
    return record


def _rest(reward: float | None, held: Iterable[str], rewards: Mapping[Target, float]) -> float:
    """Return the episode's reward without the rewards of its turns."""
    return 0.0 if reward is None else reward - math.fsum(rewards.get(Target(each), 0.0) for each in held)


def _token_rewards(trajectory: tokens_pb2.Trajectory, turns: Mapping[int, float], rest: float) -> NDArray[np.float64]:
    """Return the rewards of a branch's trained tokens: a turn's at its last token, what no turn has at the last token of all.

    Turns that another branch trains have their rewards there. `turn_rewards` would count them once more, in the rest.
    """
    values = np.zeros(len(trajectory.logprobs))
    ends = np.cumsum(trajectory.turn_runs, dtype=np.int64) - 1
    for turn, value in turns.items():
        values[ends[turn]] += value
    if len(values):
        values[-1] += rest
    return values


def _temperature(nodes: Iterable[_Node]) -> float:
    """Return the temperature of most of the tokens that may be trained; of two with as many, the one that came first."""
    tokens: Counter[float] = Counter()
    for node in nodes:
        tokens[node.made.temperature] += 0 if node.made.not_trained else len(node.sample.token_ids)
    return tokens.most_common(1)[0][0] or 1.0


def _why_not(node: _Node, temperature: float) -> str:
    return node.made.not_trained or (TEMPERATURE if node.made.temperature != temperature else "")
