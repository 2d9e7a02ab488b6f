"""Evaluations between the steps of an offline run: the loss of held-out examples, and the rewards of an environment.

outputs/.sft.evaluated               the current weights, while `sluice eval` plays the environment with them
outputs/sft.checkpoints/best         the model of the best evaluation, with `keep_best`
outputs/sft.checkpoints/best.json    which evaluation that was, for a run that resumes
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch

from sluice.config import ConfigError
from sluice.host_files import remove_tree, write_whole
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.lora import merge_adapter
from trainer_svc.offline.checkpoints import checkpoint_directory
from trainer_svc.offline.config import LOSS, OfflineConfig
from trainer_svc.offline.playing import EvaluationFailedError, play, shown
from trainer_svc.parallel.mesh import Ranks, agree

BEST = "best"
"""Name of the directory with the best model and, with ``.json``, of a file, both beside the checkpoints."""

OLD = f".{BEST}.old"
"""Directory of the previous best model while the new one takes its place."""


@dataclass
class Standing:
    """Which evaluation is the best so far. Pure.

    Attributes:
        metric: Result by which evaluations are compared. A lower loss is better; for all other results higher is better.
        min_gain: A result is better only if it exceeds the best one by more than this.
        best: The best result; None before the first.
        best_step: Number of optimizer steps before the best evaluation.
        last_step: Number of optimizer steps before the newest evaluation; -1 before the first.
        since: Number of evaluations after the best one.
    """

    metric: str
    min_gain: float = 0.0
    best: float | None = None
    best_step: int = 0
    last_step: int = -1
    since: int = 0

    def take(self, step: int, results: Mapping[str, float]) -> bool:
        """Compare the results after a step with the best so far. Return whether they are better; False if they lack the metric."""
        self.last_step = step
        value = results.get(self.metric, math.nan)
        if math.isnan(value):
            return False
        if self.best is not None:
            gain = self.best - value if self.metric == LOSS else value - self.best
            if gain <= self.min_gain:
                self.since += 1
                return False
        self.best, self.best_step, self.since = value, step, 0
        return True


class Evaluations:
    """The evaluations of one run, and the best model. Every rank makes the same calls; rank 0 runs `sluice eval`, compares and writes."""

    def __init__(self, engine: TrainEngine, config: OfflineConfig, dtype: torch.dtype) -> None:
        self._engine, self._config, self._dtype = engine, config, dtype
        self._everyone = Ranks(engine.mesh.everyone)
        self._directory = checkpoint_directory(config.output)
        self._played = config.output.with_name(f".{config.output.name}.evaluated")
        self._merged = config.output.with_name(f".{config.output.name}.evaluated-merged")
        self.standing = Standing(config.metric, config.min_gain)
        self._stop = self._ended_before = False

    def resume(self, steps: int) -> None:
        """Continue with the results of an earlier process of this run; delete them if the run starts from the beginning."""

        def look() -> None:
            if self._engine.mesh.rank == 0:
                self._remove_played()
                if steps and self._config.compares:
                    self._read()
                elif self._directory.exists():
                    self._forget()

        agree(self._everyone, look)
        # A step that is repeated gives the same weights, so its evaluation still holds.
        (answer, *_) = self._everyone.exchange(str(self.standing.last_step).encode())
        self.standing.last_step = int(answer)
        self._ended_before = self._stop = self._agreed(self._has_no_patience())

    def was_made(self, step: int) -> bool:
        """Return whether an earlier process of this run has evaluated this step."""
        return step <= self.standing.last_step

    def ended(self, step: int) -> bool:
        """Return whether an earlier process of this run ended training at this step."""
        return self._ended_before and step == self.standing.last_step

    def take(self, step: int, loss: float | None) -> tuple[str, bool]:
        """Play the environment with the current weights, compare the results, and keep the model if it is the best.

        Args:
            step: Number of optimizer steps so far.
            loss: Loss of the held-out examples; None if there are none.

        Returns:
            The environment's results as text (only on rank 0), and whether training ends here.

        Raises:
            ConfigError: if the first evaluation fails.
        """
        try:
            return self._take(step, loss)
        finally:
            if self._engine.mesh.rank == 0:
                self._remove_played()

    def _take(self, step: int, loss: float | None) -> tuple[str, bool]:
        results = {} if loss is None else {LOSS: loss}
        words = ""
        if self._config.evaluation:
            began = perf_counter()
            self._engine.export_hf(self._played, self._dtype)
            try:
                found = self._play()
                words = f"{shown(found)}  in {perf_counter() - began:.0f} s"
                results |= found
            except EvaluationFailedError as error:
                if self.standing.last_step < 0:
                    raise ConfigError(f"evaluation after {step} steps: {error}") from error
                words = f"  evaluation failed: {error}"
        if self._config.compares:
            if self.standing.metric not in results and self._engine.mesh.rank == 0:
                words += f"  not compared: there is no {self.standing.metric}"
            better = self._agreed(self.standing.take(step, results))
            if better and self._config.keep_best:
                self._keep()
            if self._engine.mesh.rank == 0:
                self._write()
            self._stop = self._agreed(self._has_no_patience())
        else:
            self.standing.last_step = step
        return words, self._stop

    def export(self) -> None:
        """Write the output: the best model with `keep_best`, else the current weights."""
        best = self._directory / BEST
        if not self._agreed(self._config.keep_best and best.is_dir()):
            self._engine.export_hf(self._config.output, self._dtype)
        elif self._engine.mesh.rank == 0:
            best.rename(self._config.output)

    def summary(self) -> str:
        """Return a text about the best evaluation, for the last line of output; empty if evaluations are not compared."""
        standing = self.standing
        if not self._config.compares or standing.best is None:
            return ""
        written = "written" if self._config.keep_best else "best"
        ended = f"; ended by patience, {standing.since} evaluations without a better one" if self._stop else ""
        return f", {written}: {standing.metric} {standing.best:.4f} after {standing.best_step} steps{ended}"

    def _play(self) -> dict[str, float]:
        """Run `sluice eval` on rank 0 while the other ranks wait. Return the results on rank 0, nothing on other ranks.

        Raises:
            EvaluationFailedError: on every rank, if there is no result.
        """
        results: dict[str, float] = {}
        failed = ""
        if self._engine.mesh.rank == 0:
            try:
                results = asyncio.run(play(self._config, self._playable(), lambda: self._everyone.exchange(b"running")))
            except EvaluationFailedError as error:
                failed = str(error)
            except OSError as error:
                failed = f"cannot run `sluice eval`: {error}"
            answers = self._everyone.exchange(b"failed:" + failed.encode() if failed else b"done")
        else:
            answers = self._everyone.exchange(b"")
            while answers[0] == b"running":
                answers = self._everyone.exchange(b"")
        kind, _, reason = answers[0].partition(b":")
        if kind == b"failed":
            raise EvaluationFailedError(reason.decode())
        return results

    def _playable(self) -> Path:
        """Return the directory of the current weights as a whole model: an adapter is merged into its base."""
        if self._engine.adapter is None:
            return self._played
        merge_adapter(self._config.model, str(self._played), self._merged, torch.float32)
        return self._merged

    def _keep(self) -> None:
        """Replace the best model by the current weights."""
        if not self._config.evaluation:
            self._engine.export_hf(self._played, self._dtype)
        if self._engine.mesh.rank == 0:
            best, old = self._directory / BEST, self._directory / OLD
            self._directory.mkdir(parents=True, exist_ok=True)
            remove_tree(old)
            if best.exists():
                best.rename(old)
            self._played.rename(best)
            remove_tree(old)

    def _has_no_patience(self) -> bool:
        return 0 < self._config.patience <= self.standing.since

    def _agreed(self, decision: bool) -> bool:
        """Return the decision of rank 0."""
        return self._everyone.exchange(b"yes" if decision else b"no")[0] == b"yes"

    def _remove_played(self) -> None:
        if not (self._config.evaluation or self._config.keep_best):
            return
        for each in (self._played, self._merged):
            if each.exists():
                remove_tree(each)

    def _read(self) -> None:
        """Read from disk which evaluation was the best. If its model is missing although it should be kept, forget all evaluations."""
        best, old, path = self._directory / BEST, self._directory / OLD, self._directory / f"{BEST}.json"
        if old.is_dir() and not best.exists():  # the process was killed between the two renames
            old.rename(best)
        if not path.exists() or (self._config.keep_best and not (self._directory / BEST).is_dir()):
            self._forget()
            return
        try:
            self.standing = Standing(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path} cannot be read ({error}): remove it, and resume again") from error

    def _write(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        write_whole(self._directory / f"{BEST}.json", json.dumps(asdict(self.standing)) + "\n")

    def _forget(self) -> None:
        remove_tree(self._directory / BEST)
        (self._directory / f"{BEST}.json").unlink(missing_ok=True)
