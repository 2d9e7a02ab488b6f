"""Policy versions: how they descend from each other, and which versions sampled the tokens of a sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Self

from sluice.v1 import common_pb2, tokens_pb2


class Version(NamedTuple):
    """A policy version, ordered by epoch, then by number.

    Attributes:
        epoch: Number of the trainer's start that produced it; 0 is the base model on disk.
        number: Batches applied to the weights since the base model.
    """

    epoch: int
    number: int

    def __str__(self) -> str:
        """Return ``epoch.number``: the form in file names, logs and the engine's weight version."""
        return f"{self.epoch}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the ``epoch.number`` form.

        Raises:
            ValueError: if the text has another form.
        """
        epoch, separator, number = text.partition(".")
        if not (separator and epoch.isdecimal() and number.isdecimal()):
            raise ValueError(f"{text!r} is not a policy version; expected epoch.number, such as 1.42")
        return cls(int(epoch), int(number))

    @classmethod
    def from_proto(cls, message: common_pb2.PolicyVersion) -> Self:
        """Read the wire form."""
        return cls(message.epoch, message.number)

    def to_proto(self) -> common_pb2.PolicyVersion:
        """Write the wire form."""
        return common_pb2.PolicyVersion(epoch=self.epoch, number=self.number)


BASE = Version(0, 0)
"""The base model before any trainer took part."""

ENDLESS = (1 << 63) - 1
"""A version number greater than every other of its epoch."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The version that each epoch began from. Versions form a tree; the present weights are the end of one of its paths.

    The staleness of a token is the distance in that tree between the version that sampled it and the version that it is trained with.
    If the version v that sampled it is an ancestor, that is `now - v`. If a restart from checkpoint c retired v, it is
    `(v - c) + (now - c)`. An unknown epoch counts as begun from the base model: this never underestimates staleness.

    Attributes:
        origins: By epoch, the version that the epoch began from. That version always belongs to an older epoch.
    """

    origins: Mapping[int, Version] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def newest_epoch(self) -> int:
        """The newest epoch; 0 before the first."""
        return max(self.origins, default=0)

    def begin(self, epoch: int, origin: Version) -> Self:
        """Return the lineage with one more epoch.

        Raises:
            ValueError: if the origin does not belong to an older epoch.
        """
        if origin.epoch >= epoch:
            raise ValueError(f"epoch {epoch} cannot begin from version {origin}, which is not older")
        return type(self)(MappingProxyType({**self.origins, epoch: origin}))

    def merged(self, other: Self) -> Self:
        """Return the epochs of both lineages. If both have an epoch, that of `other` counts."""
        return type(self)(MappingProxyType({**self.origins, **other.origins}))

    def staleness(self, token: Version, now: Version) -> int:
        """Return the distance between the version that sampled a token and the version `now` that is trained."""
        fork = self._fork(token, now)
        return (token.number - fork) + (now.number - fork)

    def is_retired(self, version: Version, now: Version) -> bool:
        """Return whether `now` does not build upon this version."""
        return self._fork(version, now) < version.number

    def number(self, version: Version) -> int:
        """Return the number for which `now - number` is the version's staleness, for any `now` of the newest epoch.

        For a retired version this is smaller than its own number, and may be negative.
        """
        return 2 * self._fork(version, Version(self.newest_epoch, ENDLESS)) - version.number

    def _fork(self, one: Version, other: Version) -> int:
        """Return the number of the newest common ancestor of two versions."""
        path = self._path(one)
        for epoch, number in self._path(other).items():
            if epoch in path:
                return min(number, path[epoch])
        return 0

    def _path(self, version: Version) -> dict[int, int]:
        """Return the epochs on the path back to the base model, newest first, each with the number of the last version on the path."""
        path = {}
        while version.epoch > 0:
            path[version.epoch] = version.number
            version = self.origins.get(version.epoch, BASE)
        path[0] = version.number
        return path


class VersionSpan(NamedTuple):
    """The tokens of a sample that one policy version sampled: from `start` to the start of the next span.

    Attributes:
        start: Index of the first token, counted in sampled tokens.
        version: The version.
    """

    start: int
    version: Version

    @classmethod
    def from_proto(cls, message: tokens_pb2.VersionSpan) -> Self:
        """Read the wire form."""
        return cls(message.start, Version.from_proto(message.policy_version))

    def to_proto(self) -> tokens_pb2.VersionSpan:
        """Write the wire form."""
        return tokens_pb2.VersionSpan(start=self.start, policy_version=self.version.to_proto())


def spans_between(spans: Sequence[VersionSpan], first: int, end: int) -> list[VersionSpan]:
    """Return the spans of the tokens from `first` to `end` (exclusive), with their starts still counted from token 0."""
    spans = list(spans)  # an engine's thread may append to the list meanwhile
    stops = [span.start for span in spans[1:]] + [end]
    return [
        VersionSpan(max(span.start, first), span.version)
        for span, stop in zip(spans, stops, strict=False)  # without spans there is still one stop
        if max(span.start, first) < min(stop, end)
    ]


def span_lengths(starts: Sequence[int], tokens: int) -> list[int]:
    """Return the number of tokens of each span."""
    stops = [*starts[1:], tokens]
    return [stop - start for start, stop in zip(starts, stops, strict=False)]


def append_spans(
    spans: MutableSequence[tokens_pb2.VersionSpan], more: Iterable[tokens_pb2.VersionSpan], offset: int
) -> None:
    """Append the spans of tokens that follow. A span that continues the last version is not repeated.

    Args:
        spans: Spans so far; changed in place.
        more: Spans of the tokens that follow, with starts counted from the first of these tokens.
        offset: Number of earlier tokens.
    """
    for span in more:
        if not spans or spans[-1].policy_version != span.policy_version:
            spans.append(tokens_pb2.VersionSpan(start=offset + span.start, policy_version=span.policy_version))


def versions_of(trajectory: tokens_pb2.Trajectory) -> list[Version]:
    """Return the policy versions that sampled the tokens of a trajectory, in order."""
    return [Version.from_proto(span.policy_version) for span in trajectory.version_spans]


def sampled_tokens(trajectory: tokens_pb2.Trajectory) -> int:
    """Return the number of tokens of a trajectory that the policy sampled."""
    return sum(trajectory.mask_runs[1::2])
