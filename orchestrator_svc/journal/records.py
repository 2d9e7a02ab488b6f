"""Trajectories as memory and journal hold them: a beginning that several trajectories of a group share, such as a prompt, is stored once.

A record is the protobuf merge of its parts, in order: token ids and messages are appended, everything else is in the last part.

    system, user: 100,000 tokens          Beginning
        +-- "a": 1 token, reward, mask    SharedRecord
        +-- "b": 1 token, reward, mask    SharedRecord

`SharedRecord.whole` assembles a record that leaves the process: in a batch, a file or an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, overload

import xxhash

from sluice.v1 import orchestrator_pb2, rollout_pb2, tokens_pb2

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Beginning:
    """Token ids and messages that several records begin with.

    Attributes:
        payload: A serialized TrajectoryRecord with the token ids and messages that follow `after`.
        tokens: Number of token ids up to its end, those of `after` included.
        trajectory_bytes: Upper bound on the bytes of these tokens in a serialized Trajectory.
        after: The beginning that it follows; None if it comes first.
    """

    payload: bytes
    tokens: int
    trajectory_bytes: int
    after: Beginning | None = None

    @classmethod
    def of(
        cls, token_ids: Iterable[int], conversation: tokens_pb2.Conversation, after: Beginning | None = None
    ) -> Beginning:
        """Return these token ids and messages behind those of `after`."""
        trajectory = tokens_pb2.Trajectory(token_ids=token_ids)
        record = orchestrator_pb2.TrajectoryRecord(trajectory=trajectory, conversation=conversation)
        return cls._of(record.SerializeToString(), trajectory, after)

    @classmethod
    def read(cls, payload: bytes, after: Beginning | None) -> Beginning:
        """Return the beginning that a payload of the journal holds.

        Raises:
            DecodeError: if it is not a TrajectoryRecord.
        """
        return cls._of(payload, orchestrator_pb2.TrajectoryRecord.FromString(payload).trajectory, after)

    @classmethod
    def _of(cls, payload: bytes, trajectory: tokens_pb2.Trajectory, after: Beginning | None) -> Beginning:
        tokens, size = len(trajectory.token_ids), trajectory.ByteSize()
        if after is not None:
            tokens, size = tokens + after.tokens, size + after.trajectory_bytes
        return cls(payload, tokens, size, after)

    def parts(self) -> list[Beginning]:
        """Return this beginning and all before it, in order."""
        found = [self]
        while (before := found[-1].after) is not None:
            found.append(before)
        return found[::-1]


@dataclass(slots=True)
class SharedRecord:
    """The record of a trajectory, without what it shares with others of its group.

    Attributes:
        own: What follows the beginning: the last token ids and messages, and everything that is not token ids or messages.
        beginning: What comes before; None if `own` is the whole record.
    """

    own: orchestrator_pb2.TrajectoryRecord
    beginning: Beginning | None = None

    @property
    def trajectory(self) -> tokens_pb2.Trajectory:
        """The trajectory; its `token_ids` are those behind the beginning."""
        return self.own.trajectory

    @property
    def tokens(self) -> int:
        """Number of all token ids."""
        return len(self.own.trajectory.token_ids) + (self.beginning.tokens if self.beginning else 0)

    @property
    def trajectory_bytes(self) -> int:
        """Upper bound on the size of the whole trajectory, serialized."""
        return self.own.trajectory.ByteSize() + (self.beginning.trajectory_bytes if self.beginning else 0)

    @property
    def text_bytes(self) -> int:
        """Size of its own messages, serialized."""
        return self.own.conversation.ByteSize()

    def whole(self) -> orchestrator_pb2.TrajectoryRecord:
        """Return the whole record: `own` itself if nothing comes before it, else a copy."""
        if self.beginning is None:
            return self.own
        record = orchestrator_pb2.TrajectoryRecord()
        for part in self.beginning.parts():
            record.MergeFromString(part.payload)
        record.MergeFrom(self.own)
        return record

    def whole_trajectory(self) -> tokens_pb2.Trajectory:
        """Return the trajectory of `whole`."""
        return self.whole().trajectory


def note_sampled(record: orchestrator_pb2.TrajectoryRecord, response: rollout_pb2.GenerateResponse) -> None:
    """Note which replicas sampled the next tokens of a trajectory, and when; An answer of an earlier release does not say so."""
    for each in response.replicas:
        if each not in record.replicas:
            record.replicas.append(each)
    if response.HasField("sample_time"):
        record.sample_time.CopyFrom(response.sample_time)


class Each(Sequence[_Made]):
    """A sequence that applies a function to each record of a group when an item is read.

    Args:
        records: The records.
        make: Such as `SharedRecord.whole`.
    """

    def __init__(self, records: Sequence[SharedRecord], make: Callable[[SharedRecord], _Made]) -> None:
        self._records, self._make = records, make

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> _Made: ...
    @overload
    def __getitem__(self, index: slice) -> Each[_Made]: ...
    def __getitem__(self, index: int | slice) -> _Made | Each[_Made]:
        """Make one, or return a part of the sequence."""
        if isinstance(index, slice):
            return Each(self._records[index], self._make)
        return self._make(self._records[index])


class EncodedPart(NamedTuple):
    """A payload of the journal.

    Attributes:
        digest: Its xxh3-128.
        after: The part that it follows, as an index of `Encoded.beginnings` from 1; 0: none.
    """

    payload: bytes
    digest: bytes
    after: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """Records of a group as payloads.

    Attributes:
        records: The records.
        beginnings: The parts that they begin with, each once, after the part that it follows.
        rests: Their own part, one for each record.
    """

    records: Sequence[SharedRecord]
    beginnings: Sequence[EncodedPart]
    rests: Sequence[EncodedPart]


def encode(records: Sequence[SharedRecord]) -> Encoded:
    """Return the payloads of a group's records. Its time grows with their size: not for an event loop."""
    beginnings: list[EncodedPart] = []
    places: dict[int, int] = {}  # by identity: records that share one name the same object
    rests = []
    for record in records:
        after = 0
        for part in record.beginning.parts() if record.beginning else ():
            if id(part) not in places:
                beginnings.append(_part(part.payload, after))
                places[id(part)] = len(beginnings)
            after = places[id(part)]
        rests.append(_part(record.own.SerializeToString(), after))
    return Encoded(records, beginnings, rests)


def _part(payload: bytes, after: int) -> EncodedPart:
    return EncodedPart(payload, xxhash.xxh3_128_digest(payload), after)


def decoded(beginnings: Iterable[tuple[bytes, int]], rests: Iterable[tuple[bytes, int]]) -> Iterator[SharedRecord]:
    """Yield the records of a group. Each payload comes with the index of the part that it follows, as in `EncodedPart`.

    Raises:
        DecodeError: if a payload is not a TrajectoryRecord.
    """
    found: list[Beginning] = []
    for payload, after in beginnings:
        found.append(Beginning.read(payload, found[after - 1] if after else None))
    for payload, after in rests:
        own = orchestrator_pb2.TrajectoryRecord.FromString(payload)
        yield SharedRecord(own, found[after - 1] if after else None)
