"""Whether an engine's process may be forked from this one, and what it leaves alone of what it inherits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the stubs leave it out

__all__ = ["collect_rpc_garbage", "fork_is_sound", "garbage_stays_behind"]

_OWNERS = (cygrpc.AioChannel, cygrpc.AioServer, cygrpc.Channel, cygrpc.Server)
"""What gRPC's threads live and end with: every channel, server, stub and call holds one of these."""


def fork_is_sound() -> bool:
    """Whether this process holds nothing of gRPC that a forked child would inherit.

    The child gets the objects, but not the threads behind them. When its garbage collection ends the last of them,
    gRPC waits for its poller's thread for ever; until then it holds the sockets open. Takes 60 ms where vLLM is loaded.
    """
    return not any(issubclass(kind, _OWNERS) for kind in {type(each) for each in gc.get_objects()})


def collect_rpc_garbage() -> None:
    """End what is left of closed channels and servers, so that they do not stand against a fork.

    Call it in the thread of the event loop that they belonged to. Takes some tenths of a second if there are any.
    """
    if not fork_is_sound():
        gc.collect()


@contextmanager
def garbage_stays_behind() -> Iterator[None]:
    """Keep what is forked in this block from collecting what it inherits.

    The garbage of a parent may end in threads and sockets that the child does not have: a store of torch.distributed then
    waits for its thread for ever, and a socket of ZeroMQ closes a number that the child has given to another.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
