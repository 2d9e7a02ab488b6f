"""Settings of the weight service, and of `sluice weights`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from sluice.config import Section, SecurityConfig, ServerConfig

_STORE_URL = re.compile(r"(s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._=/-]*)?|file:///[^?#@]+")


def is_store_url(text: str) -> bool:
    """Return whether an address is the URL of an object store.

    Raises:
        ValueError: if it is such a URL but cannot be used. The message does not repeat it, because it may hold a password.
    """
    if "://" not in text:
        return False
    if not _STORE_URL.fullmatch(text):
        raise ValueError(
            "the URL of an object store is s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or"
            " file:///DIRECTORY; credentials and endpoints come from the environment, never from the URL"
        )
    return True


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
        description="Address of the weight service behind this one, which makes this one a relay; or the URL of an object store that another site's service mirrors its versions to (`s3://`, `gs://`, `az://`, `file://`). Unset: trainers push to this service.",
    )
    mirror: str | None = Field(
        None,
        min_length=1,
        description="URL of an object store (`s3://BUCKET/PREFIX`, `gs://`, `az://`, `file://`) to which each version is copied in the background after its commit, for services at other sites. Credentials come from the environment. Unset: no copy.",
    )
    mirror_keep: int = Field(
        16,
        ge=1,
        description="Number of newest versions of a run to keep in the object store; what leads to them, and versions that a checkpoint names, are kept as well.",
    )
    mirror_poll_s: float = Field(
        5.0,
        gt=0,
        description="Seconds between two looks into the object store that `upstream` names; after a failure up to ten times as many.",
    )
    mirror_deadline_s: float = Field(
        60.0,
        gt=0,
        description="Seconds that one request to an object store may take; it moves at most 16 MiB, so a slow link needs more.",
    )
    advertise: str | None = Field(
        None,
        min_length=1,
        description="Address at which engines reach this relay. Unset: the bound address, with the host name if it listens on all interfaces.",
    )
    max_runs: int = Field(16, ge=1, description="Most runs to serve at once; a push to a further one is refused.")
    max_watchers: int = Field(1024, ge=1, description="Most WatchVersions streams at once; a further one is refused.")
    max_replicas: int = Field(
        16384,
        ge=1,
        description="Most replicas and relays that report what they serve, those behind relays included; a further one is refused.",
    )
    chunk_idle_s: float = Field(
        30.0,
        gt=0,
        description="Seconds to wait for the next chunk of a push, or for a caller to read, before the stream fails.",
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

    @field_validator("upstream")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is not None:
            is_store_url(value)
        return value

    @field_validator("mirror")
    @classmethod
    def _is_a_store(cls, value: str | None) -> str | None:
        if value is not None and not is_store_url(value):
            raise ValueError("a mirror is an object store: give a URL such as s3://BUCKET/PREFIX")
        return value

    @model_validator(mode="after")
    def _no_circle(self) -> Self:
        if self.mirror is not None and self.mirror == self.upstream:
            raise ValueError("mirror and upstream are the same object store: a service either writes it or reads it")
        return self


class WeightsConfig(Section):
    """Settings of `sluice weights`; flat: its keys stand at the top level."""

    address: str = Field("127.0.0.1:7101", description="Address of the weight service or of a relay, as host:port.")
    run: str = Field("default", description="The run.")
    replica: str | None = Field(
        None,
        min_length=1,
        description="Address of a replica, as host:port: `verify` then compares the weights in its memory. Unset: `verify` fetches a version.",
    )
    top: int = Field(10, ge=1, description="Rows of `diff`, tensors that changed most first.")
    deadline_s: float = Field(600.0, gt=0, description="Seconds for the whole command.")
    security: SecurityConfig = Field(default_factory=SecurityConfig, description="Tokens and TLS of the service.")


CONFIG = WeightSyncConfig
