"""Cut a batch into minibatches: whole groups, about equally many loss tokens, the same cut on any number of ranks."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence as Rows

import torch

from trainer_svc.batch.rows import Sequence
from trainer_svc.parallel.ranks import ALONE, Ranks

__all__ = ["split_by_group"]

KEY_BYTES = 7
"""Bytes of a group's digest: its numbers are not negative and fit int64."""


def split_by_group(sequences: Rows[Sequence], count: int, *, seed: str, ranks: Ranks = ALONE) -> list[list[int]]:
    """Cut this rank's share of a batch into minibatches.

    Groups are assigned from large to small, each to the minibatch with the fewest loss tokens; the seed decides the order
    of groups of about the same size. Every rank makes the same assignment, also if a group lies on several ranks.

    Args:
        sequences: This rank's share.
        count: Minibatches wanted; a batch with fewer groups has fewer.
        seed: Another one gives another cut.
        ranks: All ranks that have a share.

    Returns:
        For each minibatch the places of this rank's sequences in it. Every rank gets as many minibatches, at least one; this
        rank's part of one can be empty.
    """
    keys = [_key(each) for each in sequences]
    own = torch.tensor(
        [[key, int(each.loss_mask.sum())] for key, each in zip(keys, sequences, strict=True)], dtype=torch.int64
    ).reshape(-1, 2)
    tokens: Counter[int] = Counter()
    for key, loss_tokens in ranks.gather(own).tolist():
        tokens[key] += loss_tokens
    places = _places(tokens, count, seed)
    parts: list[list[int]] = [[] for _ in range(max(places.values(), default=0) + 1)]
    for place, key in enumerate(keys):
        parts[places[key]].append(place)
    return parts


def _places(tokens: Counter[int], count: int, seed: str) -> dict[int, int]:
    """Return the minibatch of each group."""
    drawn = sorted(tokens, key=lambda key: (-tokens[key].bit_length(), _digest(f"{seed}/{key}".encode())))
    filled = [0] * min(count, len(drawn))
    held = [0] * len(filled)
    places = {}
    for key in drawn:
        place = min(range(len(filled)), key=lambda index: (filled[index], held[index]))
        places[key] = place
        filled[place] += tokens[key]
        held[place] += 1
    return places


def _key(sequence: Sequence) -> int:
    """Return a number for a sequence's group; without a group, for its id, or for its tokens."""
    if sequence.group_id:
        return _digest(b"group/" + sequence.group_id.encode())
    if sequence.trajectory_id:
        return _digest(b"trajectory/" + sequence.trajectory_id.encode())
    return _digest(b"tokens/" + sequence.input_ids.numpy().tobytes())


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=KEY_BYTES).digest())
