"""Write the Grafana dashboards of the chart, which any Grafana can import, from one table: `python deploy/observability/dashboards.py`.

`RUN` looks at one run: its progress, where its time goes, its trainer, weights and environments. `FLEET` looks at its processes: each
number as the mean over the replicas with the least and the greatest, since a mean hides one sick replica, and as a line for each.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[1] / "helm/sluice/dashboards"


FAULT = "a fault"


class Query(NamedTuple):
    """A line of a panel.

    Attributes:
        expr: PromQL; `$S` stands for the labels of the run.
        legend: Name of the line.
        needs: What there must be, or have been, for it to show anything: `FAULT`, or what a run need not have.
    """

    expr: str
    legend: str
    needs: str = ""


class Panel(NamedTuple):
    """A chart, or a number."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    text: str = ""


def _one(title: str, unit: str, expr: str, legend: str, *, kind: str = "timeseries", text: str = "") -> Panel:
    return Panel(title, unit, (Query(expr, legend),), kind, text)


def _last(names: dict[str, str]) -> tuple[Query, ...]:
    """Return lines of metrics of the last step, by their name in metrics.jsonl."""
    return tuple(Query(f'sluice_run_step_metric{{$S,name="{name}"}}', legend) for name, legend in names.items())


RUN: dict[str, tuple[Panel, ...]] = {
    "Progress": (
        _one("State", "short", "sluice_run_state{$S} == 1", "{{state}}", kind="stat"),
        Panel(
            "Step",
            "short",
            (Query("sluice_run_policy_number{$S}", "applied"), Query("sluice_run_max_steps{$S}", "of")),
            "stat",
        ),
        Panel(
            "How long ago",
            "s",
            (
                Query("time() - sluice_run_last_step_timestamp_seconds{$S}", "last step"),
                Query(
                    "time() - (sluice_run_checkpoint_timestamp_seconds{$S} > 0)",
                    "last checkpoint",
                    needs="a checkpoint",
                ),
            ),
            "stat",
            "A step that is much older than usual means that the run waits. What is behind the last checkpoint is trained again after a crash.",
        ),
        _one(
            "Causes to wait for",
            "short",
            "sluice_run_waits{$S}",
            "causes",
            kind="stat",
            text="`sluice status RUN` has the texts.",
        ),
        Panel(
            "Reward",
            "short",
            (Query("sluice_run_reward_mean{$S}", "mean"), *_last({"reward/std": "standard deviation"})),
        ),
        Panel(
            "Evaluation",
            "short",
            (Query("sluice_run_evaluation{$S}", "{{environment}} {{name}}", needs="an evaluation"),),
            text="The last one of each environment; nothing without evaluations.",
        ),
        _one("Steps per hour", "short", "3600 * rate(sluice_trainer_step_seconds_count{$S}[10m])", "steps"),
        _one("Tokens sampled per second", "short", "rate(sluice_run_tokens_total{$S}[5m])", "{{kind}}"),
    ),
    "Data": (
        Panel(
            "Groups",
            "short",
            (
                Query("sluice_run_live_groups{$S}", "live"),
                Query("sluice_run_max_live_groups{$S}", "most that the staleness bound allows"),
                Query("sluice_run_ready_groups{$S}", "ready for a batch"),
                Query("sluice_run_queued_batches{$S}", "batches that wait"),
            ),
        ),
        Panel(
            "Staleness",
            "short",
            (
                *_last({"staleness/mean": "mean", "staleness/max": "greatest"}),
                Query("sluice_run_max_staleness{$S}", "bound"),
            ),
        ),
        Panel(
            "Trajectories per second",
            "short",
            (
                Query("rate(sluice_run_trajectories_accepted_total{$S}[5m])", "accepted"),
                Query("rate(sluice_run_trajectories_trained_total{$S}[5m])", "trained"),
            ),
        ),
        Panel(
            "Lost in 15 minutes",
            "short",
            (
                Query(
                    "sum by (reason) (increase(sluice_run_trajectories_dropped_total{$S}[15m]))",
                    "dropped {{reason}}",
                    needs=FAULT,
                ),
                Query(
                    "sum by (reason) (increase(sluice_run_groups_failed_total{$S}[15m]))",
                    "failed {{reason}}",
                    needs=FAULT,
                ),
                Query(
                    "sum by (reason) (increase(sluice_run_trajectories_set_aside_total{$S}[15m]))",
                    "set aside {{reason}}",
                    needs=FAULT,
                ),
            ),
        ),
        Panel(
            "Who waits",
            "percentunit",
            (
                Query("rate(sluice_run_trainer_idle_seconds_total{$S}[5m])", "trainer"),
                Query("rate(sluice_run_rollout_idle_seconds_total{$S}[5m])", "rollout"),
                Query("rate(sluice_run_dispatch_blocked_seconds_total{$S}[5m])", "dispatch is held back"),
            ),
        ),
        Panel(
            "Journal", "s", (Query("sluice_run_journal_lag_seconds{$S}", "age of the oldest fact that is not on disk"),)
        ),
        _one("Journal on disk", "bytes", "sluice_run_journal_bytes{$S}", "payloads"),
    ),
    "Trainer": (
        Panel(
            "Seconds of a step",
            "s",
            (
                Query(
                    "sum by (phase) (rate(sluice_trainer_phase_seconds_sum{$S}[10m]))"
                    " / sum by (phase) (rate(sluice_trainer_phase_seconds_count{$S}[10m]))",
                    "{{phase}}",
                ),
            ),
            text="wait_batch, wait_push and compare lie between two steps.",
        ),
        Panel(
            "Seconds of a step, quantiles",
            "s",
            tuple(
                Query(
                    f"histogram_quantile({share}, sum by (le) (rate(sluice_trainer_step_seconds_bucket{{$S}}[30m])))",
                    f"p{share * 100:g}",
                )
                for share in (0.5, 0.95)
            ),
        ),
        _one("Tokens per second", "short", "rate(sluice_trainer_tokens_total{$S}[5m])", "{{kind}}"),
        _one("Gradient norm", "short", "sluice_trainer_grad_norm{$S}", "before clipping"),
        _one("Loss", "short", "sluice_trainer_loss{$S}", "loss"),
        _one("Skipped steps in an hour", "short", "increase(sluice_trainer_skipped_steps_total{$S}[1h])", "skipped"),
        _one("Peak memory", "bytes", "sluice_trainer_peak_memory_bytes{$S}", "trainer"),
        Panel(
            "Queue",
            "short",
            (
                Query("sluice_trainer_queued_batches{$S}", "batches"),
                Query("sluice_trainer_max_queued_batches{$S}", "most"),
            ),
        ),
        _one("What it does", "short", "sluice_trainer_phase{$S} == 1", "{{phase}}", kind="stat"),
        Panel(
            "Policy",
            "short",
            _last({"trainer/entropy": "entropy", "trainer/mismatch_kl": "KL of sampler and trainer"}),
            text="Absent for a step whose groups had no signal.",
        ),
    ),
    "Weights": (
        Panel(
            "Version",
            "short",
            (
                Query("sluice_trainer_policy_number{$S}", "trainer"),
                Query("max by (run) (sluice_weights_number{$S})", "weight service"),
                Query("min by (run) (sluice_rollout_policy_number{$S})", "oldest replica"),
            ),
        ),
        Panel(
            "Update of a replica, p90",
            "s",
            tuple(
                Query(
                    f"histogram_quantile(0.9, sum by (le) (rate(sluice_weights_{name}_seconds_bucket{{$S}}[15m])))",
                    legend,
                )
                for name, legend in (
                    ("update", "from announcement to serving"),
                    ("pause", "pause of sampling"),
                    ("commit", "commit"),
                )
            ),
        ),
        _one("Behind the trainer", "short", "sluice_run_replica_lag{$S}", "{{exported_replica}}"),
        Panel(
            "Bytes per second",
            "Bps",
            (
                Query("rate(sluice_weights_committed_bytes_total{$S}[5m])", "committed"),
                Query("sum(rate(sluice_weights_pulled_bytes_total{$S}[5m]))", "pulled"),
            ),
        ),
        Panel("Versions on disk", "bytes", (Query("sluice_weights_held_bytes{$S}", "held"),)),
    ),
    "Environments and agents": (
        Panel(
            "Calls per second",
            "short",
            (
                Query(
                    "sum by (environment, outcome) (rate(sluice_environment_calls_total{$S}[5m]))",
                    "{{environment}} {{outcome}}",
                ),
            ),
        ),
        Panel(
            "Seconds of a call",
            "s",
            tuple(
                Query(
                    f"histogram_quantile({share}, sum by (environment, le) (rate(sluice_environment_call_seconds_bucket{{$S}}[5m])))",
                    f"{{{{environment}}}} p{share * 100:g}",
                )
                for share in (0.5, 0.95)
            ),
        ),
        Panel(
            "Processes started again in an hour",
            "short",
            (
                Query(
                    "sum by (environment) (increase(sluice_environment_processes_restarts_total{$S}[1h]))",
                    "{{environment}}",
                    needs=FAULT,
                ),
            ),
        ),
        Panel(
            "Episodes of environment servers",
            "short",
            (Query("sluice_environment_episodes{$S}", "{{replica}}", needs="an environment server"),),
        ),
        Panel(
            "Requests at gateways",
            "short",
            (
                Query("sluice_gateway_waiting{$S}", "wait for a replica", needs="a gateway"),
                Query("sluice_gateway_sampling{$S}", "samples under way", needs="a gateway"),
            ),
        ),
    ),
}


def _fleet(title: str, unit: str, expr: str, by: str = "replica") -> Panel:
    """Return a number of each replica: mean, least, greatest, and a line for each."""
    return Panel(
        title,
        unit,
        (
            Query(f"avg({expr})", "mean"),
            Query(f"min({expr})", "least"),
            Query(f"max({expr})", "greatest"),
            Query(expr, f"{{{{{by}}}}}"),
        ),
    )


FLEET: dict[str, tuple[Panel, ...]] = {
    "Replicas": (
        Panel(
            "Replicas",
            "short",
            (Query("sluice_run_replicas{$S}", "{{state}}"), Query("sum(sluice_rollout_healthy{$S})", "engine samples")),
        ),
        _fleet("Tokens per second", "short", "rate(sluice_rollout_generated_tokens_total{$S}[2m])"),
        _fleet("Samples under way", "short", "sluice_rollout_running{$S}"),
        _fleet("Samples that wait for a place", "short", "sluice_rollout_queued{$S}"),
        _fleet("KV cache in use", "percentunit", "sluice_rollout_kv_cache_usage{$S}"),
        _fleet("Version that serves", "short", "sluice_rollout_policy_number{$S}"),
        _fleet("Pause of the last update", "s", "sluice_rollout_last_pause_seconds{$S}"),
        _fleet("Preemptions in 15 minutes", "short", "increase(sluice_rollout_preemptions_total{$S}[15m])"),
        _fleet("Engine restarts in an hour", "short", "increase(sluice_rollout_engine_restarts_total{$S}[1h])"),
        _one(
            "What happened to requests, in 15 minutes",
            "short",
            "sum by (event) (increase(sluice_run_sampling_events_total{$S}[15m]))",
            "{{event}}",
        ),
    ),
    "Processes": (
        Panel(
            "Ready",
            "short",
            (Query("sluice_ready{$S}", "{{replica}}"),),
            text="0: `sluice health HOST:PORT` says what it waits for.",
        ),
        _one("Seen by Prometheus", "short", "up{$S}", "{{replica}}"),
        _fleet("Memory", "bytes", "process_resident_memory_bytes{$S}"),
        _fleet("CPU", "short", "rate(process_cpu_seconds_total{$S}[5m])"),
        _fleet(
            "Lag of the event loop, p99",
            "s",
            "histogram_quantile(0.99, sum by (replica, le) (rate(sluice_loop_lag_seconds_bucket{$S}[5m])))",
        ),
        _one("Calls per second by code", "short", "sum by (code) (rate(sluice_rpc_total{$S}[5m]))", "{{code}}"),
        _one(
            "Slowest calls, p99",
            "s",
            'topk(10, histogram_quantile(0.99, sum by (replica, method, le) (rate(sluice_rpc_seconds_bucket{$S,method!~"Watch.*"}[5m]))))',
            "{{replica}} {{method}}",
        ),
        _one("Calls in progress", "short", "sum by (replica) (sluice_rpc_in_flight{$S})", "{{replica}}"),
    ),
}

DASHBOARDS = {"run": ("Sluice run", RUN), "fleet": ("Sluice fleet", FLEET)}


def filled(expr: str, run: str = "$run") -> str:
    """Return PromQL with the labels of a run."""
    return expr.replace("$S", f'run=~"{run}"')


def dashboard(name: str) -> dict[str, Any]:
    """Return a dashboard as Grafana imports it."""
    title, rows = DASHBOARDS[name]
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels: list[dict[str, Any]] = []
    y = 0
    for row, of_row in rows.items():
        panels.append({"type": "row", "title": row, "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}, "panels": []})
        y += 1
        for number, panel in enumerate(of_row):
            place = {"h": 8, "w": 6, "x": 6 * (number % 4), "y": y + 8 * (number // 4)}
            targets = [
                {"refId": chr(ord("A") + line), "expr": filled(query.expr), "legendFormat": query.legend}
                for line, query in enumerate(panel.queries)
            ]
            defaults = {"unit": panel.unit}
            panels.append(
                {
                    "type": panel.kind,
                    "title": panel.title,
                    "description": panel.text,
                    "datasource": source,
                    "gridPos": place,
                    "fieldConfig": {"defaults": defaults, "overrides": []},
                    "targets": targets,
                }
            )
        y += 8 * -(-len(of_row) // 4)
    runs = {
        "name": "run",
        "type": "query",
        "datasource": source,
        "query": "label_values(sluice_run_policy_number, run)",
        "refresh": 2,
        "includeAll": False,
        "multi": False,
    }
    return {
        "title": title,
        "uid": f"sluice-{name}",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "tags": ["sluice"],
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}, runs]},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)],
    }


def text(name: str) -> str:
    """Return the file of a dashboard."""
    return json.dumps(dashboard(name), indent=1) + "\n"


def main() -> int:
    """Write the files; with `--check` compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a file is not what would be written")
    check = parser.parse_args().check
    stale = [
        name
        for name in DASHBOARDS
        if not (FOLDER / f"{name}.json").exists() or (FOLDER / f"{name}.json").read_text() != text(name)
    ]
    if check:
        for name in stale:
            sys.stderr.write(f"{name}.json is stale: run python deploy/observability/dashboards.py\n")
        return int(bool(stale))
    for name in stale:
        (FOLDER / f"{name}.json").write_text(text(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
