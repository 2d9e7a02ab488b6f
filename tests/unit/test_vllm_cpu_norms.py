"""vLLM's CPU kernels for RMS norms give the numbers of its own definition, and are taken where they fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json
import torch
from vllm import ir
from weightsync.vllm import cpu_norms
from weightsync.vllm_plugin import CPU_KERNELS

norm, add, load = ir.ops.rms_norm, ir.ops.fused_add_rms_norm, cpu_norms.current_platform.import_kernels
cpu_norms.current_platform.import_kernels = lambda: None
cpu_norms.register(CPU_KERNELS)
without = [op.impls.pop(CPU_KERNELS).supported for op in (norm, add)]
cpu_norms.current_platform.import_kernels = load
cpu_norms.register(CPU_KERNELS)
torch.manual_seed(0)
wide = torch.randn(5, 3, 96)
weight, residual = torch.randn(32), torch.randn(5, 3, 32)
found = {"without kernels": without}
heads = wide[..., 32:64]
norm.set_default([CPU_KERNELS, "native"])
add.set_default([CPU_KERNELS, "native"])
found["norm"] = float((norm(heads, weight, 1e-6) - norm.impls["native"].impl_fn(heads, weight, 1e-6)).abs().max())
x = heads.contiguous()
got, expected = add(x.clone(), residual.clone(), weight, 1e-6), add.impls["native"].impl_fn(x, residual, weight, 1e-6)
found["add"] = max(float((a - b).abs().max()) for a, b in zip(got, expected))
chosen = lambda op, *given: op.dispatch(*given).provider
found["fits"] = [chosen(norm, heads, weight, 1e-6), chosen(add, x, residual, weight, 1e-6)]
half = (x.bfloat16(), residual.bfloat16(), weight.bfloat16())
found["does not"] = [
    chosen(norm, half[0], half[2], 1e-6),
    chosen(norm, x[..., :24], weight[:24], 1e-6),
    chosen(norm, x, None, 1e-6),
    chosen(norm, x, weight, 1e-6, 16),
    chosen(add, heads, residual, weight, 1e-6),
    chosen(add, *half, 1e-6),
    chosen(add, x, half[1], weight, 1e-6),
]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_kernels_are_exact_and_taken_only_where_they_fit():
    environment = {"TORCHDYNAMO_DISABLE": "1", "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["norm"] < 1e-5
    assert found["add"] < 1e-5
    assert found["fits"] == ["sluice_cpu"] * 2
    assert found["does not"] == ["native"] * 7
    assert found["without kernels"] == [False, False]
