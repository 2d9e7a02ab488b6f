"""Decide which batch may enter, in which order, and whether it is a repeat: a pure state machine."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from sluice.versions import Version

QUEUE_BATCHES = 2
"""Batches that may wait for training. Further ones are refused; the answer says when to retry."""

REMEMBERED_BATCHES = 1024
"""Number of applied batches whose ids are kept to recognise repeats: the number of reports that WatchSteps keeps."""

Payload = TypeVar("Payload")


class RefusedError(Exception):
    """The batch may not enter now.

    Attributes:
        reason: UPPER_SNAKE_CASE name for programs.
        retry: Whether the same batch may be accepted later.
        exists: Whether another batch has this id.
    """

    def __init__(self, reason: str, message: str, *, retry: bool = False, exists: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry = retry
        self.exists = exists


@dataclass(frozen=True, slots=True)
class Ticket:
    """The place that a batch claims. For the fields see `BatchHeader`, except for this one.

    Attributes:
        content_digest: Digest of the batch's trajectories; empty until they have arrived.
    """

    batch_id: str
    sequence_no: int
    target: Version
    tokenizer_digest: str
    content_digest: str = ""


@dataclass(frozen=True, slots=True)
class Known:
    """A batch that was accepted before; `content_digest` is empty if unknown."""

    sequence_no: int
    content_digest: str = ""


class Admission(Generic[Payload]):
    """The order of batches within an epoch, with a bounded queue. Pure: no clock, no I/O, no gRPC.

    Closed until `open`. Batches are taken and finished in the order in which they enter. The batch with sequence number k
    produces version (epoch, k).

    Args:
        capacity: Batches that may wait.
        tokenizer_digest: Digest that every batch must carry.
    """

    def __init__(self, capacity: int, tokenizer_digest: str) -> None:
        self.capacity = capacity
        self.tokenizer_digest = tokenizer_digest
        self._version: Version | None = None
        self._waiting: deque[tuple[Ticket, Payload]] = deque()
        self._in_training: Ticket | None = None
        self._known: OrderedDict[str, Known] = OrderedDict()

    @property
    def version(self) -> Version | None:
        """Version of the weights; None while closed."""
        return self._version

    @property
    def queued(self) -> int:
        """Batches accepted and not yet applied."""
        return len(self._waiting) + (self._in_training is not None)

    @property
    def next_sequence_no(self) -> int:
        """Sequence number that the next batch must carry; 0 while closed."""
        return 0 if self._version is None else self._version.number + self.queued + 1

    def open(self, version: Version, held: Mapping[str, Known]) -> None:
        """Begin an epoch from a version. `held` are the batches that its weights hold, by id, oldest first; forget all others."""
        self.close()
        self._version = version
        self._known.update(held)

    def close(self) -> None:
        """Accept nothing until the next `open`."""
        self._version = None
        self._waiting.clear()
        self._in_training = None
        self._known.clear()

    def check(self, ticket: Ticket) -> bool:
        """Decide whether a batch may enter now. Nothing changes.

        Returns:
            Whether it was accepted before.

        Raises:
            RefusedError: if it may not enter.
        """
        if self._version is None:
            raise RefusedError("NO_EPOCH", "no epoch is open: call BeginEpoch first")
        if ticket.target.epoch != self._version.epoch:
            raise RefusedError(
                "WRONG_EPOCH",
                f"the batch is for epoch {ticket.target.epoch}, but the trainer is in epoch {self._version.epoch}: "
                "send it again with a target version of this epoch",
            )
        if ticket.tokenizer_digest != self.tokenizer_digest:
            raise RefusedError(
                "WRONG_TOKENIZER",
                f"the batch was made with tokenizer {ticket.tokenizer_digest or '(none)'}, but the trainer has "
                f"{self.tokenizer_digest}: start rollout and trainer with the same model, chat_template and chat_template_kwargs",
            )
        known = self._known.get(ticket.batch_id)
        if known is not None:
            if known.sequence_no != ticket.sequence_no:
                raise RefusedError(
                    "BATCH_ID_REUSED",
                    f"batch {ticket.batch_id!r} was accepted as number {known.sequence_no}, not {ticket.sequence_no}: give a"
                    " new batch a new id",
                    exists=True,
                )
            if ticket.content_digest and known.content_digest not in ("", ticket.content_digest):
                raise RefusedError(
                    "BATCH_CONTENT_DIFFERS",
                    f"batch {ticket.batch_id!r} was accepted with other trajectories (digest {known.content_digest}, now"
                    f" {ticket.content_digest}): give a new batch a new id, or begin a newer epoch to replace batches that"
                    " no checkpoint holds",
                    exists=True,
                )
            return True
        expected = self.next_sequence_no
        if ticket.sequence_no != expected:
            raise RefusedError(
                "WRONG_SEQUENCE_NO",
                f"the batch has sequence_no {ticket.sequence_no}, the next one is {expected}: send batches in order, from that number on",
            )
        if ticket.target.number != expected:
            raise RefusedError(
                "WRONG_TARGET_VERSION",
                f"batch {expected} produces version {ticket.target.epoch}.{expected}, not {ticket.target}: correct target_version",
            )
        if len(self._waiting) >= self.capacity:
            raise RefusedError(
                "QUEUE_FULL",
                f"{len(self._waiting)} batches wait, the most that the trainer holds: retry after the delay",
                retry=True,
            )
        return False

    def admit(self, ticket: Ticket, payload: Payload) -> bool:
        """Queue a batch, or recognise a repeat.

        Returns:
            Whether it was accepted before; then the payload is not kept.

        Raises:
            RefusedError: if it may not enter.
        """
        if self.check(ticket):
            return True
        self._waiting.append((ticket, payload))
        self._known[ticket.batch_id] = Known(ticket.sequence_no, ticket.content_digest)
        while len(self._known) > REMEMBERED_BATCHES + self.capacity + 1:
            self._known.popitem(last=False)
        return False

    def take(self) -> Payload | None:
        """Take the next batch to train; None if the queue is empty.

        Raises:
            RuntimeError: if the previous batch is not finished.
        """
        if self._in_training is not None:
            raise RuntimeError(f"batch {self._in_training.batch_id!r} is still in training")
        if not self._waiting:
            return None
        self._in_training, payload = self._waiting.popleft()
        return payload

    def finish(self) -> Version:
        """Mark the batch in training as applied. Return the version that it produced.

        Raises:
            RuntimeError: if no batch is in training.
        """
        if self._in_training is None or self._version is None:
            raise RuntimeError("no batch is in training")
        self._version, self._in_training = self._in_training.target, None
        return self._version
