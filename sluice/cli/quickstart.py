"""`sluice quickstart`: the whole of Sluice on one small task, in one command.

`--task reverse_text` makes a model from scratch, warms it up on demonstrations, evaluates it, trains it by RL over the four
services and evaluates it again, in minutes, in ``outputs/quickstart``. `--task sums` does the same with a real pretrained model,
SmolLM2-135M-Instruct, in a quarter of an hour, in ``outputs/sums``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sluice.cli import rl
from sluice.cli.packaged import FOLDER, copy_examples
from sluice.cli.report import PLOT_FILE, finding_texts, plot_run, read_steps
from sluice.config import ConfigError, Options, whole_number
from sluice.engines import ENGINES
from sluice.host_files import write_whole
from sluice.plan.local import shared_cores
from sluice.progress import doing
from sluice.run_files import REPORT_FILE, is_held
from sluice.supervise.log_records import LogLine
from sluice.supervise.supervisor import ChildSpec, ChildState, Ending, Supervisor, run_until_signal

ENVIRONMENT_FILE = "env.py"

MOST_STEPS = 1 << 20
"""More steps or prompts than this are a typing mistake."""

_PARTS = (ENVIRONMENT_FILE, "rl.toml", "eval.toml")
_WARM_UP_PARTS = ("demonstrations.py", "sft.toml")

_ROWS = {
    "reward_mean": "reward, sampled at T = 1",
    "exact_share": "exact, sampled at T = 1",
    "greedy_reward_mean": "reward, greedy",
    "greedy_exact_share": "exact, greedy",
}
"""Metrics of `sluice eval` and their labels in the table."""


@dataclass(frozen=True)
class Task:
    """The task of a quickstart, and its model.

    Attributes:
        run: Name of the run, and of its directory.
        pretrained: The model to fetch. Empty: make a model from scratch and warm it up on demonstrations.
        conversations: How many conversations the report shows, before and after.
    """

    run: str
    pretrained: str = ""
    conversations: int = 0


TASKS = {"reverse_text": Task("quickstart"), "sums": Task("sums", pretrained="smollm2-135m", conversations=10)}
"""The tasks, by the names of their directories in `examples`."""


@dataclass(frozen=True)
class Quickstart:
    """A quickstart to run.

    Attributes:
        example: Directory of the example, with environment, settings, and demonstrations if there are any.
        seed: Seed of data, model and sampling; the held-out prompts stay the same.
    """

    task: Task
    example: Path
    directory: Path
    seed: int
    rl_flags: tuple[str, ...] = ()
    demonstrations_flags: tuple[str, ...] = ()
    sft_flags: tuple[str, ...] = ()
    eval_flags: tuple[str, ...] = ()

    @property
    def start(self) -> Path:
        """The model from which RL starts: the pretrained model, or the one from scratch after its warm-up."""
        return Path("models") / self.task.pretrained if self.task.pretrained else self.directory / "warm"

    def conversations(self, name: str) -> Path:
        """The conversations of an evaluation."""
        return self.directory / f"eval_{name}.jsonl"

    def trained(self) -> Path:
        """The newest version of the weights, a Hugging Face directory.

        Raises:
            StageError: if no version was written.
        """
        versions = {path: path.name.removeprefix("v").split(".") for path in (self.directory / "weights").glob("v*.*")}
        if not versions:
            raise StageError(
                f"no weights in {self.directory / 'weights'}: see {self.directory / 'logs'}/weightsync.log"
            )
        return max(versions, key=lambda path: [int(part) for part in versions[path]])


def run(argv: list[str]) -> int:
    """Do everything and print the report.

    Returns:
        0 when the model is trained, 1 if a stage failed, 130 after Ctrl-C.

    Raises:
        ConfigError: if the example is missing, or another process uses the directory.
    """
    job = _job(_parser().parse_args(argv))
    console = Console()
    make_room(job.directory, console)
    began = time.monotonic()
    try:
        code, stages = _run_stages(job, console)
        if code:
            return code
        write_report(job, wall_s=time.monotonic() - began, stages=stages.seconds)
    except KeyboardInterrupt:
        console.print("stopped", style="yellow")
        return rl.EXIT_INTERRUPTED
    except StageError as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    show_report(console, job)
    if job.task.conversations:
        before, after = job.conversations("before"), job.conversations("after")
        show_conversations(console, before, after, job.task.conversations)
    return 0


def make_room(directory: Path, console: Console) -> None:
    """Move the files of an earlier quickstart to another place, so that nothing is overwritten.

    Raises:
        ConfigError: if another process uses the directory.
    """
    if not directory.exists() or not any(directory.iterdir()):
        return
    if is_held(directory):
        raise ConfigError(f"another process runs in {directory}: stop it first")
    number = 1
    while (aside := directory.with_name(f"{directory.name}.{number}")).exists():
        number += 1
    directory.rename(aside)
    console.print(f"moved the earlier {directory} to {aside}", highlight=False, soft_wrap=True)


def _run_stages(job: Quickstart, console: Console) -> tuple[int, Stages]:
    stages = Stages(console, count=4 if job.task.pretrained else 6)
    if job.task.pretrained:
        with stages.stage("fetch_model", "fetch a pretrained model") as stage:
            stage.details.append(_sluice(job, stage, "fetch-model", job.task.pretrained, str(job.start)))
    else:
        _warm_up(job, stages)
    with stages.stage("eval_before", "evaluate on held-out prompts") as stage:
        stage.details.append(_evaluate(job, stage, "before", job.start))
    with stages.stage("rl", "train by RL: rollout, trainer, orchestrator, weightsync", quiet=False):
        where = ("--run", job.directory.name, "--output-dir", str(job.directory.parent), "--model", str(job.start))
        code = rl.run(["@", str(job.example / "rl.toml"), "--seed", str(job.seed), *where, *job.rl_flags])
    if code:
        return code, stages
    with stages.stage("eval_after", "evaluate on the same held-out prompts") as stage:
        stage.details.append(_evaluate(job, stage, "after", job.trained()))
    return 0, stages


def _warm_up(job: Quickstart, stages: Stages) -> None:
    """Make a model from scratch and fine-tune it on demonstrations."""
    model, demonstrations = str(job.directory / "model"), str(job.directory / "demonstrations.jsonl")
    with stages.stage("init_model", "make a model from scratch") as stage:
        stage.details.append(_sluice(job, stage, "init-model", model, "--seed", str(job.seed)))
    with stages.stage("demonstrations", "write demonstrations, most of them wrong") as stage:
        script = str(job.example / "demonstrations.py")
        flags = ("--seed", str(job.seed), *job.demonstrations_flags)
        stage.details.append(_python(job, stage, "demonstrations", script, demonstrations, *flags))
    with stages.stage("sft", "warm the model up on them (SFT)") as stage:
        where = ("--model", model, "--data", demonstrations, "--output", str(job.start))
        settings = ("@", str(job.example / "sft.toml"), "--seed", str(job.seed), *where, *job.sft_flags)
        stage.details.append(_sluice(job, stage, "sft", *settings))


def _evaluate(job: Quickstart, stage: Stage, name: str, model: Path) -> str:
    output = job.directory / f"eval_{name}.json"
    where = ("--model", str(model), "--output", str(output), "--samples-output", str(job.conversations(name)))
    _sluice(job, stage, "eval", "@", str(job.example / "eval.toml"), *where, *job.eval_flags, log=f"eval_{name}")
    return describe_evaluation(output)


def _sluice(job: Quickstart, stage: Stage, command: str, *arguments: str, log: str = "") -> str:
    return _python(job, stage, log or command, "-m", "sluice.cli.main", command, *arguments)


def _python(job: Quickstart, stage: Stage, log: str, *argv: str) -> str:
    return run_quietly([*argv], job.directory / "logs" / f"{log}.log", shared_cores(os.environ), stage.note)


class StageError(Exception):
    """A stage failed; the message says why, for people."""


@dataclass
class Stage:
    """A stage in progress.

    Attributes:
        details: Texts to print at the end of its line.
        note: Receives the last line of output of the stage's program.
    """

    details: list[str] = field(default_factory=list)
    note: Callable[[str], object] = lambda _: None


class Stages:
    """Prints the stages of a job: one line each, with its seconds."""

    def __init__(self, console: Console, count: int) -> None:
        self._console, self._count, self._number = console, count, 0
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str, title: str, *, quiet: bool = True) -> Iterator[Stage]:
        """Run a stage and measure its seconds.

        Args:
            name: Key of its seconds in `seconds`.
            title: What it does, for people.
            quiet: Whether the stage prints nothing itself, so that its line can be printed when it has ended.
        """
        self._number += 1
        label = f"[{self._number}/{self._count}] {title}"
        began = time.monotonic()
        stage = Stage()
        if quiet:
            with doing(label) as step:
                stage.note = lambda line: setattr(step, "note", line)
                yield stage
        else:
            self._console.print(Text(label), soft_wrap=True)
            yield stage
        self.seconds[name] = time.monotonic() - began
        line = Text.assemble(label, f"  {self.seconds[name]:.1f} s", style="green")
        for detail in stage.details:
            line.append(f"  {detail}", style="default")
        self._console.print(line, soft_wrap=True)


def run_quietly(
    argv: list[str], log: Path, environment: Mapping[str, str], note: Callable[[str], object] = lambda _: None
) -> str:
    """Run the Python interpreter with additional variables, and append its output to a file. A signal ends it and all its children.

    Args:
        argv: Arguments of the interpreter.
        log: The file.
        environment: The variables.
        note: Receives each line of its output.

    Returns:
        The last line of its output.

    Raises:
        StageError: if it fails; the message holds the last lines of its output.
        KeyboardInterrupt: if a signal ended it.
    """
    listener = _LastLine(note)
    spec = ChildSpec(log.stem, (sys.executable, *argv), log, _at_once, environment, ends_run=True)
    supervisor = Supervisor([spec], listener, max_restarts=0)
    outcome = asyncio.run(run_until_signal(supervisor, lambda _: None))
    if outcome.ending is Ending.STOPPED:
        raise KeyboardInterrupt
    if outcome.ending is Ending.FAILED:
        said = "\n".join(f"  | {line}" for line in outcome.tail)
        raise StageError(f"{' '.join(argv)}\n{outcome.reason}; {log} ends with\n{said}")
    return listener.text


async def _at_once() -> None:
    """Return at once: a program that serves nothing is ready immediately."""


class _LastLine:
    """Keeps the last line of a program's output; the stage prints the outcome."""

    def __init__(self, note: Callable[[str], object]) -> None:
        self.text, self._note = "", note

    def on_line(self, child: str, line: LogLine) -> None:
        """Keep the line."""
        del child
        self.text = line.text
        self._note(line.text)

    def on_state(self, child: str, state: ChildState, detail: str) -> None:
        """Ignore it."""


def describe_evaluation(path: Path) -> str:
    """Return an evaluation in one line."""
    metrics = _read_metrics(path)
    return f"reward {metrics['reward_mean']:.3f}, greedy {metrics['greedy_reward_mean']:.3f}"


def _read_metrics(path: Path) -> dict[str, float]:
    metrics: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["metrics"]
    return metrics


def write_report(job: Quickstart, *, wall_s: float, stages: Mapping[str, float]) -> dict[str, Any]:
    """Add to the orchestrator's report the facts that only the quickstart knows, plot the reward, and return the report."""
    path = job.directory / REPORT_FILE
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    before, after = (_read_metrics(job.directory / f"eval_{name}.json") for name in ("before", "after"))
    report |= {
        "reward_before": before["reward_mean"],
        "reward_after": after["reward_mean"],
        "wall_s": round(wall_s, 1),
        "rl_wall_s": report["wall_s"],
        "seed": job.seed,
        "evaluation_before": before,
        "evaluation_after": after,
        "stages_s": {name: round(seconds, 1) for name, seconds in stages.items()},
    }
    write_whole(path, json.dumps(report, indent=2) + "\n")
    title = f"{job.example.name}, seed {job.seed}: reward of the training batches"
    plot_run(read_steps(job.directory), job.directory / PLOT_FILE, title)
    return report


def show_report(console: Console, job: Quickstart) -> None:
    """Print the table, the places of all files, and commands to continue with."""
    run_dir, model, example = job.directory, job.trained(), job.example
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
    commands = (
        f"{_program('tensorboard')} --logdir {run_dir / 'tensorboard'}",
        f"{_program('sluice')} report {run_dir}",
        f"{_program('sluice')} eval @ {example / 'eval.toml'} --model {model}",
        f"{_program('sluice')} rl @ {example / 'rl.toml'} --model {model} --run my-run",
    )
    found = finding_texts(report)
    lines = [
        facts,
        *found,
        "",
        *(f"{label:<21} {place}" for label, place in places.items()),
        "",
        "What you can do next:",
    ]
    lines += [f"  {command}" for command in commands]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _program(name: str) -> str:
    """Return the command by which to call a program of this Python environment from the working directory."""
    path = Path(sys.executable).with_name(name)
    if shutil.which(name) == str(path):
        return name
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def show_conversations(console: Console, before: Path, after: Path, count: int) -> None:
    """Print one sampled answer of the model before and one after training, for each of the same prompts."""
    earlier, later = _first_sampled(before), _first_sampled(after)
    table = Table(title="the same prompts, sampled at T = 1", show_lines=True)
    for heading in ("prompt", "before RL", "after RL"):
        table.add_column(heading)
    for task in [task for task in earlier if task in later][:count]:
        table.add_row(Text(earlier[task]["prompt"].strip()), *(_answer(each[task]) for each in (earlier, later)))
    console.print(table)


def _first_sampled(path: Path) -> dict[str, dict[str, Any]]:
    """Return the first sampled attempt at each task, by the task's id."""
    rows: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if not row["greedy"]:
            rows.setdefault(row["task_id"], row)
    return rows


def _answer(row: Mapping[str, Any]) -> Text:
    """Return an answer, green if it earned the whole reward, else red."""
    right = row["reward"] == 1.0
    return Text(f"{'+' if right else '-'} {row['completion'].strip()}", style="green" if right else "red")


def _job(options: argparse.Namespace) -> Quickstart:
    task, example = TASKS[options.task], options.example or FOLDER / options.task
    if options.example is None and not FOLDER.exists():
        copy_examples(FOLDER)
    parts = _PARTS if task.pretrained else (*_PARTS, *_WARM_UP_PARTS)
    missing = [part for part in parts if not (example / part).is_file()]
    if missing:
        raise ConfigError(
            f"{example} has no {', '.join(missing)}: run `sluice quickstart` in the root of the repository or in an empty"
            " directory, or name the example with --example DIRECTORY"
        )
    return Quickstart(
        task=task,
        example=example,
        directory=options.output_dir / task.run,
        seed=options.seed,
        rl_flags=(
            *_flag("--trainer.lr", options.lr),
            *_flag("--orchestrator.max-steps", options.steps),
            *_flag("--rollout.engine", options.engine),
            *(("--plain",) if options.plain else ()),
        ),
        demonstrations_flags=_seen_in(options.sft_steps, example),
        sft_flags=_flag("--max-steps", options.sft_steps),
        eval_flags=(*_flag("--engine", options.engine), *_flag("--prompts", options.prompts)),
    )


def _seen_in(steps: int | None, example: Path) -> tuple[str, ...]:
    """Return the flag for the number of demonstrations that a warm-up of `steps` steps uses; nothing to keep the example's number."""
    if steps is None:
        return ()
    settings = tomllib.loads((example / "sft.toml").read_text(encoding="utf-8"))
    return _flag("--count", steps * settings["batch_size"]) if "batch_size" in settings else ()


def _flag(name: str, value: float | str | None) -> tuple[str, ...]:
    """Return a flag with its value; nothing to keep the example's setting."""
    return () if value is None else (name, str(value))


def _parser() -> argparse.ArgumentParser:
    parser = Options(
        prog="sluice quickstart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--task", choices=list(TASKS), default="reverse_text", help="what to train on (default: reverse_text)")
    add("--seed", type=whole_number(0, (1 << 32) - 1), default=0, help="seed of data, model and sampling (default: 0)")
    add("--lr", type=float, help="learning rate of the RL run (default: the example's; 0 shows what no training does)")
    add("--steps", type=whole_number(1, MOST_STEPS), help="RL steps (default: the example's)")
    add("--sft-steps", type=whole_number(1, MOST_STEPS), help="warm-up steps (default: the example's)")
    add("--prompts", type=whole_number(1, MOST_STEPS), help="held-out prompts per evaluation (default: the example's)")
    add("--engine", choices=tuple(ENGINES), help="what samples (default: the example's)")
    add("--example", type=Path, help="the example's directory (default: examples/TASK)")
    add("--output-dir", type=Path, default=Path("outputs"), help="where the directory of the run is made")
    add("--plain", action="store_true", help="one line per step instead of the live view")
    return parser
