"""A replica whose sampler records each token that it draws, and the reader of these records.

It is the real replica with the transformers engine. Only the function that draws tokens is changed: it also appends them to a file.
That is below requests, streams, the gateway and the journal, whose records are compared with the file.

    python -m benchmarks.capture.witness run DIRECTORY ARGUMENTS     `sluice ARGUMENTS` with such a sampler
    python -m benchmarks.capture.witness fork DIRECTORY ARGUMENTS    the same as `sluice.cli.fork_server`
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from sluice.cli import fork_server
from sluice.cli.main import main

if TYPE_CHECKING:
    from rollout_svc.engines.slots.sampling import Drawn, RowSampling

Ids: TypeAlias = NDArray[np.uint32]

_ROW, _DRAW = b"R", b"D"
_HEADER = struct.Struct("<cI")
_TOKEN = np.dtype([("row", "<u4"), ("token", "<u4"), ("logprob", "<f4")])


class Writer:
    """Appends the rows and draws of one process to a file. A row is one sample; each draw gives some rows a token."""

    def __init__(self, directory: Path, replica: str) -> None:
        self._directory, self._replica = directory, replica
        self._file: BinaryIO | None = None
        self._numbers: dict[int, tuple[RowSampling, int]] = {}  # holds the rows, so that no id is used twice

    def drawn(self, rows: Sequence[RowSampling], drawn: Drawn) -> None:
        """Write drawn tokens before anything else sees them."""
        parts: list[bytes] = []
        tokens = np.zeros(len(rows), _TOKEN)
        for index, row in enumerate(rows):
            known = self._numbers.get(id(row))
            if known is None:
                known = self._numbers[id(row)] = row, len(self._numbers)
                ids = np.array([*row.prompt_ids, *row.token_ids], "<u4")
                parts += [_HEADER.pack(_ROW, len(ids)), ids.tobytes()]
            tokens[index] = known[1], drawn.token_ids[index], drawn.logprobs[index]
        parts += [_HEADER.pack(_DRAW, len(rows)), tokens.tobytes()]
        if self._file is None:  # opened in the process that samples, not in the one that it was forked from
            self._file = (self._directory / f"{self._replica}.{os.getpid()}").open("ab", buffering=0)
        self._file.write(b"".join(parts))


@dataclass(slots=True)
class Row:
    """What one sample drew.

    Attributes:
        replica: Replica that drew it.
        prompt: Token ids of the prompt.
        tokens: Token ids that were drawn.
        logprobs: Their log-probabilities, float32.
    """

    replica: str
    prompt: Ids
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def read(directory: Path) -> list[Row]:
    """Return all rows of all processes. A kill may have cut off the end of a file. No token of that end reached a client."""
    rows: list[Row] = []
    for path in sorted(directory.iterdir()):
        own: list[Row] = []
        replica = path.name.partition(".")[0]
        for kind, content in _frames(path.read_bytes()):
            if kind == _ROW:
                own.append(Row(replica, np.frombuffer(content, "<u4")))
            else:
                for number, token, logprob in np.frombuffer(content, _TOKEN).tolist():
                    own[number].tokens.append(token)
                    own[number].logprobs.append(logprob)
        rows += own
    return rows


def _frames(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    while at + _HEADER.size <= len(content):
        kind, count = _HEADER.unpack_from(content, at)
        at += _HEADER.size
        size = count * (4 if kind == _ROW else _TOKEN.itemsize)
        if at + size > len(content):
            return
        yield kind, content[at : at + size]
        at += size


class Witness:
    """Looks up each drawn token by all tokens before it."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._known: dict[tuple[bytes, int, float], set[str]] = {}
        self.tokens = 0
        for row in rows:
            for key in keyed(row.prompt, row.tokens, row.logprobs):
                self._known.setdefault(key, set()).add(row.replica)
                self.tokens += 1

    def replicas(self, prompt: Ids, tokens: Sequence[int], logprobs: Sequence[float]) -> list[set[str]]:
        """Return for each token the replicas that drew it after these tokens with this log-probability; empty: none did."""
        return [self._known.get(key, set()) for key in keyed(prompt, tokens, logprobs)]


def keyed(prompt: Ids, tokens: Sequence[int], logprobs: Sequence[float]) -> Iterator[tuple[bytes, int, float]]:
    """Yield for each token the digest of all tokens before it, the token, and its log-probability as a float32."""
    digest = xxhash.xxh3_128(np.asarray(prompt, "<u4").tobytes())
    rounded = np.asarray(logprobs, "<f4").tolist()
    for token, logprob in zip(tokens, rounded, strict=True):
        yield digest.digest(), token, logprob
        digest.update(struct.pack("<I", token))


def install(directory: Path, replica: str) -> None:
    """Make the sampler of this process, and of its forked children, record its draws."""
    from rollout_svc.engines.slots import batch  # noqa: PLC0415 - brings torch
    from rollout_svc.engines.slots.sampling import draw  # noqa: PLC0415

    writer = Writer(directory, replica)

    def draw_and_write(logits: Any, rows: Sequence[RowSampling], shared: np.random.Generator) -> Drawn:  # noqa: ANN401 - a tensor
        drawn = draw(logits, rows, shared)
        writer.drawn(rows, drawn)
        return drawn

    vars(batch)["draw"] = draw_and_write


if __name__ == "__main__":
    mode, directory, *arguments = sys.argv[1:]
    install(Path(directory), arguments[arguments.index("--replica") + 1])
    sys.exit(fork_server.serve(arguments) if mode == "fork" else main(arguments))
