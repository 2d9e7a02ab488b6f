"""Log-probabilities of the trained tokens of a run, computed again by the trainer's own forward in float32.

If a model is close to a tie, any float32 computation is further from the exact value than the limit. Such trajectories are computed a
third time, by the same forward in float64: the captured log-probability must agree with that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.capture.records import TRAINED, Trajectory, read_run
from sluice.versions import BASE, Version
from trainer_svc.batch.rows import TrainingRow
from trainer_svc.compute_config import ComputeConfig
from trainer_svc.engine.engine import TrainEngine
from weightsync.format.manifest import version_directory


@dataclass(frozen=True, slots=True)
class Differences:
    """The results of the recomputation.

    Attributes:
        tokens: Number of tokens.
        versions: Number of versions that sampled them.
        spanning: Trajectories that several versions sampled.
        largest: Largest difference of a log-probability, in nats.
        mean: Mean difference.
        beyond: Tokens whose difference exceeds the limit.
        beyond_exactly: For the trajectories of these tokens, the largest difference from the forward in float64.
        where: These trajectories, with the largest difference of each.
        missing: Versions whose weights are gone.
    """

    tokens: int
    versions: int
    spanning: int
    largest: float
    mean: float
    beyond: int
    beyond_exactly: float
    where: tuple[str, ...]
    missing: tuple[str, ...]


def recompute(directory: Path, model: Path, *, updates: bool, threads: int, within: float) -> Differences:
    """Compute the log-probabilities of all trained tokens, each under the weights of the version that sampled it.

    Args:
        directory: Directory of the run.
        model: Model that the run began with.
        updates: Whether versions differ; otherwise all have the weights of the model.
        threads: CPU threads.
        within: The limit, in nats.
    """
    run = read_run(directory)
    trained = [each for each in run.trajectories.values() if each.outcome == TRAINED and len(each.logprobs)]
    by_version: defaultdict[Version, dict[str, Trajectory]] = defaultdict(dict)
    for trajectory in trained:
        for _, version in trajectory.versions:
            by_version[version if updates else BASE][trajectory.name] = trajectory
    far: list[tuple[str, float]] = []
    own, exact, missing = list[np.ndarray](), list[np.ndarray](), list[str]()
    for version, named in sorted(by_version.items()):
        unchanged = not updates or version.number == 0
        weights = model if unchanged else directory / "weights" / version_directory(version)
        if not (weights / "config.json").exists():
            missing.append(str(version))
            continue
        engine = TrainEngine(ComputeConfig(threads=threads, dtype="float32"), weights, frozen="float32")
        of_version = version if updates else None
        here = _differences(engine, list(named.values()), of_version)
        own += here
        worst = {each: float(values.max(initial=0.0)) for each, values in zip(named, here, strict=True)}
        if beyond := [each for each, value in worst.items() if not value <= within]:  # NaN counts as beyond
            far += [(each, worst[each]) for each in beyond]
            engine.network.model.double()
            exact += _differences(engine, [named[each] for each in beyond], of_version)
    every = np.concatenate([*own, np.zeros(0)])
    return Differences(
        tokens=len(every),
        versions=len(by_version),
        spanning=sum(len({version for _, version in each.versions}) > 1 for each in trained),
        largest=float(every.max(initial=0.0)),
        mean=float(every.mean()) if len(every) else 0.0,
        beyond=int((~(every <= within)).sum()),
        beyond_exactly=float(np.nan_to_num(np.concatenate([*exact, np.zeros(0)]), nan=np.inf).max(initial=0.0)),
        where=tuple(f"{name}: {value:.2g}" for name, value in far),
        missing=tuple(missing),
    )


def _differences(engine: TrainEngine, trajectories: list[Trajectory], version: Version | None) -> list[np.ndarray]:
    """Return the differences from the recorded log-probabilities, for the tokens of a version. None: for all trained tokens."""
    differences = []
    for each, ours in zip(trajectories, engine.forward([_row(each) for each in trajectories]), strict=True):
        mine = ours[torch.from_numpy(_mask(each))].numpy().astype(np.float64)
        all_of = np.abs(mine - each.logprobs)
        differences.append(all_of if version is None else all_of[_sampled_by(each, version)])
    return differences


def _mask(trajectory: Trajectory) -> np.ndarray:
    mask = np.zeros(len(trajectory.ids), bool)
    for begin, length in trajectory.stretches:
        mask[begin : begin + length] = True
    return mask


def _sampled_by(trajectory: Trajectory, version: Version) -> np.ndarray:
    """Return which of the trained tokens a version sampled."""
    mask = np.zeros(len(trajectory.logprobs), bool)
    ends: Sequence[int] = [*(start for start, _ in trajectory.versions[1:]), len(mask)]
    for (start, each), end in zip(trajectory.versions, ends, strict=True):
        mask[start:end] |= each == version
    return mask


def _row(trajectory: Trajectory) -> TrainingRow:
    mask = torch.from_numpy(_mask(trajectory))
    behaviour = torch.full((len(mask),), torch.nan)
    behaviour[mask] = torch.from_numpy(trajectory.logprobs)
    return TrainingRow(
        input_ids=torch.from_numpy(trajectory.ids.astype(np.int64)),
        loss_mask=mask,
        behaviour_logprobs=behaviour,
        advantages=torch.zeros(len(mask)),
        temperature=trajectory.temperature,
        group_id=trajectory.name,
        episode_id=trajectory.episode,
        trajectory_id=trajectory.name,
    )
