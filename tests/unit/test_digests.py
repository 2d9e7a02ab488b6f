"""Digests by which the orchestrator and the trainer name the same trajectories."""

from __future__ import annotations

import xxhash

from sluice.digests import batch_digest, trajectory_digest
from sluice.v1 import tokens_pb2


def trajectory(**changed: object) -> tokens_pb2.Trajectory:
    fields = {"trajectory_id": "g1-0", "token_ids": [1, 2, 3], "mask_runs": [1, 2], "reward": 0.5, "advantages": [0.25]}
    return tokens_pb2.Trajectory(**{**fields, **changed})


def test_the_digest_of_a_trajectory_is_that_of_its_bytes_and_survives_the_wire() -> None:
    sent = trajectory()
    arrived = tokens_pb2.Trajectory.FromString(sent.SerializeToString())
    assert trajectory_digest(sent) == trajectory_digest(arrived) == xxhash.xxh3_128_digest(sent.SerializeToString())
    assert len(trajectory_digest(sent)) == 16


def test_a_change_of_any_field_changes_the_digest() -> None:
    others = [trajectory(token_ids=[1, 2, 4]), trajectory(reward=0.0), trajectory(advantages=[0.5])]
    assert len({trajectory_digest(each) for each in (trajectory(), *others)}) == 4


def test_the_digest_of_a_batch_depends_on_order_and_number() -> None:
    first, second = trajectory_digest(trajectory()), trajectory_digest(trajectory(trajectory_id="g1-1"))
    assert len({batch_digest(each) for each in ([first, second], [second, first], [first], [])}) == 4
    assert batch_digest(iter([first, second])) == xxhash.xxh3_128_hexdigest(first + second)
