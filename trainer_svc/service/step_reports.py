"""Step reports: what is reported about one applied batch, and the bounded log that watchers read.

Metrics of a step by name; those of the optimizer step are the fields of `StepMetrics`, with ``/`` before a table's key:

    trajectories, truncated_trajectories, missing_rewards    of the batch as it came
    multi_version_trajectories                               whose tokens were sampled by several versions
    optimizer_steps, skipped_steps                           applied and skipped for this batch: epochs x minibatches
    mismatch_kl, mismatch_kl_last                            trainer against engine, in the first step and in the last of several
    critic/<name>                                            of the critic, where there is one; docs/ppo.md lists them
    reward_mean, reward_std                                  over episodes with a reward
    groups, degenerate_groups                                when the trainer estimated advantages
    staleness_mean, staleness_max, staleness_share_ge_1      over the tokens that entered the loss, in versions
    staleness_tokens/<age>                                   tokens of this age; the last bin also counts older ones
    dropped_trajectories/<reason>, dropped_tokens/<reason>   not trained, by cause
    wait_batch_seconds, wait_push_seconds                    for this batch; for an earlier version to leave
    idle_share                                               both waits' share of waits and step
    tokens_per_second                                        tokens of the trained rows, prompts included, per second of step
    push_seconds, push_bytes                                 the last push that ended, its commit included
    weights/diff_s, weights/push_s, weights/commit_s         its parts: comparing with the version before, sending, committing
    weights/bytes_sent, weights/dense_bytes                  what travelled, and what a dense copy has
    weights/changed_fraction                                 values that differ from the version before, of those compared
    weights/delta                                            1 if the difference travelled, 0 for whole tensors
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from sluice.rpc import SluiceError
from sluice.v1 import checkpoint_pb2
from sluice.v1.trainer_pb2 import StepReport
from sluice.versions import Version
from trainer_svc.checkpoint.batch_record import KEPT_REPORTS
from trainer_svc.service.learner import Applied
from trainer_svc.service.stale_filter import Batch
from weightsync.publisher import PushReport

__all__ = ["StepLog", "Waits", "held_report", "step_report"]


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds that the trainer waited before a step.

    Attributes:
        batch_s: Until the batch arrived.
        push_s: Until the push of an earlier version had ended.
    """

    batch_s: float
    push_s: float


def step_report(
    batch: Batch, version: Version, applied: Applied, waits: Waits, pushed: PushReport | None
) -> StepReport:
    """Assemble the report of one step.

    Args:
        batch: The batch.
        version: What it produced.
        applied: What applying it did.
        waits: What the trainer waited for before.
        pushed: The last push that ended; None before the first.
    """
    metrics = dict(applied.batch.metrics)
    if applied.metrics is not None:
        metrics |= applied.metrics.as_flat()
    metrics |= _time_metrics(applied, waits)
    if pushed is not None:
        metrics |= _push_metrics(pushed)
    duration, end_time = Duration(), Timestamp()
    duration.FromNanoseconds(int(applied.seconds * 1e9))
    end_time.GetCurrentTime()
    return StepReport(
        policy_version=version.to_proto(),
        batch_id=batch.batch_id,
        sequence_no=batch.sequence_no,
        skipped=applied.skipped,
        metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
        results=applied.results,
        duration=duration,
        end_time=end_time,
        content_digest=batch.content_digest,
    )


def held_report(record: checkpoint_pb2.BatchRecord) -> StepReport:
    """Return the report of a batch that an earlier process applied: what the record keeps, without metrics."""
    return StepReport(
        policy_version=record.policy_version,
        batch_id=record.batch_id,
        sequence_no=record.sequence_no,
        skipped=record.skipped,
        results=record.results,
        end_time=record.end_time,
        content_digest=record.content_digest,
    )


def _time_metrics(applied: Applied, waits: Waits) -> dict[str, float]:
    idle = waits.batch_s + waits.push_s
    tokens = applied.metrics.tokens if applied.metrics is not None else 0
    return {
        "wait_batch_seconds": waits.batch_s,
        "wait_push_seconds": waits.push_s,
        "idle_share": idle / (idle + applied.seconds),
        "tokens_per_second": tokens / applied.seconds,
    }


def _push_metrics(pushed: PushReport) -> dict[str, float]:
    return {
        "push_seconds": pushed.push_s + pushed.commit_s,
        "push_bytes": float(pushed.bytes_sent),
        "weights/diff_s": pushed.diff_s,
        "weights/push_s": pushed.push_s,
        "weights/commit_s": pushed.commit_s,
        "weights/bytes_sent": float(pushed.bytes_sent),
        "weights/dense_bytes": float(pushed.dense_bytes),
        "weights/changed_fraction": pushed.changed_fraction,
        "weights/delta": float(pushed.kind == "delta"),
    }


class StepLog:
    """The reports of one epoch by version number, without gaps. Any number of watchers read it at their own pace.

    Args:
        begins_after: Version number that the epoch began from.
        held: Reports of the newest batches that this version holds, without a gap: what the record on disk has of them.
    """

    def __init__(self, begins_after: int, held: Iterable[StepReport] = ()) -> None:
        self._reports: deque[StepReport] = deque(held, maxlen=KEPT_REPORTS)
        self._next = begins_after + 1
        self._changed = asyncio.Event()
        self._ended: SluiceError | None = None

    @property
    def first_number(self) -> int:
        """Number of the oldest report that is kept, or of the next one if none is kept."""
        return self._next - len(self._reports)

    def append(self, report: StepReport) -> None:
        """Add the next version's report."""
        self._reports.append(report)
        self._next += 1
        self._wake()

    def end(self, error: SluiceError) -> None:
        """End the log: watchers get this error after the reports that they have not read yet."""
        self._ended = error
        self._wake()

    async def follow(self, from_number: int) -> AsyncIterator[StepReport]:
        """Yield the reports from a version number on, until the epoch ends.

        Args:
            from_number: First number to report; 0 is the oldest one kept.

        Raises:
            SluiceError: NOT_FOUND if a report is no longer kept; otherwise what ended the epoch.
        """
        number = from_number or self.first_number
        while True:
            changed = self._changed
            while number < self._next:
                if number < self.first_number:
                    raise SluiceError.not_found(
                        "REPORT_NOT_KEPT",
                        f"the report of version {number} is not kept any more: watch from {self.first_number} on",
                    )
                yield self._reports[number - self.first_number]
                number += 1
            if self._ended is not None:
                raise self._ended
            await changed.wait()

    def _wake(self) -> None:
        """Wake every watcher that waits."""
        self._changed.set()
        self._changed = asyncio.Event()
