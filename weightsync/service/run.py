"""One run as a service keeps it: ledger, store, uploads, watchers."""

from __future__ import annotations

import asyncio

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.service.ledger import Ledger
from weightsync.service.source_list import SourceList
from weightsync.service.store import RunStore
from weightsync.service.stored import StoredForm, StoredVersion
from weightsync.service.upload import Upload

__all__ = ["Run"]


class Run:
    """One run's versions.

    Attributes:
        name: The run.
        ledger: Which versions are visible and in use.
        store: Its directory.
        versions: The visible versions.
        uploads: Shards on their way in, by version and name.
        commit_lock: Commits are made one at a time.
        committing: The version whose commit is under way.
        relays: Services that give the same versions out again.
        watchers: WatchVersions streams of this run.
        timings: What its last update cost each replica, as it said.
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
        self.relays = SourceList()
        self.watchers = 0
        self.reserved_bytes = 0
        self.timings: dict[str, pb.UpdateTimings] = {}

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

    def find(self, version: Version) -> StoredVersion:
        """A visible version.

        Raises:
            SluiceError: NOT_FOUND.
        """
        stored = self.versions.get(version)
        if stored is None:
            raise SluiceError.not_found(
                "NO_SUCH_VERSION",
                f"run {self.name} has no version {version}; the newest is {self.ledger.newest}: watch again",
            )
        return stored

    def uploads_of(self, version: Version) -> dict[str, Upload]:
        """Uploads of one version by shard name."""
        return {name: upload for (owner, name), upload in self.uploads.items() if owner == version}

    @property
    def bytes_held(self) -> int:
        """Bytes of visible versions, of the uploads' announced sizes, and of what is being made."""
        uploads = sum(upload.shard.size for upload in self.uploads.values())
        return self.ledger.bytes_committed + uploads + self.reserved_bytes
