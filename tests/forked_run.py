"""The four services of a run, each forked from the process that has imported PyTorch, for tests that kill them one by one or are not
about how `sluice rl` starts them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path

from forked_programs import ENVIRONMENT, Forked
from rank_programs import RankPrograms

END_S = 60
"""Real seconds for a service to end after SIGTERM; only a broken one takes them."""


class ForkedRun:
    """Starts the services of one run.

    Args:
        programs: The process that forks them.
        directory: For their sockets and logs.
        settings: What each service gets as its command line; this adds where each is served: unix sockets, which no other test can take.
    """

    def __init__(self, programs: RankPrograms, directory: Path, settings: Sequence[str]) -> None:
        self._programs, self._directory, self._settings = programs, directory, settings
        names = ("weightsync", "trainer", "rollout", "orchestrator")
        self.addresses = {name: f"unix:{directory}/{name}.sock" for name in names}
        self.processes: dict[str, Forked] = {}

    async def start(self, name: str) -> None:
        words = self._words(name)
        rank = await asyncio.to_thread(
            self._programs.start, "sluice.cli.main", *words, environment=ENVIRONMENT, output=self._log(name)
        )
        self.processes[name] = Forked(rank)

    def _words(self, name: str) -> list[str]:
        """The command line of a service."""
        one = {peer: target for peer, target in self.addresses.items() if peer != "rollout"}
        peers = [f"--peers.{peer}={target}" for peer, target in one.items()]
        words = [name, *self._settings, *peers, f'--peers.rollout=["{self.addresses["rollout"]}"]']
        words.append(f"--server.host={self.addresses[name]}")
        if name == "rollout":
            words.append("--server.http-port=none")
        return words

    async def kill(self, name: str) -> None:
        self.processes[name].kill()
        await self.processes[name].wait()

    async def stop(self) -> None:
        """Send SIGTERM to the remaining processes, and kill those that do not end in time."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                if process.returncode is None:
                    process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    while process.returncode is None:  # noqa: ASYNC110 - a wait in a thread could not be given up
                        await asyncio.sleep(0.02)
            process.kill()
            await process.wait()

    def log(self, name: str) -> str:
        """Return the end of a service's log."""
        return self._log(name).read_text()[-4000:]

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"
