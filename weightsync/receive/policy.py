"""The policy that decides which version a replica takes: FOLLOW, HOLD or TARGET, with an owner and a time to live. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from sluice.versions import Version

__all__ = ["Policy", "PolicyError", "PolicyHeldError", "PolicyMode", "WeightPolicy"]


class PolicyMode(Enum):
    """How a replica chooses its version; the names are those of the contract."""

    FOLLOW = "follow"
    HOLD = "hold"
    TARGET = "target"


class PolicyError(ValueError):
    """The policy contradicts itself or the replica's state."""


class PolicyHeldError(Exception):
    """Another owner's policy is in force; the message names it and its end."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy in force.

    Attributes:
        mode: How versions are chosen.
        version: The version of HOLD and TARGET.
        owner: Who set it; empty for FOLLOW.
        expires: Second at which FOLLOW returns; infinite for FOLLOW.
    """

    mode: PolicyMode = PolicyMode.FOLLOW
    version: Version | None = None
    owner: str = ""
    expires: float = math.inf


_FOLLOW = Policy()


class WeightPolicy:
    """The policy of one replica. Times are seconds of the caller's monotonic clock."""

    def __init__(self) -> None:
        self._policy = _FOLLOW

    def current(self, now: float) -> Policy:
        """Return the policy in force."""
        if now >= self._policy.expires:
            self._policy = _FOLLOW
        return self._policy

    def set(
        self,
        mode: PolicyMode,
        version: Version | None = None,
        *,
        owner: str = "",
        ttl_s: float | None = None,
        serving: Version,
        now: float,
    ) -> Policy:
        """Change the policy. Only the owner of the policy in force may; while FOLLOW is in force, anybody may.

        Args:
            mode: The new mode; FOLLOW ends the owner's policy.
            version: For HOLD and TARGET; None with HOLD means the one that serves.
            owner: Who asks.
            ttl_s: Seconds after which FOLLOW returns; needed for HOLD and TARGET.
            serving: The version that serves.
            now: The time.

        Raises:
            PolicyHeldError: if another owner's policy is in force.
            PolicyError: if owner, time to live or version are missing or wrong.
        """
        self.check_owner(owner, now)
        if mode is PolicyMode.FOLLOW:
            self._policy = _FOLLOW
            return self._policy
        if not owner:
            raise PolicyError(f"{mode.name} needs an owner: set the name of the caller who may end it")
        if ttl_s is None or not 0 < ttl_s < math.inf:
            raise PolicyError(f"{mode.name} needs a time to live above 0 seconds: set one, no policy holds for ever")
        if mode is PolicyMode.TARGET and version is None:
            raise PolicyError("TARGET needs a version: set the one to serve")
        if mode is PolicyMode.HOLD and version not in {None, serving}:
            raise PolicyError(f"cannot HOLD {version} while {serving} serves: use TARGET to go there")
        self._policy = Policy(mode, serving if version is None else version, owner, now + ttl_s)
        return self._policy

    def check_owner(self, owner: str, now: float) -> None:
        """Check that `owner` may change what serves.

        Raises:
            PolicyHeldError: if another owner's policy is in force.
        """
        policy = self.current(now)
        if policy.mode is not PolicyMode.FOLLOW and policy.owner != owner:
            raise PolicyHeldError(
                f"{policy.owner} has set {policy.mode.name} {policy.version} for another"
                f" {policy.expires - now:.1f} s: wait, or let it set FOLLOW"
            )

    def wanted(self, serving: Version, newest: Version | None, now: float) -> Version | None:
        """Return the version to take now; None if the one that serves is right."""
        policy = self.current(now)
        if policy.mode is PolicyMode.FOLLOW:
            return newest if newest is not None and newest > serving else None
        return policy.version if policy.version != serving else None

    def expires_in(self, now: float) -> float:
        """Return the seconds until the policy ends by itself; infinite for FOLLOW."""
        return self.current(now).expires - now
