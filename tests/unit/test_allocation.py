"""Allocation strings: what they mean, how they are printed, and what each wrong one is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config.allocation import Allocation, AllocationError, Dimensions, Side

D = Dimensions

sizes = st.integers(1, 64)
rollouts = st.builds(Side, st.builds(Dimensions, data=sizes, tensor=sizes), st.sampled_from(["", "vllm"])) | st.builds(
    Side, st.builds(Dimensions, data=sizes), st.just("transformers")
)
trainers = st.builds(
    Side, st.builds(Dimensions, data=sizes, tensor=sizes, context=sizes, pipeline=sizes), st.just("fsdp")
)
apart = (
    st.builds(Allocation, rollouts, trainers)
    | st.builds(Allocation, rollouts.filter(lambda side: side.backend), st.none())
    | st.builds(Allocation, st.none(), trainers)
)
shared = st.builds(Dimensions, data=sizes, tensor=sizes).map(
    lambda both: Allocation(Side(both), Side(both, "fsdp"), shared=True)
)


@given(apart | shared)
def test_a_printed_allocation_parses_to_the_same_allocation(allocation: Allocation) -> None:
    assert Allocation.parse(str(allocation)) == allocation


@given(st.permutations(["d3", "t2", "c4", "p5", "e1"]))
def test_dimensions_may_stand_in_any_order(letters: list[str]) -> None:
    read = Allocation.parse(f"fsdp:{''.join(letters)}")
    assert read.trainer == Side(D(data=3, tensor=2, context=4, pipeline=5), "fsdp")


@pytest.mark.parametrize(
    ("text", "meant", "canonical"),
    [
        ("vllm:d12t1+fsdp:d4t1p1", Allocation(Side(D(12), "vllm"), Side(D(4), "fsdp")), "vllm:d12+fsdp:d4"),
        (" vllm: t2d1 + d4 ", Allocation(Side(D(1, 2), "vllm"), Side(D(4), "fsdp")), "vllm:d1t2+fsdp:d4"),
        ("fsdp:d2c2+vllm:d1", Allocation(Side(D(1), "vllm"), Side(D(2, 1, 2), "fsdp")), "vllm:d1+fsdp:d2c2"),
        ("d4p1t2+d4p2t2", Allocation(Side(D(4, 2)), Side(D(4, 2, 1, 2), "fsdp")), "d4t2+fsdp:d4t2p2"),
        ("vllm.d2t2p1+d1t4p1", Allocation(Side(D(2, 2), "vllm"), Side(D(1, 4), "fsdp")), "vllm:d2t2+fsdp:d1t4"),
        ("d4p1t1", Allocation(Side(D(4)), Side(D(4), "fsdp"), shared=True), "d4"),
        ("vllm:t4", Allocation(Side(D(1, 4), "vllm")), "vllm:d1t4"),
        ("fsdp:d2t2", Allocation(None, Side(D(2, 2), "fsdp")), "fsdp:d2t2"),
    ],
)
def test_every_form_of_an_allocation_is_parsed(text: str, meant: Allocation, canonical: str) -> None:
    read = Allocation.parse(text)
    assert read == meant
    assert str(read) == canonical


def test_backends_per_role_mean_the_same_as_one_line() -> None:
    assert Allocation.parse_roles({"rollout": "vllm:d2t1", "actor": "fsdp:d4"}) == Allocation.parse("vllm:d2+fsdp:d4")
    assert Allocation.parse_roles({"trainer": "t2"}) == Allocation.parse("fsdp:t2")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sglang:d2+fsdp:d2", ("sglang", "vllm or transformers", "fsdp")),
        ("vllm:d2+megatron:d2p2", ("megatron", "vllm or transformers", "fsdp")),
        ("d4d2", ("'d4d2'", "d twice")),
        ("fsdp:d0", ("d0", "leave d out")),
        ("fsdp:d99999999999", ("give 1 to",)),
        ("fsdp:x2", ("dimension 'x'", "p (pipeline)")),
        ("fsdp:d2e2", ("expert", "leave e out")),
        ("vllm:d2p2+fsdp:d2", ("rollout", "pipeline", "p2")),
        ("d2c2", ("rollout", "context", "side of its own")),
        ("transformers:d1t2", ("transformers", "t1")),
        ("vllm:d2+vllm:d2", ("rollout two sides",)),
        ("d1+d1+d1", ("3 sides",)),
        ("vllm:", ("'vllm:'", "vllm:d2t1+fsdp:d4")),
        ("", ("''", "vllm:d2t1+fsdp:d4")),
        ("fsdp:(attn:d2|ffn:e2)", ("cannot read", "vllm:d2t1+fsdp:d4")),
        ("vllm:d²", ("cannot read",)),
    ],
)
def test_the_error_about_a_wrong_line_says_what_to_write(text: str, told: tuple[str, ...]) -> None:
    with pytest.raises(AllocationError) as error:
        Allocation.parse(text)
    for part in told:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("backends", "told"),
    [
        ({"critic": "fsdp:d2"}, "no role 'critic'"),
        ({"actor": "vllm:d2"}, "role actor cannot run on vllm"),
        ({"actor": "fsdp:d2", "trainer": "fsdp:d4"}, "two backends"),
    ],
)
def test_a_wrong_backend_of_a_role_is_refused(backends: dict[str, str], told: str) -> None:
    with pytest.raises(AllocationError, match=told):
        Allocation.parse_roles(backends)
