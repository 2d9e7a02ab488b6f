"""Settings of `sluice weights`; flat: its keys stand at the top level."""

from __future__ import annotations

from pydantic import Field

from sluice.config import Section, SecurityConfig

__all__ = ["WeightsConfig"]


class WeightsConfig(Section):
    """Which service is asked about which run."""

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
