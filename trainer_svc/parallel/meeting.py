"""Where the processes of one start of a trainer meet, apart from those of earlier starts.

torchrun's agent keeps one store of keys for all starts of a job, so that after a restart processes would find the addresses
of those that were killed (pytorch/pytorch#135712). Each start therefore agrees on a prefix that none before it had. The
number of the restart will not do: the agents of several nodes count it apart.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

__all__ = ["fresh_store"]

POLL_S = 0.02
"""Between two looks of rank 0 at who has come."""


def fresh_store(timeout: timedelta) -> dist.Store | None:
    """The store of this start, as torchrun's environment names it.

    Args:
        timeout: How long to wait for the other processes.

    Returns:
        A store in which nothing stands yet; None where no agent holds one, as rank 0 then makes one by itself.

    Raises:
        torch.distributed.DistStoreError: if the others do not come in time.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start = _lead(store, count, timeout) if rank == 0 else _follow(store, rank, timeout)
    return dist.PrefixStore(f"start/{start}", store)


def _lead(store: dist.Store, count: int, timeout: timedelta) -> str:
    """Name this start, and tell every process that asks; one that does not confirm belonged to an earlier start."""
    start = uuid.uuid4().hex
    missing = set(range(1, count))
    give_up = time.monotonic() + timeout.total_seconds()
    while missing:
        for rank in sorted(missing):
            if store.check([_asked(rank)]):
                question = store.get(_asked(rank)).decode()
                store.set(_answer(rank, question), start)
            if store.check([_confirmed(rank, start)]):
                missing.discard(rank)
        if missing and time.monotonic() > give_up:
            seconds = timeout.total_seconds()
            raise dist.DistStoreError(
                f"ranks {sorted(missing)} did not come within {seconds:g} s: look at their logs, or raise trainer.parallel.timeout_s"
            )
        time.sleep(POLL_S)
    return start


def _follow(store: dist.Store, rank: int, timeout: timedelta) -> str:
    question = uuid.uuid4().hex
    store.set(_asked(rank), question)
    store.wait([_answer(rank, question)], timeout)
    start = str(store.get(_answer(rank, question)).decode())
    store.set(_confirmed(rank, start), b"")
    return start


def _asked(rank: int) -> str:
    return f"meeting/asked/{rank}"


def _answer(rank: int, question: str) -> str:
    return f"meeting/answer/{rank}/{question}"


def _confirmed(rank: int, start: str) -> str:
    return f"meeting/confirmed/{start}/{rank}"
