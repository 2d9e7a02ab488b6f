"""Linear layers by oneDNN: the numbers of PyTorch's own layers, for any number of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import policy_step, ragged_batch, tiny_model

from trainer_svc.config import TrainerConfig
from trainer_svc.engine import loading
from trainer_svc.engine.cpu_kernels import LEAST_STEP, CpuLinear, rounded, use_onednn
from trainer_svc.engine.engine import TrainEngine

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch is built without oneDNN")


@given(st.integers(1, 1 << 24))
def test_few_numbers_of_tokens_are_left_and_few_rows_are_padding(tokens):
    assert 0 <= rounded(tokens) - tokens < max(LEAST_STEP, tokens / 16)
    assert rounded(rounded(tokens)) == rounded(tokens)


def test_an_octave_has_few_numbers_of_tokens():
    assert len({rounded(tokens) for tokens in range(1025, 2049)}) == 32


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("shape", [(5,), (2, 9), (0,)])
def test_output_and_gradients_are_those_of_pytorch(bias, frozen, shape):
    torch.manual_seed(0)
    plain = torch.nn.Linear(24, 40, bias=bias)
    ours = torch.nn.Sequential(torch.nn.Linear(24, 40, bias=bias))
    ours[0].load_state_dict(plain.state_dict())
    use_onednn(ours, leave_out=())
    assert type(ours[0]) is CpuLinear
    states = torch.randn(*shape, 24)
    results = []
    for layer in (plain, ours[0]):
        layer.weight.requires_grad_(not frozen)
        given = states.clone().requires_grad_()
        output = layer(given)
        (output * torch.arange(40.0)).sum().backward()
        results.append([output, given.grad, *(each.grad for each in layer.parameters() if each.requires_grad)])
    assert len(results[0]) == len(results[1])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_other_precisions_are_left_to_pytorch():
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8))
    use_onednn(layer, leave_out=())
    assert layer.double()(torch.ones(2, 8, dtype=torch.float64)).dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.float()(torch.ones(2, 8)).dtype == torch.bfloat16


def test_the_layers_on_top_are_left_out():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    use_onednn(model, leave_out=(model[1], None))
    assert [type(each) for each in model] == [CpuLinear, torch.nn.Linear]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("onednn"))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_is_that_of_pytorch_s_layers(model_dir, monkeypatch, checkpointing):
    gradients, logprobs, losses = [], [], []
    rows = ragged_batch(seed=6)
    for faster in (False, True):
        monkeypatch.setattr(loading, "onednn_is_faster", lambda faster=faster: faster)
        settings = {"lr": 1e-3, "device": "cpu", "grad_clip": 0.0, "gradient_checkpointing": checkpointing}
        trainer = TrainEngine(TrainerConfig(**settings), model_dir)
        used = any(type(module) is CpuLinear for module in trainer.network.model.modules())
        assert used == trainer.network.few_lengths == faster
        logprobs.append(torch.cat(trainer.forward(rows)))
        taken: list[torch.Tensor] = []
        trainer.optimizer.parts[0].register_step_pre_hook(
            lambda *_, trainer=trainer, taken=taken: taken.append(
                torch.cat([each.grad.flatten() for each in trainer.network.model.parameters()])
            )
        )
        losses.append(policy_step(trainer, rows).loss)
        gradients += taken
    torch.testing.assert_close(logprobs[1], logprobs[0], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 1e-5
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
