"""Transfers of weights: from the trainer's device to the host and compared there, and from a staged file to an engine's device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from safetensors.torch import load_file

from benchmarks.gpu.case import Case, rate
from benchmarks.gpu.parts import Figures, Measurements, NotRunError
from benchmarks.gpu.training import load as load_update
from benchmarks.gpu.training import settings
from benchmarks.pauses import stage_files
from rollout_svc.engines.model_files import read_base_model
from rollout_svc.engines.slots.model import InPlaceWeights, SlotModel
from weightsync.publish.shards import HOST_DIRECTORY, KeptCopy, local_slices

CHECKED = 8
"""Tensors that are compared bit for bit after a load."""


def publish(case: Case) -> Measurements:
    """Measure the trainer's work on weights after a step: copy them to the host, compare, hash, keep."""
    trained = load_update(case, settings(case))
    engine = trained.update.engine
    dtype = torch.bfloat16 if case.device.type == "cuda" else torch.float32  # as `publish_dtype = auto`
    rows = case.rows(min(case.shape.lengths), 2)
    held = local_slices(engine.live_tensors(), dtype)
    kept = KeptCopy("rank0", [described for described, _ in held])

    def renew(copy: KeptCopy, *, compare: bool) -> Figures:
        diff = copy.renew(held, compare=compare, most_bytes=copy.dense_bytes // 2)
        return {
            "seconds": round(diff.seconds, 4),
            "dense_bytes": copy.dense_bytes,
            "gb_s": rate(copy.dense_bytes, diff.seconds, 1e9),
            "changed_fraction": diff.changed_fraction,
            "encoded_bytes": diff.encoded_bytes if diff.compared else None,
        }

    def step() -> Figures:
        skipped = trained.update.apply(rows).metrics.skipped
        return {"step_skipped": skipped, "learning_rate": trained.config.lr, **renew(kept, compare=True)}

    def shared() -> Figures:
        if not HOST_DIRECTORY.is_dir():
            raise NotRunError(f"there is no {HOST_DIRECTORY}")
        copy = KeptCopy("rank0", [described for described, _ in held], HOST_DIRECTORY)
        try:
            return {"in_shared_memory": copy.local is not None, **renew(copy, compare=False)}
        finally:
            copy.close()

    yield "first version", partial(renew, kept, compare=False)
    yield "nothing changed", partial(renew, kept, compare=True)
    yield "after a step", step
    yield "after another step", step
    yield "in shared memory", shared
    yield "copy to the host alone", partial(_to_host, case, {each.name: tensor for each, tensor in held}, dtype)


def _to_host(case: Case, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Figures:
    """Measure ways to copy the same bytes: converted by the copy as the trainer does, converted on the device first, into pinned memory."""
    count = sum(each.numel() for each in tensors.values()) * dtype.itemsize
    seconds = {
        "converted_by_copy": case.seconds(lambda: [each.detach().to("cpu", dtype) for each in tensors.values()]),
        "converted_on_device": case.seconds(lambda: [each.detach().to(dtype).cpu() for each in tensors.values()]),
    }
    if case.device.type == "cuda":
        pinned = [torch.empty(each.shape, dtype=dtype, pin_memory=True) for each in tensors.values()]

        def copy() -> None:
            for place, tensor in zip(pinned, tensors.values(), strict=True):
                place.copy_(tensor.detach().to(dtype), non_blocking=True)

        seconds["into_pinned"] = case.seconds(copy)
    found = {f"{name}_gb_s": rate(count, taken, 1e9) for name, taken in seconds.items()}
    return {"bytes": count, "into_pinned_gb_s": None} | found


def load(case: Case) -> Measurements:
    """Measure an engine's pause: a staged file is loaded into the live model. Also measure the needs of a second model on the device."""
    model = SlotModel(str(case.model()), case.device.type, "auto", None)
    weights = InPlaceWeights(model.module, model.known_of(read_base_model(model.directory)))
    [staged] = stage_files(case.model(), case.directory, 1)
    tensors = load_file(staged.path)
    live = model.module.state_dict()
    buffers = {name: torch.empty_like(live[name]) for name in tensors}
    count = sum(each.nbytes for each in buffers.values())

    def from_file() -> Figures:
        seconds = case.seconds(lambda: weights.copy([staged.path]))
        names = weights.names()[:: max(1, len(tensors) // CHECKED)]
        wrong = [name for name in names if weights.differs(name, [staged.path])]
        return {"bytes": count, "seconds": round(seconds, 4), "gb_s": rate(count, seconds, 1e9), "wrong": wrong}

    def from_pinned() -> Figures:
        if case.device.type != "cuda":
            raise NotRunError("pinned memory needs CUDA")
        pinned = {name: each.pin_memory() for name, each in tensors.items()}

        def copy() -> None:
            for name, buffer in buffers.items():
                buffer.copy_(pinned[name], non_blocking=True)

        seconds = case.seconds(copy)
        return {"bytes": count, "seconds": round(seconds, 4), "gb_s": rate(count, seconds, 1e9)}

    def swap() -> Figures:
        for name, buffer in buffers.items():
            buffer.copy_(tensors[name])
        seconds = case.seconds(lambda: [live[name].copy_(buffer) for name, buffer in buffers.items()])
        wrong = [name for name in weights.names() if weights.differs(name, [staged.path])]
        return {"bytes": count, "seconds": round(seconds, 6), "gb_s": rate(2 * count, seconds, 1e9), "wrong": wrong}

    yield "from the staged file", from_file
    yield "from pinned memory to a second copy", from_pinned
    yield "from the second copy", swap
