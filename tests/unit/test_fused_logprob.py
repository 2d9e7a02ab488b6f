"""Log-probabilities, entropies and all gradients of the fused output layer, against plain autograd in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vocabulary_ranks import largest_difference

from trainer_svc.engine.logprob import fused_logprobs

TOKENS, WIDTH, VOCABULARY = 13, 16, 53
"""Sizes that no tile divides evenly."""

RAGGED = (1, 70, 300, 1000)
"""Logits alive at once, from one cell a tile to all kept."""


def inputs(dtype: torch.dtype = torch.float64, tokens: int = TOKENS, *, bias: bool = True) -> dict[str, torch.Tensor]:
    """An output layer, states, targets and temperatures; leaves that learn."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return {
        "hidden": normal(tokens, WIDTH),
        "weight": normal(VOCABULARY, WIDTH),
        "bias": normal(VOCABULARY) if bias else None,
        "targets": torch.randint(VOCABULARY, (tokens,), generator=generator),
        "temperatures": torch.rand(tokens, generator=generator).double() + 0.5,
    }


def plain(hidden, weight, targets, temperatures, *, bias=None, entropy="none", **_):
    """The same by full logits and log_softmax."""
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logprobs = torch.log_softmax(logits / temperatures.to(logits.dtype).unsqueeze(1), -1)
    spread = logprobs if entropy == "train" else logprobs.detach()
    return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), -(spread.exp() * spread).sum(1)


def results(function, given, **options) -> dict[str, torch.Tensor]:
    """Return values, and the gradients for some gradient of a loss, which is zero for a third of the tokens."""
    generator = torch.Generator().manual_seed(8)
    arriving = torch.randn(2, len(given["targets"]), generator=generator, dtype=torch.float64)
    arriving[:, ::3] = 0
    logprobs, spread = function(**given, **options)
    loss = (logprobs * arriving[0]).sum()
    if options.get("entropy") == "train":
        loss = loss + (spread * arriving[1]).sum()
    learning = {name: each for name, each in given.items() if each is not None and each.requires_grad}
    found = dict(zip(learning, torch.autograd.grad(loss, list(learning.values())), strict=True))
    return found | {"logprobs": logprobs.detach()} | ({} if spread is None else {"entropy": spread.detach()})


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(float((found[name].double() - expected[name]).abs().max()) for name in found)


@pytest.mark.parametrize("entropy", ["none", "measure", "train"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cells", RAGGED)
def test_values_and_gradients_are_those_of_plain_autograd_however_it_is_cut(cells, bias, entropy):
    given = inputs(bias=bias)
    found = results(fused_logprobs, given, entropy=entropy, cells=cells)
    assert ("entropy" in found) is (entropy != "none")
    assert difference(found, results(plain, given, entropy=entropy)) < 1e-12


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_narrow_inputs_are_computed_wide(dtype, tolerance):
    given = inputs(dtype)
    exact = {name: each.double() if each.is_floating_point() else each for name, each in given.items()}
    expected = results(
        plain, {n: e.detach().requires_grad_(given[n].requires_grad) for n, e in exact.items()}, entropy="train"
    )
    found = results(fused_logprobs, given, entropy="train", cells=300)
    assert difference({name: found[name] for name in ("logprobs", "entropy")}, expected) < 2e-5
    assert found["logprobs"].dtype == torch.float32
    gradients = {name: found[name] / expected[name].abs().max() for name in ("hidden", "weight", "bias")}
    assert all(found[name].dtype == dtype for name in gradients)
    scaled = {name: expected[name] / expected[name].abs().max() for name in gradients}
    assert difference(gradients, scaled) < tolerance


@pytest.mark.parametrize("entropy", ["none", "train"])
def test_numerical_differentiation_agrees(entropy):
    given = inputs(tokens=2)

    def value(hidden, weight, bias):
        fixed = {name: given[name] for name in ("targets", "temperatures")}
        logprobs, spread = fused_logprobs(hidden, weight, bias=bias, entropy=entropy, cells=100, **fixed)
        return logprobs if spread is None else (logprobs, spread)

    learning = (
        given["hidden"],
        given["weight"][:9].detach().requires_grad_(),
        given["bias"][:9].detach().requires_grad_(),
    )
    given["targets"] %= 9
    assert torch.autograd.gradcheck(value, learning)


class Sizes(TorchDispatchMode):
    """Records the largest result of any operation, in elements, by its precision."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor):
                self.largest = max(self.largest, each.untyped_storage().nbytes() // each.element_size())
        return result


@pytest.mark.parametrize("entropy", ["none", "train"])
def test_no_tensor_is_larger_than_the_weight_or_the_cells_allowed(entropy):
    tokens, cells = 600, 2000
    given = inputs(torch.float32, tokens, bias=False)
    assert tokens * VOCABULARY > 10 * cells
    with Sizes() as sizes:
        results(plain, given, entropy=entropy)
    assert sizes.largest >= tokens * VOCABULARY
    with Sizes() as sizes:
        results(fused_logprobs, given, entropy=entropy, cells=cells)
    assert sizes.largest <= max(cells, tokens * WIDTH)


def test_what_is_kept_for_the_backward_pass_stays_within_the_cells_and_is_nothing_without_one():
    given = inputs(torch.float32, 600, bias=False)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    own = sum(each.numel() for each in given.values() if each is not None) + 2 * 600
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        fused_logprobs(**given, cells=8000)
        assert 0 < sum(each.numel() for each in saved) - own <= 8000
        saved.clear()
        with torch.no_grad():
            fused_logprobs(**given, cells=8000)
        assert not saved


def test_the_backward_pass_may_run_twice():
    given = inputs()
    logprobs, _ = fused_logprobs(**given, cells=600)
    first = torch.autograd.grad(logprobs.sum(), given["hidden"], retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(logprobs.sum(), given["hidden"])[0])


def test_no_tokens_give_empty_results_and_gradients_of_zero():
    given = inputs(tokens=0)
    logprobs, spread = fused_logprobs(**given, entropy="train")
    assert logprobs.shape == spread.shape == (0,)
    gradients = torch.autograd.grad(logprobs.sum() + spread.sum(), [given["hidden"], given["weight"], given["bias"]])
    assert all(not bool(each.any()) for each in gradients)


def test_tokens_without_a_gradient_cost_no_work_in_the_backward_pass():
    given = inputs()
    logprobs, _ = fused_logprobs(**given, cells=600)
    before = given["weight"].detach().clone()
    (gradient,) = torch.autograd.grad(logprobs[5:6].sum(), given["weight"])
    alone = {name: each[5:6] if name in ("hidden", "targets", "temperatures") else each for name, each in given.items()}
    (expected,) = torch.autograd.grad(plain(**alone)[0].sum(), given["weight"])
    assert float((gradient - expected).abs().max()) < 1e-12
    assert torch.equal(before, given["weight"])


def test_far_apart_logits_stay_finite_and_a_target_outside_the_vocabulary_is_impossible():
    hidden = torch.tensor([[1.0], [1.0], [1.0]])
    weight = torch.tensor([[-1e4], [0.0], [1e4], [3.0]])
    logprobs, spread = fused_logprobs(
        hidden, weight, torch.tensor([2, 0, 4]), torch.ones(3), entropy="measure", cells=2
    )
    assert logprobs.tolist() == [0.0, -2e4, -math.inf]
    assert spread.tolist() == [0.0, 0.0, 0.0]


def test_arguments_that_do_not_fit_are_refused():
    given = inputs()
    with pytest.raises(ValueError, match="do not fit"):
        fused_logprobs(**(given | {"targets": given["targets"][1:]}))
    with pytest.raises(ValueError, match="at least 1"):
        fused_logprobs(**given, cells=0)


@pytest.mark.slow
def test_a_vocabulary_that_is_cut_over_2_and_3_processes_gives_the_same(tmp_path, rank_programs):
    assert largest_difference(tmp_path, rank_programs) < 1e-12
