"""The benchmark of long sequences on a device, at a size that takes seconds."""

from __future__ import annotations

import pytest
import torch

from benchmarks.trainer_ours import QWEN3_06B, measure_lengths

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and a build of PyTorch for it"),
]


def test_it_reports_speed_and_memory_of_each_length():
    sizes = QWEN3_06B | {"num_hidden_layers": 2, "vocab_size": 1024}
    found = measure_lengths(sizes, [512, 2048], rounds=2, batch_tokens=4096)
    for each in found.values():
        assert each["tokens_per_s"] > 0
        assert each["peak_memory_gib"] > 0
        assert not each["activation_checkpointing"]
    assert found.keys() == {"512", "2048"}
