"""Sends bytes of a stored file as chunks, each write with a deadline."""

from __future__ import annotations

import asyncio
import os
from io import FileIO
from pathlib import Path
from typing import TypeVar

import grpc

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from weightsync.format.chunks import ChunkSums, fill_chunk, next_cut
from weightsync.service.runs import Runs

__all__ = ["send_file", "write_within"]

Q = TypeVar("Q")
R = TypeVar("R")


async def write_within(context: grpc.aio.ServicerContext[Q, R], response: R, seconds: float) -> None:
    """Write one message of a stream.

    Raises:
        SluiceError: DEADLINE_EXCEEDED if the caller does not read.
    """
    try:
        async with asyncio.timeout(seconds):
            await context.write(response)
    except TimeoutError as error:
        raise SluiceError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "PULL_IDLE",
            f"nobody read for {seconds:g} s (weightsync.chunk_idle_s): pull from where it broke",
        ) from error


async def send_file(
    runs: Runs,
    path: Path,
    sums: ChunkSums,
    context: grpc.aio.ServicerContext[pb.PullWeightsRequest, pb.PullWeightsResponse],
    *,
    begin: int,
    end: int,
) -> None:
    """Send bytes `begin` to before `end`, read in a thread while the chunk before goes out.

    Raises:
        SluiceError: DEADLINE_EXCEEDED if the caller does not read, DATA_LOSS if the file is shorter.
    """
    file = await runs.in_thread(FileIO, path)
    reading: asyncio.Future[pb.PullWeightsResponse] | None = None
    try:
        if begin < end:
            reading = runs.in_thread(_read, file, sums, begin, end)
        while reading is not None:
            response = await reading
            begin = next_cut(begin, end)
            reading = runs.in_thread(_read, file, sums, begin, end) if begin < end else None
            await write_within(context, response, runs.config.chunk_idle_s)
    finally:
        if reading is not None:
            reading.cancel()
        file.close()


def _read(file: FileIO, sums: ChunkSums, begin: int, end: int) -> pb.PullWeightsResponse:
    wanted = next_cut(begin, end) - begin
    data = os.pread(file.fileno(), wanted, begin)
    if len(data) < wanted:
        raise SluiceError.data_loss(
            "SHARD_SHORT", f"the stored file ends at byte {begin + len(data)}: push a new version"
        )
    response = pb.PullWeightsResponse()
    fill_chunk(response.chunk, begin, data, sums.of(begin, data))
    return response
