"""The trainer on a CUDA device: its kernels against the stock ones, and a whole run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from sluice.cli.init_model import ModelShape, init_model
from trainer_svc.batch.rows import TrainingRow, count_loss_tokens, pack
from trainer_svc.compute_config import ComputeConfig
from trainer_svc.engine.attention_choice import LARGEST_ERROR, choose_attention, kernel_error
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.logprob import fused_logprobs, logprobs_of_logits
from trainer_svc.engine.network import HeadShape, Packing, packed_attention

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and a build of PyTorch for it"),
]

needs_bfloat16 = pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)),
    reason="needs a CUDA device of compute capability 8.0 or more, which has bfloat16 flash kernels",
)

SHAPE = ModelShape(hidden=256, layers=2, heads=4, kv_heads=2, head_dim=64, mlp=512, max_positions=512)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("device") / "model"
    init_model(directory, SHAPE, seed=3)
    return directory


def rows(seed: int = 0) -> list[TrainingRow]:
    """Four groups of three samples that share their prompt."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for group in range(4):
        prompt = torch.randint(100, (5 + 9 * group,), generator=generator)
        for _ in range(3):
            count = int(torch.randint(1, 70, (), generator=generator))
            ids = torch.cat([prompt, torch.randint(100, (count,), generator=generator)])
            mask = torch.arange(len(ids)) >= len(prompt)
            nothing = torch.zeros(len(ids))
            made.append(TrainingRow(ids, mask, nothing, nothing, group_id=str(group), temperature=0.8))
    return made


def train(engine: TrainEngine, steps: int = 1) -> tuple[float, float]:
    """Loss and gradient norm of the last step on the negative log-likelihood."""
    for _ in range(steps):
        metrics = engine.train_batch(
            rows(), lambda outputs, _: (-outputs.logprobs.sum(), {}), count_loss_tokens, entropy="measure"
        )
    return metrics.loss, metrics.grad_norm


@needs_bfloat16
@pytest.mark.parametrize(
    "shape",
    [HeadShape(16, 16, 64, 64), HeadShape(32, 8, 128, 128), HeadShape(64, 8, 128, 128), HeadShape(16, 16, 192, 128)],
    ids=str,
)
def test_both_kernels_are_right_with_heads_of_any_number_and_size(shape):
    errors = [kernel_error(shape, CUDA, torch.bfloat16, varlen=varlen) for varlen in (True, False)]
    assert max(errors) < 0.5 * LARGEST_ERROR, errors


@needs_bfloat16
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("fold", [True, False])
def test_varlen_attention_equals_the_blocks_in_values_and_gradients(window, fold):
    assert choose_attention("varlen", CUDA, torch.bfloat16, [HeadShape(8, 2, 64, 64)]).varlen
    generator = torch.Generator(CUDA).manual_seed(0)
    for batch in pack(rows(), 150, fold=fold):
        plan = batch.to(CUDA).attention
        given = [
            torch.randn(1, heads, batch.packed_tokens, 64, generator=generator, device=CUDA, dtype=torch.bfloat16)
            for heads in (8, 2, 2)
        ]
        found = []
        for varlen in (False, True):
            inputs = [each.clone().requires_grad_() for each in given]
            output, _ = packed_attention(
                torch.nn.Identity(), *inputs, None, packing=Packing(plan, varlen=varlen), sliding_window=window
            )
            found.append([output, *torch.autograd.grad(output.float().square().sum(), inputs)])
        for stock, ours in zip(*found, strict=True):
            scale = float(stock.float().abs().max())
            assert float((ours.float() - stock.float()).abs().max()) < 0.02 * scale


@needs_bfloat16
def test_log_probabilities_in_bfloat16_stay_near_those_in_float32(model):
    exact = TrainEngine(ComputeConfig(device="cuda", dtype="float32"), model)
    narrow = TrainEngine(ComputeConfig(device="cuda", dtype="bfloat16", attention="varlen"), model)
    assert narrow.network.varlen
    assert not exact.network.varlen
    gaps = [
        (ours - expected).abs().nan_to_num()
        for ours, expected in zip(narrow.forward(rows()), exact.forward(rows()), strict=True)
    ]
    assert float(torch.cat(gaps).max()) < 0.05
    assert float(torch.cat(gaps).mean()) < 0.005
    loss, norm = train(exact)
    assert train(narrow) == (pytest.approx(loss, rel=5e-3), pytest.approx(norm, rel=5e-2))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)])
def test_the_fused_layer_agrees_with_float64_and_holds_a_part_of_the_logits(dtype):
    tokens, width, vocabulary, cells = 300, 128, 20_000, 1 << 18
    generator = torch.Generator(CUDA).manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, device=CUDA).to(dtype)
    weight = (torch.randn(vocabulary, width, generator=generator, device=CUDA) / width**0.5).to(dtype)
    targets = torch.randint(vocabulary, (tokens,), generator=generator, device=CUDA)
    temperatures = torch.full((tokens,), 0.7, device=CUDA)
    learning = [hidden.requires_grad_(), weight.requires_grad_()]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = fused_logprobs(hidden, weight, targets, temperatures, entropy="train", cells=cells)
    gradients = torch.autograd.grad(torch.stack(found).sum(), learning)
    assert torch.cuda.max_memory_allocated() - before < 4 * tokens * vocabulary // 2 + weight.nbytes
    doubled = [each.detach().double().requires_grad_() for each in learning]
    expected = logprobs_of_logits(doubled[0] @ doubled[1].T, targets, temperatures, entropy="train")
    exact = torch.autograd.grad(torch.stack(expected).sum(), doubled)
    for ours, reference in zip(found, expected, strict=True):
        assert float((ours - reference).abs().max()) < 1e-4
    for ours, reference in zip(gradients, exact, strict=True):
        limit = 1e-4 if dtype == torch.float32 else 2e-2
        assert float((ours.double() - reference).abs().max()) < limit * float(reference.abs().max())


def test_compiled_layers_train_like_eager_ones(model):
    eager = TrainEngine(ComputeConfig(device="cuda", dtype="float32"), model)
    compiled = TrainEngine(ComputeConfig(device="cuda", dtype="float32", compile=True), model)
    loss, norm = train(eager, steps=2)
    assert train(compiled, steps=2) == (pytest.approx(loss, rel=1e-4), pytest.approx(norm, rel=1e-4))


@pytest.mark.skipif(
    not entry_points(group="sluice.services"), reason="needs the package installed, which names the services"
)
@pytest.mark.timeout(600)
def test_a_whole_run_with_the_transformers_engine_on_one_device(tmp_path):
    sluice = (sys.executable, "-m", "sluice.cli.main")
    model = tmp_path / "model"
    subprocess.run([*sluice, "init-model", str(model), "--layers", "2"], check=True, capture_output=True, cwd=ROOT)
    flags = ("--model", str(model), "--output-dir", str(tmp_path / "runs"), "--run", "device")
    small = ("--orchestrator.batch-size", "2", "--orchestrator.group-size", "4", "--orchestrator.max-steps", "5")
    placed = ("--rollout.engine", "transformers", "--rollout.device", "cuda", "--trainer.device", "cuda")
    run = subprocess.run(
        [*sluice, "rl", "@", "examples/reverse_text/rl.toml", *flags, *small, *placed],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads((tmp_path / "runs" / "device" / "report.json").read_text())
    assert report["steps"] == 5
