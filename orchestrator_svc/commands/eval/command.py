"""`sluice eval`: score a model directory or a running server on an environment.

For a model directory a rollout replica is started, and stopped when the evaluation has ended. With `workflow = "external"` agents
play the episodes, through a gateway that is started as well.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator_svc.commands.eval.config import EvalConfig, EvaluatedEnvironment
from orchestrator_svc.commands.runs import weight_versions
from orchestrator_svc.commands.table import table_lines
from sluice.chat_template import check_chat_template
from sluice.config import Command, ConfigError, load_command
from sluice.environments.loading import locate
from sluice.loading import check_there
from sluice.models import check_files, check_model
from sluice.telemetry import LEVEL_VARIABLE, configure_logging

if TYPE_CHECKING:
    from orchestrator_svc.commands.eval.play import Outcome
    from orchestrator_svc.run.evaluation import EvalSample

_LABELS = {
    "reward_mean": "reward, sampled",
    "exact_share": "exact, sampled",
    "greedy_reward_mean": "reward, greedy",
    "greedy_exact_share": "exact, greedy",
    "truncated_share": "truncated",
    "missing_rewards": "missing rewards",
    "failed_tasks": "failed tasks",
    "failed_episodes": "failed episodes",
}


_FAULTS = ("missing_rewards", "failed_tasks", "failed_episodes")
"""Counters that make `sluice eval` exit with 1."""


def run(argv: list[str]) -> int:
    """Evaluate, print a table, and write the result.

    Returns:
        0, or 1 if a task failed or a reward is missing.
    """
    config = load_command(EvalConfig, argv, "eval", check=check_evaluation)
    configure_logging("eval", os.environ.get(LEVEL_VARIABLE) or "warning", for_people=True)
    results, samples = [], []
    for result, outcome in evaluations(config):
        results.append(result)
        names = {name: result[name] for name in ("checkpoint", "environment") if name in result}
        samples += [{**names, **asdict(sample)} for sample in outcome.result.samples]
        sys.stderr.write(_missing(outcome.result.samples, outcome.unscored))
        if config.output is not None:
            several = config.weights_dir is not None or config.environments
            whole = {"results": results} if several else result
            _write(config.output, json.dumps(whole, indent=2) + "\n")
    if config.samples_output is not None:
        _write(config.samples_output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in samples))
    if config.plot is not None:
        from orchestrator_svc.run.evaluation import INTERVAL  # noqa: PLC0415 - as in _evaluated

        draw([{"checkpoint": "", **each} for each in results], config.plot, INTERVAL)
    return int(any(each["metrics"][name] > 0 for each in results for name in _FAULTS))


def _missing(samples: Sequence[EvalSample], unscored: int) -> str:
    """Return why rewards are missing, and what to do about it. Empty if none is missing.

    Args:
        samples: All samples.
        unscored: How many of them the environment failed to score.
    """
    missing = [each for each in samples if each.reward is None]
    cut_off = min(sum(each.truncated for each in missing), max(0, len(missing) - unscored))
    lines = []
    if cut_off:
        lines.append(
            f"{cut_off} episodes were cut off by max_tokens or max_turns before the environment gave a reward: raise the limit, or let"
            " `step` take a parameter `last` and score what there is (docs/environments.md)"
        )
    if len(missing) > cut_off:
        lines.append(
            f"{len(missing) - cut_off} rewards are missing because the environment gave none: see `scoring failed` above"
        )
    return "".join(f"{line}\n" for line in lines)


def evaluations(config: EvalConfig) -> Iterator[tuple[dict[str, Any], Outcome]]:
    """Run the requested evaluations in order, and print each. Yield the result for people, and the outcome that it was computed from."""
    found = False
    for each in _each(config):
        try:
            result, outcome = _compared(each.config)
        except ConfigError:
            if not each.is_removed:
                raise
            sys.stderr.write(f"{each.config.model} is left out: its run has removed it meanwhile (weightsync.keep)\n")
            continue
        found = True
        result |= each.names
        _print(result)
        yield result, outcome
    if not found:
        raise ConfigError(f"{config.weights_dir} has none of the versions any more that it had: evaluate it again")


@dataclass(frozen=True)
class _Evaluation:
    """One of the requested evaluations.

    Attributes:
        config: Settings for one model and one environment.
        names: What distinguishes it from the others: `checkpoint`, `environment`.
    """

    config: EvalConfig
    names: Mapping[str, str]

    @property
    def is_removed(self) -> bool:
        """Whether a live run has removed the directory of its version since the versions were listed."""
        return "checkpoint" in self.names and not Path(self.config.model).is_dir()


def _each(config: EvalConfig) -> Iterator[_Evaluation]:
    """Yield an evaluation for each checkpoint and environment."""
    checkpoints = weight_versions(config.weights_dir, config.steps) if config.weights_dir is not None else [None]
    environments: Sequence[EvaluatedEnvironment | None] = config.environments or [None]
    for checkpoint in checkpoints:
        for environment in environments:
            updates: dict[str, Any] = {"environments": [], "weights_dir": None}
            names = {}
            if checkpoint is not None:
                updates["model"], names["checkpoint"] = str(checkpoint), checkpoint.name
            if environment is not None:
                names["environment"] = environment.name
                updates |= {name: value for name, value in environment if name != "name" and value is not None}
            if config.attempts is not None and names:
                file = config.attempts
                updates["attempts"] = file.with_name(".".join((file.stem, *names.values())) + file.suffix)
            yield _Evaluation(config.model_copy(update=updates), names)


def _compared(config: EvalConfig) -> tuple[dict[str, Any], Outcome]:
    """Evaluate a model, and the baseline before it if there is one."""
    result, outcome = _evaluated(config)
    if not config.baseline:
        return result, outcome
    from orchestrator_svc.run.evaluation import gain  # noqa: PLC0415 - as in _evaluated

    _print(result)
    before, others = result, outcome.result
    result, outcome = _evaluated(config.model_copy(update={"baseline": ""}))
    try:
        result |= {"baseline": before, "gain": asdict(gain(others.task_rewards, outcome.result.task_rewards))}
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return result, outcome


def _evaluated(config: EvalConfig) -> tuple[dict[str, Any], Outcome]:
    """Evaluate the model, or the baseline if there is one; return the result for people, and the outcome that it was computed from."""
    if config.baseline and config.attempts is not None:
        file = config.attempts
        config = config.model_copy(update={"attempts": file.with_name(f"{file.stem}.baseline{file.suffix}")})
    config = config.model_copy(update={"model": config.baseline or config.model})
    from orchestrator_svc.commands.eval.play import run_evaluation  # noqa: PLC0415 - brings gRPC and process pools: not for `--help`

    began = time.monotonic()
    outcome = asyncio.run(run_evaluation(config))
    result = {
        "model": config.model or config.address,
        "environment": config.environment,
        "split": config.split,
        "prompts": outcome.tasks,
        "samples": config.samples,
        "temperature": config.temperature,
        "engine": config.engine if config.model and not config.url else "",
        "policy_version": outcome.version,
        "episodes": len(outcome.result.samples),
        "tokens": outcome.tokens,
        "wall_s": round(time.monotonic() - began, 3),
        "metrics": outcome.result.metrics(),
    }
    if config.chat_template is not None:
        result["chat_template"] = str(config.chat_template)
    if config.chat_template_kwargs:
        result["chat_template_kwargs"] = config.chat_template_kwargs
    return result, outcome


def check_evaluation(config: EvalConfig) -> None:
    """Refuse settings that would fail later, before a replica is started.

    Raises:
        ConfigError: if a model directory is unusable, or the environment is not there.
    """
    for model in filter(None, (config.baseline, "" if config.url else config.model)):
        check_model(model)
        check_files(model)
        check_chat_template(model, config.chat_template, config.chat_template_kwargs)
    for each in _each(config):
        check_there(locate(each.config.environment), "environment")


def _print(result: Mapping[str, Any]) -> None:
    from orchestrator_svc.run.evaluation import INTERVAL  # noqa: PLC0415 - as in _evaluated

    metrics = result["metrics"]
    rows = []
    for name, label in _LABELS.items():
        if name not in metrics or (name in _FAULTS and not metrics[name]):
            continue
        error = metrics.get(name.replace("_mean", "_stderr")) if name.endswith("_mean") else None
        half = None if error is None else INTERVAL * error
        interval = "" if half is None else f"  95% {metrics[name] - half:.4f} to {metrics[name] + half:.4f}"
        shown = f"{metrics[name]:.0f}" if name in _FAULTS else f"{metrics[name]:.4f}"
        rows.append((label, f"{shown}{interval}"))
    ks = sorted(int(name[8:]) for name in metrics if name.startswith("pass_at_") and name[8:].isdigit())
    for k in ks[1:]:
        low, high = metrics[f"pass_at_{k}_low"], metrics[f"pass_at_{k}_high"]
        rows.append((f"pass@{k}", f"{metrics[f'pass_at_{k}']:.4f}  95% {low:.4f} to {high:.4f}"))
    rows += [(name.partition("/")[2], f"{value:.4f}") for name, value in metrics.items() if "/" in name]
    rows.append(("episodes", f"{result['episodes']}, {result['tokens']} tokens, {result['wall_s']:.0f} s"))
    lines = [f"{result['model']} on {result['environment']}, {result['prompts']} tasks of split {result['split']}:"]
    lines += [f"  {line}" for line in table_lines(rows, gap=1, least=18)]
    if "gain" in result:
        gain = result["gain"]
        lines.append(
            f"gain in reward over {result['baseline']['model']}: {gain['mean']:+.4f}  95% {gain['low']:+.4f} to {gain['high']:+.4f},"
            f" paired over {gain['tasks']} tasks"
        )
    sys.stdout.write("\n".join(lines) + "\n")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def draw(results: Sequence[Mapping[str, Any]], path: Path, interval: float) -> None:
    """Draw the mean reward and pass@k by checkpoint, a panel for each environment, with their 95% intervals.

    Args:
        results: What `sluice eval` writes for each evaluation, with its `checkpoint`.
        path: PNG, SVG or PDF file.
        interval: Standard errors of half an interval.

    Raises:
        ConfigError: if the file cannot be written.
    """
    import matplotlib as mpl  # noqa: PLC0415 - slow to import

    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    names = list(dict.fromkeys(each["environment"] for each in results))
    figure, panels = plt.subplots(1, len(names), figsize=(6.4 * len(names), 4.2), squeeze=False, layout="constrained")
    for panel, name in zip(panels[0], names, strict=True):
        mine = [each for each in results if each["environment"] == name]
        labels = [str(each["checkpoint"]) for each in mine]
        for metric, label in _curves(mine[0]["metrics"]):
            means = [each["metrics"].get(metric, float("nan")) for each in mine]
            below, above = zip(*(_interval(each["metrics"], metric, interval) for each in mine), strict=True)
            panel.errorbar(labels, means, yerr=(below, above), marker="o", capsize=3, label=label)
        panel.set_title(name.rpartition("/")[2], fontsize=10)
        panel.set_xlabel("checkpoint")
        panel.grid(alpha=0.3)
        panel.legend()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
    finally:
        plt.close(figure)


def _curves(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the metrics to draw, with their labels: rewards, and pass@k for the greatest k."""
    found = [("reward_mean", "reward, sampled"), ("greedy_reward_mean", "reward, greedy")]
    ks = [int(each.removeprefix("pass_at_")) for each in metrics if each.removeprefix("pass_at_").isdigit()]
    if ks and max(ks) > 1:
        found.append((f"pass_at_{max(ks)}", f"pass@{max(ks)}"))
    return [(name, label) for name, label in found if name in metrics]


def _interval(metrics: Mapping[str, float], metric: str, interval: float) -> tuple[float, float]:
    """Return how far the ends of the interval are below and above the mean."""
    mean = metrics.get(metric, 0.0)
    if f"{metric}_low" in metrics:
        return max(0.0, mean - metrics[f"{metric}_low"]), max(0.0, metrics[f"{metric}_high"] - mean)  # rounding
    half = interval * metrics.get(metric.replace("_mean", "_stderr"), 0.0)
    return half, half


COMMAND = Command("eval", "score a model directory or a running server on an environment", run)
