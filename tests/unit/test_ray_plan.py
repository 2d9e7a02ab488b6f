"""A plan as bundles and actors of Ray: what may be lost alone, what stays together, and what does not fit."""

from __future__ import annotations

import pytest

from sluice.config import ConfigError, load_run
from sluice.config import allocated as set_sizes
from sluice.plan import Machines, Plan, make_plan
from sluice.plan.ray import Bundle, left_over, render, seat, unplaced


def plan(allocation: str, machines: Machines, *flags: str) -> Plan:
    run = set_sizes(load_run(flags).model_copy(update={"allocation_mode": allocation}))
    return make_plan(run, machines)


def test_each_replica_and_each_node_of_the_trainer_has_a_bundle_and_what_keeps_state_without_computing_shares_one() -> (
    None
):
    bundles, seats = seat(plan("vllm:d2t2+fsdp:d8", Machines.alike(nodes=3, devices=4, cores=8)))
    assert [(each.name, each.gpus, each.keeps_state) for each in bundles] == [
        ("control", 0, True),
        ("trainer", 4, True),
        ("trainer.1", 4, True),
        ("rollout-0", 2, False),
        ("rollout-1", 2, False),
    ]
    assert {each.name: bundles[each.bundle].name for each in seats} == {
        "weightsync": "control",
        "orchestrator": "control",
        "trainer": "trainer",
        "trainer.1": "trainer.1",
        "rollout-0": "rollout-0",
        "rollout-1": "rollout-1",
    }
    by_name = {each.name: each for each in seats}
    assert set(by_name["trainer"].ports) == {"grpc", "rendezvous"}
    assert by_name["trainer.1"].ports == {}
    for number, bundle in enumerate(bundles):
        assert sum(each.cpus for each in seats if each.bundle == number) <= bundle.cpus


def test_a_pinned_plan_names_the_node_of_what_keeps_state_alone() -> None:
    bundles, _ = seat(plan("vllm:d1+fsdp:d1", Machines.alike(nodes=2, devices=2, cores=2)), "10.0.0.7")
    assert {each.name: each.resources.get("node:10.0.0.7") for each in bundles} == {
        "control": 0.001,
        "trainer": 0.001,
        "rollout": None,
    }


def test_shared_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"each actor has GPUs of its own.*--allocation-mode vllm:d2\+fsdp:d2"):
        seat(plan("d2", Machines.alike(nodes=1, devices=2, cores=2)))


def test_gpus_of_the_cluster_that_a_run_does_not_take_are_named() -> None:
    cluster = Machines.alike(nodes=2, devices=2, cores=8)
    assert left_over(plan("vllm:d1+fsdp:d2", cluster)).startswith("1 of 4 GPUs of the cluster are left to other jobs")
    assert not left_over(plan("vllm:d2+fsdp:d2", cluster))


def test_what_does_not_fit_is_named_and_large_bundles_get_room_first() -> None:
    small, large = Bundle("rollout", 1, 1), Bundle("trainer", 4, 4)
    nodes = [{"CPU": 4.0, "GPU": 4.0}, {"CPU": 4.0, "GPU": 1.0}]
    assert unplaced([small, large], nodes) == []
    assert unplaced([small, small, large], nodes) == [small]
    assert unplaced([large], nodes[1:]) == [large]
    assert unplaced([Bundle("control", 1, node="10.0.0.7")], nodes) == [Bundle("control", 1, node="10.0.0.7")]


def test_the_text_shows_who_sits_where() -> None:
    text = render(plan("vllm:d1+fsdp:d2", Machines.alike(nodes=2, devices=2, cores=2)))
    assert text.splitlines()[0].split() == ["bundle", "0", "1", "CPU", "keeps", "state", "weightsync,", "orchestrator"]
    assert "2 CPU, 2 GPU" in text
