"""What a service tells the people who run it: logs, Prometheus metrics, and the run's curves."""

from __future__ import annotations

from sluice.telemetry.curves import MetricsWriter
from sluice.telemetry.logs import configure_logging
from sluice.telemetry.prometheus import metrics_text, start_metrics_server

__all__ = ["MetricsWriter", "configure_logging", "metrics_text", "start_metrics_server"]
