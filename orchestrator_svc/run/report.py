"""Shows the steps and evaluations of a run, adds rates and counts to their metrics, and writes its report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import structlog

from orchestrator_svc.config import OrchestratorConfig
from orchestrator_svc.journal.facts import Reason, Stage
from orchestrator_svc.journal.ledger import Ledger
from orchestrator_svc.run.metrics import EPOCH, AppliedStep, percentiles
from orchestrator_svc.run.recorder import Recorder
from orchestrator_svc.run.status import RunStatus
from sluice.config import CommonConfig
from sluice.environments.processes import EnvironmentProcesses
from sluice.sampling.policy import PolicyEngine
from sluice.sampling.pool import evictions
from sluice.tasks import Turn
from sluice.v1 import orchestrator_pb2
from sluice.versions import Version

log = structlog.get_logger(__name__)


NOT_TRAINED = "not_trained/"
"""Prefix of the counters of external agents' sampled tokens that may not be trained; the reason follows."""


class RunReporter:
    """Shows and records the steps and evaluations of a run, and writes its report."""

    def __init__(
        self,
        common: CommonConfig,
        config: OrchestratorConfig,
        ledger: Ledger,
        status: RunStatus,
        recorder: Recorder,
        *,
        engine: PolicyEngine,
        environments: Mapping[str, EnvironmentProcesses],
    ) -> None:
        self._common, self._config, self._ledger, self._status = common, config, ledger, status
        self._recorder, self._engine, self._environments = recorder, engine, environments
        self._generated_before = ledger.generated.copy()
        self._last_step = time.monotonic()
        self._counted: Counter[str] = Counter()
        self._failed_before = self._failed_calls()
        self._shares = status.shares()

    async def show_step(self, step: AppliedStep) -> None:
        """Show and record an applied batch."""
        version, metrics = step.version, {**step.metrics, EPOCH: float(step.version.epoch)}
        if not step.past:
            metrics |= self._since_last_step() | self._engine.pool.update_metrics(version)
        turn = Turn()
        for record in step.records:
            self._status.history.add(record)
            await turn.give_way()
        self._status.step_finished(version, metrics)
        await self._recorder.write_step(version.number, metrics, step.records, self._ledger.lineage)
        shown = {name: round(metrics[name], 4) for name in ("reward/mean", "staleness/mean") if name in metrics}
        log.info("step", version=str(version), trained=step.trained, dropped=dict(step.dropped), **shown)

    def _since_last_step(self) -> dict[str, float]:
        """Return rates and counts of the time since the last applied batch."""
        now, counts = time.monotonic(), self._engine.counts.copy()
        more, self._counted = counts - self._counted, counts
        idle, blocked, rollout_idle = (share.take(now) for share in self._shares)
        elapsed, self._last_step = now - self._last_step, now
        failed, before = self._failed_calls(), self._failed_before
        self._failed_before = failed
        scoring = [seconds for each in self._environments.values() for seconds in each.take_scoring_s()]
        return {
            "environment/failed_calls": float(failed - before),
            **({"environment/score_seconds_p95": percentiles(scoring, 95)[0]} if scoring else {}),
            "time/step_s": elapsed,
            "tokens/generated": float(more["tokens"]),
            "tokens/generated_per_s": more["tokens"] / elapsed if elapsed > 0 else 0.0,
            "requests/count": float(more["requests"]),
            "requests/spanning": float(more["spanning"]),
            "rollout/retried": float(more["retried"]),
            "rollout/continued": float(more["continued"]),
            "rollout/evicted": float(sum(evictions(more).values())),
            "rollout/tokens_kept": float(more["tokens_kept"]),
            "rollout/tokens_lost": float(more["tokens_lost"]),
            "load/trainer_idle": idle,
            "load/dispatch_blocked": blocked,
            "load/rollout_idle": rollout_idle,
            "orchestrator/loop_lag_p99_ms": self._status.loop_lag.take_p99_s() * 1e3,
        }

    def _failed_calls(self) -> int:
        """Return the calls of environments that failed so far."""
        return sum(each.failed_calls for each in self._environments.values())

    async def recorded_steps(self) -> Mapping[int, int]:
        """Return the last epoch in which each step was recorded, by this process and earlier ones."""
        return await self._recorder.recorded_steps()

    async def show_evaluation(self, version: Version, environment: str, metrics: Mapping[str, float]) -> None:
        """Show and record an evaluation on one environment."""
        self._status.evaluation_finished(version, environment, metrics)
        prefix = "eval" if len(self._environments) == 1 else f"eval/{environment}"
        await self._recorder.write_scalars(
            version.number, {f"{prefix}/{name}": value for name, value in metrics.items()}
        )
        shown = {name: round(value, 4) for name, value in metrics.items()}
        log.info("evaluation", version=str(version), environment=environment, **shown)

    async def write_report(self, state: str, facts: Mapping[str, Any]) -> None:
        """Write the report.

        Args:
            state: "succeeded", "stopped" or "failed".
            facts: Values that neither the metrics nor the counts of this class hold.
        """
        ledger = self._ledger
        dropped = ledger.dropped
        generated = self._generated_before + self._engine.counts
        if state == "succeeded":
            # They will not be trained, unless the run is continued.
            left = sum(each.size for each in ledger.groups.values() if each.stage is not Stage.RUNNING)
            dropped[Reason.RUN_ENDED] += left
        report = await self._recorder.write_report(
            {
                "run": self._common.run,
                "state": state,
                "error": self._status.error,
                "seed": self._common.seed,
                "model": self._common.model,
                "chat_template": None if self._common.chat_template is None else str(self._common.chat_template),
                "chat_template_kwargs": self._common.chat_template_kwargs,
                "environment": ", ".join(each.environment for each in self._config.mix),
                "steps": ledger.applied,
                "epochs": ledger.epoch,
                "wall_s": round(self._status.elapsed_s, 3),
                "max_staleness": self._common.max_staleness,
                "trajectories_accepted": ledger.accepted,
                "trajectories_trained": ledger.trained,
                "trajectories_dropped": {reason: count for reason, count in dropped.items() if count},
                "set_aside": {
                    reason: {"trajectories": each.trajectories, "problem": each.problem}
                    for reason, each in ledger.set_aside.items()
                },
                "refused": [
                    {"principal": each.principal, "task_id": each.task_id, "reason": each.reason, "count": each.count}
                    for each in self._status.refusals.describe()
                ],
                "groups_failed": dict(ledger.failed_groups),
                "episodes_lost": dict(ledger.lost_episodes),
                "redraws_dropped": dict(ledger.redraws_dropped),
                "tokens_generated": generated["tokens"],
                "requests": generated["requests"],
                "requests_spanning_versions": generated["spanning"],
                "generation_retries": generated["retried"],
                "samples_continued": generated["continued"],
                "replicas_evicted": evictions(generated),
                "tokens_kept": generated["tokens_kept"],
                "tokens_lost": generated["tokens_lost"],
                "tokens_lost_share": generated["tokens_lost"] / max(1, generated["tokens"] + generated["tokens_lost"]),
                "sessions_ended": dict(ledger.session_ends),
                "tokens_not_trained": {
                    name.removeprefix(NOT_TRAINED): count
                    for name, count in generated.items()
                    if name.startswith(NOT_TRAINED)
                },
                "changed_settings": [
                    {
                        "key": each.key,
                        "old": each.old_value,
                        "new": each.new_value,
                        "principal": each.principal,
                        "from_batch": each.from_sequence_no,
                    }
                    for each in ledger.setting_changes
                ],
                "environments": [
                    {
                        **environment_row(each),
                        "failed_calls": dict(self._environments[each.name].failures),
                        "processes_ended": dict(self._environments[each.name].processes_ended),
                    }
                    for each in self._status.environments()
                ],
                "findings": [each.as_json() for each in self._status.watch.findings],
                **facts,
            }
        )
        log.info("report", state=state, steps=report["steps"], wall_s=report["wall_s"])


def environment_row(environment: orchestrator_pb2.RunEnvironment) -> dict[str, Any]:
    """Return an environment in the form of the report, under the names of `RunEnvironment`."""
    numbers = ("groups", "groups_accepted", "groups_refilled", "groups_failed", "quarantined_count")
    return {
        "name": environment.name,
        "wanted_share": round(environment.wanted_share, 6),
        **{name: getattr(environment, name) for name in numbers},
        "groups_passed_on": round(environment.groups_passed_on, 3),
        "pools": dict(environment.pools),
        "groups_by_pool": dict(environment.groups_by_pool),
        "overlong": dict(environment.overlong),
        "quarantined": [
            {"task_id": each.task_id, "failures": each.failures, "problem": each.problem}
            for each in environment.quarantined
        ],
    }
