"""What differs between two versions, as vLLM's loader of checkpoint patches takes it. On the CPU, with a model of our own."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from weightsync.vllm.worker import Patch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def patches() -> ModuleType:
    """The module, which imports vLLM: that takes seconds, which a process that only collects tests need not spend."""
    import weightsync.vllm.worker

    return weightsync.vllm.worker


class Fused(torch.nn.Module):
    """A fused layer and a rank's half, loaded as vLLM's layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(8, 6, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        names = set()
        for name, tensor in weights:
            row = {"q": 0, "k": 4}[name]
            self.qk.data[row : row + 4].copy_(tensor.narrow(0, 4, 4))  # the second of two ranks
            names.add(name)
        return names


def version(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, 6, generator=random).bfloat16() for name in ("q", "k")}


def nudged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["q"][0, 0] += 1
    changed["q"][7, 5] = -changed["q"][7, 5]
    changed["k"][4, 0] = -0.0
    return changed


def patch_of(patches: ModuleType, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> Patch:
    patch = patches.Patch(["old"], ["new"])
    patch.begin(old.items(), new.items(), {})
    return patch


def test_a_patched_model_is_the_loaded_one_bit_for_bit(patches):
    old = version(0)
    old["k"][4, 0] = 0.0
    new = nudged(old)
    patched, loaded = Fused(), Fused()
    patched.load_weights(old.items())
    loaded.load_weights(new.items())
    patch = patch_of(patches, old, new)
    assert patch.leads(["old"], ["new"])
    patch.apply(patched, torch.device("cpu"))
    assert patched.qk.view(torch.int16).equal(loaded.qk.view(torch.int16))


def test_a_patch_leads_from_one_version_to_one_other(patches):
    patch = patch_of(patches, version(0), nudged(version(0)))
    assert patch.leads(["old"], ["new"])
    assert not patch.leads(["new"], ["new"])
    assert not patch.leads(None, ["new"])
    assert not patch.leads(["old"], ["newer"])


def test_only_what_differs_and_is_read_is_in_it(patches):
    old, new = version(0), nudged(version(0))
    (q, k) = patches.differences(old, new.items(), {})
    assert (q.indices.tolist(), k.indices.tolist()) == ([0, 47], [24])
    assert q.values.tolist() == [new["q"][0, 0].item(), new["q"][7, 5].item()]
    assert [patch.name for patch in patches.differences(old, new.items(), {"q": (), "k": ((0, 48),)})] == ["k"]
    assert not list(patches.differences(old, old.items(), {}))


@pytest.mark.parametrize(
    "change",
    [
        lambda new: new.update(v=torch.zeros(1)),
        lambda new: new.update(q=new["q"].float()),
        lambda new: new.update(q=new["q"][:4]),
        lambda new: new["q"][0].fill_(float("nan")),
        lambda new: new.update(q=torch.zeros(8, 6, dtype=torch.int16)),
    ],
)
def test_what_a_patch_cannot_express_is_an_error(patches, change):
    new = nudged(version(0))
    change(new)
    with pytest.raises(patches.PatchError):
        list(patches.differences(version(0), new.items(), {}))
    assert not patch_of(patches, version(0), new).leads(["old"], ["new"])


def test_much_that_changed_is_better_loaded_whole(patches):
    old = {"w": torch.zeros(1 << 23)}
    with pytest.raises(patches.PatchError, match="whole is cheaper"):
        list(patches.differences(old, {"w": torch.ones(1 << 23)}.items(), {}))
