"""`sluice report outputs/RUN`: print a table of a finished run, and plot its reward. All is read from the run's files."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import xxhash
from rich.console import Console
from rich.table import Table

from sluice.config import ConfigError, Options
from sluice.progress import doing
from sluice.run_files import METRICS_FILE
from sluice.versions import Version
from sluice.watch.files import RunFiles

Step = dict[str, float]
"""One line of ``metrics.jsonl``: ``step``, ``time`` (seconds since 1970) and scalars by name, without null values."""

PLOT_FILE = "reward.png"

_MIX_HEADINGS = ("wanted", "had", "drawn", "accepted", "replaced", "failed", "passed on", "overlong")
_POOLS = ("new", "easy", "medium", "hard")

_SMOOTHING = 5
"""Steps of the running mean in the plot."""

METRIC_NAMES: Mapping[str, str] = {
    "reward": "reward/mean",
    "staleness": "staleness/mean",
    "loss": "trainer/loss",
    "entropy": "trainer/entropy",
    "mismatch_kl": "trainer/mismatch_kl",
}
"""The metrics that views show, by their short names."""


def run(argv: list[str]) -> int:
    """Print the table and write the plot.

    Raises:
        ConfigError: if the directory holds no run.
    """
    parser = Options(prog="sluice report", description=__doc__)
    parser.add_argument("directory", type=Path, help="the run's directory, such as outputs/quickstart")
    parser.add_argument(
        "--digest", action="store_true", help="print only the digests that deterministic runs with one seed share"
    )
    options = parser.parse_args(argv)
    directory: Path = options.directory
    steps = read_steps(directory)
    if options.digest:
        print(f"metrics {metrics_digest(steps)}")
        digests = weight_digests(directory)
        if digests:  # how many older versions still exist depends on when old versions were last deleted
            newest = max(digests, key=lambda name: Version.parse(name.removeprefix("v")))
            print(f"weights {newest} {digests[newest]}")
        return 0
    summary = summarise(steps)
    title = f"{directory}: {summary['steps']:.0f} steps in {summary['train_wall_s']:.1f} s"
    table = Table()
    for heading in ("metric", "first tenth", "last tenth", "mean"):
        table.add_column(heading, justify="left" if heading == "metric" else "right")
    for name in METRIC_NAMES:
        if f"{name}_mean" in summary:
            table.add_row(name, *(f"{summary[f'{name}_{part}']:.4g}" for part in ("first", "last", "mean")))
    plot = directory / PLOT_FILE
    with doing(f"draw {plot}"):
        plot_run(steps, plot, str(directory))
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    console.print(title, style="bold", highlight=False, soft_wrap=True)
    console.print(table)
    report = RunFiles(directory).report() or {}
    for text in finding_texts(report):
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    for each in report_tables(report):
        console.print(each)
    console.print(f"plot: {plot}", highlight=False, soft_wrap=True)
    return 0


FILE_WIDTH = 140
"""Columns of the tables if they are not written to a terminal: wide enough that no name is cut."""

MEASURED = re.compile(r"^time|^load/|_s$|_ms$|seconds|per_s|idle|memory|flops_util")
"""Names of metrics of time or memory. These differ between runs that are otherwise equal."""


def metrics_digest(steps: Sequence[Step]) -> str:
    """Return the xxh3-128 of all metrics that do not depend on the machine's speed."""
    kept = [{name: value for name, value in sorted(each.items()) if not MEASURED.search(name)} for each in steps]
    return xxhash.xxh3_128_hexdigest(json.dumps(kept).encode())


def weight_digests(run_dir: Path) -> dict[str, str]:
    """Return the xxh3-128 of every version of the weights that the run has kept, by version."""
    digests = {}
    for directory in sorted((run_dir / "weights").glob("v*")):
        whole = xxhash.xxh3_128()
        for file in sorted(directory.glob("*.safetensors")):
            whole.update(file.read_bytes())
        digests[directory.name] = whole.hexdigest()
    return digests


def finding_texts(report: Mapping[str, Any]) -> list[str]:
    """Return the findings at the end of a run: what was wrong, since when, and what to do."""
    return [
        f"{each['level'].upper()} {each['rule']} since step {each['since_step']}: {each['what']}. {each['remedy']}"
        for each in report.get("findings", ())
        if each["active"]
    ]


def report_tables(report: Mapping[str, Any]) -> list[Table]:
    """Return tables about a run: the mix of its environments, their pools, the tasks in quarantine, what was lost and what was set aside.

    The list is empty for a run with a single environment if all groups were accepted and trained.
    """
    environments = report.get("environments") or []
    # A group that replaces another one does not count towards its environment's share.
    shared = [each["groups"] - each["groups_refilled"] for each in environments]
    told = len(environments) > 1 or any(each["groups_refilled"] or each["groups_failed"] for each in environments)
    mix = _table("groups by environment", "environment", _MIX_HEADINGS)
    pools = _table("tasks by solve rate (groups drawn of them)", "environment", (*_POOLS, "in quarantine"))
    faulty = _table("tasks in quarantine", "environment", ("task", "failures", "problem"))
    for each, own in zip(environments, shared, strict=True):
        overlong = ", ".join(f"{count} {rule}" for rule, count in sorted(each["overlong"].items()))
        shares = f"{each['wanted_share']:.1%}", f"{own / (sum(shared) or 1):.1%}"
        counts = (each[name] for name in ("groups", "groups_accepted", "groups_refilled", "groups_failed"))
        mix.add_row(each["name"], *shares, *map(str, counts), f"{each['groups_passed_on']:.1f}", overlong or "0")
        sizes = (f"{each['pools'].get(name, 0)} ({each['groups_by_pool'].get(name, 0)})" for name in _POOLS)
        pools.add_row(each["name"], *sizes, str(each["quarantined_count"]))
        for task in each["quarantined"]:
            faulty.add_row(each["name"], task["task_id"], str(task["failures"]), task["problem"])
    aside = _table("set aside, because it can never be trained", "reason", ("trajectories", "problem"))
    for reason, found in (report.get("set_aside") or {}).items():
        aside.add_row(reason, str(found["trajectories"]), found["problem"])
    lost = _table("episodes that their groups were trained without", "reason", ("episodes",))
    for reason, count in (report.get("episodes_lost") or {}).items():
        lost.add_row(reason, str(count))
    by_pool = any(name != "new" for each in environments for name in each["groups_by_pool"])
    tables = (mix, told), (pools, by_pool), (faulty, faulty.rows), (lost, lost.rows), (aside, aside.rows)
    return [table for table, shown in tables if shown]


def _table(title: str, first: str, others: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="left" if heading in ("task", "problem") else "right")
    return table


def read_steps(run_dir: Path) -> list[Step]:
    """Return the steps of a run in order. If a step was written twice, after a resume, the later line counts.

    Raises:
        ConfigError: if the run has finished no step.
    """
    path = run_dir / METRICS_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"no metrics in {run_dir}: cannot read {path} ({error.strerror})") from error
    steps: dict[int, Step] = {}
    for line in lines:
        try:
            fields = json.loads(line)
        except json.JSONDecodeError:
            continue  # the torn last line of a process that was killed
        record = {key: value for key, value in fields.items() if value is not None}
        steps.setdefault(record["step"], {}).update(record)
    if not steps:
        raise ConfigError(f"{path} is empty: the run has not finished a step")
    return [steps[number] for number in sorted(steps)]


def series(steps: Sequence[Step], name: str) -> list[tuple[float, float]]:
    """Return ``(step, value)`` of a metric, by its short or its full name; steps without it are left out."""
    key = METRIC_NAMES.get(name, name)
    return [(step["step"], step[key]) for step in steps if key in step]


def summarise(steps: Sequence[Step]) -> dict[str, float]:
    """Return the number of steps, the seconds, and the mean of each metric over all steps and their first and last tenth."""
    tenth = max(1, len(steps) // 10)
    summary: dict[str, float] = {
        "steps": steps[-1]["step"],
        "train_wall_s": steps[-1].get("time", math.nan) - steps[0].get("time", math.nan),
    }
    for name in METRIC_NAMES:
        values = [value for _, value in series(steps, name)]
        if values:
            summary |= {f"{name}_first": fmean(values[:tenth]), f"{name}_last": fmean(values[-tenth:])}
            summary[f"{name}_mean"] = fmean(values)
    return summary


def plot_run(steps: Sequence[Step], path: Path, title: str) -> None:
    """Write a PNG file with the reward, and the staleness below it, over the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    rewards = series(steps, "reward")
    numbers, values = [number for number, _ in rewards], [value for _, value in rewards]
    upper.plot(numbers, values, color="#9ecae1", linewidth=1, label="mean reward of a batch")
    smooth = [fmean(values[max(0, end - _SMOOTHING) : end]) for end in range(1, len(values) + 1)]
    upper.plot(numbers, smooth, color="#08519c", linewidth=2, label=f"mean of {_SMOOTHING} steps")
    upper.set_ylabel("reward")
    upper.set_title(title)
    upper.legend(loc="lower right")
    upper.grid(alpha=0.3)
    staleness = series(steps, "staleness")
    lower.plot([number for number, _ in staleness], [value for _, value in staleness], color="#d94801", linewidth=1.5)
    lower.set_ylabel("staleness")
    lower.set_xlabel("step")
    lower.grid(alpha=0.3)
    figure.savefig(path, metadata={"Software": None})
