"""`sluice quickstart`: the whole of Sluice on one small task, in one command.

`--task reverse_text` makes a model from scratch, warms it up on demonstrations, evaluates it, trains it by RL over the four
services and evaluates it again, in minutes, in ``outputs/quickstart``. `--task sums` does the same with a real pretrained model,
SmolLM2-135M-Instruct, in a quarter of an hour, in ``outputs/sums``.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from sluice.cli import rl
from sluice.config import Command, ConfigError, Options, whole_number
from sluice.supervise.plan import shared_cores
from sluice.supervise.run_directory import is_held
from sluice.view import quickstart_report
from sluice.view.stages import StageError, Stages, run_quietly

__all__ = ["COMMAND", "Quickstart", "make_room", "run"]

ENVIRONMENT_FILE = "env.py"

MOST_STEPS = 1 << 20
"""More steps or prompts than this are a typing mistake."""

_PARTS = (ENVIRONMENT_FILE, "rl.toml", "eval.toml")
_WARM_UP_PARTS = ("demonstrations.py", "sft.toml")


@dataclass(frozen=True)
class Task:
    """What a quickstart trains on, and which model.

    Attributes:
        run: Name of the run, and of its directory.
        pretrained: The model to fetch; empty if one is made from scratch and warmed up on demonstrations.
        conversations: How many conversations the report shows, before and after.
    """

    run: str
    pretrained: str = ""
    conversations: int = 0


TASKS = {"reverse_text": Task("quickstart"), "sums": Task("sums", pretrained="smollm2-135m", conversations=10)}
"""By the name of their directory in `examples`."""


@dataclass(frozen=True)
class Quickstart:
    """What to do where.

    Attributes:
        task: What is trained.
        example: Directory of the example: environment, settings, and demonstrations where there are any.
        directory: Where everything goes.
        seed: Seed of data, model and sampling; the held-out strings stay the same.
        rl_flags: Further settings of the RL run.
        sft_flags: Further settings of the warm-up.
        eval_flags: Further settings of both evaluations.
    """

    task: Task
    example: Path
    directory: Path
    seed: int
    rl_flags: tuple[str, ...] = ()
    sft_flags: tuple[str, ...] = ()
    eval_flags: tuple[str, ...] = ()

    @property
    def model(self) -> Path:
        """The untrained model."""
        return self.directory / "model"

    @property
    def start(self) -> Path:
        """The model that RL starts from: the pretrained one, or the one made from scratch after its warm-up."""
        return Path("models") / self.task.pretrained if self.task.pretrained else self.directory / "warm"

    @property
    def demonstrations(self) -> Path:
        """The demonstrations."""
        return self.directory / "demonstrations.jsonl"

    def evaluation(self, name: str) -> Path:
        """Results of an evaluation."""
        return self.directory / f"eval_{name}.json"

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
        ConfigError: if the example is not there, or another process is at work in the directory.
    """
    options = _parser().parse_args(argv)
    job = _job(options)
    console = Console()
    make_room(job.directory, console)
    began = time.monotonic()
    try:
        code, stages = _run_stages(job, console)
        if code:
            return code
        title = f"{job.example.name}, seed {job.seed}"
        wall_s = time.monotonic() - began
        quickstart_report.write(job.directory, seed=job.seed, wall_s=wall_s, stages=stages.seconds, title=title)
    except KeyboardInterrupt:
        console.print("stopped", style="yellow")
        return rl.EXIT_INTERRUPTED
    except StageError as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    quickstart_report.show(console, job.directory, job.trained(), job.example)
    if job.task.conversations:
        before, after = job.conversations("before"), job.conversations("after")
        quickstart_report.show_conversations(console, before, after, job.task.conversations)
    return 0


def _run_stages(job: Quickstart, console: Console) -> tuple[int, Stages]:
    stages = Stages(console, count=4 if job.task.pretrained else 6)
    if job.task.pretrained:
        with stages.stage("fetch_model", "fetch a pretrained model") as details:
            details.append(_sluice(job, "fetch-model", job.task.pretrained, str(job.start)))
    else:
        _warm_up(job, stages)
    with stages.stage("eval_before", "evaluate on held-out prompts") as details:
        details.append(_evaluate(job, "before", job.start))
    with stages.stage("rl", "train by RL: rollout, trainer, orchestrator, weightsync", quiet=False):
        where = ("--run", job.directory.name, "--output-dir", str(job.directory.parent), "--model", str(job.start))
        code = rl.run(["@", str(job.example / "rl.toml"), "--seed", str(job.seed), *where, *job.rl_flags])
    if code:
        return code, stages
    with stages.stage("eval_after", "evaluate on the same held-out prompts") as details:
        details.append(_evaluate(job, "after", job.trained()))
    return 0, stages


def _warm_up(job: Quickstart, stages: Stages) -> None:
    """Make a model from scratch and fine-tune it on demonstrations."""
    with stages.stage("init_model", "make a model from scratch") as details:
        details.append(_sluice(job, "init-model", str(job.model), "--seed", str(job.seed)))
    with stages.stage("demonstrations", "write demonstrations, most of them wrong") as details:
        script = str(job.example / "demonstrations.py")
        details.append(_python(job, "demonstrations", script, str(job.demonstrations), "--seed", str(job.seed)))
    with stages.stage("sft", "warm the model up on them (SFT)") as details:
        where = ("--model", str(job.model), "--data", str(job.demonstrations), "--output", str(job.start))
        settings = ("@", str(job.example / "sft.toml"), "--seed", str(job.seed), *where, *job.sft_flags)
        details.append(_sluice(job, "sft", *settings))


def _evaluate(job: Quickstart, name: str, model: Path) -> str:
    output = job.evaluation(name)
    where = ("--model", str(model), "--output", str(output), "--samples-output", str(job.conversations(name)))
    _sluice(job, "eval", "@", str(job.example / "eval.toml"), *where, *job.eval_flags, log=f"eval_{name}")
    return quickstart_report.describe_evaluation(output)


def _sluice(job: Quickstart, command: str, *arguments: str, log: str = "") -> str:
    return _python(job, log or command, "-m", "sluice.cli.main", command, *arguments)


def _python(job: Quickstart, log: str, *argv: str) -> str:
    """Run one program to its end."""
    return run_quietly([*argv], job.directory / "logs" / f"{log}.log", shared_cores(os.environ))


def make_room(directory: Path, console: Console) -> None:
    """Move what an earlier quickstart left aside: nothing is overwritten.

    Raises:
        ConfigError: if a process is at work there.
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


def _job(options: argparse.Namespace) -> Quickstart:
    task, example = TASKS[options.task], options.example or Path("examples") / options.task
    parts = _PARTS if task.pretrained else (*_PARTS, *_WARM_UP_PARTS)
    missing = [part for part in parts if not (example / part).is_file()]
    if missing:
        raise ConfigError(
            f"{example} has no {', '.join(missing)}: run `sluice quickstart` in the root of the repository, "
            "or name the example with --example DIRECTORY"
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
        sft_flags=_flag("--max-steps", options.sft_steps),
        eval_flags=(*_flag("--engine", options.engine), *_flag("--prompts", options.prompts)),
    )


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
    add("--engine", choices=("vllm", "transformers"), help="what samples (default: the example's)")
    add("--example", type=Path, help="the example's directory (default: examples/TASK)")
    add("--output-dir", type=Path, default=Path("outputs"), help="where the directory of the run is made")
    add("--plain", action="store_true", help="one line per step instead of the live view")
    return parser


COMMAND = Command("quickstart", "train a small model by RL from nothing, in minutes", run)
