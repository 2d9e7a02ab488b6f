"""Which trajectories of a scored group are trained: missing rewards, episodes that were cut off, groups without signal.

Pure. An episode that a limit (of length or turns) cut off is recognised by its finish reason, never by its length.
Its environment's `overlong.policy` says what becomes of it:

    none      nothing
    mask      its reward stays in the statistics of its group, and none of its tokens is trained: it reaches the trainer with a
              mask of one untrained run, so that its tokens are in no numerator and in no denominator of the loss
    penalise  it loses `penalty` of its reward; turns that end within `buffer_tokens` of the limit lose a part of it that grows
              linearly from 0 (soft overlong punishment: DAPO, arXiv 2503.14476)
    filter    it is dropped, its reward as well
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from orchestrator_svc.config import EpisodeConfig, FilterConfig, OverlongConfig
from orchestrator_svc.journal.facts import Reason
from orchestrator_svc.journal.records import Each, SharedRecord
from sluice.limits import MAX_REWARD, MAX_TRAJECTORY_TOKENS, within
from sluice.v1 import orchestrator_pb2, tokens_pb2
from sluice.versions import sampled_tokens


@dataclass(slots=True)
class ScoredGroup:
    """The outcome of a group's episodes.

    Attributes:
        everyone: All records, in order.
        rewards: Their rewards as the environment gave them; None for a missing one.
        records: Those that may be trained; empty if none may.
        untrainable: Reason of each trajectory that may not be trained, by its name.
        overlong: Trajectories that the rule for long episodes changed or left out.
        without_signal: Whether another group shall take the place of this one, according to the settings.
    """

    everyone: list[SharedRecord] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    records: list[SharedRecord] = field(default_factory=list)
    untrainable: dict[str, str] = field(default_factory=dict)
    overlong: int = 0
    without_signal: bool = False

    def leave_out(self, reason: str) -> None:
        """Train none of the records, for one reason."""
        self.untrainable |= {each.trajectory.trajectory_id: reason for each in self.records}
        self.records = []


def sift(
    records: Sequence[SharedRecord],
    settings: EpisodeConfig,
    most_tokens: int,
    should_accept: Callable[[Sequence[orchestrator_pb2.TrajectoryRecord]], bool] | None = None,
    most_reward: float = MAX_REWARD,
) -> ScoredGroup:
    """Separate trajectories that may be trained from the others. Change rewards and masks of the records as `overlong` says.

    Args:
        records: All trajectories of the group.
        settings: The settings of its environment.
        most_tokens: Limit of one turn in tokens.
        should_accept: Gets the whole records that may be trained, and returns whether to train them; None: train them.
        most_reward: Largest absolute value of a reward.
    """
    group = ScoredGroup(
        list(records), [each.trajectory.reward if each.trajectory.HasField("reward") else None for each in records]
    )
    policy = settings.overlong.policy
    for record in records:
        if reason := _why_not(record, policy, most_reward):
            group.untrainable[record.trajectory.trajectory_id] = reason
            group.overlong += reason == Reason.OVERLONG
        else:
            group.records.append(record)
    if policy == "penalise":
        _penalise(group, settings.overlong, most_tokens)
    # One reward per episode: an episode that forked has several trajectories.
    rewards = {each.trajectory.episode_id: each.trajectory.reward for each in group.records}
    group.without_signal = bool(rewards) and (
        _without_signal(list(rewards.values()), settings.filter)
        or not (should_accept is None or should_accept(Each(group.records, SharedRecord.whole)))
    )
    if policy == "mask":
        cut = [each for each in group.records if _cut_off(each.trajectory)]
        group.overlong += len(cut)
        if len(cut) == len(group.records):
            group.leave_out(Reason.OVERLONG)
            group.without_signal = False
        for record in cut:
            mask(record)
    return group


def _why_not(record: SharedRecord, policy: str, most_reward: float) -> str:
    """Return why a trajectory may not be trained; empty if it may."""
    trajectory = record.trajectory
    if record.tokens > MAX_TRAJECTORY_TOKENS:
        return Reason.TOO_LONG
    if not record.tokens:
        return Reason.EPISODE_FAILED
    if not trajectory.HasField("reward"):
        return Reason.MISSING_REWARD
    if not all(within(each, most_reward) for each in _rewards(trajectory)):
        return Reason.REWARD_TOO_LARGE
    if not sampled_tokens(trajectory):
        return Reason.NO_TOKENS
    return Reason.OVERLONG if policy == "filter" and _cut_off(trajectory) else ""


def _rewards(trajectory: tokens_pb2.Trajectory) -> Iterator[float]:
    """Yield every reward of a trajectory."""
    yield trajectory.reward
    yield from trajectory.branch_rewards
    yield from trajectory.token_rewards
    yield from (each.reward for each in trajectory.turn_rewards)


def _penalise(group: ScoredGroup, rule: OverlongConfig, most_tokens: int) -> None:
    """Subtract the penalty of its longest turn from the reward of each episode, and from the rewards of its branches."""
    lost: dict[str, float] = {}
    for record in group.records:
        episode, own = record.trajectory.episode_id, penalty(record.trajectory, rule, most_tokens)
        lost[episode] = max(own, lost.get(episode, 0.0))
        group.overlong += own > 0
    for record in group.records:
        trajectory = record.trajectory
        taken = lost[trajectory.episode_id]
        trajectory.reward -= taken
        trajectory.branch_rewards[:] = [each - taken for each in trajectory.branch_rewards]


def penalty(trajectory: tokens_pb2.Trajectory, rule: OverlongConfig, most_tokens: int) -> float:
    """Return how much to subtract from an episode's reward, by its longest turn."""
    if _cut_off(trajectory):
        return rule.penalty
    if not rule.buffer_tokens:
        return 0.0
    longest = max(trajectory.turn_runs, default=sampled_tokens(trajectory))
    buffer = min(rule.buffer_tokens, most_tokens)
    return rule.penalty * min(1.0, max(0, longest - (most_tokens - buffer)) / buffer)


def mask(record: SharedRecord) -> None:
    """Mark every token as not trained, and drop what describes trained tokens."""
    trajectory = record.trajectory
    trajectory.mask_runs[:] = [record.tokens]
    trajectory.ClearField("logprobs")
    trajectory.ClearField("version_spans")
    trajectory.ClearField("turn_rewards")
    trajectory.ClearField("turn_runs")
    trajectory.ClearField("token_rewards")
    trajectory.ClearField("branch_rewards")
    trajectory.ClearField("advantages")
    trajectory.ClearField("ref_logprobs")
    trajectory.ClearField("teacher_logprobs")


def _cut_off(trajectory: tokens_pb2.Trajectory) -> bool:
    return trajectory.finish_reason == tokens_pb2.FINISH_REASON_LENGTH


def _without_signal(rewards: Sequence[float], rules: FilterConfig) -> bool:
    mean = sum(rewards) / len(rewards)
    return (
        (rules.drop_degenerate and len(set(rewards)) == 1)
        or (rules.min_reward_mean is not None and mean < rules.min_reward_mean)
        or (rules.max_reward_mean is not None and mean > rules.max_reward_mean)
    )
