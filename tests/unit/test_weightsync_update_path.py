"""The way to a version: what follows from what."""

from __future__ import annotations

import pytest

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.receive.pull import PathError, PathStep, check_path, direct_step

V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)


def dense(version: Version) -> PathStep:
    return PathStep(pb.Manifest(version=version.to_proto(), kind=pb.VERSION_KIND_ANCHOR))


def delta(version: Version, base: Version) -> PathStep:
    return PathStep(pb.Manifest(version=version.to_proto(), base=base.to_proto(), kind=pb.VERSION_KIND_DELTA))


def adapter(version: Version) -> PathStep:
    return PathStep(pb.Manifest(version=version.to_proto(), kind=pb.VERSION_KIND_ADAPTER))


@pytest.mark.parametrize(
    ("steps", "held"),
    [
        ([dense(V3)], None),
        ([dense(V3)], V1),
        ([delta(V3, V2)], V2),
        ([delta(V2, V1), delta(V3, V2)], V1),
        ([dense(V1), delta(V3, V1)], None),
        ([adapter(V3)], None),
        ([adapter(V3)], V1),
    ],
)
def test_ways_that_lead_there(steps: list[PathStep], held: Version | None) -> None:
    check_path(steps, V3, held)


@pytest.mark.parametrize(
    ("steps", "held"),
    [
        ([], None),
        ([dense(V2)], None),
        ([delta(V3, V2)], None),
        ([delta(V3, V2)], V1),
        ([delta(V2, V1), delta(V3, V1)], V1),
        ([delta(V2, V1), dense(V3)], V1),
        ([adapter(V2), delta(V3, V2)], None),
        ([dense(V2), adapter(V3)], None),
    ],
)
def test_ways_that_do_not(steps: list[PathStep], held: Version | None) -> None:
    with pytest.raises(PathError):
        check_path(steps, V3, held)


def test_an_announced_delta_on_what_is_held_needs_no_other_way() -> None:
    assert direct_step(delta(V2, V1).manifest, V1) is not None
    assert direct_step(delta(V2, V1).manifest, None) is None
    assert direct_step(delta(V3, V2).manifest, V1) is None
    assert direct_step(dense(V3).manifest, None) is not None
