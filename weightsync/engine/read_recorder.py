"""Notes what a model's own loader reads of the tensors that it is given, and where it copies them.

Which slice of ``q_proj`` a tensor-parallel rank keeps, and where in its fused layer it lands, only the model's loader knows.
It is not asked and not guessed: it is run, and what it reads is written down.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.engine.selection import Ranges, normal, region_ranges, scaled, shifted

__all__ = ["Copy", "ReadRecorder", "Region"]


@dataclass(frozen=True, slots=True)
class Region:
    """Elements of a tensor: the first one counted from the tensor's first, extents, and elements from index to index."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The region of a contiguous tensor, as a view."""
        return tensor.as_strided(self.sizes, self.strides, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy from a watched tensor.

    Attributes:
        name: The tensor.
        source: What of it was copied.
        storage: Key of the storage that it was copied into, as `storage_key` gives it.
        target: Where in that storage.
    """

    name: str
    source: Region
    storage: int
    target: Region

    @staticmethod
    def storage_key(tensor: torch.Tensor) -> int:
        """What tells storages apart as long as they live; also those on the meta device, which have no address."""
        key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - no public name for it
        return key


class ReadRecorder(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """While active, notes every operation of this thread that reads a watched tensor; views alone read nothing.

    A read that it does not understand is noted as one of the whole tensor. It never raises: `failure` says what went wrong,
    and nothing that it noted may then be relied on.

    Attributes:
        copies: Copies in the order in which they were made.
        failure: Empty unless noting failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Copy] = []
        self.failure = ""
        self._begins: list[int] = []
        self._watched: list[tuple[str, torch.Tensor]] = []
        self._reads: dict[str, list[tuple[int, int]]] = {}

    def watch(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Give the tensors on, each watched from then on. They are held, so that no address is used again meanwhile."""
        for name, tensor in tensors:
            self._reads.setdefault(name, [])
            if tensor.numel():
                position = bisect_right(self._begins, tensor.data_ptr())
                self._begins.insert(position, tensor.data_ptr())
                self._watched.insert(position, (name, tensor))
            yield name, tensor

    def reads(self) -> dict[str, Ranges]:
        """Elements that were read of each watched tensor."""
        return {name: normal(ranges) for name, ranges in self._reads.items()}

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's own signature, as the next ones
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Note the operation, then run it."""
        try:
            if not func.is_view:
                self._note(func, args, kwargs or {})
        except Exception as error:  # noqa: BLE001 - it runs inside of another library's loader
            self.failure = f"{type(error).__name__}: {error}"
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:  # noqa: ANN401
        for argument in torch.utils._pytree.tree_leaves((args, dict(kwargs))):  # noqa: SLF001
            if not isinstance(argument, torch.Tensor) or argument.is_meta or not argument.numel():
                continue
            found = self._find(argument)
            if found is None:
                continue
            name, watched = found
            offset, size = argument.data_ptr() - watched.data_ptr(), watched.itemsize
            read = shifted(scaled(region_ranges(0, argument.shape, argument.stride()), argument.itemsize), offset)
            self._reads[name] += [(begin // size, -(-end // size)) for begin, end in read]
            if func is torch.ops.aten.copy_.default and argument is args[1] and argument.dtype == watched.dtype:
                into = args[0]
                source = Region(offset // size, tuple(argument.shape), argument.stride())
                target = Region(into.storage_offset(), tuple(into.shape), into.stride())
                self.copies.append(Copy(name, source, Copy.storage_key(into), target))

    def _find(self, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """The watched tensor that holds another one's first byte, and its name."""
        address = tensor.data_ptr()
        position = bisect_right(self._begins, address) - 1
        if position < 0:
            return None
        name, watched = self._watched[position]
        inside = address < self._begins[position] + watched.nbytes and tensor.device == watched.device
        return (name, watched) if inside else None
