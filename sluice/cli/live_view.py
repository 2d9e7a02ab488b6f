"""The view of a running run: a live panel on a terminal, plain lines elsewhere.

`RunProgress` and `RateLimit` know neither a clock nor a terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sluice.cli.report import METRIC_NAMES
from sluice.client import OrchestratorClient
from sluice.config import SecurityConfig
from sluice.rpc import SluiceError
from sluice.supervise.log_records import LEVELS, LogLine
from sluice.supervise.supervisor import ChildState
from sluice.v1 import orchestrator_pb2
from sluice.watch.files import RunFiles
from sluice.watch.live import STATES, LoadReader
from sluice.watch.rules import Row
from sluice.watch.watch import Finding, Watch

_REFRESH_S = 0.25
_SPARK_WIDTH = 48
_REASON_WIDTH = 56
"""Most characters shown of the reason why a replica gets no work. The log has the whole reason."""

_LOOK_S = 5.0
"""Seconds between two looks at the state of the run and of this machine."""

_RECONNECT_S = 0.5
"""Pause before another attempt to reach the orchestrator, in seconds; the supervisor bounds how long it may be away."""

_CHILD_STYLES = {
    ChildState.STARTING: "yellow",
    ChildState.SERVING: "green",
    ChildState.RESTARTING: "bold yellow",
    ChildState.STOPPING: "yellow",
    ChildState.LEFT: "dim",
    ChildState.ENDED: "dim",
}

_HISTORY = 400
"""Rewards that are kept for the sparkline."""

_PACE_STEPS = 20
"""Steps over which the seconds per step are averaged."""

_BLOCKS = "▁▂▃▄▅▆▇█"

_WAITS = {"rollout": "trainer waits for rollout", "trainer": "rollout waits for trainer"}

SHOWN = 3
"""Lines of one kind that are shown before further ones are counted."""

WINDOW_S = 10.0
"""Seconds without a line of a kind after which its count starts again."""


class RunView:
    """Shows a run; a `Listener` of the supervisor.

    Args:
        live: Draw the panel; otherwise one line per step.
        verbose: Show every line of the children instead of warnings and errors.
        watch: Says what is wrong with the run.
        run_dir: The run's directory, whose disk is watched. None: watch no disk.
    """

    def __init__(
        self,
        run: str,
        console: Console,
        *,
        live: bool,
        verbose: bool,
        watch: Watch | None = None,
        run_dir: Path | None = None,
    ) -> None:
        self.progress, self.watch = RunProgress(), watch or Watch()
        self._loads, self._files = LoadReader(), None if run_dir is None else RunFiles(run_dir)
        self._run, self._console, self._verbose = run, console, verbose
        self._children: dict[str, ChildState] = {}
        self._limits: defaultdict[str, RateLimit] = defaultdict(RateLimit)
        self._live = Live(console=console, auto_refresh=False, transient=False) if live else None

    def on_line(self, child: str, line: LogLine) -> None:
        """Show a child's line if it is a warning or an error, or if `verbose` is set."""
        threshold = LEVELS["warning"] if line.structured else LEVELS["error"]
        if not self._verbose and line.level < threshold:
            return
        style = "red" if line.level >= LEVELS["error"] else "yellow" if line.level >= LEVELS["warning"] else "dim"
        parts = line.text.splitlines()
        if not self._verbose and len(parts) > 1:
            # The first and the last line of a traceback name the error. The log has the rest, which is shown if the child dies.
            parts = [f"{parts[0]}: {parts[-1]}"]
        if not self._verbose:
            parts = list(self._limits[child].offer(line.kind, parts[0], time.monotonic()))
        self._print(child, parts, style)

    def _print(self, child: str, lines: Sequence[str], style: str) -> None:
        for line in lines:
            self._console.print(f"[{style}]{child:>12} |[/] {escape(line)}", highlight=False, soft_wrap=True)

    def on_state(self, child: str, state: ChildState, detail: str) -> None:
        """Show that a child started, serves, ended or is restarted."""
        self._children[child] = state
        if state is ChildState.ENDED:
            self._print(child, self._limits[child].flush(), "red")
        if state in {ChildState.RESTARTING, ChildState.LEFT}:
            self.say(f"{child} {detail}", style="yellow")
        elif self._live is None and state is ChildState.SERVING:
            self.say(f"{child} serves")

    def on_event(self, event: orchestrator_pb2.RunEvent) -> None:
        """Process an event of the run. Print new findings, and without a panel a line for each new step."""
        if not self.progress.apply(event):
            return
        if self._live is None:
            self.say(step_line(self.progress))
        row = Row(event.step_finished.step, _seconds(event), self.progress.metrics)
        self.tell(*self.watch.step(row))

    def tell(self, *findings: Finding) -> None:
        """Print findings: what and since when, why it matters, what to do."""
        for each in findings:
            self._console.print(*finding_lines(each), sep="\n", soft_wrap=True)

    async def follow(self, target: str, security: SecurityConfig) -> None:
        """Show the run's events while the orchestrator serves, across restarts, until the run has succeeded.

        Cancel this when the supervisor reports that the run failed for good.
        """
        while not self.progress.succeeded:
            if self._children.get("orchestrator") is ChildState.SERVING:
                async with OrchestratorClient(target, security) as orchestrator:
                    with contextlib.suppress(SluiceError):
                        await self._look(orchestrator)
                        looking = asyncio.create_task(self._keep_looking(orchestrator))
                        try:
                            async for answer in orchestrator.watch(self._run):
                                self.on_event(answer.event)
                        finally:
                            looking.cancel()
                            with contextlib.suppress(asyncio.CancelledError):
                                await looking
            await asyncio.sleep(_RECONNECT_S)

    async def _keep_looking(self, orchestrator: OrchestratorClient) -> None:
        """Read the state of the run at intervals until cancelled, because events do not show the state of replicas and of this machine."""
        while True:
            await asyncio.sleep(_LOOK_S)
            with contextlib.suppress(SluiceError):
                await self._look(orchestrator)

    async def _look(self, orchestrator: OrchestratorClient) -> None:
        run, now = await orchestrator.run(self._run), time.time()
        self.progress.describe(run)
        self.tell(*self.watch.load(self._loads.read(run, now)))
        if self._files is not None:
            with contextlib.suppress(OSError):
                self.tell(*self.watch.machine(await asyncio.to_thread(self._files.machine), now))

    def say(self, text: str, style: str = "") -> None:
        """Print one line."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    async def keep_drawing(self) -> None:
        """Redraw the panel until cancelled; return at once if there is no panel."""
        if self._live is None:
            return
        with self._live as live:
            try:
                while True:
                    live.update(render(self._run, self.progress, self._children, self.watch.active), refresh=True)
                    await asyncio.sleep(_REFRESH_S)
            finally:
                live.update(render(self._run, self.progress, self._children, self.watch.active), refresh=True)


def finding_style(broken: bool) -> str:
    """Return the style of a finding."""
    return "bold red" if broken else "yellow"


def finding_lines(finding: Finding) -> list[Text]:
    """Return the lines of a finding: what is wrong and since when, why it matters, what to do."""
    style = finding_style(finding.broken)
    when = (
        f"since step {finding.since_step}" if finding.active else f"steps {finding.since_step} to {finding.until_step}"
    )
    return [
        Text.assemble(
            (f"{'BROKEN' if finding.broken else 'LOOK'} {finding.rule.name}", style), f" {when}: {finding.what}."
        ),
        Text(f"     {finding.rule.why} {finding.rule.remedy}", style="dim"),
    ]


def render(
    run: str, progress: RunProgress, children: dict[str, ChildState], findings: Sequence[Finding] = ()
) -> RenderableType:
    """Return the panel."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for label, content in _rows(progress):
        table.add_row(label, content)
    services = Text("  ").join(
        Text.assemble(
            ("● ", _CHILD_STYLES[state]), name, ("" if state is ChildState.SERVING else f" {state.value}", "dim")
        )
        for name, state in children.items()
    )
    table.add_row("services", services)
    for each in findings:
        style = finding_style(each.broken)
        table.add_row(
            Text(each.rule.name, style=style), Text(f"{each.what}, since step {each.since_step}", style=style)
        )
    return Panel(table, title=f"{run}: {progress.state}", title_align="left", border_style="cyan")


def _rows(progress: RunProgress) -> Iterator[tuple[str, RenderableType]]:
    """Yield the label and the content of each row that has something to show."""
    bar = ProgressBar(total=max(progress.max_steps, 1), completed=progress.step, width=_SPARK_WIDTH)
    pace, remaining = progress.seconds_per_step(), progress.remaining_s()
    left = ""
    if pace is not None and remaining is not None:
        minutes, seconds = divmod(round(remaining), 60)
        left = f"  {pace:.2f} s/step, {minutes}:{seconds:02d} left"
    yield "step", Columns([bar, f"{progress.step}/{progress.max_steps or '?'}{left}"], padding=(0, 2))
    if values := list(progress.rewards):
        spark = (sparkline(values, _SPARK_WIDTH), "green")
        yield "reward", Text.assemble(spark, f"  {values[0]:.3f} → {values[-1]:.3f}")
    staleness = progress.metric("staleness")
    if staleness is not None:
        yield "staleness", f"mean {staleness:.2f}, bound {progress.max_staleness}"
    shown = [(name, progress.metric(name)) for name in ("entropy", "mismatch_kl", "loss")]
    if policy := "  ".join(f"{name} {value:.4g}" for name, value in shown if value is not None):
        yield "policy", policy
    load = progress.load
    if load.max_live_groups:
        groups = f"{load.live_groups}/{load.max_live_groups} groups live, {load.queued_batches} batches queued"
        yield "load", f"{load.generated_tokens_per_s:,.0f} tokens/s sampled, {groups}"
        shares = f"trainer idle {load.trainer_idle:.0%}, dispatch held by staleness {load.dispatch_blocked:.0%}"
        yield "waiting", f"{progress.waiting()} ({shares})"
    if environments := list(_environments(load)):
        yield "tasks", "\n".join(environments)
    replicas = [
        f"{each.replica or address} at {each.policy_version.epoch}.{each.policy_version.number}, {each.running} running"
        + ("" if each.eligible else f" ({shorten(each.reason, _REASON_WIDTH)})")
        for address, each in sorted(progress.replicas.items())
    ]
    if replicas:
        yield "replicas", "\n".join(replicas)


def _environments(load: orchestrator_pb2.LoadReport) -> Iterator[str]:
    """Yield one line per environment if there are several, or if there is something to report about the only one."""
    # A group that replaces another one does not count towards its environment's share.
    shared = [each.groups - each.groups_refilled for each in load.environments]
    for each, own in zip(load.environments, shared, strict=True):
        counts = {
            "replaced": each.groups_refilled,
            "failed": each.groups_failed,
            "in quarantine": each.quarantined_count,
            "passed on": round(each.groups_passed_on),
        }
        told = "".join(f", {count} {what}" for what, count in counts.items() if count)
        if told or len(load.environments) > 1:
            yield f"{each.name} {own / (sum(shared) or 1):.0%} of {each.wanted_share:.0%} wanted{told}"


@dataclass
class RunProgress:
    """What is known about a run from its events.

    Attributes:
        max_steps: Batches to apply in all; 0 until it is known.
        applied: Batches applied, including those before a resume.
        rewards: Mean reward of each step, the last few hundred.
        replicas: Replicas by address, which is known before the name.
    """

    max_steps: int = 0
    max_staleness: int = 0
    step: int = 0
    applied: int = 0
    state: str = "starting"
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    load: orchestrator_pb2.LoadReport = field(default_factory=orchestrator_pb2.LoadReport)
    replicas: dict[str, orchestrator_pb2.Replica] = field(default_factory=dict)
    _times: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_PACE_STEPS))

    def describe(self, run: orchestrator_pb2.Run) -> None:
        """Take over the answer of GetRun."""
        self.max_steps, self.max_staleness = run.max_steps, run.max_staleness
        self.applied = max(self.applied, run.step)
        self.state = STATES.get(run.state, self.state)
        self.replicas = {each.address: each for each in run.replicas}

    def apply(self, event: orchestrator_pb2.RunEvent) -> bool:
        """Take over an event.

        Returns:
            Whether it is a new step. A server that restarts repeats its events.
        """
        match event.WhichOneof("kind"):
            case "state_changed":
                self.state = STATES.get(event.state_changed.state, self.state)
            case "step_finished":
                return self._finish_step(event)
            case "replica_changed":
                self.replicas[event.replica_changed.replica.address] = event.replica_changed.replica
            case "load":
                self.load = event.load
                self.max_staleness = event.load.max_staleness  # it may change while the run lives
            case _:
                pass
        return False

    def _finish_step(self, event: orchestrator_pb2.RunEvent) -> bool:
        finished = event.step_finished
        if finished.step <= self.step:
            return False
        self.step = self.applied = finished.step
        self.metrics = dict(finished.metrics)
        self._times.append((finished.step, _seconds(event)))
        reward = self.metric("reward")
        if reward is not None:
            self.rewards.append(reward)
        return True

    @property
    def succeeded(self) -> bool:
        """Whether the run has done its last step. A failed run may still continue when its orchestrator is restarted."""
        return self.state == STATES[orchestrator_pb2.RUN_STATE_SUCCEEDED]

    def metric(self, name: str) -> float | None:
        """Return a metric of the last step by its short name; None if it is missing."""
        return self.metrics.get(METRIC_NAMES.get(name, name))

    def seconds_per_step(self) -> float | None:
        """Return the mean seconds of the last steps; None before the second one."""
        if len(self._times) < 2:
            return None
        (first_step, first), (last_step, last) = self._times[0], self._times[-1]
        return (last - first) / (last_step - first_step)

    def remaining_s(self) -> float | None:
        """Return the estimated seconds to the last step; None if unknown."""
        pace = self.seconds_per_step()
        return None if pace is None or not self.max_steps else pace * max(0, self.max_steps - self.step)

    def waiting(self) -> str:
        """Return which side waits for the other, for people."""
        return _WAITS.get(self.load.bottleneck, "balanced")


def _seconds(event: orchestrator_pb2.RunEvent) -> float:
    """Return when it happened, in seconds since 1970."""
    return event.time.seconds + event.time.nanos / 1e9


def sparkline(values: list[float], width: int) -> str:
    """Return values as a row of at most `width` blocks, scaled to their range. Each block is the mean of the same number of values."""
    if not values or width < 1:
        return ""
    size = -(-len(values) // width)
    buckets = [values[start : start + size] for start in range(0, len(values), size)]
    means = [sum(bucket) / len(bucket) for bucket in buckets]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(_BLOCKS[round((mean - low) / span * (len(_BLOCKS) - 1))] for mean in means)


def step_line(progress: RunProgress) -> str:
    """Return one line about the last step, for output that is not a terminal."""
    parts = [f"step {progress.step}/{progress.max_steps or '?'}"]
    for name, digits in (("reward", 3), ("staleness", 2), ("mismatch_kl", 5), ("entropy", 3)):
        value = progress.metric(name)
        if value is not None:
            parts.append(f"{name} {value:.{digits}f}")
    pace = progress.seconds_per_step()
    if pace is not None:
        parts.append(f"{pace:.2f} s/step")
    if progress.load.generated_tokens_per_s:
        parts.append(f"{progress.load.generated_tokens_per_s:,.0f} tokens/s")
        parts.append(progress.waiting())
    remaining = progress.remaining_s()
    if remaining is not None:
        parts.append(f"{remaining:.0f} s left")
    return "  ".join(parts)


@dataclass
class _Kind:
    seen: int = 0
    hidden: int = 0
    last: str = ""
    last_at: float = 0.0


class RateLimit:
    """Shows the first lines of a kind, then a count and the last one. Pure: the caller passes the time.

    The last hidden line is kept, because the end of a traceback names the error.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}
        self._current = ""

    def offer(self, kind: str, text: str, now: float) -> Sequence[str]:
        """Return the lines to show now: summaries of kinds whose window has ended, and this line unless its kind was shown too often."""
        shown = [] if kind == self._current else self.flush(self._current)
        for over in [name for name, state in self._kinds.items() if now - state.last_at > WINDOW_S]:
            shown += self.flush(over)
            del self._kinds[over]
        self._current = kind
        state = self._kinds.setdefault(kind, _Kind())
        state.seen += 1
        state.last, state.last_at = text, now
        if state.seen > SHOWN:
            state.hidden += 1
            return shown
        return [*shown, text]

    def flush(self, kind: str | None = None) -> list[str]:
        """Return the summary of the hidden lines of a kind, or of every kind."""
        kinds = list(self._kinds) if kind is None else [kind]
        lines = []
        for name in kinds:
            state = self._kinds.get(name)
            if state is not None and state.hidden:
                more = "" if state.hidden == 1 else f"({state.hidden - 1} more like it) "
                lines.append(f"{more}{state.last}")
                state.hidden = 0
        return lines
