"""`sluice report outputs/RUN`: print a table of a finished run, and plot its reward."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from sluice.config import Command, Options
from sluice.view.progress import METRIC_NAMES
from sluice.view.summary import PLOT_FILE, plot_run, read_steps, summarise

__all__ = ["COMMAND"]


def run(argv: list[str]) -> int:
    """Print the table and write the plot.

    Raises:
        ConfigError: if the directory holds no run.
    """
    parser = Options(prog="sluice report", description=__doc__)
    parser.add_argument("directory", type=Path, help="the run's directory, such as outputs/quickstart")
    directory: Path = parser.parse_args(argv).directory
    steps = read_steps(directory)
    summary = summarise(steps)
    title = f"{directory}: {summary['steps']:.0f} steps in {summary['train_wall_s']:.1f} s"
    table = Table()
    for heading in ("metric", "first tenth", "last tenth", "mean"):
        table.add_column(heading, justify="left" if heading == "metric" else "right")
    for name in METRIC_NAMES:
        if f"{name}_mean" in summary:
            table.add_row(name, *(f"{summary[f'{name}_{part}']:.4g}" for part in ("first", "last", "mean")))
    plot = directory / PLOT_FILE
    plot_run(steps, plot, str(directory))
    console = Console()
    console.print(title, style="bold", highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"plot: {plot}", highlight=False, soft_wrap=True)
    return 0


COMMAND = Command("report", "summarise a finished run", run)
