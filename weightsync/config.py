"""Settings of the weight service."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from sluice.config import Section, ServerConfig


class WeightSyncConfig(Section):
    """Where versions are kept, how many, and how long the service waits."""

    server: ServerConfig = Field(
        default_factory=lambda: ServerConfig(port=7101), description="Where the service listens."
    )
    directory: Path | None = Field(
        None, description="Directory that holds one directory of versions per run. Unset: `output_dir/<run>/weights`."
    )
    keep: int = Field(
        3, ge=1, description="Number of newest versions of a run to keep; versions in use are kept as well."
    )
    anchor_every: int = Field(
        16,
        ge=1,
        description="Keep the dense form of a version from which deltas start, every so many versions; sooner if the deltas since then outgrow half a dense copy.",
    )
    local_dir: Path | None = Field(
        Path("/dev/shm"),  # noqa: S108 - a well-known place is the point: trainers of this host write there
        description="A trainer on this host may hand over shards as files under this directory. Unset: disabled.",
    )
    dense_delay_s: float = Field(
        1.0,
        ge=0,
        description="Seconds to wait after the commit of a delta before making the dense form of the newest version in the background.",
    )
    max_bytes: int | None = Field(
        None,
        ge=1,
        description="Most bytes that all runs hold together, uploads and files under construction included. A push that needs room removes the oldest unused versions of any run; if that is not enough, it is refused. None: no limit but the disk's.",
    )
    min_free_bytes: int = Field(
        1 << 30, ge=0, description="Bytes to leave free on the disk; a push that would use them is refused."
    )
    upstream: str | None = Field(
        None,
        min_length=1,
        description="Address of the weight service behind this one, which makes this one a relay. Unset: trainers push to this service.",
    )
    advertise: str | None = Field(
        None,
        min_length=1,
        description="Address at which engines reach this relay. Unset: the bound address, with the host name if it listens on all interfaces.",
    )
    max_runs: int = Field(16, ge=1, description="Most runs to serve at once; a push to a further one is refused.")
    max_watchers: int = Field(1024, ge=1, description="Most WatchVersions streams at once; a further one is refused.")
    chunk_idle_s: float = Field(
        30.0,
        gt=0,
        description="Seconds to wait for the next chunk of a push, or for a caller to read, before the stream fails.",
    )
    incoming_ttl_s: float = Field(
        600.0, gt=0, description="Seconds after its last chunk until an upload that was not committed is dropped."
    )
    linger_s: float = Field(
        5.0,
        ge=0,
        description="Seconds to keep a version after a part of it was pulled, so that the caller finds the next part.",
    )
    lease_s: float = Field(
        60.0,
        gt=0,
        description="Seconds after its last report for which a replica counts as live and its version as in use.",
    )
    heartbeat_s: float = Field(
        5.0, gt=0, le=10, description="Seconds between heartbeats on a WatchVersions stream without news."
    )
    io_threads: int = Field(8, ge=1, description="Threads for disk work and hashing.")


CONFIG = WeightSyncConfig
