"""One run as a service keeps it: its versions, uploads, watchers, and who serves what."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.service.ledger import Ledger
from weightsync.service.store import RunStore
from weightsync.service.stored import StoredForm, StoredVersion
from weightsync.service.upload import Upload

__all__ = ["RELAY_PREFIX", "Run"]

RELAY_PREFIX = "relay:"
"""Names of relays begin with it, and no others: a replica that reports under such a name has to be allowed to."""

_MOST_ERROR_CHARACTERS = 2000


class Run:
    """One run's versions.

    Args:
        name: The run.
        ledger: Which versions are visible and in use.
        store: Its directory.

    Attributes:
        versions: The visible versions.
        uploads: Shards that are being pushed, by version and name.
        commit_lock: Commits are made one at a time.
        committing: The version whose commit is under way.
        changed: Set when a version is published; another event takes its place then.
        watchers: WatchVersions streams of this run.
        reserved_bytes: Sizes of the files that are being made: a dense form of deltas, whole tensors of slices.
    """

    def __init__(self, name: str, ledger: Ledger, store: RunStore) -> None:
        self.name = name
        self.ledger = ledger
        self.store = store
        self.versions: dict[Version, StoredVersion] = {}
        self.uploads: dict[tuple[Version, str], Upload] = {}
        self.commit_lock = asyncio.Lock()
        self.committing: Version | None = None
        self.changed = asyncio.Event()
        self.watchers = 0
        self.reserved_bytes = 0
        self._relays: dict[str, pb.ReportVersionRequest] = {}
        self._timings: dict[str, pb.UpdateTimings] = {}

    def restore(self, found: list[StoredVersion]) -> None:
        """Take up what was found on disk."""
        for stored in found:
            self.versions[stored.version] = stored
            self.ledger.restore(stored.version, stored.forms())

    def publish(self, stored: StoredVersion) -> None:
        """Make a version visible and wake the watchers.

        Raises:
            RefusedError: as `Ledger.commit`.
        """
        self.ledger.commit(stored.version, stored.forms())
        self.versions[stored.version] = stored
        self.changed.set()
        self.changed = asyncio.Event()

    def add_dense(self, version: Version, form: StoredForm) -> None:
        """Give a visible version a dense form."""
        self.ledger.add_dense(version, form.manifest.size_bytes)
        self.versions[version] = self.versions[version].with_form(form)

    def drop_dense(self, version: Version) -> None:
        """Take the dense form of a visible version out of sight."""
        self.ledger.drop_dense(version)
        self.versions[version] = replace(self.versions[version], dense=None)

    def find(self, version: Version | None) -> StoredVersion:
        """Return a visible version; None: the newest.

        Raises:
            SluiceError: NOT_FOUND.
        """
        wanted = self.ledger.newest if version is None else version
        if wanted is None:
            raise SluiceError.not_found(
                "NO_VERSION", f"nothing was committed in run {self.name} yet: push a version, or watch for one"
            )
        stored = self.versions.get(wanted)
        if stored is None:
            raise SluiceError.not_found(
                "NO_SUCH_VERSION",
                f"run {self.name} has no version {wanted}; the newest is {self.ledger.newest}: watch again",
            )
        return stored

    def uploads_of(self, version: Version) -> dict[str, Upload]:
        """Return the uploads of one version by shard name."""
        return {name: upload for (owner, name), upload in self.uploads.items() if owner == version}

    @property
    def bytes_held(self) -> int:
        """Return the bytes of visible versions, of the uploads as announced, and of what is being made."""
        uploads = sum(upload.size for upload in self.uploads.values())
        return self.ledger.bytes_committed + uploads + self.reserved_bytes

    def report(self, request: pb.ReportVersionRequest, now: float, lease_s: float) -> None:
        """Renew a replica's lease; what it reports replaces what it reported before."""
        about = Version.from_proto(request.version)
        serving = Version.from_proto(request.serving) if request.HasField("serving") else None
        self.ledger.report(
            request.replica,
            serving=about if request.phase == pb.REPLICA_PHASE_SERVING else serving,
            staged=about if request.phase == pb.REPLICA_PHASE_STAGED else None,
            error=request.error[:_MOST_ERROR_CHARACTERS],
            now=now,
            lease_s=lease_s,
        )
        self._relays.pop(request.replica, None)
        if request.relay_address:
            self._relays[request.replica] = request
        if request.HasField("timings"):
            self._timings[request.replica] = request.timings
        live = self.ledger.replicas(now)
        self._relays = {name: relay for name, relay in self._relays.items() if name in live}
        self._timings = {name: timings for name, timings in self._timings.items() if name in live}

    def describe_replicas(self, now: float) -> list[pb.ReplicaVersion]:
        """Return what each live replica serves, in the order of their names."""
        rows = []
        for name, lease in sorted(self.ledger.replicas(now).items()):
            row = pb.ReplicaVersion(replica=name, error=lease.error)
            row.age.FromNanoseconds(int((now - lease.reported) * 1e9))
            if lease.serving is not None:
                row.version.CopyFrom(lease.serving.to_proto())
                row.versions_behind = sum(version > lease.serving for version in self.versions)
            if name in self._timings:
                row.timings.CopyFrom(self._timings[name])
            if name in self._relays:
                row.relay_address = self._relays[name].relay_address
            rows.append(row)
        return rows

    def describe_relays(self, now: float) -> list[pb.WeightSource]:
        """Return the live relays, which give the same versions out again, in the order of their names."""
        live = self.ledger.replicas(now)
        return [
            pb.WeightSource(
                address=relay.relay_address,
                host=relay.host,
                watchers=relay.watchers,
                newest=None if (serving := live[name].serving) is None else serving.to_proto(),
            )
            for name, relay in sorted(self._relays.items())
            if name in live
        ]
