"""A trainer on two machines: its nodes find each other, and when one is gone both end, and continue from the checkpoint."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from network_namespaces import Machines, needs_namespaces
from trainer_programs import RUN, START_S, Programs, ready, train

from sluice.client import TrainerClient
from sluice.supervise.restart_policy import EXIT_UNFINISHED
from sluice.versions import Version

WEIGHTSYNC_PORT = 7113
"""On a machine of its own, where nobody else listens."""

LOST_S = 24
"""Seconds without a sign of life after which a node is gone."""

ENDED_S = 300.0
"""Seconds in which both nodes must end after one is gone: ranks get a moment to end, and the machine may be busy."""

pytestmark = [pytest.mark.slow, pytest.mark.ecosystem, needs_namespaces, pytest.mark.timeout(1200)]


@dataclass
class Node:
    process: asyncio.subprocess.Process
    log: Path

    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self) -> None:
        """Kill everything of the machine, as the loss of its power does."""
        for each in self.ranks():
            each.kill()
        self.process.kill()

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), ENDED_S)


class Cluster:
    """One run on two machines, from one file."""

    def __init__(self, machines: Machines, directory: Path) -> None:
        self.machines, self.programs = machines, Programs(directory)
        self.socket = f"unix:{directory}/trainer.sock"
        self.rendezvous = f"{machines.address(0)}:7112"

    @asynccontextmanager
    async def weightsync(self) -> AsyncIterator[None]:
        address = ("--server.host", self.machines.address(0), "--server.port", WEIGHTSYNC_PORT)
        flags = ("weightsync", "@", self.programs.file, *address, "--insecure")
        async with self._on(0, "weightsync", *flags):
            yield

    @asynccontextmanager
    async def node(self, number: int, *options: str) -> AsyncIterator[Node]:
        """One node of the trainer: a rank on the CPU."""
        launcher = ("ranks", "--processes", "1", "--nodes", "2", "--node-rank", str(number), "--lost", str(LOST_S))
        weightsync = f"{self.machines.address(0)}:{WEIGHTSYNC_PORT}"
        trainer = ("trainer", "@", self.programs.file, "--server.host", self.socket, "--peers.weightsync", weightsync)
        parallel = ("--parallel.dp-shard", "2")
        words = (*launcher, "--rendezvous", self.rendezvous, *options, *trainer, *parallel)
        async with self._on(number, f"node-{number}", *words) as node:
            yield node

    def client(self) -> TrainerClient:
        return TrainerClient(self.socket)

    @asynccontextmanager
    async def _on(self, number: int, name: str, *words: object) -> AsyncIterator[Node]:
        path = self.programs.directory / f"{name}.log"
        with path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self.machines.enter(number),
                *(sys.executable, "-m", "sluice.cli.main", *map(str, words)),
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )
        node = Node(process, path)
        try:
            yield node
        finally:
            if process.returncode is None:
                node.kill()
            await process.wait()


async def test_a_node_is_killed_both_end_and_the_restarted_ones_resume_from_the_checkpoint(tmp_path: Path) -> None:
    with Machines(2) as machines:
        cluster = Cluster(machines, tmp_path)
        async with cluster.weightsync(), cluster.client() as client:
            async with cluster.node(0) as first, cluster.node(1) as second:
                digest = (await ready(client, first.process)).tokenizer_digest
                await client.begin_epoch(RUN, 1)
                await train(client, 1, 1, digest)
                await train(client, 2, 1, digest)
                await client.save_checkpoint(RUN)
                ranks = first.ranks()
                second.kill()
                assert await first.ended() == 1
                assert not any(each.is_running() for each in ranks)
            async with cluster.node(0) as first, cluster.node(1) as second:
                await ready(client, first.process)
                begun = await client.begin_epoch(RUN, 2)
                assert Version.from_proto(begun.policy_version) == Version(2, 2)
                assert begun.last_batch_id == "b2"
                await train(client, 3, 2, digest)
                for node in (first, second):  # as every engine stops a job
                    node.process.send_signal(signal.SIGTERM)
                assert (await first.ended(), await second.ended()) == (EXIT_UNFINISHED, EXIT_UNFINISHED)


@pytest.mark.soak
async def test_a_node_that_is_cut_off_ends_both_while_nothing_is_trained(tmp_path: Path) -> None:
    with Machines(2) as machines:
        cluster = Cluster(machines, tmp_path)
        async with (
            cluster.weightsync(),
            cluster.client() as client,
            cluster.node(0) as first,
            cluster.node(1) as second,
        ):
            await ready(client, first.process)
            machines.cut(1)
            assert await asyncio.gather(first.ended(), second.ended()) == [1, 1]
            for node, missing in ((first, 1), (second, 0)):
                assert (
                    f"node {missing} of 2 gave no sign of life for {LOST_S} s (rendezvous 10.77.0.1:7112)"
                    in node.log.read_text()
                )


async def test_a_node_that_never_comes_is_named_at_the_deadline_on_both_sides(tmp_path: Path) -> None:
    with Machines(2) as machines:
        cluster = Cluster(machines, tmp_path)
        async with cluster.node(0, "--join", "2") as first:
            assert await asyncio.wait_for(first.process.wait(), START_S) == 1
        assert "1 of 2 nodes joined at 10.77.0.1:7112 within 2 s: node 1 did not" in first.log.read_text()
        async with cluster.node(1, "--join", "2") as second:
            assert await asyncio.wait_for(second.process.wait(), START_S) == 1
        assert "node 1 of 2 did not join the first node at 10.77.0.1:7112 within 2 s" in second.log.read_text()
