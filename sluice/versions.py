"""Policy versions: how one descends from another, and which of them sampled the tokens of a sample."""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence, Sequence
from typing import NamedTuple, Self

from sluice.v1 import common_pb2, tokens_pb2

__all__ = [
    "BASE",
    "Lineage",
    "Version",
    "VersionSpan",
    "append_spans",
    "sampled_tokens",
    "span_lengths",
    "spans_between",
    "versions_of",
]


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


class Lineage:
    """The version that each epoch began from: versions form a tree, and the present weights end one of its paths.

    When a trainer restarts from checkpoint c, the versions above c of older epochs are retired. A token of such a
    version v is as stale as its distance from c, plus what the trainer did since.
    """

    def __init__(self) -> None:
        self._origins: dict[int, Version] = {}

    def open(self, epoch: int, origin: Version) -> None:
        """Add an epoch that a trainer began from weights of version `origin`.

        Raises:
            ValueError: if the epoch is not newer than all others, or the origin not older.
        """
        if epoch <= max(self._origins, default=0) or origin.epoch >= epoch:
            raise ValueError(f"epoch {epoch} cannot follow {max(self._origins, default=0)} from version {origin}")
        self._origins[epoch] = origin

    def number(self, version: Version) -> int:
        """Return the number that a version counts as today: `now - number` is the staleness of its tokens at version `now`.

        Below its own, even below zero, where it was retired.
        """
        newest = max(self._origins, default=0)
        present = self._path(self._origins[newest]) | {newest: version.number} if newest else {0: version.number}
        path = self._path(version)
        # The newest version that both build upon; in the present epoch it is the version itself.
        fork = next((min(number, present[epoch]) for epoch, number in path.items() if epoch in present), 0)
        return 2 * fork - version.number

    def oldest(self, versions: Iterable[Version]) -> int:
        """Return the least of the numbers that some versions count as.

        Raises:
            ValueError: if there are none.
        """
        return min(self.number(version) for version in versions)

    def _path(self, version: Version) -> dict[int, int]:
        """For each epoch on the way back to the base model, the number at which the way leaves it; newest first."""
        path = {}
        while version.epoch > 0:
            path[version.epoch] = version.number
            # An epoch that is not known counts as begun from the base model: never younger than it is.
            version = self._origins.get(version.epoch, BASE)
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
    spans = list(spans)  # an engine's thread may append to it meanwhile
    stops = [span.start for span in spans[1:]] + [end]
    return [
        VersionSpan(max(span.start, first), span.version)
        for span, stop in zip(spans, stops, strict=False)  # before the first token there is no span, but a stop
        if max(span.start, first) < min(stop, end)
    ]


def span_lengths(starts: Sequence[int], tokens: int) -> list[int]:
    """Return the number of tokens of each span.

    Args:
        starts: Start of each span, in order.
        tokens: Number of tokens of the sample.
    """
    stops = [*starts[1:], tokens]
    return [stop - start for start, stop in zip(starts, stops, strict=False)]


def append_spans(
    spans: MutableSequence[tokens_pb2.VersionSpan], more: Iterable[tokens_pb2.VersionSpan], offset: int
) -> None:
    """Append the spans of tokens that follow. A span that continues the last version is not repeated.

    Args:
        spans: Spans so far; changed in place.
        more: Spans of the tokens that follow, counted from the first of them.
        offset: Number of tokens before them.
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
