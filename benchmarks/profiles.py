"""CPU time of running processes by library, sampled with py-spy if it is installed."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from sluice.config import ConfigError

PER_SECOND = 200
SHARES = 14
"""Most parts that are shown."""


@contextlib.asynccontextmanager
async def profiled(processes: Mapping[str, int], seconds: float) -> AsyncIterator[dict[str, dict[str, float]]]:
    """Sample processes for a while from the beginning of the block. The mapping has their shares when the block has ended.

    Args:
        processes: Process ids by name. If empty, nothing is sampled.
        seconds: How long to sample.

    Raises:
        ConfigError: if py-spy is not installed.
    """
    shares: dict[str, dict[str, float]] = {}
    if not processes:
        yield shares
        return
    found = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if found is None:
        raise ConfigError("a profile needs py-spy: pip install py-spy")
    with tempfile.TemporaryDirectory(prefix="sluice-profile-") as scratch:
        sampling = {
            name: await asyncio.create_subprocess_exec(
                found, "record", "--format=raw", f"--rate={PER_SECOND}", f"--duration={int(seconds)}", "--nonblocking",
                f"--pid={pid}", f"--output={scratch}/{name}",
                stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            )
            for name, pid in processes.items()
        }  # fmt: skip
        yield shares
        for name, child in sampling.items():
            await child.wait()
            shares[name] = by_part(await asyncio.to_thread(Path(scratch, name).read_text))


def by_part(stacks: str) -> dict[str, float]:
    """Return the share of samples in each of our functions and in each library, the largest first.

    Args:
        stacks: One stack a line, `outermost;...;innermost COUNT`, each frame as `function (file:line)`.
    """
    counts: Counter[str] = Counter()
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        counts[_part(stack.split(";"))] += int(count)
    total = sum(counts.values()) or 1
    return {part: round(count / total, 3) for part, count in counts.most_common(SHARES)}


def _part(frames: list[str]) -> str:
    """Return the innermost of our own modules in a stack with its function, else the library of the innermost frame."""
    for frame in reversed(frames):
        if frame.startswith("run_service"):  # the event loop itself
            break
        function, _, place = frame.rpartition(" (")
        file = place.rpartition(":")[0]
        if file.startswith(("gateway_svc/", "orchestrator_svc/", "sluice/")) and "/v1/" not in file:
            return f"{file}:{function}"
    place = frames[-1].rpartition(" (")[2]
    return place.partition("/")[0].partition(":")[0].rstrip(")")
