"""Read the state of a live run from its orchestrator."""

from __future__ import annotations

from sluice.v1 import orchestrator_pb2
from sluice.watch.rules import EnvironmentLoad, Load, ReplicaLoad

STATES = {
    orchestrator_pb2.RUN_STATE_STARTING: "starting",
    orchestrator_pb2.RUN_STATE_RUNNING: "running",
    orchestrator_pb2.RUN_STATE_PAUSED: "paused",
    orchestrator_pb2.RUN_STATE_STOPPING: "finishing",
    orchestrator_pb2.RUN_STATE_SUCCEEDED: "succeeded",
    orchestrator_pb2.RUN_STATE_FAILED: "failed",
}
"""The states of a run, for people."""

_LEAST_S = 10.0
"""Least seconds between two counts of tokens to compute a rate from. Over a shorter time, single replies would dominate."""


class LoadReader:
    """Converts each answer of GetRun into a `Load`. Remembers the counts of tokens, to compute rates.

    The rate of a replica is that of one sample: tokens divided by seconds of sampling, both summed over its samples. So it does not depend
    on how much work the replica had. A replica without work keeps its last rate.
    """

    def __init__(self) -> None:
        self._counted: dict[str, tuple[float, int, float]] = {}
        self._rates: dict[str, float] = {}

    def read(self, run: orchestrator_pb2.Run, now: float) -> Load:
        """Return the state of a run at a time in seconds since 1970."""
        for each in run.replicas:
            then, tokens, seconds = self._counted.get(each.address, (0.0, 0, 0.0))
            more_tokens, more_s = each.generated_tokens - tokens, each.sample_seconds - seconds
            if now - then < _LEAST_S or 0 <= more_s < _LEAST_S:
                continue
            self._counted[each.address] = (now, each.generated_tokens, each.sample_seconds)
            # After a restart, a replica or an orchestrator counts from 0 again.
            if then and more_tokens >= 0 and more_s > 0:
                self._rates[each.address] = more_tokens / more_s
        known = {each.address for each in run.replicas}
        self._counted = {address: count for address, count in self._counted.items() if address in known}
        self._rates = {address: rate for address, rate in self._rates.items() if address in known}
        return Load(
            now,
            run.state == orchestrator_pb2.RUN_STATE_RUNNING,
            tuple(
                ReplicaLoad(
                    each.replica or each.address,
                    "" if each.eligible else each.reason or "not eligible",
                    self._rates.get(each.address),
                )
                for each in run.replicas
            ),
            tuple(
                EnvironmentLoad(each.name, each.groups, each.groups_failed, each.quarantined_count)
                for each in run.environments
            ),
            tuple(run.waits_for),
        )
