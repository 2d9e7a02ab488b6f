"""Which parts of a version one worker's model reads, and where it puts them. Found by running its loader on a model without memory.

Only the loader knows which slice of ``q_proj`` a tensor-parallel rank keeps, and where in its fused layer that slice goes. So
the model is built a second time on the meta device, where a copy moves nothing. Its loader gets tensors that are mapped but
not read, and a dispatch mode records the loader's reads and copies. That takes as long as building the modules, so it is done
once per worker, and never while the engine is paused.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs (begin, end) of a tensor's elements in the order in which safetensors lays them out; sorted, disjoint, not touching."""

MOST_RANGES = 4096
"""Most ranges that describe one read of a tensor. If a read has more pieces, neighbouring pieces are joined."""


_PREFIX = "sluice_plan"
"""Keeps the layers of the model without memory apart in vLLM's registry of layers."""


@dataclass(frozen=True, slots=True)
class Region:
    """A strided part of a tensor: its first element (counted from the tensor's first), its extents, and its strides in elements."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the region of a contiguous tensor, as a view."""
        return tensor.as_strided(self.sizes, self.strides, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a part of a watched tensor into `target`, a part of the storage whose `storage_key` is `storage`."""

    name: str
    source: Region
    storage: int
    target: Region

    @staticmethod
    def storage_key(tensor: torch.Tensor) -> int:
        """Return a key of a storage that is unique while it lives, also on the meta device, where there are no addresses."""
        key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - no public name for it
        return key


class ReadRecorder(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """While active, notes every operation of this thread that reads a watched tensor; views alone read nothing.

    An operation that it does not understand is noted as a read of the whole tensor. It never raises: if noting fails, `failure`
    says why, and all notes are unreliable.

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
        """Yield the tensors and watch each from then on. References to them are kept, so that their addresses are not reused."""
        for name, tensor in tensors:
            self._reads.setdefault(name, [])
            if tensor.numel():
                position = bisect_right(self._begins, tensor.data_ptr())
                self._begins.insert(position, tensor.data_ptr())
                self._watched.insert(position, (name, tensor))
            yield name, tensor

    def reads(self) -> dict[str, Ranges]:
        """Return, for each watched tensor, the elements that were read."""
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
            octets = (
                (offset + begin * argument.itemsize, offset + end * argument.itemsize)
                for begin, end in region_ranges(0, argument.shape, argument.stride())
            )
            self._reads[name] += [(begin // size, -(-end // size)) for begin, end in octets]
            if func is torch.ops.aten.copy_.default and argument is args[1] and argument.dtype == watched.dtype:
                into = args[0]
                source = Region(offset // size, tuple(argument.shape), argument.stride())
                target = Region(into.storage_offset(), tuple(into.shape), into.stride())
                self.copies.append(Copy(name, source, Copy.storage_key(into), target))

    def _find(self, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Return the name of the watched tensor whose memory holds the first byte of `tensor`, and that watched tensor."""
        address = tensor.data_ptr()
        position = bisect_right(self._begins, address) - 1
        if position < 0:
            return None
        name, watched = self._watched[position]
        inside = address < self._begins[position] + watched.nbytes and tensor.device == watched.device
        return (name, watched) if inside else None


def normal(ranges: Iterable[tuple[int, int]], gap: int = 0) -> Ranges:
    """Sort and join ranges.

    Args:
        ranges: In any order, possibly overlapping or empty.
        gap: Ranges that are at most this far apart become one range, which includes the elements between them.
    """
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if begin >= end:
            continue
        if joined and begin <= joined[-1][1] + gap:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return tuple(joined)


def region_ranges(offset: int, sizes: Sequence[int], strides: Sequence[int]) -> Ranges:
    """Return the elements of a strided region, such as the columns of one tensor-parallel rank.

    Args:
        offset: First element, counted from the tensor's first.
        sizes: Extent per dimension.
        strides: Elements from one index to the next, per dimension; not negative.

    Returns:
        At most `MOST_RANGES` ranges. If there were more, neighbours are joined, including the elements between them.
    """
    if math.prod(sizes) == 0:
        return ()
    run = 1  # elements from the first to the last of what is described so far
    outer: list[tuple[int, int]] = []  # (size, stride) of the dimensions outside of it, innermost first
    for stride, size in sorted((stride, size) for stride, size in zip(strides, sizes, strict=True) if size > 1):
        if outer or stride > run:
            outer.append((size, stride))
        else:
            run += (size - 1) * stride
    while math.prod(size for size, _ in outer) > MOST_RANGES:
        size, stride = outer.pop(0)
        run += (size - 1) * stride
    begins = [offset]
    for size, stride in outer:
        begins = [begin + index * stride for begin in begins for index in range(size)]
    return normal((begin, begin + run) for begin in begins)


class PlanError(Exception):
    """The model's loader could not be observed."""


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """A part of a checkpoint's tensor (`name`, `source`), and its place in a tensor of the model (`parameter`, `target`)."""

    name: str
    source: Region
    parameter: str
    target: Region


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How a worker's model loads the tensors of a version.

    Attributes:
        reads: Ranges of elements that it reads, by tensor; every tensor has an entry.
        copies: Copies straight into its parameters or buffers. If several modules share a parameter, there is an entry for each
            of them.
        shapes: Shape and type of each of these parameters as the loader sees them.
    """

    reads: Mapping[str, Ranges]
    copies: tuple[PlannedCopy, ...]
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@torch.no_grad()  # type: ignore[untyped-decorator]
def make_plan(vllm_config: Any, tensors: Iterator[tuple[str, torch.Tensor]]) -> LoadPlan:  # noqa: ANN401 - VllmConfig
    """Run the model's loader and record its reads and copies.

    Args:
        vllm_config: The engine's configuration, in a worker that has loaded its model.
        tensors: A version's tensors in mapped files. Their bytes are not read.

    Raises:
        PlanError: if the loader's reads could not be recorded.
        Exception: whatever the model raises when it is built on the meta device or given these tensors.
    """
    from vllm.model_executor.layers import rotary_embedding  # noqa: PLC0415 - the rest of this module needs no vLLM
    from vllm.model_executor.model_loader.utils import initialize_model  # noqa: PLC0415
    from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: PLC0415

    layers = vllm_config.compilation_config.static_forward_context
    known, rotary = set(layers), dict(rotary_embedding._ROPE_DICT)  # noqa: SLF001 - embeddings shared between models
    recorder = ReadRecorder()
    try:
        with set_default_torch_dtype(vllm_config.model_config.dtype), torch.device("meta"):
            model = initialize_model(vllm_config=vllm_config, prefix=_PREFIX)
        with recorder:
            model.load_weights(recorder.watch(tensors))
    finally:  # remove the model from vLLM's registries, because its layers must never run
        for name in set(layers) - known:
            del layers[name]
        rotary_embedding._ROPE_DICT.clear()  # noqa: SLF001
        rotary_embedding._ROPE_DICT.update(rotary)  # noqa: SLF001
    if recorder.failure:
        raise PlanError(recorder.failure)
    owners: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in _tensors_of(model):
        owners.setdefault(Copy.storage_key(tensor), []).append((name, tensor))
    copies = [
        PlannedCopy(copy.name, copy.source, parameter, _within(tensor, copy.target))
        for copy in recorder.copies
        for parameter, tensor in owners.get(copy.storage, ())
    ]
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in _tensors_of(model)}
    return LoadPlan(recorder.reads(), tuple(copies), {copy.parameter: shapes[copy.parameter] for copy in copies})


def _tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _within(tensor: torch.Tensor, target: Region) -> Region:
    return Region(target.offset - tensor.storage_offset(), target.sizes, target.strides)
