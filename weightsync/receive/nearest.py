"""Chooses the source that an engine takes versions from: the weight service (the root) or one of its relays. Pure.

A source on the engine's own host comes first, then any other relay, then the root. Among equals, the one with fewer watchers is
chosen, then the one that answers quicker, then one by a hash that differs between engines, so that a fleet that starts at once does
not go to one relay. A choice stays until another source is better by a margin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from sluice.versions import Version

__all__ = ["ROOT", "Candidate", "behind", "choose"]

ROOT = ""
"""The address of the root among candidates: the service that the engine's settings name."""

MOST_BEHIND = 1
"""Versions that a relay may lack: the one that it is pulling."""

_NEAR_S = 0.005
"""Answers within this time come from the same building; their differences are noise."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A source that answered.

    Attributes:
        address: Where it is; `ROOT` for the root.
        host: What tells its host apart.
        watchers: WatchVersions streams that it has, the engine's own included.
        newest: Newest version that it gives out.
        latency_s: Seconds that its last answer took.
    """

    address: str
    host: str
    watchers: int
    newest: Version | None
    latency_s: float


def behind(version: Version | None, newest: Version | None) -> float:
    """Versions that a source lacks; infinite where they cannot be counted."""
    if newest is None or (version is not None and version >= newest):
        return 0
    if version is None or version.epoch != newest.epoch:
        return math.inf
    return newest.number - version.number


def choose(candidates: Sequence[Candidate], current: str | None, *, host: str, replica: str, draw: float) -> str:
    """The source to take from now on.

    Args:
        candidates: The sources that answer.
        current: The one in use; None before the first choice.
        host: What tells the engine's host apart.
        replica: The engine's name.
        draw: A random number in [0, 1): only some of many engines leave a crowded source at a time.

    Returns:
        Its address; `ROOT` where nothing else will do.
    """
    newest = max((each.newest for each in candidates if each.newest is not None), default=None)
    usable = [each for each in candidates if each.address == ROOT or behind(each.newest, newest) <= MOST_BEHIND]
    staying = next((each for each in usable if each.address == current), None)
    # An engine that came from elsewhere has heard of the newest version; where it goes, that must be at hand.
    open_to_us = [each for each in usable if current is None or behind(each.newest, newest) == 0 or each is staying]
    if not open_to_us:
        return ROOT
    best = min(_distance(each, host) for each in open_to_us)
    nearest = [each for each in open_to_us if _distance(each, host) == best]
    if staying is None or _distance(staying, host) > best:
        return _lightest(nearest, replica).address
    others = [each for each in nearest if each is not staying]
    if others:
        other = _lightest(others, replica)
        if staying.watchers >= 2 * (other.watchers + 1) and draw < _share_to_leave(staying, other):
            return other.address
    return staying.address


def _distance(candidate: Candidate, host: str) -> tuple[bool, bool]:
    return candidate.host != host, candidate.address == ROOT


def _share_to_leave(crowded: Candidate, other: Candidate) -> float:
    """The share of a source's watchers whose leaving makes both equal."""
    return (crowded.watchers - other.watchers) / (2 * crowded.watchers)


def _lightest(candidates: Sequence[Candidate], replica: str) -> Candidate:
    """One of those with few watchers: counts within a factor of two are alike, since others choose at the same time."""
    least = min(each.watchers for each in candidates)
    light = [each for each in candidates if each.watchers <= 2 * least + 1]
    return min(
        light,
        key=lambda each: (
            math.ceil(math.log2(max(1.0, each.latency_s / _NEAR_S))),
            xxhash.xxh3_64_intdigest(f"{replica} {each.address}".encode()),
        ),
    )
