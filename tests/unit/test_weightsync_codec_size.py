"""What an encoded version weighs: close to its entropy where it is a training step, never more than dense."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.weight_deltas import entropy_bound_bytes
from weightsync.codec.slices import Encoding, apply, encode

COUNT = 1 << 20


def brain(values: np.ndarray) -> np.ndarray:
    """Bytes of the values rounded to BF16, to nearest even."""
    patterns = values.astype(np.float32).view(np.uint32)
    return ((patterns + 0x7FFF + (patterns >> 16 & 1)) >> 16).astype("<u2").view(np.uint8)


def adam_steps(learning_rate: float, steps: int) -> list[np.ndarray]:
    """Versions of a weight matrix under steps of about one learning rate each, scaled as Adam's are."""
    random = np.random.default_rng(0)
    weights = random.standard_normal(COUNT) * 0.02
    momentum = random.standard_normal(COUNT)
    versions = [brain(weights)]
    for _ in range(steps):
        momentum = 0.9 * momentum + np.sqrt(1 - 0.81) * random.standard_normal(COUNT)
        weights -= learning_rate * np.clip(momentum, -3, 3) / 2
        versions.append(brain(weights))
    return versions


@pytest.mark.parametrize("learning_rate", [3e-7, 1e-6, 3e-6])
def test_a_training_step_is_within_a_quarter_of_its_entropy(learning_rate: float) -> None:
    versions = adam_steps(learning_rate, 3)
    for base, new in itertools.pairwise(versions):
        encoded = encode(new, base, "BF16")
        assert encoded.encoding is Encoding.DELTA
        assert 0.001 < encoded.changed / COUNT < 0.05
        assert len(encoded.data) <= 1.25 * entropy_bound_bytes(new, base, "BF16")


def test_a_training_step_of_one_percent_is_fifty_times_smaller_than_dense() -> None:
    base, new = adam_steps(1e-6, 1)
    encoded = encode(new, base, "BF16")
    assert 0.005 < encoded.changed / COUNT < 0.02
    assert len(encoded.data) * 50 <= new.size


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.005, 0.03, 0.1, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_any_density_is_within_a_quarter_of_its_entropy(dtype: str, share: float) -> None:
    random = np.random.default_rng(1)
    base = random.integers(0, 2**15, COUNT).astype("<u4" if dtype == "F32" else "<u2")
    new = base.copy()
    where = np.flatnonzero(random.random(COUNT) < share)
    new[where] += random.choice(np.array([1, 1, 1, 1, -1, -1, -1, -1, 2, -3]), where.size).astype(base.dtype)
    encoded = encode(new.view(np.uint8), base.view(np.uint8), dtype)
    bound = entropy_bound_bytes(new.view(np.uint8), base.view(np.uint8), dtype)
    tables = 250
    assert len(encoded.data) <= 1.25 * bound + tables


def test_the_bound_is_the_entropy() -> None:
    base = np.zeros(8, "<u2")
    new = np.array([1, 1, 2, 2, 0, 0, 0, 0], "<u2")
    assert entropy_bound_bytes(new.view(np.uint8), base.view(np.uint8), "BF16") == pytest.approx((8 + 4) / 8)
    assert entropy_bound_bytes(base.view(np.uint8), base.view(np.uint8), "BF16") == 0
    assert entropy_bound_bytes(base.view(np.uint8)[:0], base.view(np.uint8)[:0], "BF16") == 0
    with pytest.raises(ValueError, match="BF16, F16, F32"):
        entropy_bound_bytes(base.view(np.uint8), base.view(np.uint8), "U16")


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("count", [1, 100, 1000, 2 * COUNT])
def test_what_has_nothing_in_common_stays_dense(dtype: str, count: int) -> None:
    random = np.random.default_rng(2)
    width = 4 if dtype == "F32" else 2
    base, new = random.integers(0, 256, (2, count * width), np.uint8)
    encoded = encode(new, base, dtype)
    assert encoded.encoding is Encoding.DENSE
    assert isinstance(encoded.data, memoryview)
    assert np.shares_memory(np.frombuffer(encoded.data, np.uint8), new)
    assert encoded.changed == np.count_nonzero((new != base).reshape(-1, width).any(axis=1))


def test_trained_weights_without_a_base_stay_dense() -> None:
    assert encode(adam_steps(1e-6, 0)[0], None, "BF16").encoding is Encoding.DENSE


@pytest.mark.parametrize("dtype", ["BOOL", "U8", "BF16", "F32", "I64"])
def test_what_compresses_well_is_compressed(dtype: str) -> None:
    base = np.random.default_rng(3).integers(0, 256, 8 * COUNT // 8, np.uint8)
    new = np.zeros_like(base)
    encoded = encode(new, base, dtype)
    assert encoded.encoding is Encoding.DENSE_ZSTD
    assert len(encoded.data) < new.size / 100
    apply(encoded.encoding, encoded.data, base, dtype)
    assert np.array_equal(base, new)


def test_a_delta_that_only_part_of_the_slice_promises_is_not_sent_if_it_is_larger() -> None:
    random = np.random.default_rng(4)
    base = random.integers(0, 2**16, 2 * COUNT).astype("<u2")
    new = random.integers(0, 2**16, 2 * COUNT).astype("<u2")
    new[: 1 << 18] = base[: 1 << 18]
    encoded = encode(new.view(np.uint8), base.view(np.uint8), "BF16")
    assert len(encoded.data) <= new.nbytes
    apply(encoded.encoding, encoded.data, base.view(np.uint8), "BF16")
    assert np.array_equal(base, new)
