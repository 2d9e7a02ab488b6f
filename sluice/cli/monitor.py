"""`sluice monitor RUN`: look at a run that something else started, live or ended, and say what is wrong with it."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sluice.cli.live_view import finding_lines, sparkline
from sluice.cli.report import FILE_WIDTH
from sluice.client import OrchestratorClient
from sluice.config import ConfigError, Options, RunConfig, load_run, seconds, whole_number
from sluice.progress import doing
from sluice.run_files import CONFIG_FILE
from sluice.watch.files import Evaluation
from sluice.watch.follow import FollowedRun, runs_below
from sluice.watch.rules import Row
from sluice.watch.watch import Finding

KEY_METRICS = (
    "reward/mean",
    "reward/std",
    "groups/degenerate",
    "completion/mean_tokens",
    "completion/truncated_share",
    "trainer/entropy",
    "trainer/mismatch_kl",
    "trainer/effective_sample_size",
    "trainer/grad_norm",
    "staleness/mean",
    "load/trainer_idle",
    "load/rollout_idle",
    "time/step_s",
    "tokens/generated_per_s",
)
"""Metrics that the summary shows; `--metrics` shows all."""

EXIT_UNREACHED = 1
"""Exit code if the run ended, or the time was over, before the event that `--until` names."""

_NOTIFY_S = 30.0
"""Deadline in seconds for the command or the server that is notified of a finding."""

_SPARK_WIDTH = 32
_TEXT_WIDTH = 600
"""Most characters shown of a prompt or a completion."""


def run(argv: list[str]) -> int:
    """Run the command.

    Returns:
        With `--once`: 0 if nothing is wrong, 1 if somebody should look, 2 if the run is broken. With `--until`: 0 if its event came,
        otherwise 1. Otherwise 0.

    Raises:
        ConfigError: if there is no such run.
    """
    parser = _parser()
    own = {name for action in parser._actions for name in action.option_strings}  # noqa: SLF001 - argparse has no other way
    first = (
        number
        for number, word in enumerate(argv)
        if word == "@" or (word[:2] == "--" and word.partition("=")[0] not in own)
    )
    end = next(first, len(argv))
    options, settings = parser.parse_args(argv[:end]), argv[end:]
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH, highlight=False)
    if options.list:
        return asyncio.run(_list(settings, console, as_lines=options.json))
    config = find_run(options.run, settings)
    if options.plots:
        return _plot(config, options.plots, console)
    return asyncio.run(_monitor(config, options, console))


def find_run(name: str | None, settings: Sequence[str]) -> RunConfig:
    """Return the settings of a run: `name` is a run in the output directory or a run's directory. None: the newest run.

    Raises:
        ConfigError: if there is no such run.
    """
    given = load_run(list(settings))
    if name is None:
        found = runs_below(given.output_dir)
        if not found:
            raise ConfigError(
                f"there is no run in {given.output_dir}: name the directory of runs with --output-dir DIR"
            )
        directory = found[-1]
    else:
        directory = Path(name) if "/" in name or (Path(name) / CONFIG_FILE).is_file() else given.output_dir / name
    if not directory.is_dir():
        raise ConfigError(
            f"there is no run {name!r} in {given.output_dir}: `sluice monitor --list` shows the runs of a directory, --output-dir DIR"
            " names another one"
        )
    path = directory / CONFIG_FILE
    written = ["@", str(path)] if path.is_file() else []
    config = load_run([*written, *settings])
    return config.model_copy(update={"output_dir": directory.parent, "run": directory.name})


async def _list(settings: Sequence[str], console: Console, *, as_lines: bool) -> int:
    """Show the runs of the output directory; return the worst verdict."""
    output_dir = load_run(list(settings)).output_dir
    table = Table(
        "run", "state", "step", "reward", "last step", "verdict", title=f"runs in {output_dir}", title_justify="left"
    )
    worst = 0
    runs = runs_below(output_dir)
    with doing("look at runs", len(runs), "runs") as step:
        for path in step.count(runs):
            config = find_run(str(path.resolve()), settings)
            async with OrchestratorClient(config.peers.orchestrator, config.security) as orchestrator:
                followed = FollowedRun(config, orchestrator)
                await followed.look()
            worst = max(worst, followed.verdict)
            if as_lines:
                print(json.dumps(_state(followed)))
                continue
            rewards = [row.values["reward/mean"] for row in followed.rows if "reward/mean" in row.values]
            ago = _ago(followed.rows[-1].time) if followed.rows else ""
            found = ", ".join(each.rule.name for each in followed.watch.active)
            table.add_row(
                path.name,
                followed.state,
                f"{followed.step}/{followed.max_steps or '?'}",
                f"{rewards[-1]:.3f}" if rewards else "",
                ago,
                Text(_VERDICTS[followed.verdict] + (f": {found}" if found else ""), style=_STYLES[followed.verdict]),
            )
    if not as_lines:
        console.print(table)
    return worst


_VERDICTS = ("fine", "look", "broken")
_STYLES = ("green", "yellow", "bold red")


def _ago(then: float) -> str:
    return f"{timedelta(seconds=round(max(0.0, time.time() - then)))} ago"


def _state(followed: FollowedRun) -> Mapping[str, object]:
    """Return the state of a run, for programs."""
    return {
        "run": followed.config.run,
        "directory": str(followed.config.run_dir),
        "state": followed.state,
        "error": followed.error,
        "live": followed.live,
        "step": followed.step,
        "max_steps": followed.max_steps,
        "verdict": _VERDICTS[followed.verdict],
        "findings": [each.as_json() for each in followed.watch.findings],
        "metrics": dict(followed.rows[-1].values) if followed.rows else {},
    }


async def _monitor(config: RunConfig, options: argparse.Namespace, console: Console) -> int:
    async with OrchestratorClient(config.peers.orchestrator, config.security) as orchestrator:
        followed = FollowedRun(config, orchestrator)
        look = await followed.look()
        if options.once:
            _print_once(followed, options, console)
            return followed.verdict
        wanted = options.metrics or options.samples is not None or options.below is not None
        if (wanted or not followed.live) and options.until is None:
            _print_summary(followed, options, console)
            return 0
        notifier = Notifier(options.notify, config.run)
        return await _attach(followed, look.rows, options, console, notifier)


def _print_once(followed: FollowedRun, options: argparse.Namespace, console: Console) -> None:
    if options.json:
        print(json.dumps(_state(followed)))
        return
    console.print(headline(followed), soft_wrap=True)
    for each in followed.watch.active:
        console.print(*finding_lines(each), sep="\n", soft_wrap=True)


def headline(followed: FollowedRun) -> Text:
    """Return one line about the state of a run."""
    error = f" ({followed.error})" if followed.error else ""
    text = f"{followed.config.run}: {followed.state}{error}, step {followed.step}/{followed.max_steps or '?'}: "
    return Text.assemble((text, "bold"), (_VERDICTS[followed.verdict], _STYLES[followed.verdict]))


def _print_summary(followed: FollowedRun, options: argparse.Namespace, console: Console) -> None:
    """Show metrics, findings and samples of a run, or only those that the options name."""
    samples_alone = not options.metrics and (options.samples is not None or options.below is not None)
    if options.json:
        for line in _samples(followed, options) if samples_alone else map(_row_as_json, followed.rows):
            print(json.dumps(line, ensure_ascii=False))
        return
    if not options.metrics and not samples_alone:
        console.print(headline(followed), soft_wrap=True)
        for each in followed.watch.findings:
            console.print(*finding_lines(each), sep="\n", soft_wrap=True)
    if not samples_alone:
        console.print(metrics_table(followed.rows, None if options.metrics else KEY_METRICS))
        if followed.evaluations:
            console.print(_evaluations(followed.evaluations))
    if not options.metrics:
        for sample in _samples(followed, options):
            console.print(_sample(sample))


def _row_as_json(row: Row | Evaluation) -> Mapping[str, object]:
    return {"step": row.step, "time": row.time, **row.values}


def metrics_table(rows: Sequence[Row], names: Iterable[str] | None = None) -> Table:
    """Return a table with the means of the first and the last tenth of each metric, and its course. None: all metrics of the steps."""
    table = Table("metric", "first", "last", "mean", "course", title=f"{len(rows)} steps", title_justify="left")
    tenth = max(1, len(rows) // 10)
    known = dict.fromkeys(name for row in rows for name in row.values)
    for name in sorted(known) if names is None else names:
        values = [row.values[name] for row in rows if name in row.values]
        if values:
            parts = fmean(values[:tenth]), fmean(values[-tenth:]), fmean(values)
            table.add_row(name, *(f"{value:.4g}" for value in parts), sparkline(values, _SPARK_WIDTH))
    return table


def _evaluations(evaluations: Sequence[Evaluation]) -> Table:
    names = sorted({name for each in evaluations for name in each.values})
    table = Table("step", *names, title="evaluations", title_justify="left")
    for each in evaluations:
        table.add_row(str(each.step), *(f"{each.values[name]:.4g}" if name in each.values else "" for name in names))
    return table


def _samples(followed: FollowedRun, options: argparse.Namespace) -> Iterable[Mapping[str, object]]:
    """Yield the newest trajectories; if the options have a reward, only trajectories below it."""
    left = options.samples or 3
    for each in followed.files.samples():
        reward = each.get("reward")
        if options.below is not None and not (reward is not None and reward < options.below):
            continue
        yield each
        left -= 1
        if not left:
            return


def _sample(row: Mapping[str, Any]) -> RenderableType:
    reward = row.get("reward")
    told = {
        "task": row.get("task_id"),
        "reward": "none" if reward is None else f"{reward:.3g}",
        "tokens": row.get("tokens"),
        "staleness": row.get("staleness"),
        "outcome": " ".join(filter(None, (row.get("outcome"), row.get("reason")))),
    }
    title = f"step {row.get('step')}  " + "  ".join(
        f"{name} {value}" for name, value in told.items() if value is not None
    )
    prompt = "\n".join(f"{each.get('role')}: {each.get('content')}" for each in row.get("prompt", ()))
    return Panel(
        Text.assemble((_shortened(prompt), "dim"), "\n", _shortened(str(row.get("completion", "")))),
        title=escape(title),
        title_align="left",
    )


def _shortened(text: str) -> str:
    """Return the beginning and the end of a text, without control characters that a terminal would obey."""
    plain = "".join(each if each == "\n" or each.isprintable() else "�" for each in text)
    return plain if len(plain) <= _TEXT_WIDTH else f"{plain[: _TEXT_WIDTH // 2]} ... {plain[-_TEXT_WIDTH // 2 :]}"


async def _attach(
    followed: FollowedRun,
    past: Sequence[Row | Evaluation],
    options: argparse.Namespace,
    console: Console,
    notifier: Notifier,
) -> int:
    """Show a run until it ends, or until the event that `--until` names."""
    draws = console.is_terminal and not options.json and not options.plain
    end = time.monotonic() + options.within
    shown = list(past)[-1:] if not options.json else list(past)
    begun: Sequence[Finding] = followed.watch.active
    with Live(console=console, auto_refresh=False, transient=False) if draws else _NoLive() as live:
        while True:
            _print_new(shown, begun, options, console)
            live.update(_panel(followed), refresh=True)
            for each in begun:
                await notifier.send("finding", each.as_json())
            if reached(options.until, followed):
                code = 0
                break
            if not followed.live:
                code = 0 if options.until is None else EXIT_UNREACHED
                break
            if options.until is not None and time.monotonic() > end:
                print(f"sluice: {options.until} has not come within {options.within:g} s", file=sys.stderr)
                return EXIT_UNREACHED
            await asyncio.sleep(options.every)
            look = await followed.look()
            shown, begun = list(look.rows), look.begun
    if not followed.live:
        await notifier.send("ended", _state(followed))
    _print_once(followed, options, console)
    return code


class _NoLive:
    """Stands in for the panel if there is no terminal."""

    def __enter__(self) -> _NoLive:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, _panel: RenderableType, *, refresh: bool) -> None:
        """Draw nothing."""


def _print_new(
    rows: Iterable[Row | Evaluation], begun: Iterable[Finding], options: argparse.Namespace, console: Console
) -> None:
    for row in rows:
        if options.json:
            print(json.dumps(_row_as_json(row)), flush=True)
        elif not console.is_terminal or options.plain:
            names = (
                "reward/mean",
                "staleness/mean",
                "trainer/entropy",
                "trainer/mismatch_kl",
                "time/step_s",
                *row.values,
            )
            known = dict.fromkeys(name for name in names if name in row.values)
            told = list(known)[: 5 if isinstance(row, Row) else None]
            console.print(
                f"step {row.step}  " + "  ".join(f"{name} {row.values[name]:.4g}" for name in told), soft_wrap=True
            )
    for each in begun:
        if options.json:
            print(json.dumps({"finding": each.as_json()}), flush=True)
        else:
            console.print(*finding_lines(each), sep="\n", soft_wrap=True)


def _panel(followed: FollowedRun) -> RenderableType:
    rows = followed.rows[-400:]
    table = metrics_table(rows, KEY_METRICS)
    found = [line for each in followed.watch.active for line in finding_lines(each)]
    return Panel(Group(headline(followed), table, *found), title_align="left", border_style=_STYLES[followed.verdict])


def reached(until: str | None, followed: FollowedRun) -> bool:
    """Return whether the event that `--until` names has come: a state, "ended", or "step=N"."""
    if until is None:
        return False
    if until.startswith("step="):
        return followed.step >= int(until.removeprefix("step="))
    return not followed.live if until == "ended" else followed.state == until


class Notifier:
    """Notifies a command or a server of findings and of the end of a run. Failures are printed and have no other effect.

    Args:
        target: A URL that accepts a POST of JSON, or a shell command that reads JSON from stdin. None: notify nobody.
        run: The run's name.
    """

    def __init__(self, target: str | None, run: str) -> None:
        self._target, self._run = target, run

    async def send(self, event: str, told: Mapping[str, object]) -> None:
        """Notify of an event, and wait at most `_NOTIFY_S` seconds until the notification was accepted."""
        if self._target is None:
            return
        message = json.dumps({"run": self._run, "event": event, **told})
        try:
            async with asyncio.timeout(_NOTIFY_S):
                problem = await (
                    self._post(self._target, message) if "://" in self._target else self._call(self._target, message)
                )
        except (TimeoutError, subprocess.TimeoutExpired):
            problem = f"no answer within {_NOTIFY_S:g} s"
        except (OSError, httpx.HTTPError) as error:
            problem = str(error) or type(error).__name__
        if problem:
            print(f"sluice: --notify {self._target} failed: {problem}", file=sys.stderr)

    async def _post(self, url: str, message: str) -> str:
        async with httpx.AsyncClient(timeout=_NOTIFY_S) as client:
            answer = await client.post(url, content=message, headers={"Content-Type": "application/json"})
        return "" if answer.is_success else f"HTTP {answer.status_code}"

    async def _call(self, command: str, message: str) -> str:
        # The command is the user's own.
        told = partial(subprocess.run, command, shell=True, input=message.encode(), timeout=_NOTIFY_S, check=False)  # noqa: S604
        ended = await asyncio.to_thread(told)
        return "" if ended.returncode == 0 else f"exit code {ended.returncode}"


def _plot(config: RunConfig, directory: Path, console: Console) -> int:
    """Write one picture for each metric of a run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import
    from matplotlib.figure import Figure  # noqa: PLC0415

    from sluice.watch.files import RunFiles  # noqa: PLC0415

    directory.mkdir(parents=True, exist_ok=True)
    series: dict[str, dict[int, float]] = {}
    for row in RunFiles(config.run_dir).new_rows():
        for name, value in row.values.items():
            series.setdefault(name, {})[row.step] = value
    if not series:
        raise ConfigError(f"{config.run_dir} has no metrics: the run has not finished a step")
    with doing("draw", len(series), "plots") as step:
        for name, values in step.count(sorted(series.items())):
            figure = Figure(figsize=(6, 3.5), dpi=110, layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.subplots()
            axes.plot(sorted(values), [values[step] for step in sorted(values)], marker="o" if len(values) < 20 else "")
            axes.set_title(f"{config.run}: {name}")
            axes.set_xlabel("step")
            axes.grid(alpha=0.3)
            figure.savefig(directory / f"{name.replace('/', '-')}.png", metadata={"Software": None})
    console.print(f"{len(series)} plots in {directory}", soft_wrap=True)
    return 0


def _until(text: str) -> str:
    """Check the value of `--until`."""
    state, _, number = text.partition("=")
    if (state == "step" and number.isascii() and number.isdigit()) or text in {
        "running",
        "succeeded",
        "stopped",
        "failed",
        "ended",
    }:
        return text
    raise argparse.ArgumentTypeError(f"give running, succeeded, stopped, failed, ended or step=N, not {text!r}")


def _parser() -> argparse.ArgumentParser:
    parser = Options(
        prog="sluice monitor",
        description=f"{__doc__} After these: settings, such as `--output-dir DIR` or `--security.token-file FILE`: where it is and who asks.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="name or directory of the run (default: the one that was written last)")
    add("--list", action="store_true", help="show all runs of the output directory")
    add("--once", action="store_true", help="say what is wrong now, and exit with 0: nothing, 1: look, 2: broken")
    add(
        "--until",
        type=_until,
        metavar="WHAT",
        help="wait for a state (running, succeeded, stopped, failed, ended) or step=N; exit with 1 if it cannot come",
    )
    add("--within", type=seconds, default=86_400.0, metavar="S", help="seconds to wait for it (default: a day)")
    add("--json", action="store_true", help="print JSON: one object for each step, and for each finding")
    add("--plain", action="store_true", help="one line for each step instead of the panel")
    add("--metrics", action="store_true", help="show all metrics, and nothing else")
    add(
        "--samples",
        type=whole_number(1),
        nargs="?",
        const=10,
        metavar="N",
        help="show the newest N samples (default: 10), and nothing else",
    )
    add("--below", type=float, metavar="R", help="of the samples those with a reward below R")
    add("--plots", type=Path, metavar="DIR", help="write a picture for each metric to DIR")
    add(
        "--notify",
        metavar="TARGET",
        help="POST each finding and the end to a URL, or run a shell command with them as JSON on its stdin",
    )
    add("--every", type=seconds, default=2.0, metavar="S", help="seconds between two looks at a live run (default: 2)")
    return parser
