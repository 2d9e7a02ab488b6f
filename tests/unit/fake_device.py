"""A fake device: its tensors compute on the CPU, and each time that the host would wait for a real device is counted.

Importing this registers the device in the whole process, so import it only in a separate process.

The host waits for a GPU when it reads a value, when the size of a result depends on values, and when it copies between the
device and unpinned memory, or copies without `non_blocking`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend(rename="counted", backend_module=_Module())

DEVICE = torch.device("counted", 0)

aten = torch.ops.aten
READS = {aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.item}
SIZED_BY_VALUES = {
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
COPIES = {aten._to_copy, aten.copy_, aten.copy}


class DeviceTensor(torch.Tensor):
    """A tensor that says it lies on the device.

    Args:
        held: Its values, on the CPU.
    """

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device=DEVICE, requires_grad=False
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError("use the tensor inside of `fake_device`")


class _Device(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.pinned: list[torch.Tensor] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        here = any(isinstance(each, DeviceTensor) for each in given)
        target = kwargs.get("device")
        there = torch.device(target).type == DEVICE.type if target is not None else here
        self._count(function.overloadpacket, args, kwargs, from_device=here, to_device=there)
        if not (here or there):
            return self._on_cpu(function, args, kwargs)
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        wrappers = {id(each.held): each for each in given if isinstance(each, DeviceTensor)}
        plain_args, plain_kwargs = tree_map(_held, (args, kwargs))
        made = self._run(function, plain_args, plain_kwargs)

        def wrap(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) in wrappers:
                return wrappers[id(value)]
            if any(value is each for each in given):
                return value  # changed in place, on the CPU
            return DeviceTensor(value) if there else value

        return tree_map(wrap, made)

    def _on_cpu(self, function, args, kwargs):
        if function is aten._pin_memory.default:
            self.pinned.append(args[0].clone())
            return self.pinned[-1]
        return function(*args, **kwargs)

    def _run(self, function, args, kwargs):
        packet = function.overloadpacket
        if packet is aten._fused_sdp_choice:
            query, key = args[:2]
            grouped = query.shape[1] != key.shape[1]
            return (SDPBackend.MATH if grouped else SDPBackend.EFFICIENT_ATTENTION).value  # as CUDA in float32
        if packet is aten._scaled_dot_product_efficient_attention:
            query, key, value, mask, _, dropout, causal = [*args, 0.0, False][:7]
            scale = kwargs.get("scale")
            output, sums = aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, dropout, causal, attn_mask=mask, scale=scale
            )
            return output, sums, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
        if packet is aten._scaled_dot_product_efficient_attention_backward:
            grad, query, key, value, mask, output, sums, _, _, dropout, _, causal = [*args, False][:12]
            found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, output, sums, dropout, causal, attn_mask=mask, scale=kwargs.get("scale")
            )
            return *found, None
        return function(*args, **kwargs)

    def _count(self, packet, args, kwargs, *, from_device: bool, to_device: bool) -> None:
        name = str(packet)
        if from_device and packet in READS | SIZED_BY_VALUES:
            self.waits[name] += 1
        if packet is aten.repeat_interleave and from_device and kwargs.get("output_size") is None:
            self.waits[name] += 1
        if packet in INDEXING and from_device:
            indices = [each for each in args[1] if each is not None]
            if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
                self.waits[f"{name} by a mask"] += 1
        if packet in COPIES:
            source = args[1] if packet is not aten._to_copy else args[0]
            target = args[0] if packet is not aten._to_copy else None
            into_device = isinstance(target, DeviceTensor) if target is not None else to_device
            out_of_device = isinstance(source, DeviceTensor)
            blocking = not (kwargs.get("non_blocking") or (packet is aten.copy_ and len(args) > 2 and args[2]))
            pinned = any(source is each or source._base is each for each in self.pinned)
            if out_of_device and not into_device:
                self.waits[f"{name} to the host"] += 1
            elif into_device and not out_of_device and (blocking or not pinned):
                self.waits[f"{name} to the device"] += 1


def _held(value: Any) -> Any:
    return value.held if isinstance(value, DeviceTensor) else value


def to_fake_device(module: torch.nn.Module) -> None:
    """Put a module's parameters and buffers on the device, in place; tied ones stay tied."""
    moved: dict[int, torch.nn.Parameter] = {}
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                if id(parameter) not in moved:
                    wrapped = DeviceTensor(parameter.detach())
                    moved[id(parameter)] = torch.nn.Parameter(wrapped, requires_grad=parameter.requires_grad)
                each._parameters[name] = moved[id(parameter)]
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = DeviceTensor(buffer)


@contextmanager
def fake_device() -> Iterator[Counter[str]]:
    """Compute with tensors of the device; what is given counts how often the host had to wait, by operation."""
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device=)` is then a tensor of the host, and its copy
    mode = _Device()
    with mode, patch.object(torch.Tensor, "pin_memory", lambda tensor, *_: aten._pin_memory(tensor)):
        yield mode.waits
