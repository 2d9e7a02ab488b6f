"""Removed settings of earlier versions: where they are still accepted, and the error where they are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from sluice.config.schema import Value
from sluice.errors import ConfigError

_FIXED = "it is always {}"

REMOVED: Mapping[str, tuple[float, str]] = {
    "capture.deadlines.orchestrator_s": (60.0, _FIXED),
    "concurrency.kv_high": (0.9, _FIXED),
    "concurrency.queue_share": (0.5, _FIXED),
    "concurrency.settle_s": (2.0, _FIXED),
    "concurrency.shrink": (0.75, _FIXED),
    "environment_processes.log_lines_per_minute": (600, _FIXED),
    "external.cache_mb": (256, _FIXED),
    "external.cacheable_s": (60.0, _FIXED),
    "external.retry_s": (1.0, _FIXED),
    "limits.answer_ttl_s": (300.0, _FIXED),
    "limits.max_answer_bytes": (256 << 20, _FIXED),
    "limits.max_answers": (4096, _FIXED),
    "orchestrator.journal.fsync_interval_ms": (25.0, _FIXED),
    "orchestrator.journal.queue_records": (100_000, _FIXED),
    "pools.newest_weight": (0.5, _FIXED),
    "replicas.affinity_margin": (0.25, _FIXED),
    "replicas.waiting_poll_s": (0.02, _FIXED),
    "trainer.queue_batches": (2, _FIXED),
    "tuner.deadlines.publish_s": (120.0, _FIXED),
    "tuner.deadlines.sample_s": (600.0, "set tuner.deadlines.operation_s"),
    "tuner.limits.waiting_mb": (256, _FIXED),
    "weightsync.incoming_ttl_s": (600.0, _FIXED),
    "weightsync.io_threads": (8, _FIXED),
}
"""By the end of a setting's name: its old default, and what holds now."""

log = structlog.get_logger(__name__)


def without_removed(table: Mapping[str, Any], path: tuple[str, ...] = (), *, recorded: bool) -> dict[str, Any]:
    """Return nested tables without removed settings that have their old default.

    Args:
        table: Tables as they were written.
        path: Path of `table` in the settings.
        recorded: Whether the tables come from a run's directory, where the run wrote all its settings. Then removed settings with other
            values are dropped with a warning, so that the run can still be looked at, stopped and scored again.

    Raises:
        ConfigError: if a removed setting has another value.
    """

    def kept(key: str, value: Value) -> Value:
        inner = (*path, key.replace("-", "_"))
        if isinstance(value, Mapping):
            return without_removed(value, inner, recorded=recorded)
        if isinstance(value, list):
            return [
                without_removed(each, inner, recorded=recorded) if isinstance(each, Mapping) else each for each in value
            ]
        return value

    def goes(key: str, value: Value) -> bool:
        name = (*path, key.replace("-", "_"))
        if (gone := found(name)) is None:
            return False
        if value != gone[0] and not recorded:
            raise no_setting(name, gone)
        if value != gone[0]:
            log.warning(
                "a setting of the run is gone", setting=".".join(name), value=value, now=gone[1].format(gone[0])
            )
        return True

    return {key: kept(str(key), value) for key, value in table.items() if not goes(str(key), value)}


def is_old_default(path: Sequence[str], text: str) -> bool:
    """Return whether a setting was removed and the text of a flag or variable is its old default.

    Raises:
        ConfigError: if it was removed and the text is another value.
    """
    if (gone := found(path)) is None:
        return False
    try:
        same = float(text) == gone[0]
    except ValueError:
        same = False
    if not same:
        raise no_setting(path, gone)
    return True


def found(path: Sequence[str]) -> tuple[float, str] | None:
    """Return the old default of a removed setting, and what holds now; None for other names."""
    name = f".{'.'.join(path)}"
    return next((gone for end, gone in REMOVED.items() if name.endswith(f".{end}")), None)


def no_setting(path: Sequence[str], gone: tuple[float, str]) -> ConfigError:
    """Return the error for a removed setting."""
    default, instead = gone
    return ConfigError(f"{'.'.join(path)} is no setting any more: leave it out; {instead.format(default)}")
