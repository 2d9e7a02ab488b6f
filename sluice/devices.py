"""The CUDA devices of this machine, counted without loading PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

__all__ = ["VISIBLE", "smallest_memory", "visible_devices"]

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Variable that names the devices a process may use."""

_NVML = "libnvidia-ml.so.1"
"""NVIDIA's management library, which comes with the driver."""


def visible_devices(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the devices that a process with this environment may use, as in `CUDA_VISIBLE_DEVICES`."""
    given = environment.get(VISIBLE)
    if given is None:
        return tuple(map(str, range(_installed())))
    names = [name.strip() for name in given.split(",")]
    # CUDA ignores everything after the first invalid name.
    end = next((place for place, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names))
    return tuple(names[:end])


def _installed() -> int:
    """Return the number of devices that the driver knows; 0 without a driver."""
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        return 0
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return 0
    nvml.nvmlShutdown()
    return count.value


class _MemoryInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def smallest_memory() -> int | None:
    """Bytes of memory of the smallest device that the driver knows; None where there is no device or no driver."""
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    sizes = []
    for number in range(_installed_now(nvml)):
        device, info = ctypes.c_void_p(), _MemoryInfo()
        found = nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)) == 0
        if found and nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(info)) == 0:
            sizes.append(int(info.total))
    nvml.nvmlShutdown()
    return min(sizes, default=None)


def _installed_now(nvml: ctypes.CDLL) -> int:
    count = ctypes.c_uint()
    return 0 if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) else count.value
