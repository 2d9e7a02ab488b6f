"""Settings of a gateway. Imports neither torch nor vLLM, so that `--help` is fast."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sluice.config import Section, ServerConfig
from sluice.limits import MAX_BODIES_BYTES
from sluice.rpc import MAX_MESSAGE_BYTES
from sluice.sampling.config import ConcurrencyConfig, ReplicasConfig


class CaptureDeadlines(Section):
    """How long a captured request waits."""

    request_s: float = Field(
        3600.0,
        gt=0,
        description="Seconds for a request, the wait for a replica included; then it fails with 504. Clients have limits of their own, of ten minutes and less.",
    )
    linger_s: float = Field(
        60.0,
        ge=0,
        description="Seconds that sampling continues after the client has disconnected, so that a client with a short timeout finds its reply when it retries.",
    )
    keepalive_s: float = Field(
        5.0,
        gt=0,
        description="Seconds without an event after which a stream gets a comment. The first comment begins the response, so that a later error is an event of the stream.",
    )


class CaptureLimits(Section):
    """How much a gateway holds."""

    max_requests: int = Field(
        4096,
        ge=1,
        description="Maximum number of HTTP requests in progress, those that wait for a replica included, and of those that wait for a session; further ones get 429.",
    )
    max_body_bytes: int = Field(
        MAX_MESSAGE_BYTES,
        ge=1024,
        le=MAX_MESSAGE_BYTES,
        description="Maximum size of the body of a request; a larger one gets 413. At most the size of a message of the contract.",
    )
    max_bodies_mb: int = Field(
        MAX_BODIES_BYTES >> 20,
        ge=16,
        description="MiB of the bodies of all HTTP requests in progress; a request for which there is no room gets 429. The last quarter is for sessions that hold little.",
    )


class CaptureConfig(Section):
    """How requests of agents become recorded generations."""

    history: Literal["append", "template"] = Field(
        "append",
        description="append: keep the exact tokens of earlier turns, with the reasoning of the assistant. template: fork where the chat template renders earlier turns differently.",
    )
    on_unsupported: Literal["override", "reject", "not_trained"] = Field(
        "override",
        description="What happens to sampling that may not be trained, such as top_p: use that of the session instead, answer 400, or do it and train nothing of the reply.",
    )
    deadlines: CaptureDeadlines = Field(
        default_factory=CaptureDeadlines, description="How long a captured request waits."
    )
    limits: CaptureLimits = Field(default_factory=CaptureLimits, description="How much a gateway holds.")


class GatewayConfig(Section):
    """The table `[gateway]`."""

    capture: CaptureConfig = Field(
        default_factory=CaptureConfig, description="How requests of agents become recorded generations."
    )
    server: ServerConfig = Field(
        default_factory=lambda: ServerConfig(port=7105, http_port=7115, drain_s=600.0),
        description="Where the gateway listens. `drain_s` lets a generation of minutes end; a gateway with nothing under way, or without an orchestrator, ends before.",
    )
    advertise_url: str | None = Field(
        None,
        description="Where agents reach the HTTP port, such as `https://gateway.example:7115`; none: the host and port that it is bound to.",
    )
    replicas: ReplicasConfig = Field(
        default_factory=ReplicasConfig, description="Rollout replicas, which the orchestrator lists."
    )
    concurrency: ConcurrencyConfig = Field(
        default_factory=ConcurrencyConfig, description="How many samples a replica is given at a time by this gateway."
    )


CONFIG = GatewayConfig
