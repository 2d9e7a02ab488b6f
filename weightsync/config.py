"""Settings of the weight service."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from sluice.config import Section, ServerConfig

__all__ = ["CONFIG", "WeightSyncConfig"]


class WeightSyncConfig(Section):
    """Where versions are kept, how many, and how long the service waits for whom."""

    server: ServerConfig = Field(
        default_factory=lambda: ServerConfig(port=7101), description="Where the service listens."
    )
    directory: Path | None = Field(
        None, description="Directory that holds one directory of versions per run; none: `output_dir/<run>/weights`."
    )
    keep: int = Field(3, ge=1, description="Newest versions of a run that are kept; those in use stay beyond that.")
    anchor_every: int = Field(
        16,
        ge=1,
        description="Versions after which a dense form is kept as an anchor, from which chains of deltas start; earlier if the chain outgrows half a dense copy.",
    )
    local_dir: Path | None = Field(
        Path("/dev/shm"),  # noqa: S108 - a well-known place is the point: trainers of this host write there
        description="Directory below which a trainer of the same host may name files to be read in place of a transfer; none: nowhere.",
    )
    dense_delay_s: float = Field(
        1.0,
        ge=0,
        description="Seconds after the commit of a delta at which its dense form is begun, in the background; what is newest then is made.",
    )
    max_bytes: int | None = Field(
        None,
        ge=1,
        description="Most bytes that all runs hold together, uploads and files under construction included. A push that needs room removes the oldest unused versions of any run; if that is not enough, it is refused. None: no limit but the disk's.",
    )
    min_free_bytes: int = Field(
        1 << 30, ge=0, description="Bytes that stay free on the disk; a push that would use them is refused."
    )
    upstream: str | None = Field(
        None,
        min_length=1,
        description="Address of a weight service whose versions this one gives out again, as a relay; none: take them from trainers.",
    )
    advertise: str | None = Field(
        None,
        min_length=1,
        description="Address under which a relay's engines reach it; none: the bound one, with the host name for a wildcard.",
    )
    max_runs: int = Field(16, ge=1, description="Runs served at once; a further one is refused.")
    max_watchers: int = Field(1024, ge=1, description="WatchVersions streams at once; a further one is refused.")
    chunk_idle_s: float = Field(30.0, gt=0, description="Seconds that a push may pass without a chunk before it fails.")
    incoming_ttl_s: float = Field(
        600.0, gt=0, description="Seconds after its last chunk at which an upload that was not committed is dropped."
    )
    linger_s: float = Field(
        5.0, ge=0, description="Seconds that a version is spared from retention after a part of it was pulled."
    )
    lease_s: float = Field(
        60.0,
        gt=0,
        description="Seconds that a replica counts as live, and its version as in use, after its last report.",
    )
    heartbeat_s: float = Field(
        5.0, gt=0, le=10, description="Seconds between signs of life on a WatchVersions stream without news."
    )
    io_threads: int = Field(8, ge=1, description="Threads for disk work and hashing.")


CONFIG = WeightSyncConfig
