"""What ranks decide together, from what each of them says."""

import grpc
import pytest

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.publish.push import from_wire, messages, to_wire
from weightsync.publisher import agree

V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)


def proposal(
    *,
    version: Version = V2,
    base: Version | None = V1,
    encoded: int = 10,
    dense: int = 1000,
    changed: float = 0.01,
    diff_s: int = 1,
) -> pb.Manifest:
    message = pb.Manifest(
        version=version.to_proto(),
        kind=pb.VERSION_KIND_ANCHOR if base is None else pb.VERSION_KIND_DELTA,
        base=None if base is None else base.to_proto(),
        size_bytes=encoded,
        dense_bytes=dense,
        push_timings=pb.PushTimings(changed_fraction=changed),
    )
    message.push_timings.diff.FromSeconds(diff_s)
    return message


def test_all_ranks_together_push_a_delta_that_is_at_most_half_a_copy() -> None:
    assert agree([proposal(encoded=900), proposal(encoded=100)]).delta
    assert not agree([proposal(encoded=901), proposal(encoded=100)]).delta


def test_one_rank_without_a_delta_makes_it_an_anchor() -> None:
    assert not agree([proposal(), proposal(base=None)]).delta
    assert not agree([proposal(), proposal(version=V2, base=Version(1, 0))]).delta, "bases differ"
    gave_up = proposal(encoded=0)
    gave_up.kind = pb.VERSION_KIND_ANCHOR
    decided = agree([proposal(), gave_up])
    assert (decided.delta, decided.compared) == (False, True)


def test_ranks_that_publish_different_versions_are_told() -> None:
    with pytest.raises(SluiceError, match=r"1\.2, 1\.3") as caught:
        agree([proposal(version=V2), proposal(version=V3)])
    assert caught.value.reason == "RANKS_DIFFER"


def test_costs_of_ranks_are_added_and_the_slowest_counts() -> None:
    decided = agree([proposal(dense=3000, changed=0.1, diff_s=2), proposal(dense=1000, changed=0.5, diff_s=7)])
    assert (decided.dense_bytes, decided.diff_s) == (4000, 7)
    assert decided.changed_fraction == pytest.approx(0.2)


def test_a_failure_travels_with_its_code_reason_and_facts() -> None:
    failure = SluiceError(grpc.StatusCode.DATA_LOSS, "DIGEST", "differs: push again", metadata={"stored_bytes": "5"})
    with pytest.raises(SluiceError) as caught:
        messages([b"", from_wire(*to_wire(failure))])
    told = caught.value
    assert (told.code, told.reason, told.metadata) == (failure.code, failure.reason, failure.metadata)
    assert told.message == "rank 1: differs: push again"
    assert from_wire(*to_wire(b"said")) == b"said"
