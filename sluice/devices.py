"""The CUDA devices of this machine, counted without loading PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

__all__ = ["VISIBLE", "visible_devices"]

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
