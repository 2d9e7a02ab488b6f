"""Segments in shared memory that vLLM leaves behind: a replica removes its own, not those of one that starts at the same time."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_svc.engines.vllm.processes import SHARED_MEMORY, mapped_segments

REPLICA = """
import mmap, subprocess, sys
worker = '''
import mmap, sys
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
print("mapped", flush=True)
sys.stdin.read()
'''
subprocess.run([sys.executable, "-c", worker, sys.argv[1]], check=True)
"""


@contextmanager
def replica(segment: Path) -> Iterator[int]:
    """A process whose worker, a process of its own, has mapped a segment."""
    process = subprocess.Popen(
        [sys.executable, "-c", REPLICA, str(segment)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"mapped\n"
        yield process.pid
    finally:
        process.communicate(timeout=30)
        segment.unlink(missing_ok=True)


def test_replicas_that_start_together_claim_their_own_segments() -> None:
    one, other = (SHARED_MEMORY / f"vllm_dist_{uuid.uuid4().hex}" for _ in range(2))
    before = frozenset(SHARED_MEMORY.glob("vllm_dist_*"))
    with replica(one) as first, replica(other) as second:
        assert {one, other} <= frozenset(SHARED_MEMORY.glob("vllm_dist_*")) - before  # what each sees appear
        assert mapped_segments(first) - before == {one}
        assert mapped_segments(second) - before == {other}
