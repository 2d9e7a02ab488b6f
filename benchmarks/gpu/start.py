"""Whether a device can train at all: its raw speed, the first update, and the effect of bfloat16."""

from __future__ import annotations

import time
from functools import partial

import torch

from benchmarks.gpu.case import Case, rate
from benchmarks.gpu.parts import Figures, Measurements
from benchmarks.gpu.training import estimated, load, settings, train
from trainer_svc.engine.engine import TrainEngine


def start(case: Case) -> Measurements:
    """Measure the baseline for the other parts, and make the first update."""
    yield "first update", partial(_first_update, case)
    yield "bfloat16 against float32", partial(_precision, case)
    yield "matrix product", partial(_product, case)
    yield "copies", partial(_copies, case)


def _first_update(case: Case) -> Figures:
    begun = time.perf_counter()
    model = case.model()
    made = time.perf_counter()
    config = settings(case)
    trained = load(case, config)
    loaded = time.perf_counter()
    rows = case.rows(min(case.shape.lengths), 4)
    return {
        "make_model_s": round(made - begun, 2),
        "model_bytes": sum(each.stat().st_size for each in model.glob("*.safetensors")),
        "load_s": round(loaded - made, 2),
        "parameters": sum(each.numel() for each in trained.update.engine.network.model.parameters()),
        "loaded_bytes": trained.loaded_bytes,
        **train(case, trained, rows),
        **estimated(case, config),
    }


def _precision(case: Case) -> Figures:
    """Compare the log-probabilities of the same weights in both precisions."""
    rows = case.rows(min(case.shape.lengths), 2)
    found = [
        torch.cat(TrainEngine(settings(case, dtype=dtype), case.model()).forward(rows))
        for dtype in ("float32", "bfloat16")
    ]
    exact, narrow = (each[~each.isnan()].double() for each in found)
    gap = (narrow - exact).abs()
    return {
        "tokens": len(gap),
        "mean_nats": float(f"{float(gap.mean()):.3g}"),
        "largest_nats": float(f"{float(gap.max()):.3g}"),
        "bias_nats": float(f"{float((narrow - exact).mean()):.3g}"),
    }


def _product(case: Case) -> Figures:
    size = case.shape.matrix
    one, other = (torch.randn(size, size, device=case.device).to(torch.bfloat16) for _ in range(2))
    seconds = case.seconds(lambda: one @ other)
    return {"size": size, "tflops": rate(2 * size**3, seconds, 1e12)}


def _copies(case: Case) -> Figures:
    """Measure GB/s within the device (bytes read and written), and to and from the host with and without pinned memory."""
    count = case.shape.copied_bytes
    here = torch.empty(count, dtype=torch.uint8, device=case.device)
    there = torch.ones_like(here)
    pageable = torch.ones(count, dtype=torch.uint8)
    found = {"device_gb_s": rate(2 * count, case.seconds(lambda: here.copy_(there)), 1e9)}
    hosts = {"pageable": pageable}
    if case.device.type == "cuda":
        hosts["pinned"] = torch.ones(count, dtype=torch.uint8, pin_memory=True)
    for name, host in hosts.items():
        found[f"to_device_{name}_gb_s"] = rate(count, case.seconds(partial(here.copy_, host)), 1e9)
        found[f"to_host_{name}_gb_s"] = rate(count, case.seconds(partial(host.copy_, here)), 1e9)
    return {"bytes": count, "to_device_pinned_gb_s": None, "to_host_pinned_gb_s": None} | found
