"""How many seconds of tokens one message of a stream has: the more streams there are, the more."""

from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.servicer import MAX_COALESCE_S
from sluice.sampling.config import ReplicasConfig
from sluice.sampling.policy import MOST_COALESCE_S, coalescing_s

SECONDS = st.floats(0.01, 1000.0)


def test_a_loaded_orchestrator_asks_for_fewer_messages() -> None:
    config = ReplicasConfig()
    assert [coalescing_s(config, streams) for streams in (0, 1, 688, 1000)] == [1.0] * 4
    assert coalescing_s(config, 1500) == 1.5
    assert coalescing_s(config, 3438) == coalescing_s(config, 10**6) == 2.5, "silence of 5 s is still a sign"
    patient = ReplicasConfig(progress_s=30.0)
    assert coalescing_s(patient, 3438) == 3.438
    assert coalescing_s(ReplicasConfig(coalesce_s=2.0), 1500) == 2.0
    assert [coalescing_s(config, streams, 0.02) for streams in (0, 64, 1500, 10**6)] == [0.02, 0.064, 1.5, 2.5]


@given(SECONDS, SECONDS, st.integers(0, 10**7), st.integers(0, 10**7))
def test_messages_are_bounded_until_silence_would_be_no_sign(progress_s, coalesce_s, streams, more) -> None:
    config = ReplicasConfig(
        progress_s=progress_s, coalesce_s=min(coalesce_s, progress_s / 2), poll_s=min(0.5, progress_s / 2)
    )
    every_s = coalescing_s(config, streams)
    assert min(config.coalesce_s, MOST_COALESCE_S) <= every_s <= min(progress_s / 2, MOST_COALESCE_S)
    assert streams <= 1000 * every_s + 1e-6 or every_s == min(progress_s / 2, MOST_COALESCE_S)
    assert coalescing_s(config, streams + more) >= every_s


def test_no_request_asks_for_more_than_a_replica_grants() -> None:
    assert MOST_COALESCE_S == MAX_COALESCE_S
