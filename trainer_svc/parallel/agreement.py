"""Whether processes that share a forward pass were given the same rows; if not, they would train nonsense or wait for each other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Rows
from dataclasses import fields

import torch
import torch.distributed as dist

from trainer_svc.batch.rows import Sequence
from trainer_svc.parallel.mesh import Mesh

__all__ = ["check_same_rows"]

DIGEST_BYTES = 7
"""Of a batch: a positive int64."""

LARGEST = 1 << (8 * DIGEST_BYTES)


def check_same_rows(sequences: Rows[Sequence], mesh: Mesh) -> None:
    """Compare the rows of the processes that share them; all processes call this.

    Raises:
        ValueError: in every process, if some that share rows have different ones.
    """
    shares = mesh.dims.data_parallel
    if mesh.everyone is None or shares == mesh.dims.world_size:
        return
    place, digest = mesh.dims.data_rank(mesh.rank), _digest(sequences)
    bounds = torch.zeros(2, shares, dtype=torch.int64)
    bounds[:, place] = torch.tensor([digest, LARGEST - digest])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, mesh.everyone)
    differing = (bounds.sum(0) != LARGEST).nonzero().flatten().tolist()
    if differing:
        ranks = ", ".join(map(str, mesh.dims.ranks_of(differing[0])))
        raise ValueError(
            f"ranks {ranks} share their rows (tp, cp, pp) but were given different ones: pass the same rows, in the same"
            " order, to all of them"
        )


def _digest(sequences: Rows[Sequence]) -> int:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for sequence in sequences:
        for each in fields(sequence):
            value = getattr(sequence, each.name)
            if isinstance(value, torch.Tensor):
                digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())
            else:
                digest.update(repr(value).encode())
    return int.from_bytes(digest.digest())
