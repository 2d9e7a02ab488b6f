"""The rules that say what is wrong with a run: what, why it matters, and what to do.

A rule is a function of what `History` remembers of the run. It returns a sentence while something is wrong, else None.
`sluice.watch.watch` keeps track of how long a rule has applied, and whether that is long enough to count.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean, median, stdev

from sluice.config import WatchConfig

_FIRST = 10
"""Number of first steps whose metrics are the baseline, before the run has learned."""

_KEPT = 50
"""Number of last steps that are remembered, besides the first ones."""

_SHORT, _LONG, _IDLE = 5, 10, 20
"""Steps over which rules average: for metrics that vary little, for metrics that vary with the tasks of a batch, and for which side waits
for the other."""

_LEAST_EARLIER = 5
"""Steps that a median needs before a step is compared with it."""

_MORE_TOKENS = 4.0
"""Least number of tokens by which completions must have grown. On tasks with short answers, one more token is not growth."""

_START_S = 600.0
"""Seconds within which a run must make its first step, and a replica must load its model."""

_PAUSE_S = 30.0
"""Further seconds that a step may take, for a checkpoint or an evaluation."""


class Family(StrEnum):
    """The subject of a rule."""

    LEARNING = "learning"
    SPEED = "speed"
    ROLLOUT = "rollout"
    ENVIRONMENT = "environment"
    MACHINE = "machine"


class Source(StrEnum):
    """What must arrive for a rule to be evaluated again."""

    STEP = "step"
    LOAD = "load"
    MACHINE = "machine"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Said:
    """The result of a rule that applies.

    Attributes:
        what: A sentence with the numbers.
        broken: Whether the run is worth nothing like this; otherwise somebody should look.
    """

    what: str
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A step.

    Attributes:
        time: Seconds since 1970.
        values: Its metrics by name.
    """

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica at one moment.

    Attributes:
        reason: Why it gets no work; empty if it gets work.
        tokens_per_s: Recent average of tokens per second and sample; None until it is known.
    """

    name: str
    reason: str
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class EnvironmentLoad:
    """An environment at one moment: groups drawn and failed since the run began, and tasks in quarantine now."""

    name: str
    groups: int
    failed: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class Load:
    """The state of a run at one moment.

    Attributes:
        time: Seconds since 1970.
        running: Whether steps are due: it has started, and is neither paused nor ending.
        waits_for: What it waits for, as far as somebody may have to repair or start it.
    """

    time: float
    running: bool
    replicas: tuple[ReplicaLoad, ...] = ()
    environments: tuple[EnvironmentLoad, ...] = ()
    waits_for: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """Free resources of a machine: bytes on the run's disk, and the fraction of the memory that is available."""

    disk_bytes: int
    memory_share: float


@dataclass(slots=True)
class History:
    """What the rules remember of a run. Its size is bounded, however long the run lasts.

    Attributes:
        first: The first steps.
        last: The last steps.
        best_reward: The best mean reward of `_LONG` steps in a row.
        served: Replicas that have ever got work.
        loads: States between which the number of drawn groups changed, the oldest first.
        load: The present state of a live run.
        began: Since when steps are due, or when the run was first seen, in seconds since 1970.
    """

    limits: WatchConfig
    max_staleness: int = 0
    first: list[Row] = field(default_factory=list)
    last: deque[Row] = field(default_factory=lambda: deque(maxlen=_KEPT))
    best_reward: float = -math.inf
    served: set[str] = field(default_factory=set)
    loads: deque[Load] = field(default_factory=lambda: deque(maxlen=_KEPT))
    load: Load | None = None
    machine: Machine | None = None
    began: float = 0.0
    now: float = 0.0

    @property
    def steps_are_due(self) -> bool:
        """Return whether the run should be making steps now."""
        return self.load is not None and self.load.running

    def add_step(self, row: Row) -> None:
        """Remember a step, and forget steps that a rollback undid."""
        self.first = [each for each in self.first if each.step < row.step]
        while self.last and self.last[-1].step >= row.step:
            self.last.pop()
        if len(self.first) < _FIRST:
            self.first.append(row)
        self.last.append(row)
        self.now = max(self.now, row.time)
        if (reward := self.mean("reward/mean", _LONG)) is not None:
            self.best_reward = max(self.best_reward, reward)

    def add_load(self, load: Load) -> None:
        """Remember a state of the run."""
        if load.running and not self.steps_are_due:
            self.began = load.time
        self.load, self.now = load, max(self.now, load.time)
        self.served |= {each.name for each in load.replicas if not each.reason}
        drawn = sum(each.groups for each in load.environments)
        if not self.loads or drawn != sum(each.groups for each in self.loads[-1].environments):
            self.loads.append(load)

    def value(self, name: str) -> float | None:
        """Return a metric of the last step; None if it has none."""
        return self.last[-1].values.get(name) if self.last else None

    def mean(self, name: str, steps: int) -> float | None:
        """Return the mean of a metric over the last `steps` steps; None if there are fewer, or less than half of them have it."""
        rows = list(self.last)[-steps:]
        found = [row.values[name] for row in rows if name in row.values]
        return fmean(found) if len(rows) == steps and 2 * len(found) >= steps else None

    def baseline(self, name: str) -> float | None:
        """Return the median of a metric over the first steps before the last; None if fewer than three have it."""
        found = [row.values[name] for row in self.first[:-1] if name in row.values]
        return median(found) if len(found) > 2 else None

    def usual(self, name: str) -> float | None:
        """Return the median of a metric over the steps before the last, zeros left out; None if too few have it."""
        found = [value for row in list(self.last)[:-1] if (value := row.values.get(name, 0.0)) > 0]
        return median(found) if len(found) >= _LEAST_EARLIER else None

    def has_learned(self) -> bool:
        """Return whether the reward is about as good as at its best, and better than at the start."""
        now, start = self.mean("reward/mean", _LONG), self.baseline("reward/mean")
        if now is None or start is None:
            return False
        return now > start and now >= self.best_reward - 0.02 * abs(self.best_reward)


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule.

    Attributes:
        name: Its name, and the name of its alert in Prometheus.
        test: Returns what is wrong, or None.
        why: Why it matters.
        remedy: What to do, with the settings or the page of docs/.
        steps: Steps in a row in which it must be wrong.
        seconds: Seconds for which it must be wrong without a break.
    """

    name: str
    family: Family
    source: Source
    test: Callable[[History], Said | None]
    why: str
    remedy: str
    steps: int = 1
    seconds: float = 0.0


def _mismatch(run: History) -> Said | None:
    value, usual = run.value("trainer/mismatch_kl"), run.usual("trainer/mismatch_kl")
    if value is None:
        return None
    limit = run.limits.mismatch_kl
    if value > limit:
        return Said(f"mismatch_kl is {value:.3g}, the limit is {limit:g}", broken=value > 10 * limit)
    if usual is not None and value > 10 * usual and value > limit / 10:
        return Said(f"mismatch_kl is {value:.3g}, {value / usual:.0f} times what it was")
    return None


def _precision(run: History) -> Said | None:
    if run.value("trainer/precision_differs"):
        return Said("the engine samples with weights of another precision than the trainer computes in")
    value = run.value("trainer/max_abs_log_difference")
    if value is None or run.value("staleness/max") != 0.0 or value <= run.limits.log_difference:
        return None
    return Said(
        f"log-probabilities of one token differ by {value:.3g} between engine and trainer although both have the same version; the limit"
        f" is {run.limits.log_difference:g}"
    )


def _effective(run: History) -> Said | None:
    value = run.value("trainer/effective_sample_size")
    if value is None or value >= run.limits.effective_samples:
        return None
    return Said(
        f"{value:.0%} of the sampled tokens count, the limit is {run.limits.effective_samples:.0%}",
        broken=value < run.limits.effective_samples / 5,
    )


def _gradient(run: History) -> Said | None:
    value, usual = run.value("trainer/grad_norm"), run.usual("trainer/grad_norm")
    if value is None or usual is None or value <= run.limits.times_usual * usual:
        return None
    return Said(f"the norm of the gradient is {value:.3g}, {value / usual:.0f} times what it was")


def _skipped(run: History) -> Said | None:
    skipped = [row.values.get("trainer/skipped_steps", 0.0) for row in list(run.last)[-_SHORT:]]
    if not skipped or not skipped[-1]:
        return None
    count = sum(value > 0 for value in skipped)
    return Said(
        f"the optimizer skipped updates in {count} of the last {len(skipped)} steps", broken=count > _SHORT // 2
    )


def _entropy(run: History) -> Said | None:
    value, start = run.value("trainer/entropy"), run.baseline("trainer/entropy")
    if value is None or start is None or value >= run.limits.entropy_share * start or run.has_learned():
        return None
    return Said(f"entropy is {value:.3g}, {value / start:.0%} of the {start:.3g} of the first steps")


def _no_signal(run: History) -> Said | None:
    wasted, count = run.mean("groups/degenerate", _LONG), run.mean("groups/count", _LONG)
    if wasted is None or not count:
        return None
    solved = run.mean("groups/all_solved", _LONG)
    if solved is None:  # a run of an earlier release: nearly all tasks are solved if the mean is near the best
        mean, best = run.mean("reward/mean", _LONG), run.mean("reward/max", _LONG)
        solved = wasted if mean is not None and best is not None and mean >= 0.9 * best else 0.0
    share = (wasted - min(solved, wasted)) / count
    if share < run.limits.no_signal_share:
        return None
    return Said(
        f"in {share:.0%} of the groups of the last {_LONG} steps all attempts had one reward, and it was not the best",
        broken=share >= 1.0,
    )


def _length(run: History) -> Said | None:
    now, start = run.mean("completion/mean_tokens", _LONG), run.baseline("completion/mean_tokens")
    if now is None or start is None or now < start + _MORE_TOKENS:
        return None
    rewarded = run.mean("completion/mean_tokens_rewarded", _LONG)
    others = run.mean("completion/mean_tokens_unrewarded", _LONG)
    pays = rewarded is not None and others is not None and rewarded > 1.1 * others
    factor = run.limits.length_factor if pays else run.limits.length_factor**2
    if now < factor * start:
        return None
    longer = f", and the better ones are {rewarded / others - 1:.0%} longer" if pays and rewarded and others else ""
    return Said(f"completions have {now:.0f} tokens, {start:.0f} in the first steps{longer}")


def _truncated(run: History) -> Said | None:
    now, start = run.mean("completion/truncated_share", _SHORT), run.baseline("completion/truncated_share")
    if now is None or now <= run.limits.truncated_share or (start is not None and now < 0.5 * start):
        return None
    if run.has_learned():
        return None
    return Said(f"{now:.0%} of the completions of the last {_SHORT} steps were cut off")


def _repetition(run: History) -> Said | None:
    now, start = run.mean("completion/repetition", _SHORT), run.baseline("completion/repetition")
    if now is None or start is None or now <= run.limits.repetition_share or now < 2 * start:
        return None
    return Said(f"{now:.0%} of a completion repeats what stands before it, {start:.0%} in the first steps")


def _reward(run: History) -> Said | None:
    rewards = [row.values["reward/mean"] for row in list(run.last)[-_LONG:] if "reward/mean" in row.values]
    if len(rewards) < _LONG:
        return None
    now, best = fmean(rewards), run.best_reward
    fall = best - now
    if fall <= run.limits.reward_fall * abs(best) or fall <= 3 * stdev(rewards) / math.sqrt(_LONG):
        return None
    return Said(f"mean reward is {now:.3g}, it was {best:.3g}", broken=fall > 0.5 * abs(best))


def _slow_step(run: History) -> Said | None:
    value, usual = run.value("time/step_s"), run.usual("time/step_s")
    if value is None or usual is None or value <= run.limits.times_usual * usual + 1.0:
        return None
    return Said(f"a step takes {value:.1f} s, {value / usual:.0f} times what it took")


def _trainer_idle(run: History) -> Said | None:
    share = run.mean("load/trainer_idle", _IDLE)
    wasted, count = run.mean("groups/degenerate", _IDLE), run.mean("groups/count", _IDLE)
    if wasted is not None and count and wasted >= run.limits.no_signal_share * count:
        return None  # batches without signal take the trainer no time
    if share is None or share <= run.limits.idle_share:
        return None
    return Said(f"the trainer waited for batches {share:.0%} of the last {_IDLE} steps")


def _rollout_idle(run: History) -> Said | None:
    share = run.mean("load/rollout_idle", _IDLE)
    if share is None or share <= run.limits.idle_share:
        return None
    return Said(f"the replicas had nothing to do {share:.0%} of the last {_IDLE} steps")


def _lag(run: History) -> Said | None:
    value = run.value("weights/replica_lag")
    if value is None or value <= run.max_staleness + 1:
        return None
    return Said(f"a replica serves a version {value:.0f} behind the trainer's; the bound is {run.max_staleness}")


def _replica(run: History) -> Said | None:
    out = [each for each in run.load.replicas if each.reason] if run.load else []
    late = run.now - run.began > _START_S
    out = [each for each in out if each.name in run.served or late]
    if not out or run.load is None:
        return None
    names = ", ".join(f"{each.name or 'one without a name'} ({each.reason})" for each in out[:3])
    return Said(
        f"{len(out)} of {len(run.load.replicas)} replicas get no work: {names}",
        broken=len(out) == len(run.load.replicas),
    )


def _slow_replica(run: History) -> Said | None:
    replicas = run.load.replicas if run.load else ()
    rates = {each.name: each.tokens_per_s for each in replicas if not each.reason and each.tokens_per_s is not None}
    for name, rate in rates.items():
        others = [other for key, other in rates.items() if key != name]
        if others and rate < median(others) / run.limits.slow_replica_factor:
            return Said(f"a sample gets {rate:.3g} tokens/s of replica {name}, {median(others):.3g} of the others")
    return None


def _failing(run: History) -> Said | None:
    if run.load is None:
        return None
    # If there is only one state, count from the beginning of the run.
    before = {each.name: each for each in run.loads[0].environments} if len(run.loads) > 1 else {}
    for each in run.load.environments:
        then = before.get(each.name, EnvironmentLoad(each.name, 0, 0, 0))
        failed, groups = each.failed - then.failed, each.groups - then.groups
        if failed >= run.limits.failed_groups and failed > run.limits.failed_share * groups:
            share = min(1.0, failed / max(1, groups))
            return Said(f"{failed} of the last {groups} groups of environment {each.name} failed", broken=share > 0.5)
    return None


def _failed_calls(run: History) -> Said | None:
    rows = [row.values for row in list(run.last)[-_SHORT:]]
    failed = sum(row.get("environment/failed_calls", 0.0) for row in rows)
    trajectories = sum(row.get("trainer/trajectories", 0.0) for row in rows)
    if failed < run.limits.failed_groups or failed <= run.limits.failed_share * trajectories:
        return None
    return Said(
        f"{failed:.0f} calls of environments failed in the last {len(rows)} steps, of {trajectories:.0f} trajectories"
    )


def _quarantine(run: History) -> Said | None:
    held = [each for each in run.load.environments if each.quarantined] if run.load else []
    if not held:
        return None
    return Said(
        "tasks are set aside because they kept failing: "
        + ", ".join(f"{each.quarantined} of {each.name}" for each in held)
    )


def _waits(run: History) -> Said | None:
    waits = run.load.waits_for if run.load else ()
    return Said("the run waits for " + "; ".join(waits)) if waits else None


def _no_step(run: History) -> Said | None:
    if not run.steps_are_due:
        return None
    # After a pause or a restart, the time for a step counts from then on.
    since = run.now - max(run.began, run.last[-1].time if run.last else 0.0)
    usual = run.usual("time/step_s")
    limit = _START_S if usual is None else run.limits.times_usual * usual + _PAUSE_S
    if since <= limit:
        return None
    took = "" if usual is None else f"; one took {usual:.1f} s"
    return Said(f"no step for {since:.0f} s{took}", broken=since > 10 * limit)


def _disk(run: History) -> Said | None:
    if run.machine is None or run.machine.disk_bytes >= run.limits.disk_gb * 1e9:
        return None
    left = run.machine.disk_bytes / 1e9
    return Said(f"{left:.1f} GB are left on the disk of the run", broken=left < run.limits.disk_gb / 5)


def _memory(run: History) -> Said | None:
    if run.machine is None or run.machine.memory_share >= run.limits.memory_share:
        return None
    return Said(f"{run.machine.memory_share:.1%} of this machine's memory is available")


_L, _S, _R, _E, _M = Family.LEARNING, Family.SPEED, Family.ROLLOUT, Family.ENVIRONMENT, Family.MACHINE

RULES: tuple[Rule, ...] = (
    Rule(
        "mismatch",
        _L,
        Source.STEP,
        _mismatch,
        "The trainer learns from tokens that its policy would hardly have sampled: updates are noise, or ruin it.",
        "Lower trainer.lr or max_staleness; if it is high from the first step, engine and trainer differ (docs/numerics.md).",
        steps=3,
    ),
    Rule(
        "precision",
        _L,
        Source.STEP,
        _precision,
        "Engine and trainer compute different policies from one version: every ratio is wrong, and small updates do not reach the samples.",
        "Set rollout.dtype to the trainer's, or auto; quantise neither weights nor the KV cache (docs/numerics.md).",
    ),
    Rule(
        "effective-samples",
        _L,
        Source.STEP,
        _effective,
        "A few tokens decide the update, the rest of the batch is wasted.",
        "Lower trainer.lr or max_staleness (docs/objectives.md).",
        steps=2,
    ),
    Rule(
        "gradient",
        _L,
        Source.STEP,
        _gradient,
        "Updates of this size often ruin a policy.",
        "Lower trainer.lr or trainer.grad_clip, and look at the samples with the lowest rewards.",
        steps=2,
    ),
    Rule(
        "skipped-steps",
        _L,
        Source.STEP,
        _skipped,
        "A gradient that is not finite updates nothing: the batch was in vain.",
        "Look at the trainer's log for the first one; lower trainer.lr (docs/numerics.md).",
    ),
    Rule(
        "entropy",
        _L,
        Source.STEP,
        _entropy,
        "The policy hardly tries anything new, so groups stop to differ and learning ends.",
        "Lower trainer.lr, raise the sampling temperature, or use an objective with a higher upper clip (docs/objectives.md).",
        steps=_SHORT,
    ),
    Rule(
        "no-signal",
        _L,
        Source.STEP,
        _no_signal,
        "Groups whose attempts have one reward teach nothing.",
        "Use easier tasks or more attempts a group, or a reward with more than two values (docs/curriculum.md).",
    ),
    Rule(
        "length",
        _L,
        Source.STEP,
        _length,
        "A reward that pays for length trains long answers, not good ones.",
        "Read the longest samples (`sluice monitor RUN --samples`), and limit or penalise length (docs/rewards.md).",
    ),
    Rule(
        "truncation",
        _L,
        Source.STEP,
        _truncated,
        "What is cut off rarely has its answer, so its reward says nothing.",
        "Raise orchestrator.sampling.max_tokens, or find out why the model does not end (docs/rewards.md).",
    ),
    Rule(
        "repetition",
        _L,
        Source.STEP,
        _repetition,
        "A policy that repeats itself has collapsed, or exploits the reward.",
        "Read samples (`sluice monitor RUN --samples`); go back to an earlier checkpoint with a lower trainer.lr (`sluice fork`).",
    ),
    Rule(
        "reward",
        _L,
        Source.STEP,
        _reward,
        "The policy gets worse at what it is rewarded for.",
        "Go back to the best checkpoint with a lower trainer.lr (`sluice fork`), after a look at the other findings.",
    ),
    Rule(
        "slow-step",
        _S,
        Source.STEP,
        _slow_step,
        "The run takes longer than it has to.",
        "See time/, trainer/seconds/ and weights/ of the last steps for the part that grew (docs/throughput.md).",
        steps=3,
    ),
    Rule(
        "trainer-idle",
        _S,
        Source.STEP,
        _trainer_idle,
        "The devices of the trainer do nothing most of the time.",
        "Add replicas (--replicas), raise max_staleness, or give the trainer fewer devices (docs/throughput.md).",
    ),
    Rule(
        "rollout-idle",
        _S,
        Source.STEP,
        _rollout_idle,
        "The devices of the replicas do nothing most of the time.",
        "Raise max_staleness, use fewer replicas, or give the trainer more devices (docs/throughput.md).",
    ),
    Rule(
        "no-step",
        _S,
        Source.TIME,
        _no_step,
        "A run that makes no steps learns nothing.",
        "`sluice status RUN` says what it waits for, logs/ what each service does.",
    ),
    Rule(
        "version-lag",
        _R,
        Source.STEP,
        _lag,
        "What an old version samples is too stale to be trained.",
        "See weights/pull_s and weights/total_s, and the replica's log (docs/weight-sync.md).",
        steps=3,
    ),
    Rule(
        "replica",
        _R,
        Source.LOAD,
        _replica,
        "The run samples more slowly, or not at all.",
        "See the replica's log; `sluice doctor RUN` asks each service.",
        seconds=60.0,
    ),
    Rule(
        "slow-replica",
        _R,
        Source.LOAD,
        _slow_replica,
        "Groups wait for their slowest sample, and it gets stale.",
        "See what else runs on its machine, its clocks and its KV cache; `sluice drain` takes it out (docs/failover.md).",
        seconds=30.0,
    ),
    Rule(
        "waits",
        _R,
        Source.LOAD,
        _waits,
        "The run does nothing until it comes.",
        "Start or repair what is named.",
        seconds=60.0,
    ),
    Rule(
        "environment",
        _E,
        Source.LOAD,
        _failing,
        "What fails is sampled for nothing, and hard tasks may fail more often than others.",
        "See the environment's log for the first error; `sluice env play` runs one episode (docs/environments.md).",
    ),
    Rule(
        "failed-calls",
        _E,
        Source.STEP,
        _failed_calls,
        "Trajectories whose environment fails have no reward, and hard tasks may fail more often than others.",
        "See the orchestrator's log for the first error; `sluice env play` runs one episode (docs/environments.md).",
    ),
    Rule(
        "quarantine",
        _E,
        Source.LOAD,
        _quarantine,
        "These tasks are no longer trained.",
        "`sluice status RUN --json` names tasks and errors (docs/environments.md).",
    ),
    Rule(
        "disk",
        _M,
        Source.MACHINE,
        _disk,
        "A full disk ends the run.",
        "Free space, or lower orchestrator.disk.*, trainer.checkpoint.keep and weightsync.keep (docs/disk.md).",
    ),
    Rule(
        "memory",
        _M,
        Source.MACHINE,
        _memory,
        "The system ends a process when memory runs out.",
        "See docs/memory.md for what each service needs.",
        seconds=30.0,
    ),
)
"""Every rule, by family."""
