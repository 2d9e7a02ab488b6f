"""What people learn of a run's steps and of its end: rates and counts, shown as status and recorded in files."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import structlog

from orchestrator_svc.config import OrchestratorConfig
from orchestrator_svc.envs.calls import EnvironmentCalls
from orchestrator_svc.evaluation import Evaluations
from orchestrator_svc.journal import Recovery
from orchestrator_svc.recorder import Recorder
from orchestrator_svc.replicas import GenerationCounts, ReplicaPool
from orchestrator_svc.scheduler import Reason, Scheduler, Stage
from orchestrator_svc.status import RunStatus, TrajectoryHistory
from orchestrator_svc.step_summary import AppliedStep
from sluice.config import CommonConfig

__all__ = ["RunReporter"]

log = structlog.get_logger(__name__)


class RunReporter:
    """Shows and records the steps of a run, and writes its report.

    Args:
        common: Settings that all services of the run share.
        config: Settings of the orchestrator.
        scheduler: Counts trajectories.
        status: Shows steps and waiting times.
        history: Keeps the last trajectories for operators.
        recorder: Writes the files.
        pool: Knows what the replicas' updates cost.
        counts: What was generated.
        calls: Where the environment's code runs.
    """

    def __init__(
        self,
        *,
        common: CommonConfig,
        config: OrchestratorConfig,
        scheduler: Scheduler,
        status: RunStatus,
        history: TrajectoryHistory,
        recorder: Recorder,
        pool: ReplicaPool,
        counts: GenerationCounts,
        calls: EnvironmentCalls,
    ) -> None:
        self._common, self._config, self._scheduler, self._status = common, config, scheduler, status
        self._history, self._recorder, self._pool, self._counts, self._calls = history, recorder, pool, counts, calls
        self._generated_before: Counter[str] = Counter()
        self._last_step = time.monotonic()
        self._counted: Counter[str] = Counter()
        self._shares = status.shares()

    def continue_from(self, recovery: Recovery) -> None:
        """Add what earlier processes of the run generated, and how long they lasted."""
        self._generated_before = recovery.generated
        self._status.continue_from(recovery.elapsed_s)

    async def step(self, step: AppliedStep) -> None:
        """Show and record an applied batch."""
        summary, version = step.summary, step.version
        metrics = dict(summary.metrics)
        if not step.past:
            metrics |= self._since_last_step() | self._pool.update_metrics(version)
        self._history.add(step.records)
        self._status.step_finished(version, metrics)
        await self._recorder.step(version.number, metrics, step.records, self._scheduler.lineage)
        shown = {name: round(metrics[name], 4) for name in ("reward/mean", "staleness/mean") if name in metrics}
        log.info("step", version=str(version), trained=summary.trained, dropped=dict(summary.dropped), **shown)

    def _since_last_step(self) -> dict[str, float]:
        """Return rates and counts of the time since the last applied batch."""
        now, counts = time.monotonic(), self._counts.of_policy()
        more, self._counted = counts - self._counted, counts
        idle, blocked, rollout_idle = (share.take(now) for share in self._shares)
        elapsed, self._last_step = now - self._last_step, now
        return {
            "time/step_s": elapsed,
            "tokens/generated": float(more["tokens"]),
            "tokens/generated_per_s": more["tokens"] / elapsed if elapsed > 0 else 0.0,
            "requests/count": float(more["requests"]),
            "requests/spanning": float(more["spanning"]),
            "load/trainer_idle": idle,
            "load/dispatch_blocked": blocked,
            "load/rollout_idle": rollout_idle,
        }

    async def report(self, state: str, stop_reason: str, evaluations: Evaluations | None) -> None:
        """Write the report.

        Args:
            state: "succeeded", "stopped" or "failed".
            stop_reason: Why an operator stopped the run; empty if none did.
            evaluations: Those of the run; None if it never evaluates.
        """
        facts = self._facts(state) | {
            "stop_reason": stop_reason,
            "evaluations_failed": evaluations.failed if evaluations else 0,
            "evaluation_held_all_replicas": evaluations.held_all_replicas if evaluations else False,
        }
        report = await self._recorder.report(facts)
        log.info("report", state=state, steps=report["steps"], wall_s=report["wall_s"])

    def _facts(self, state: str) -> dict[str, Any]:
        """Return what the metrics of the steps do not hold, for the report."""
        scheduler, accounting = self._scheduler, self._scheduler.accounting
        dropped = accounting.dropped
        generated = self._generated_before + self._counts.of_policy()
        if state == "succeeded":
            # Nothing will train them; a continued run would.
            left = sum(each.trajectories for each in scheduler.groups.values() if each.stage is not Stage.RUNNING)
            dropped[Reason.RUN_ENDED] += left
        return {
            "run": self._common.run,
            "state": state,
            "error": self._status.error,
            "seed": self._common.seed,
            "model": self._common.model,
            "environment": self._config.environment,
            "steps": scheduler.applied,
            "epochs": scheduler.epoch,
            "wall_s": round(self._status.elapsed_s, 3),
            "max_staleness": self._common.max_staleness,
            "trajectories_accepted": accounting.accepted,
            "trajectories_trained": accounting.trained,
            "trajectories_dropped": {reason: count for reason, count in dropped.items() if count},
            "groups_failed": dict(accounting.failed_groups),
            "tokens_generated": generated["tokens"],
            "requests": generated["requests"],
            "requests_spanning_versions": generated["spanning"],
            "generation_retries": self._counts.retried,
            "samples_continued": self._counts.continued,
            "environment_calls_hung": self._calls.hung,
        }
