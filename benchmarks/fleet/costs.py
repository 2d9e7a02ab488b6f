"""Costs of single messages: the inputs of `sluice bench scale`, measured by `sluice bench orchestrator` and `sluice bench weightsync`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

MIB = 1 << 20


class Line(NamedTuple):
    """A cost that grows with a size: `fixed` + `each` x size."""

    fixed: float
    each: float

    def of(self, size: float) -> float:
        """Return the cost at a size."""
        return self.fixed + self.each * size


def line_through(points: Iterable[tuple[float, float]]) -> Line:
    """Fit a line by least squares of relative errors. Neither of its parts is negative, since costs cannot be.

    With relative errors a small size counts as much as a large one.
    """
    known = [(x, y) for x, y in points if y > 0]
    if not known:
        raise ValueError("no cost was measured")
    a = sum(1 / y**2 for _, y in known)
    b = sum(x / y**2 for x, y in known)
    c = sum(x * x / y**2 for x, y in known)
    d = sum(1 / y for _, y in known)
    e = sum(x / y for x, y in known)
    determinant = a * c - b * b
    if determinant > 1e-12 * a * c:
        fixed, each = (d * c - b * e) / determinant, (a * e - b * d) / determinant
        if fixed >= 0 and each >= 0:
            return Line(fixed, each)
        if fixed < 0 and c > 0:
            return Line(0.0, e / c)
    return Line(d / a, 0.0)


@dataclass(frozen=True, slots=True)
class OrchestratorCosts:
    """CPU seconds of the orchestrator's process, and bytes of messages without what gRPC and TCP add.

    Attributes:
        trajectory_s: CPU seconds for a finished trajectory: journal, score, batch, report of the step.
        message_s: CPU seconds for a message of a group's stream.
        idle: CPU seconds per second without replicas and work.
        poll_s: CPU seconds for a status request to a replica.
        pick_s: CPU seconds for one search for a replica, by known replicas.
        picks: Searches per group.
        request_bytes: Bytes of the request of a group.
        message_bytes: Bytes of a message of a stream, without its tokens.
        token_bytes: Bytes of one token in a stream.
        poll_bytes: Bytes of a status request and its answer.
        trajectory_bytes: Bytes of a trajectory sent to the trainer, and of its result, without its tokens.
        trained_token_bytes: Bytes of one token sent to the trainer.
    """

    trajectory_s: float
    message_s: float
    idle: float
    poll_s: float
    pick_s: Line
    picks: float
    request_bytes: float
    message_bytes: float
    token_bytes: float
    poll_bytes: float
    trajectory_bytes: float
    trained_token_bytes: float


@dataclass(frozen=True, slots=True)
class WeightCosts:
    """Costs of the weight path.

    Attributes:
        encode_s: Seconds in which a trainer compares its weights with the version before, by MiB of weights.
        push_s: Seconds from the first byte of a push to the answer of its commit, by MiB sent.
        pull_s: Seconds from the announcement to the last byte at a receiver, by MiB sent.
        stage_s: Seconds from the last byte to a version that serves, by MiB of weights.
        share_s: Additional seconds until all replicas of a machine serve one staged copy, compared with a single replica. One replica
            makes the copy, the others poll for it.
        hop_s: Additional seconds of a relay, by MiB sent.
        take_in_cpu_s: CPU seconds of a service that takes a version in, by MiB.
        give_out_cpu_s: CPU seconds of a service for one receiver of a version, by MiB; announcement and report included.
        report_s: CPU seconds for a report.
        list_s: CPU seconds for an answer to `ListSources`, by relays in it.
        watch_s: CPU seconds for a message to a watcher.
        manifest_bytes: Bytes of the announcement of a version, by tensors.
        report_bytes: Bytes of a report and its answer.
        list_bytes: Bytes of the answer to `ListSources`, by relays in it.
        reports: Reports of a replica for one version.
        delta_over_dense: Bytes of a delta over those of the weights, as measured with one weight of a hundred changed.
    """

    encode_s: Line
    push_s: Line
    pull_s: Line
    stage_s: Line
    share_s: float
    hop_s: Line
    take_in_cpu_s: Line
    give_out_cpu_s: Line
    report_s: float
    list_s: Line
    watch_s: float
    manifest_bytes: Line
    report_bytes: float
    list_bytes: Line
    reports: float
    delta_over_dense: float


@dataclass(frozen=True, slots=True)
class Costs:
    """All inputs that are measured."""

    orchestrator: OrchestratorCosts
    weights: WeightCosts


def from_json(kind: type[Any], content: Mapping[str, Any]) -> Any:  # noqa: ANN401 - one of the two kinds of costs
    """Return costs from a benchmark's JSON.

    Raises:
        ValueError: if one is missing.
    """
    missing = [each.name for each in fields(kind) if each.name not in content]
    if missing:
        raise ValueError(f"the costs lack {', '.join(missing)}: measure them again with the benchmark of this release")
    values = {each.name: content[each.name] for each in fields(kind)}
    return kind(**{name: Line(*value) if isinstance(value, list | tuple) else value for name, value in values.items()})


def read_costs(file: Path) -> dict[str, Mapping[str, Any]]:
    """Return the `costs` of each benchmark whose last line is in the file, by name of the benchmark.

    Raises:
        ValueError: if the file has no such line.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for line in file.read_text().splitlines():
        if not line.startswith("{"):
            continue
        result = json.loads(line)
        all_costs = result.get("all_costs", {result.get("bench", ""): result.get("costs")})
        found |= {name: costs for name, costs in all_costs.items() if costs is not None}
    if not found:
        raise ValueError(
            f"{file} has no costs: it has to hold the last line of `sluice bench orchestrator`, of `sluice bench weightsync"
            " --only fanout`, or of `sluice bench scale`"
        )
    return found


def median_by(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return each size with the median of its costs."""
    return [(x, statistics.median(y for other, y in points if other == x)) for x in sorted({x for x, _ in points})]
