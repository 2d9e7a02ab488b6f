"""Which services give out a run's versions: this one, and the relays that reported to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sluice.v1 import weightsync_pb2 as pb
from weightsync.service.ledger import Lease

__all__ = ["RELAY_PREFIX", "RelayFacts", "SourceList"]

RELAY_PREFIX = "relay:"
"""Names of relays begin with it, and no others: whoever reports under such a name has to be allowed to."""


@dataclass(frozen=True, slots=True)
class RelayFacts:
    """What a relay said of itself last: its address, what tells its host apart, its WatchVersions streams."""

    address: str
    host: str
    watchers: int


class SourceList:
    """The relays of one run by replica name. How long each counts is up to its lease: there is one list of who is live."""

    def __init__(self) -> None:
        self._relays: dict[str, RelayFacts] = {}

    def note(self, request: pb.ReportVersionRequest) -> None:
        """Remember a report; one without an address is of a replica that gives nothing out."""
        if request.relay_address:
            self._relays[request.replica] = RelayFacts(request.relay_address, request.host, request.watchers)
        else:
            self._relays.pop(request.replica, None)

    def live(self, leases: Mapping[str, Lease]) -> dict[str, RelayFacts]:
        """The relays whose leases hold; the others are forgotten."""
        self._relays = {name: facts for name, facts in self._relays.items() if name in leases}
        return dict(self._relays)

    def sources(self, leases: Mapping[str, Lease]) -> list[pb.WeightSource]:
        """The live relays, in the order of their names."""
        found = []
        for name, facts in sorted(self.live(leases).items()):
            serving = leases[name].serving
            found.append(
                pb.WeightSource(
                    address=facts.address,
                    host=facts.host,
                    watchers=facts.watchers,
                    newest=None if serving is None else serving.to_proto(),
                )
            )
        return found
