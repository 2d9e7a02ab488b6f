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

_LEAST_S = 5.0
"""Seconds between two counts of tokens from which a rate is computed: over less, single replies decide."""


class LoadReader:
    """Makes a `Load` of each answer of GetRun; remembers the counts of tokens, for the rates between them."""

    def __init__(self) -> None:
        self._counted: dict[str, tuple[float, int]] = {}
        self._rates: dict[str, float] = {}

    def read(self, run: orchestrator_pb2.Run, now: float) -> Load:
        """Return the state of a run at a time in seconds since 1970."""
        for each in run.replicas:
            then, before = self._counted.get(each.address, (0.0, 0))
            if now - then < _LEAST_S:
                continue
            self._counted[each.address] = (now, each.generated_tokens)
            if then:  # a replica that started again counts from 0
                self._rates[each.address] = max(0, each.generated_tokens - before) / (now - then)
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
                    each.running,
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
