"""The report of a quickstart: ``report.json``, the plot, and the table at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sluice.host_files import write_whole
from sluice.view.summary import PLOT_FILE, plot_run, read_steps

__all__ = ["REPORT_FILE", "describe_evaluation", "show", "write"]

REPORT_FILE = "report.json"

_ROWS = {
    "reward_mean": "reward, sampled at T = 1",
    "exact_share": "exact, sampled at T = 1",
    "greedy_reward_mean": "reward, greedy",
    "greedy_exact_share": "exact, greedy",
}
"""Metrics of `sluice eval` and their labels in the table."""


def read_evaluation(path: Path) -> dict[str, float]:
    """Return the metrics of an evaluation by name."""
    numbers: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["metrics"]
    return numbers


def describe_evaluation(path: Path) -> str:
    """Return an evaluation in one line."""
    numbers = read_evaluation(path)
    return f"reward {numbers['reward_mean']:.3f}, greedy {numbers['greedy_reward_mean']:.3f}"


def write(run_dir: Path, *, seed: int, wall_s: float, stages: Mapping[str, float], title: str) -> dict[str, Any]:
    """Write the report and the plot.

    Args:
        run_dir: The quickstart's directory.
        seed: Its seed.
        wall_s: Seconds that all of it took.
        stages: Seconds of each stage.
        title: Task and seed, for the plot.

    Returns:
        The report: the orchestrator's, completed by what only the quickstart knows. `wall_s` covers all stages.
    """
    path = run_dir / REPORT_FILE
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    before, after = (read_evaluation(run_dir / f"eval_{name}.json") for name in ("before", "after"))
    report |= {
        "reward_before": before["reward_mean"],
        "reward_after": after["reward_mean"],
        "wall_s": round(wall_s, 1),
        "rl_wall_s": report["wall_s"],
        "seed": seed,
        "evaluation_before": before,
        "evaluation_after": after,
        "stages_s": {name: round(seconds, 1) for name, seconds in stages.items()},
    }
    write_whole(path, json.dumps(report, indent=2) + "\n")
    plot_run(read_steps(run_dir), run_dir / PLOT_FILE, f"{title}: reward of the training batches")
    return report


def show(console: Console, run_dir: Path, model: Path, example: Path) -> None:
    """Print the table, the places of all files, and commands to continue with."""
    report = json.loads((run_dir / REPORT_FILE).read_text(encoding="utf-8"))
    before, after = report["evaluation_before"], report["evaluation_after"]
    title = f"{run_dir}: {report['steps']} steps, {report['wall_s']:.0f} s in all, seed {report['seed']}"
    table = Table()
    for heading in ("on held-out prompts", "before RL", "after RL"):
        table.add_column(heading, justify="left" if heading.startswith("on") else "right")
    for name, label in _ROWS.items():
        table.add_row(label, f"{before[name]:.3f}", f"{after[name]:.3f}")
    console.print(f"\n{title}", style="bold", highlight=False, soft_wrap=True)
    console.print(table)
    facts = (
        f"{report['tokens_trained']:,} tokens trained, {report['staleness_share_ge_1']:.0%} of them at staleness 1 or more"
        f" (at most {report['max_staleness_seen']});"
        f" {report['requests_spanning_versions']} requests span two or more policy versions"
    )
    places = {
        "model (Hugging Face)": model,
        "reward plot": run_dir / PLOT_FILE,
        "trajectories": run_dir / "trajectories",
        "TensorBoard logs": run_dir / "tensorboard",
        "report": run_dir / REPORT_FILE,
        "logs": run_dir / "logs",
    }
    lines = [facts, "", *(f"{label:<21} {place}" for label, place in places.items()), "", "To go on:"]
    lines += [f"  {command}" for command in _next_commands(run_dir, model, example)]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def show_conversations(console: Console, before: Path, after: Path, count: int) -> None:
    """Print what the model answered to the same prompts before and after, one sampled answer each.

    Args:
        console: Where to print.
        before: JSONL file of an evaluation's conversations before training.
        after: The same after it.
        count: How many prompts.
    """
    earlier, later = _first_sampled(before), _first_sampled(after)
    table = Table(title="the same prompts, sampled at T = 1", show_lines=True)
    for heading in ("prompt", "before RL", "after RL"):
        table.add_column(heading)
    for task in [task for task in earlier if task in later][:count]:
        table.add_row(Text(earlier[task]["prompt"].strip()), *(_answer(each[task]) for each in (earlier, later)))
    console.print(table)


def _first_sampled(path: Path) -> dict[str, dict[str, Any]]:
    """The first sampled attempt at each task, by the task's id."""
    rows: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if not row["greedy"]:
            rows.setdefault(row["task_id"], row)
    return rows


def _answer(row: Mapping[str, Any]) -> Text:
    """An answer in green if it earned the whole reward, else in red."""
    right = row["reward"] == 1.0
    return Text(f"{'+' if right else '-'} {row['completion'].strip()}", style="green" if right else "red")


def _next_commands(run_dir: Path, model: Path, example: Path) -> list[str]:
    return [
        f".venv/bin/tensorboard --logdir {run_dir / 'tensorboard'}",
        f".venv/bin/sluice report {run_dir}",
        f".venv/bin/sluice eval @ {example / 'eval.toml'} --model {model}",
        f".venv/bin/sluice rl @ {example / 'rl.toml'} --model {model} --run my-run",
    ]
