"""What operators see of a run: its state, its events, its load, and its last trajectories."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import structlog
from google.protobuf.timestamp_pb2 import Timestamp
from prometheus_client import Metric

from orchestrator_svc.config import OrchestratorConfig
from orchestrator_svc.journal.facts import Stage
from orchestrator_svc.journal.records import Beginning, SharedRecord
from orchestrator_svc.run.curriculum import Curriculum
from orchestrator_svc.run.scheduler import Scheduler
from orchestrator_svc.sessions.desk import MissingAgents
from orchestrator_svc.sessions.lending import Refusals
from sluice.clock import CLOCK, Clock
from sluice.paging import page_start
from sluice.sampling.pool import ReplicaPool
from sluice.sampling.replica import Replica
from sluice.telemetry import LoopLag, counter, gauge
from sluice.v1 import orchestrator_pb2
from sluice.versions import Version
from sluice.watch.live import LoadReader
from sluice.watch.rules import RULES, Row
from sluice.watch.watch import Finding, Watch

log = structlog.get_logger(__name__)

RunState: TypeAlias = orchestrator_pb2.RunState.ValueType

KEPT = 10_000
"""Events kept, as the contract says."""

_AGENTS = "agents/"
"""Prefix of the name of this cause in `RunStatus.waits_for`; the environment follows."""

_NUMBERS_PER_START = 1 << 32
"""Sequence numbers per process: more than it can emit, so that all numbers of the next process are greater."""

_LOOK_S = 5.0
"""Seconds between two checks of replicas and environments."""

_NOTABLE = 0.1
"""Share of the time below which waiting is not worth reporting."""

_MOST_QUARANTINED = 100
"""Tasks in quarantine that GetRun and the report name, as the contract says."""

_TOKENS = {"sampled": "tokens", "kept": "tokens_kept", "lost": "tokens_lost"}
"""Counts of the pool, by kind of tokens: sampled in whole samples; kept or lost when a request moved to another replica."""

_DEFAULT_PAGE = 50
_LARGEST_PAGE = 500
_PAGE_BYTES = 3 << 20
"""Size of a page in bytes: below the size limit of a message."""


class RunStatus:
    """Keeps the run's state and appends its events.

    Attributes:
        history: The last trajectories whose outcome is known.
        watch: Says what is wrong with the run.
        waits_for: What the run waits for and somebody may have to repair or start, by name of the cause.
        evaluations: The last evaluation of each environment.
        trainer_idle: Time in which the trainer had no batch.
        dispatch_blocked: Time in which the staleness bound, the pace, or a version that no replica serves yet stopped dispatch.
        rollout_idle: The part of that time in which no group was running either.
        loop_lag: How late the event loop is.
    """

    def __init__(
        self,
        run: str,
        config: OrchestratorConfig,
        scheduler: Scheduler,
        pool: ReplicaPool,
        events: EventLog,
        *,
        curriculum: Curriculum,
        refusals: Refusals | None = None,
        missing: MissingAgents | None = None,
        watch: Watch | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        self._curriculum, self._clock = curriculum, clock
        self.refusals = refusals or Refusals()
        self.events, self.history = events, TrajectoryHistory()
        self.state: RunState = orchestrator_pb2.RUN_STATE_STARTING
        self.error = ""
        self.waits_for: dict[str, str] = {}
        self._missing_agents = missing or MissingAgents((), 0.0)
        self.metrics: dict[str, float] = {}
        self.watch, self._loads, self._looked = watch or Watch(), LoadReader(), 0.0
        self.evaluations: dict[str, Mapping[str, float]] = {}
        self._last_step_time = self._checkpoint_time = 0.0
        self._checkpoint = 0
        self.max_staleness_seen = 0
        now = self._clock()
        self.trainer_idle, self.dispatch_blocked, self.rollout_idle = (HeldTime(now) for _ in range(3))
        self.loop_lag = LoopLag()
        self._began, self._elapsed_before_s = now, scheduler.ledger.elapsed_s
        self._load_shares = self.shares()
        self._run, self._config, self._scheduler, self._pool = run, config, scheduler, pool
        self._ledger = scheduler.ledger
        self._started = Timestamp()
        self._started.GetCurrentTime()
        self._bottleneck = ""
        self._last_load = (now, 0)

    @property
    def elapsed_s(self) -> float:
        """Seconds that the run has lasted, earlier processes included."""
        return self._elapsed_before_s + self._clock() - self._began

    def shares(self) -> tuple[ShareSince, ShareSince, ShareSince]:
        """Return the shares of time since the last call: trainer idle, dispatch blocked, rollout idle."""
        now = self._clock()
        return (
            ShareSince(self.trainer_idle, now),
            ShareSince(self.dispatch_blocked, now),
            ShareSince(self.rollout_idle, now),
        )

    def enter(self, state: RunState, message: str = "") -> None:
        """Change the run's state."""
        if state == self.state and not message:
            return
        self.state = state
        changed = orchestrator_pb2.RunStateChanged(state=state, message=message)
        self.events.append(orchestrator_pb2.RunEvent(state_changed=changed))

    def group_scored(self, group_id: str, task_id: str, rewards: Mapping[str, float | None]) -> None:
        """Report a scored group with the rewards of its episodes, None for a missing one."""
        episodes = [orchestrator_pb2.ScoredEpisode(episode_id=name, reward=reward) for name, reward in rewards.items()]
        scored = orchestrator_pb2.GroupScored(group_id=group_id, task_id=task_id, episodes=episodes)
        self.events.append(orchestrator_pb2.RunEvent(group_scored=scored))

    def step_finished(self, version: Version, metrics: Mapping[str, float]) -> None:
        """Report an applied batch."""
        self._last_step_time = time.time()
        self.metrics = dict(metrics)
        self.max_staleness_seen = max(self.max_staleness_seen, int(metrics.get("staleness/max", 0)))
        finished = orchestrator_pb2.StepFinished(
            step=version.number, policy_version=version.to_proto(), metrics=self.metrics
        )
        self.events.append(orchestrator_pb2.RunEvent(step_finished=finished))
        self._log_findings(self.watch.step(Row(version.number, time.time(), self.metrics)))

    def evaluation_finished(self, version: Version, environment: str, metrics: Mapping[str, float]) -> None:
        """Report an evaluation."""
        self.evaluations[environment] = metrics
        finished = orchestrator_pb2.EvaluationFinished(
            policy_version=version.to_proto(), environment=environment, metrics=metrics
        )
        self.events.append(orchestrator_pb2.RunEvent(evaluation_finished=finished))

    def checkpoint_written(self, name: str, version: Version) -> None:
        """Report a complete checkpoint."""
        self._checkpoint_time, self._checkpoint = time.time(), version.number
        written = orchestrator_pb2.CheckpointWritten(name=name, policy_version=version.to_proto())
        self.events.append(orchestrator_pb2.RunEvent(checkpoint_written=written))

    def setting_changed(self, changed: orchestrator_pb2.ChangedSetting) -> None:
        """Report a setting that has another value, or a task that was released."""
        self.events.append(orchestrator_pb2.RunEvent(setting_changed=changed))

    def report_load(self) -> None:
        """Report the load since the last report, and who is missing."""
        now = self._clock()
        self._look_for_agents(now)
        tokens = self._pool.generated_tokens()
        then, before = self._last_load
        self._last_load = (now, tokens)
        idle, blocked, rollout_idle = (share.take(now) for share in self._load_shares)
        self._bottleneck = bottleneck(idle, rollout_idle)
        scheduler, ledger = self._scheduler, self._ledger
        load = orchestrator_pb2.LoadReport(
            # A replica that restarts counts from 0 again.
            generated_tokens_per_s=max(0, tokens - before) / (now - then) if now > then and before else 0.0,
            live_groups=len(ledger.groups),
            max_live_groups=scheduler.bound.capacity,
            ready_groups=ledger.count(Stage.READY),
            queued_batches=len(ledger.to_send),
            trainer_idle=idle,
            dispatch_blocked=blocked,
            bottleneck=self._bottleneck,
            environments=describe_environments(self._curriculum, most_quarantined=0),
            max_staleness=scheduler.bound.max_staleness,
        )
        self.events.append(orchestrator_pb2.RunEvent(load=load))
        if now - self._looked >= _LOOK_S:
            self._looked = now
            self._look_at_load(time.time())

    def _look_at_load(self, wall: float) -> None:
        """Report what is wrong with replicas and environments. `wall` is in seconds since 1970."""
        self._log_findings(self.watch.load(self._loads.read(self.describe(), wall)))

    def _log_findings(self, begun: Iterable[Finding]) -> None:
        # No warning: `sluice rl` would show it twice.
        for each in begun:
            log.info("finding", rule=each.rule.name, broken=each.broken, what=each.what, remedy=each.rule.remedy)

    def _look_for_agents(self, now: float) -> None:
        """Report which environments wait for agents that do not come. Log each once."""
        missing = self._missing_agents
        for environment in missing.look(self._ledger.groups.values(), now):
            log.warning(
                "waits for agents: episodes are on offer and no agent has one",
                environment=environment,
                groups=missing.groups[environment],
                remedy="start an agent that leases episodes through a gateway; the run waits as long as it takes, unless other"
                " environments can be played meanwhile",
            )
        others = {key: text for key, text in self.waits_for.items() if not key.startswith(_AGENTS)}
        self.waits_for = others | {
            f"{_AGENTS}{name}": f"agents: {groups} groups of environment {name} are on offer and no agent has an episode of it:"
            " start one that leases episodes through a gateway"
            for name, groups in missing.groups.items()
        }
        for name in missing.away:
            self.waits_for[f"{_AGENTS}{name}"] = (
                f"agents: none came for environment {name}, and others are played meanwhile; its episodes are offered again as soon as"
                " an agent asks a gateway for one"
            )

    def describe(self) -> orchestrator_pb2.Run:
        """Describe the run as it stands."""
        scheduler, ledger = self._scheduler, self._ledger
        return orchestrator_pb2.Run(
            name=f"runs/{self._run}",
            state=self.state,
            step=ledger.applied,
            max_steps=self._config.max_steps,
            policy_version=Version(ledger.epoch, ledger.applied).to_proto(),
            live_groups=len(ledger.groups),
            max_live_groups=scheduler.bound.capacity,
            running_episodes=self._curriculum.running_episodes(),
            max_staleness=scheduler.bound.max_staleness,
            max_staleness_seen=self.max_staleness_seen,
            trajectories_accepted=ledger.accepted,
            trajectories_trained=ledger.trained,
            trajectories_dropped=dict(ledger.dropped),
            replicas=[each.describe() for each in self._pool.replicas],
            error=self.error,
            start_time=self._started,
            metrics=self.metrics,
            bottleneck=self._bottleneck,
            changed_settings=ledger.setting_changes,
            environments=self.environments(),
            groups_failed=dict(ledger.failed_groups),
            redraws_dropped=ledger.redraws_dropped,
            set_aside=[
                orchestrator_pb2.SetAside(reason=reason, trajectories=each.trajectories, problem=each.problem)
                for reason, each in ledger.set_aside.items()
            ],
            refused=self.refusals.describe(),
            waits_for=list(self.waits_for.values()),
        )

    def waits_for_others(self) -> Iterator[str]:
        """Yield what the run waits for: replicas, and the entries of `waits_for`."""
        replicas = self._pool.replicas
        if all(each.why_not() for each in replicas):
            known = f"none of the {len(replicas)} that are known gets work" if replicas else "none is known yet"
            yield f"replicas: {known}"
        yield from self.waits_for.values()

    def scrape(self) -> Iterator[Metric]:
        """Yield the run as Prometheus metrics."""
        ledger, bound, now = self._ledger, self._scheduler.bound, self._clock()
        states = orchestrator_pb2.RunState
        named = {
            name.removeprefix("RUN_STATE_").lower(): float(states.Value(name) == self.state)
            for name in states.keys()[1:]
        }
        yield gauge("sluice_run_state", "1 for the state of the run, 0 for the others.", named, "state")
        for name, text, value in (
            ("policy_epoch", "Epoch of the trainer's version.", ledger.epoch),
            (
                "policy_number",
                "Number of the trainer's version: batches that its weights have absorbed.",
                ledger.applied,
            ),
            ("max_steps", "Batches after which the run ends.", self._config.max_steps),
            ("live_groups", "Groups dispatched and neither applied nor dropped.", len(ledger.groups)),
            ("max_live_groups", "Most groups that the bound on staleness allows.", bound.capacity),
            ("running_episodes", "Episodes that are generated or scored.", self._curriculum.running_episodes()),
            ("ready_groups", "Scored groups that wait for a batch.", ledger.count(Stage.READY)),
            ("queued_batches", "Batches made that the trainer has not applied.", len(ledger.to_send)),
            ("max_staleness", "Most versions that a token may lag behind.", bound.max_staleness),
            (
                "staleness_seen",
                "Most versions that a trained token lagged behind since the start of this process.",
                self.max_staleness_seen,
            ),
        ):
            yield gauge(f"sluice_run_{name}", text, float(value))
        for name, text, total in (
            ("trainer_idle_seconds", "Seconds in which the trainer had no batch.", self.trainer_idle.seconds(now)),
            ("dispatch_blocked_seconds", "Seconds in which no group could start.", self.dispatch_blocked.seconds(now)),
            ("rollout_idle_seconds", "Those of them in which no group ran either.", self.rollout_idle.seconds(now)),
            ("trajectories_accepted", "Trajectories accepted.", ledger.accepted),
            ("trajectories_trained", "Trajectories trained.", ledger.trained),
        ):
            yield counter(f"sluice_run_{name}", text, float(total))
        dropped = {reason: float(count) for reason, count in ledger.dropped.items()}
        yield counter("sluice_run_trajectories_dropped", "Trajectories dropped, by reason.", dropped, "reason")
        failed = {reason: float(count) for reason, count in ledger.failed_groups.items()}
        set_aside = {reason: float(each.trajectories) for reason, each in ledger.set_aside.items()}
        yield counter(
            "sluice_run_trajectories_set_aside", "Of those dropped, what can never be trained.", set_aside, "reason"
        )
        refused = Counter({each.reason: 0.0 for each in self.refusals.describe()})
        for each in self.refusals.describe():
            refused[each.reason] += each.count
        yield counter("sluice_run_refused", "Rewards refused where they were given, by reason.", refused, "reason")
        waiting = {name: float(groups) for name, groups in self._missing_agents.groups.items()}
        yield gauge(
            "sluice_run_groups_without_agents",
            "Groups on offer of an environment that no agent has taken an episode of for `external.notice_s`.",
            waiting,
            "environment",
        )
        yield counter("sluice_run_groups_failed", "Groups that failed, by reason.", failed, "reason")
        lost = {reason: float(count) for reason, count in ledger.lost_episodes.items()}
        yield counter("sluice_run_episodes_lost", "Episodes that trained groups lack, by reason.", lost, "reason")
        happened = {name: float(count) for name, count in self._pool.counts.items()}
        yield counter("sluice_run_sampling_events", "What happened to requests at replicas.", happened, "event")
        yield gauge("sluice_run_step_metric", "Metrics of the last step, as in metrics.jsonl.", self.metrics, "name")
        levels = dict.fromkeys((each.name for each in RULES), 0.0)
        levels |= {each.rule.name: 2.0 if each.broken else 1.0 for each in self.watch.active}
        text = (
            "What is wrong with the run, by rule: 0 nothing, 1 somebody should look, 2 it is worth nothing like this."
        )
        yield gauge("sluice_run_finding", text, levels, "rule")
        yield from self._scrape_progress()
        yield from self._scrape_replicas()

    def _scrape_progress(self) -> Iterator[Metric]:
        generated = self._pool.counts
        tokens = {kind: float(generated[name]) for kind, name in _TOKENS.items()}
        yield counter("sluice_run_tokens", "Tokens sampled for the run by this process, by kind.", tokens, "kind")
        for name, text, value in (
            ("last_step_timestamp_seconds", "Unix time of the last applied batch; 0 before it.", self._last_step_time),
            (
                "checkpoint_timestamp_seconds",
                "Unix time of the last checkpoint of this process; 0 before it.",
                self._checkpoint_time,
            ),
            ("checkpoint_number", "Number of the version of that checkpoint.", float(self._checkpoint)),
            ("waits", "Causes for which the run waits, as `sluice status` lists them.", float(len(self.waits_for))),
        ):
            yield gauge(f"sluice_run_{name}", text, value)
        if "reward/mean" in self.metrics:
            yield gauge("sluice_run_reward_mean", "Mean reward of the last batch.", self.metrics["reward/mean"])
        found = {(of, name): value for of, metrics in self.evaluations.items() for name, value in metrics.items()}
        text = "Metrics of the last evaluation of each environment."
        yield gauge("sluice_run_evaluation", text, found, "environment", "name")

    def _scrape_replicas(self) -> Iterator[Metric]:
        replicas, ledger = self._pool.replicas, self._ledger
        fit = sum(not each.why_not() for each in replicas)
        counts = {"fit": float(fit), "unfit": float(len(replicas) - fit)}
        yield gauge("sluice_run_replicas", "Replicas known, by whether they get work.", counts, "state")
        # A replica at a version of an older epoch has no version of this epoch.
        lags = {
            each.name: float(
                ledger.applied - each.version.number if each.version.epoch == ledger.epoch else ledger.applied
            )
            for each in replicas
            if each.seen
        }
        lag_text = "Versions that a replica is behind the trainer."
        yield gauge("sluice_run_replica_lag", lag_text, lags, "replica")

    def environments(self) -> list[orchestrator_pb2.RunEnvironment]:
        """Describe the environments of the run, with the first tasks in quarantine."""
        return describe_environments(self._curriculum)


def describe_environments(
    curriculum: Curriculum, most_quarantined: int = _MOST_QUARANTINED
) -> list[orchestrator_pb2.RunEnvironment]:
    """Describe the environments of a run, each with at most `most_quarantined` tasks in quarantine."""
    described = []
    for name in curriculum.environments:
        counts, stream = curriculum.counts(name), curriculum.stream(name)
        first = list(stream.quarantined.items())[:most_quarantined]
        described.append(
            orchestrator_pb2.RunEnvironment(
                name=name,
                wanted_share=curriculum.share(name),
                groups=counts.groups,
                groups_accepted=counts.accepted,
                groups_refilled=counts.refilled,
                groups_failed=counts.failed,
                groups_passed_on=counts.passed_on,
                pools=stream.sizes(),
                groups_by_pool=counts.by_pool,
                overlong=counts.overlong,
                quarantined=[
                    orchestrator_pb2.QuarantinedTask(task_id=task_id, failures=each.failures, problem=each.problem)
                    for task_id, each in first
                ],
                quarantined_count=len(stream.quarantined),
            )
        )
    return described


def replica_event(replica: Replica) -> orchestrator_pb2.RunEvent:
    """Return the event of a replica that came, went or changed its version."""
    return orchestrator_pb2.RunEvent(replica_changed=orchestrator_pb2.ReplicaChanged(replica=replica.describe()))


class EventLog:
    """Events by sequence number: a bounded history that any number of watchers read at their own pace.

    The numbers of the first process begin at 1. Each later process of the run begins above all numbers that its predecessors
    can have used, so that a watcher that continues from the last number it saw misses no event.

    Args:
        start: Number of this process among those of the run, from 1.
        keep: Gets each event with its number, and returns at once. None: events are kept only here.
    """

    def __init__(self, start: int = 1, keep: Callable[[orchestrator_pb2.RunEvent], None] | None = None) -> None:
        self._keep = keep
        self._events: deque[orchestrator_pb2.RunEvent] = deque(maxlen=KEPT)
        self._next = (start - 1) * _NUMBERS_PER_START + 1
        self._changed = asyncio.Event()
        self._ended = False
        self._watchers = 0
        self._nobody = asyncio.Event()
        self._nobody.set()

    def append(self, event: orchestrator_pb2.RunEvent) -> None:
        """Number an event, stamp it with the time and wake the watchers."""
        event.sequence_no = self._next
        event.time.GetCurrentTime()
        self._events.append(event)
        self._next += 1
        self._changed.set()
        if self._keep is not None:
            self._keep(event)

    def end(self) -> None:
        """End the log: no event will follow."""
        self._ended = True
        self._changed.set()

    async def follow(self, from_sequence_no: int) -> AsyncIterator[orchestrator_pb2.RunEvent]:
        """Yield events from a number on, or from the oldest kept event, until the run has ended."""
        number = max(1, from_sequence_no)
        self._watchers += 1
        self._nobody.clear()
        try:
            while True:
                while number < self._next:
                    oldest = self._next - len(self._events)
                    number = max(number, oldest)
                    if number < self._next:  # a later process of the run has no event yet
                        yield self._events[number - oldest]
                        number += 1
                if self._ended:
                    return
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._nobody.set()

    async def all_read(self, deadline_s: float) -> bool:
        """Wait until the watchers have read the end and left; return whether they did in time."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._nobody.wait()
        except TimeoutError:
            return False
        return True


class Kept(NamedTuple):
    """A trajectory of the history, serialised: as a message it takes four times the memory.

    Attributes:
        number: Its place in the order in which they came, from 1.
        beginning: The beginning that it shares with others; None if it shares none.
        payload: The rest of the trajectory.
    """

    number: int
    step: int
    reward: float | None
    beginning: Beginning | None
    payload: bytes

    def matches(self, request: orchestrator_pb2.ListTrajectoriesRequest) -> bool:
        """Return whether a request asks for this trajectory."""
        if request.HasField("step") and self.step != request.step:
            return False
        if not request.HasField("reward_below"):
            return True
        return self.reward is not None and self.reward < request.reward_below

    def shared(self) -> list[Beginning]:
        """Return the parts before the rest, in order."""
        return self.beginning.parts() if self.beginning else []


class TrajectoryHistory:
    """The last trajectories whose outcome is known, for ListTrajectories; older ones are in the files.

    Args:
        max_bytes: Serialised size of all kept trajectories; a shared beginning counts once.
    """

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._kept: deque[Kept] = deque()
        self._max_bytes, self._bytes, self._next = max_bytes, 0, 1
        self._holders: Counter[int] = Counter()  # trajectories that begin with it, by identity

    def add(self, record: SharedRecord) -> None:
        """Add a trajectory; forget the oldest beyond the bound."""
        trajectory = record.trajectory
        reward = trajectory.reward if trajectory.HasField("reward") else None
        kept = Kept(self._next, record.own.step, reward, record.beginning, record.own.SerializeToString())
        self._kept.append(kept)
        self._next += 1
        self._bytes += len(kept.payload)
        for part in kept.shared():
            self._holders[id(part)] += 1
            self._bytes += len(part.payload) if self._holders[id(part)] == 1 else 0
        while self._bytes > self._max_bytes:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        oldest = self._kept.popleft()
        self._bytes -= len(oldest.payload)
        for part in oldest.shared():
            self._holders[id(part)] -= 1
            if not self._holders[id(part)]:
                del self._holders[id(part)]
                self._bytes -= len(part.payload)

    def page(self, request: orchestrator_pb2.ListTrajectoriesRequest) -> orchestrator_pb2.ListTrajectoriesResponse:
        """Return a page, newest first. Its token is the number of the last trajectory shown.

        Raises:
            SluiceError: INVALID_ARGUMENT if the token is not from `page`.
        """
        before = page_start(request.page_token, "ListTrajectories") or self._next
        wanted = min(request.page_size or _DEFAULT_PAGE, _LARGEST_PAGE)
        answer = orchestrator_pb2.ListTrajectoriesResponse()
        taken = last = 0
        for each in reversed(self._kept):
            if each.number >= before or not each.matches(request):
                continue
            payloads = [*(part.payload for part in each.shared()), each.payload]
            size = sum(map(len, payloads))
            if len(answer.trajectories) == wanted or (answer.trajectories and taken + size > _PAGE_BYTES):
                answer.next_page_token = str(last)
                break
            answer.trajectories.add().MergeFromString(b"".join(payloads))
            taken, last = taken + size, each.number
        return answer


class HeldTime:
    """Adds up the seconds for which a condition held. It has no clock: the caller passes the time in monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._holds = False
        self._since = now
        self._held = 0.0

    def set(self, holds: bool, now: float) -> None:
        """Set whether the condition holds from now on."""
        self._held = self.seconds(now)
        self._holds, self._since = holds, now

    def seconds(self, now: float) -> float:
        """Return the seconds for which it held so far."""
        return self._held + (now - self._since if self._holds else 0.0)


class ShareSince:
    """The share of time in which a condition held since the last `take`."""

    def __init__(self, held: HeldTime, now: float) -> None:
        self._held = held
        self._last, self._last_held = now, held.seconds(now)

    def take(self, now: float) -> float:
        """Return the share since the last call, 0 to 1."""
        held = self._held.seconds(now)
        elapsed, gained = now - self._last, held - self._last_held
        self._last, self._last_held = now, held
        return min(1.0, gained / elapsed) if elapsed > 0 else 0.0


def bottleneck(trainer_idle: float, rollout_idle: float) -> str:
    """Return which side makes the other wait: "rollout", "trainer", or empty if neither waits notably."""
    if max(trainer_idle, rollout_idle) < _NOTABLE:
        return ""
    return "rollout" if trainer_idle >= rollout_idle else "trainer"
