"""Logs and metrics of a service."""

from __future__ import annotations

from sluice.telemetry.logs import configure_logging
from sluice.telemetry.metrics import MetricsWriter, metrics_text, start_metrics_server

__all__ = ["MetricsWriter", "configure_logging", "metrics_text", "start_metrics_server"]
