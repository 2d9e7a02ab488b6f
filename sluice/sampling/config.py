"""Settings of a service that samples through replicas."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from sluice.config import Section


class ReplicasConfig(Section):
    """How rollout replicas are found, watched and chosen."""

    poll_s: float = Field(0.5, gt=0, description="Seconds between two status requests to a replica.")
    progress_s: float = Field(
        5.0,
        gt=0,
        description="Seconds without a message from a replica, or without a step of its engine while it has work, after which it hangs: it gets no work, and its requests continue at another replica.",
    )
    paused_s: float = Field(
        60.0,
        gt=0,
        description="Seconds that a request waits at a paused replica before it continues at one that is not paused.",
    )
    switch_s: float = Field(
        60.0,
        gt=0,
        description="Seconds that a replica may take to switch to other weights, without a step of its engine, before it hangs.",
    )
    longest_step_s: float = Field(
        60.0,
        gt=0,
        description="Most seconds that one step of an engine may take: a request whose engine made no step for `progress_s` gets twice the time at the next replica, up to this, so that a long prompt ends somewhere.",
    )
    coalesce_s: float = Field(
        1.0,
        gt=0,
        description="Seconds of new tokens that a replica sends in one message; what it has not sent is lost if it dies. With more than 1,000 requests under way for each of these seconds it grows, up to half of `progress_s`.",
    )
    resolve_s: float = Field(5.0, gt=0, description="Seconds between two look-ups of replicas given by name.")

    @model_validator(mode="after")
    def _in_time(self) -> Self:
        for name in ("poll_s", "coalesce_s"):
            if getattr(self, name) > self.progress_s / 2:
                raise ValueError(
                    f"progress_s ({self.progress_s:g}) must be at least twice {name} ({getattr(self, name):g}): a replica that"
                    " works would be taken for one that hangs"
                )
        return self


class ConcurrencyConfig(Section):
    """How many samples a replica is given at a time."""

    adapt: bool = Field(
        True,
        description="Give a replica more samples while it has room, and fewer when they queue there or its KV cache is too small; false leaves `max_running` as the only limit.",
    )
    initial_samples: int = Field(
        1024,
        ge=1,
        description="Samples in flight at a replica at first if it does not say how many it generates at a time; else twice that number and a reserve.",
    )
    most_samples: int = Field(65536, ge=1, description="Most samples in flight at a replica.")
