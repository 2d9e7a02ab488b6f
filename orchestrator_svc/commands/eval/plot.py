"""Draws what evaluations of several checkpoints found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sluice.config import ConfigError

FORMATS = (".png", ".svg", ".pdf")


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
    """Return what is drawn, with its label: rewards, and pass@k of the greatest k."""
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
