"""Which of two equal requests is another draw, and which one repeats the other. Pure.

Best of n and self-consistency send one body several times, and want as many samples. A client whose connection broke sends it again, and
wants the reply that it missed: most mark that, some do not, and a reply that nobody has read must not be trained beside the one that was.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class State(Enum):
    """What became of a request."""

    SAMPLED = "is being sampled"
    RECORDED = "its reply is in the journal"
    LOST = "ended without a reply"


class Earlier(NamedTuple):
    """An earlier request of the session with the same body.

    Attributes:
        name: Its name.
        state: What became of it.
        read: Whether a client reads its reply, or has read it, as far as its gateways know.
        retry: The largest number of the retries that it answers; 0 if it was sent once.
        doubt: Of one that is being sampled, how likely its client has left without a sign: 2 if its gateway has, 1 if its gateway is another
            one than that of the new request, whose sign may be under way.
    """

    name: str
    state: State
    read: bool
    retry: int = 0
    doubt: int = 0


def repeated(earlier: Sequence[Earlier], *, is_retry: bool, retry: int) -> Earlier | None:
    """Return the request that a new one repeats; None if it is another draw.

    A reply without a reader is for the next request, marked or not. A marked one repeats also one that was lost; else one whose connection
    may be broken without a sign, or whose reply was sent and may have been lost then. Of these, one that answers no retry with its number
    yet: so n requests that fail together and are retried together stay n. If none is left, it is given what was recorded all the same,
    since a client may count wrongly.

    Args:
        earlier: The earlier requests with the same body, oldest first.
        is_retry: Whether the client marks the new one as a retry.
        retry: Its number; 0 if it has none: then all with this body are one request.
    """
    newest = earlier[::-1]
    unread = [each for each in newest if not each.read and each.state is not State.LOST]
    retried = sorted(newest, key=lambda each: -each.retry) if is_retry else []
    fits = [each for each in retried if not retry or each.retry < retry]
    sampled = sorted((each for each in fits if each.state is State.SAMPLED), key=lambda each: -each.doubt)
    in_order = [
        *(each for each in unread if each.state is State.RECORDED),
        *unread,
        *(each for each in (*fits, *retried) if each.state is State.LOST and retry),
        *sampled,
        *(each for each in (*fits, *retried) if each.state is State.RECORDED),
    ]
    return in_order[0] if in_order else None
