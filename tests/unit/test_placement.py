"""Which processes and devices the children of a run get."""

from __future__ import annotations

import pytest

from sluice.config import ConfigError, load_run
from sluice.config.decide import visible_devices
from sluice.supervise.plan import Place, assign_devices, replicas_of

EIGHT = tuple("01234567")


def placed(devices: tuple[str, ...], *flags: str, replicas: int = 2) -> dict[str, Place]:
    return dict(assign_devices(load_run(flags), [f"rollout-{number}" for number in range(replicas)], devices))


def test_each_child_gets_devices_of_its_own() -> None:
    assert placed(EIGHT, "--allocation-mode", "vllm:d2t2+fsdp:d2t2") == {
        "rollout-0": Place(2, ("0", "1")),
        "rollout-1": Place(2, ("2", "3")),
        "trainer": Place(4, ("4", "5", "6", "7")),
    }


def test_one_allocation_for_both_gives_both_the_same_devices() -> None:
    assert placed(("5", "GPU-a"), "--allocation-mode", "d2") == {
        "rollout-0": Place(1, ("5",)),
        "rollout-1": Place(1, ("GPU-a",)),
        "trainer": Place(2, ("5", "GPU-a")),
    }


def test_without_an_allocation_children_share_devices_only_if_there_are_too_few() -> None:
    assert placed(EIGHT)["trainer"] == Place(1, ("2",))
    assert placed(("0",)) == {"rollout-0": Place(1), "rollout-1": Place(1), "trainer": Place(1)}


def test_on_a_cpu_no_devices_are_assigned() -> None:
    assert placed((), "--trainer.backend", "fsdp:d3t2")["trainer"] == Place(6)
    flags = ("--trainer.device", "cpu", "--trainer.parallel.tp", "2")
    assert placed(("0", "1"), *flags) == {
        "rollout-0": Place(1, ("0",)),
        "rollout-1": Place(1, ("1",)),
        "trainer": Place(2),
    }


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--allocation-mode", "d2+d1"), "allocation d2\\+fsdp:d1 needs 3 devices, but there are 2"),
        (("--trainer.parallel.tp", "4"), "trainer.parallel needs 6 devices, but there are 2"),
    ],
)
def test_a_run_that_needs_more_devices_than_there_are_is_refused(flags: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        placed(("0", "1"), *flags)


def test_the_environment_limits_the_visible_devices() -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "3, 1,-1,2"}) == ("3", "1")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_the_allocation_sets_the_number_of_replicas() -> None:
    assert replicas_of(None, load_run(["--rollout.backend", "vllm:d3"])) == 3
    assert replicas_of(3, load_run(["--rollout.backend", "vllm:d3"])) == 3
    assert replicas_of(None, load_run(["--peers.rollout", "a:1,b:1"])) == 2
    with pytest.raises(ConfigError, match="has 3 replicas, but --replicas is 2"):
        replicas_of(2, load_run(["--rollout.backend", "vllm:d3"]))
    with pytest.raises(ConfigError, match=r"length of peers\.rollout is 2"):
        replicas_of(None, load_run(["--rollout.backend", "vllm:d3", "--peers.rollout", "a:1,b:1"]))
