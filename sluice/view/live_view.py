"""The view of a running run: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from textwrap import shorten

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sluice.client import OrchestratorClient
from sluice.config import SecurityConfig
from sluice.rpc import SluiceError
from sluice.supervise.child_logs import LEVELS, LogLine, RateLimit
from sluice.supervise.supervisor import ChildState
from sluice.v1 import orchestrator_pb2
from sluice.view.progress import RunProgress, sparkline, step_line

__all__ = ["RunView", "render"]

_REFRESH_S = 0.25
_SPARK_WIDTH = 48
_REASON_WIDTH = 56
"""Characters that are shown of the reason why a replica gets no work; the log has all of it."""

_RECONNECT_S = 0.5
"""Pause before another attempt to reach the orchestrator, in seconds; the supervisor bounds how long it may be away."""

_CHILD_STYLES = {
    ChildState.STARTING: "yellow",
    ChildState.SERVING: "green",
    ChildState.RESTARTING: "bold yellow",
    ChildState.STOPPING: "yellow",
    ChildState.ENDED: "dim",
}


class RunView:
    """Shows a run; a `Listener` of the supervisor.

    Args:
        run: Name of the run.
        console: Where to write.
        live: Draw the panel; otherwise one line per step.
        verbose: Show every line of the children instead of warnings and errors.
    """

    def __init__(self, run: str, console: Console, *, live: bool, verbose: bool) -> None:
        self.progress = RunProgress()
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
        if state is ChildState.RESTARTING:
            self.say(f"{child} {detail}", style="yellow")
        elif self._live is None and state is ChildState.SERVING:
            self.say(f"{child} serves")

    def on_event(self, event: orchestrator_pb2.RunEvent) -> None:
        """Take over an event of the run; without a panel, print a line for each new step."""
        if self.progress.apply(event) and self._live is None:
            self.say(step_line(self.progress))

    async def follow(self, target: str, security: SecurityConfig) -> None:
        """Take the run's events from the orchestrator until the run has succeeded, across restarts of the orchestrator.

        A run that fails for good is noticed by the supervisor; cancel this then.

        Args:
            target: Address of the orchestrator.
            security: Tokens and TLS.
        """
        while not self.progress.succeeded:
            async with OrchestratorClient(target, security) as orchestrator:
                with contextlib.suppress(SluiceError):
                    self.progress.describe(await orchestrator.run(self._run))
                    async for answer in orchestrator.watch(self._run):
                        self.on_event(answer.event)
            await asyncio.sleep(_RECONNECT_S)

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
                    live.update(render(self._run, self.progress, self._children), refresh=True)
                    await asyncio.sleep(_REFRESH_S)
            finally:
                live.update(render(self._run, self.progress, self._children), refresh=True)


def render(run: str, progress: RunProgress, children: dict[str, ChildState]) -> RenderableType:
    """Return the panel."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for label, cell in _ROWS.items():
        content = cell(progress)
        if content is not None:
            table.add_row(label, content)
    services = Text("  ").join(
        Text.assemble(
            ("● ", _CHILD_STYLES[state]), name, ("" if state is ChildState.SERVING else f" {state.value}", "dim")
        )
        for name, state in children.items()
    )
    table.add_row("services", services)
    return Panel(Group(table), title=f"{run}: {progress.state}", title_align="left", border_style="cyan")


def _steps(progress: RunProgress) -> RenderableType:
    bar = ProgressBar(total=max(progress.max_steps, 1), completed=progress.step, width=_SPARK_WIDTH)
    grid = Table.grid(padding=(0, 2))
    grid.add_row(bar, f"{progress.step}/{progress.max_steps or '?'}{_time_left(progress)}")
    return grid


def _time_left(progress: RunProgress) -> str:
    pace, remaining = progress.seconds_per_step(), progress.remaining_s()
    if pace is None or remaining is None:
        return ""
    minutes, seconds = divmod(round(remaining), 60)
    return f"  {pace:.2f} s/step, {minutes}:{seconds:02d} left"


def _reward(progress: RunProgress) -> RenderableType | None:
    if not progress.rewards:
        return None
    values = list(progress.rewards)
    return Text.assemble((sparkline(values, _SPARK_WIDTH), "green"), f"  {values[0]:.3f} → {values[-1]:.3f}")


def _staleness(progress: RunProgress) -> RenderableType | None:
    staleness = progress.metric("staleness")
    return None if staleness is None else f"mean {staleness:.2f}, bound {progress.max_staleness}"


def _policy(progress: RunProgress) -> RenderableType | None:
    shown = [(name, progress.metric(name)) for name in ("entropy", "mismatch_kl", "loss")]
    text = "  ".join(f"{name} {value:.4g}" for name, value in shown if value is not None)
    return text or None


def _load(progress: RunProgress) -> RenderableType | None:
    load = progress.load
    if not load.max_live_groups:
        return None
    return (
        f"{load.generated_tokens_per_s:,.0f} tokens/s sampled, "
        f"{load.live_groups}/{load.max_live_groups} groups live, {load.queued_batches} batches queued"
    )


def _waiting(progress: RunProgress) -> RenderableType | None:
    load = progress.load
    if not load.max_live_groups:
        return None
    return f"{progress.waiting()} (trainer idle {load.trainer_idle:.0%}, dispatch held by staleness {load.dispatch_blocked:.0%})"


def _replicas(progress: RunProgress) -> RenderableType | None:
    shown = [
        f"{each.replica or address} at {each.policy_version.epoch}.{each.policy_version.number}, {each.running} running"
        + ("" if each.eligible else f" ({shorten(each.reason, _REASON_WIDTH)})")
        for address, each in sorted(progress.replicas.items())
    ]
    return "\n".join(shown) or None


_ROWS: dict[str, Callable[[RunProgress], RenderableType | None]] = {
    "step": _steps,
    "reward": _reward,
    "staleness": _staleness,
    "policy": _policy,
    "load": _load,
    "waiting": _waiting,
    "replicas": _replicas,
}
