"""Which adapters stay and which go, on random histories and by example."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.config import LoraConfig, LoraLimits, RolloutConfig
from rollout_svc.engines.adapters import Adapter, AdaptersFullError, AdapterSlots, UnknownAdapterError
from rollout_svc.engines.base import EngineError
from rollout_svc.engines.slots import build
from rollout_svc.engines.vllm import check_names, lora_arguments
from sluice.config import CommonConfig, ConfigError
from sluice.versions import BASE, Version
from weightsync.staged import StagedAdapter


def staged(number: int, base: Version = BASE) -> StagedAdapter:
    return StagedAdapter(Version(1, number), base, Path(f"v{number}"), {}, digest=str(number))


def load(slots: AdapterSlots, number: int) -> tuple[Adapter, list[int]]:
    """Load a version as an engine does. Return it, and the numbers of the versions that were removed for it."""
    found = slots.find(staged(number))
    if found is not None:
        return found, []
    gone = slots.leaving()
    for each in gone:
        slots.remove(each)
    return slots.add(staged(number)), [each.version.number for each in gone]


def test_idle_versions_go_before_one_in_use():
    slots = AdapterSlots(3)
    slots.current, _ = load(slots, 1)
    slots.current.requests = 1
    for number in (2, 3):
        slots.current, gone = load(slots, number)
        assert gone == []
    slots.current, gone = load(slots, 4)
    assert gone == [2]
    slots.current.requests = 1
    slots.current, gone = load(slots, 5)
    assert gone == [3]


def test_the_oldest_in_use_goes_when_nothing_is_idle():
    slots = AdapterSlots(2)
    for number, expected in ((1, []), (2, []), (3, [1]), (4, [2])):
        slots.current, gone = load(slots, number)
        slots.current.requests = 1
        assert gone == expected


def test_what_has_a_name_stays():
    slots = AdapterSlots(3)
    slots.named["eval"], _ = load(slots, 1)
    for number in range(2, 9):
        slots.current, gone = load(slots, number)
        slots.current.requests = 1
        assert 1 not in gone
    assert slots.choose("eval").version == Version(1, 1)
    assert slots.choose("").version == Version(1, 8)
    with pytest.raises(UnknownAdapterError, match=r"no adapter 'other' is loaded \(loaded: eval\)"):
        slots.choose("other")


def test_names_leave_two_places_to_the_policy():
    slots = AdapterSlots(3)
    slots.check_name("a")
    slots.named["a"], _ = load(slots, 1)
    slots.check_name("a")
    with pytest.raises(AdaptersFullError, match=r"raise rollout\.lora\.max_loras"):
        slots.check_name("b")


def test_the_same_number_is_never_given_twice():
    slots = AdapterSlots(2)
    labels = set()
    for number in (1, 2, 3, 1, 2):
        slots.current, _ = load(slots, number)
        labels.add(slots.current.label)
    assert len(labels) == 5


HISTORY = st.lists(
    st.one_of(
        st.tuples(st.just("policy"), st.integers(1, 9)),
        st.tuples(st.just("name"), st.integers(1, 9)),
        st.tuples(st.just("unname"), st.integers(0, 3)),
        st.tuples(st.just("begin"), st.integers(0, 3)),
        st.tuples(st.just("end"), st.integers(0, 3)),
    ),
    max_size=60,
)


@given(HISTORY, st.integers(2, 5))
def test_there_is_always_room_for_the_policy_and_what_is_wanted_stays(history, capacity):
    slots = AdapterSlots(capacity)
    for action, number in history:
        if action == "policy":
            slots.current, _ = load(slots, number)
        elif action == "name":
            name = f"name{number}"
            try:
                slots.check_name(name)
            except AdaptersFullError:
                assert len(slots.named) == capacity - 2
                continue
            slots.named[name], _ = load(slots, number)
        elif action == "unname" and slots.named:
            del slots.named[sorted(slots.named)[number % len(slots.named)]]
        elif action in {"begin", "end"} and slots.loaded:
            adapter = slots.loaded[number % len(slots.loaded)]
            adapter.requests = max(0, adapter.requests + (1 if action == "begin" else -1))
        assert len(slots.loaded) <= capacity
        assert slots.current is None or slots.current in slots.loaded
        assert all(each in slots.loaded for each in slots.named.values())


def test_adapters_of_other_weights_are_found():
    slots = AdapterSlots(3)
    slots.add(staged(1))
    other = slots.add(staged(2, Version(1, 1)))
    assert slots.of_other_bases(BASE) == [other]


def test_vllm_keeps_a_place_empty_on_the_cpu():
    limits = LoraLimits(max_loras=4, max_rank=20)
    assert lora_arguments(limits, on_cpu=True) == {
        "enable_lora": True,
        "max_loras": 5,
        "max_cpu_loras": 5,
        "max_lora_rank": 32,
    }
    assert lora_arguments(limits, on_cpu=False)["max_loras"] == 4
    with pytest.raises(EngineError, match="vLLM goes up to 512"):
        lora_arguments(LoraLimits(4, 513), on_cpu=True)


def test_adapters_are_switched_on_in_one_place():
    with pytest.raises(EngineError, match=r"comes from the table \[rollout\.lora\]"):
        check_names({"enable_lora": True}, {"enable_lora"})


@pytest.mark.parametrize(("max_loras", "most"), [(None, 5), (7, 7)])
def test_as_many_versions_fit_as_staleness_allows(max_loras, most):
    config = RolloutConfig(engine="transformers", lora=LoraConfig(enabled=True, max_loras=max_loras))
    assert build(CommonConfig(model="model", max_staleness=3), config).lora_limits == LoraLimits(most, 16)


def test_fewer_places_than_staleness_needs_are_a_wrong_setting():
    config = RolloutConfig(engine="transformers", lora=LoraConfig(enabled=True, max_loras=4))
    with pytest.raises(ConfigError, match="max_staleness = 3 needs 5"):
        build(CommonConfig(model="model", max_staleness=3), config)
