"""A trainer that pushes two megabytes of a version, and then stops for good. Arguments: target, run, megabytes."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import torch

import weightsync.publish.push
from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.versions import Version
from weightsync.publisher import WeightPublisher

make = weightsync.publish.push.push_request


def make_some(offset: int, views: Any) -> Any:
    if offset > 2 << 20:
        threading.Event().wait()  # until this process is killed
    return make(offset, views)


async def push(target: str, run: str, megabytes: int) -> None:
    async with connect(target, SecurityConfig()) as channel:
        tensors = {"w": torch.ones(megabytes << 18)}
        await WeightPublisher(channel, run, chunk_bytes=1024).update(Version(1, 2), tensors, deadline_s=300)


def main() -> None:
    weightsync.publish.push.push_request = make_some
    target, run, megabytes = sys.argv[1:]
    asyncio.run(push(target, run, int(megabytes)))
