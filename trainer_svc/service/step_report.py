"""What is told about one applied batch.

Metrics of a step by name; those of the optimizer step are the fields of `StepMetrics`, with ``/`` before a table's key:

    trajectories, truncated_trajectories, missing_rewards    of the batch as it came
    multi_version_trajectories                               those whose tokens several versions sampled
    optimizer_steps, skipped_steps                           made and left out for this batch: epochs x minibatches
    mismatch_kl, mismatch_kl_last                            trainer against engine, in the first step and in the last of several
    critic/<name>                                            of the critic, where there is one; docs/ppo.md lists them
    reward_mean, reward_std                                  over episodes with a reward
    groups, degenerate_groups                                when the trainer estimated advantages
    staleness_mean, staleness_max, staleness_share_ge_1      over the tokens that entered the loss, in versions
    staleness_tokens/<age>                                   how many of them had this age; the last one: or more
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

import math
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from sluice.v1 import checkpoint_pb2
from sluice.v1.trainer_pb2 import StepReport
from sluice.versions import Version
from trainer_svc.service.consumption import Batch
from trainer_svc.service.learner import Applied
from weightsync.publisher import PushReport

__all__ = ["Waits", "held_report", "step_report"]


@dataclass(frozen=True, slots=True)
class Waits:
    """What the trainer waited for before a step, in seconds.

    Attributes:
        batch_s: For the batch to arrive.
        push_s: For an earlier version to leave.
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
    metrics = dict(applied.consumption.metrics)
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
