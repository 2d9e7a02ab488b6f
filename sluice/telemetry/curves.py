"""The run's curves: one line per step in ``metrics.jsonl``, and the same scalars for TensorBoard, without torch."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

__all__ = ["MetricsWriter"]


class MetricsWriter:
    """Appends scalars of a run to ``metrics.jsonl`` and ``tensorboard/``; for one thread.

    Args:
        run_dir: The run's directory; made if absent, appended to if present.
    """

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415 - slow to import

        run_dir.mkdir(parents=True, exist_ok=True)
        self._lines = (run_dir / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
        self._events = EventFileWriter(str(run_dir / "tensorboard"), flush_secs=10)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the scalars of one step.

        Args:
            step: Position on the horizontal axis.
            values: Scalars by name; ``/`` groups them in TensorBoard. JSON has no NaN: the line says null for it, and
                for an infinity.
        """
        now = time.time()
        line = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._lines.write(json.dumps({"step": step, "time": now, **line}) + "\n")
        self._add_event(step, now, values)

    def _add_event(self, step: int, now: float, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 - slow to import
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._events.add_event(Event(wall_time=now, step=step, summary=Summary(value=scalars)))

    def flush(self) -> None:
        """Make everything written readable by others."""
        self._lines.flush()
        self._events.flush()

    def close(self) -> None:
        """Flush and close the files."""
        self._lines.close()
        self._events.close()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close."""
        self.close()
