"""All engines start what the plan says: the same parts, as often, with the same devices, command, memory, seconds and checks."""

from __future__ import annotations

import argparse
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sluice.cli.slurm import job_of
from sluice.config import RunConfig, load_run
from sluice.plan import Part, Plan, make_plan
from sluice.plan.compose import MARGIN_S, document
from sluice.plan.helm import values
from sluice.plan.local import child_specs
from sluice.plan.machines import machines_of
from sluice.plan.plan import COMPUTES, Ready
from sluice.plan.ray import seat
from sluice.plan.slurm import groups_of, script

EXAMPLE = ("@", str(Path(__file__).parents[2] / "examples/reverse_text/rl.toml"), "--model", "a/b")

PLANS = {
    "a laptop": ((), "0"),
    "one GPU": (("--rollout.device", "cpu", "--rollout.engine", "transformers"), "1xRTX4090-24"),
    "one node of eight": (("--allocation-mode", "vllm:d4t1+fsdp:d4"), "8xH100-80"),
    "four nodes": (("--allocation-mode", "vllm:d12t1+fsdp:d4"), "4x4xH100-80"),
    "a trainer of two nodes": (("--allocation-mode", "vllm:d8t2+fsdp:d16"), "4x8xH100-80"),
}


ON_ONE_MACHINE = ("a laptop", "one GPU", "one node of eight")
"""For engines that start one machine's processes."""


def planned(name: str) -> tuple[RunConfig, list[str], Plan]:
    """The settings, the words that name them, and their plan with a gateway."""
    flags, machines = PLANS[name]
    words = [*EXAMPLE, *flags]
    run = load_run(words)
    return run, words, make_plan(run, machines_of(machines, 8), extra={"gateway": 2}, start_s=321)


def counted(plan: Plan) -> dict[str, int]:
    """How often each part is started: once for each node of each instance."""
    return {part.name: part.count * part.nodes for part in plan.parts}


def serves(part: Part, command: list[str] | tuple[str, ...]) -> bool:
    """Return whether a command runs the service of a part, with the number of processes that the plan says."""
    words = list(command)
    if not part.ranked:
        return part.service in words and "ranks" not in words
    processes = words[words.index("--processes") + 1]
    return part.service in words and int(processes) == part.processes


@pytest.mark.parametrize("name", ON_ONE_MACHINE)
def test_compose(name: str) -> None:
    _, words, plan = planned(name)
    services: dict[str, Any] = document(plan, words)["services"]
    found: Counter[str] = Counter()
    for part in plan.parts:
        for instance in part.instances if part.devices else (part.name,):
            service = services.pop(instance)
            found[part.name] += service.get("deploy", {}).get("replicas", 1)
            assert serves(part, service["command"])
            assert service["mem_limit"].endswith(f":-{part.memory_gib}g}}")
            assert service["stop_grace_period"] == f"{part.drain_s + MARGIN_S:g}s"
            assert service["healthcheck"]["start_period"] == f"{part.start_s:g}s"
            assert ("--ready" in service["healthcheck"]["test"]) == (part.ready is Ready.HAS_ITS_PEERS)
            devices = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [{}])
            given = [int(each) for each in devices[0].get("device_ids", ())]
            assert given == (list(plan.place(instance).devices) if part.devices else [])
            needed = {each for other in part.waits_for for each in instances(plan, other)} | {"prepare"}
            assert service["depends_on"].keys() == needed
    assert found == counted(plan)
    assert services.keys() == {"prepare"}


def instances(plan: Plan, name: str) -> tuple[str, ...]:
    """The names of a part's services of compose."""
    part = plan.part(name)
    return part.instances if part.devices else (name,)


@pytest.mark.parametrize("name", PLANS)
def test_helm(name: str) -> None:
    run, words, plan = planned(name)
    given = values(plan, run, words)
    for part in plan.parts:
        found = given.pop(part.name)
        replicas = found.get("nodes", 1) if part.name == "trainer" else found.get("replicas", 1)
        assert replicas == part.count * part.nodes
        assert found["port"] == part.port()
        assert found["drainSeconds"] == part.drain_s
        assert found["startSeconds"] == part.start_s
        assert found["resources"]["limits"]["memory"] == f"{part.memory_gib}Gi"
        assert found.get("gpus", 0) == part.devices
        if part.name == "trainer":
            assert found["processes"] == part.processes
    assert given.keys() == {"run"}


@pytest.mark.parametrize("name", PLANS)
def test_slurm(name: str) -> None:
    run, _, plan = planned(name)
    groups = groups_of(plan)
    assert sum(group.nodes for group in groups) == plan.machines.nodes
    options = argparse.Namespace(
        replicas=None, threads=None, max_restarts=10, start_deadline=321.0, extra=[("gateway", 2)]
    )
    text = script(plan, groups, job_of(run, plan, options))
    listed = re.findall(r"^#   node (\d+): (.*)$", text, re.MULTILINE)
    found: Counter[str] = Counter()
    for node, line in listed:
        for place, shown in zip(plan.on_node(int(node)), re.split(r", (?=[a-z])", line), strict=True):
            assert shown.split()[0] == (f"{place.instance}.{place.rank}" if place.rank else place.instance)
            assert all(str(port.number) in shown for port in place.ports)
            assert shown.endswith(f"on devices {','.join(map(str, place.devices))}") == bool(place.devices)
            found[place.part] += 1
    assert found == counted(plan)
    for group in groups:
        used = [
            device + 1
            for node in range(group.nodes)
            for place in plan.on_node(group.first + node)
            for device in place.devices
        ]
        assert group.devices == max(used, default=0)
    command = shlex.split(text.splitlines()[-1])
    assert {"--start-deadline=321.0", "--with=gateway=2"} <= set(command), "the job makes the same plan"


@pytest.mark.parametrize("name", PLANS)
def test_ray(name: str) -> None:
    _, _, plan = planned(name)
    bundles, seats = seat(plan)
    assert Counter(each.part.name for each in seats) == counted(plan)
    for each in seats:
        assert each.part == plan.part(each.part.name)
        assert bundles[each.bundle].gpus == each.part.devices
        assert each.ports.keys() == {port.name for port in plan.place(each.instance, each.rank).ports}


@pytest.mark.parametrize("name", ON_ONE_MACHINE)
def test_the_children_of_sluice_rl(name: str, tmp_path: Path) -> None:
    run, _, plan = planned(name)
    names = [f"gpu-{number}" for number in range(plan.machines.devices[0])]
    specs = {
        spec.name: spec
        for spec in child_specs(plan, run, tmp_path / "c.toml", tmp_path, devices=names, own_threads=True)
    }
    assert specs.keys() == {place.instance for place in plan.places}
    for part in plan.parts:
        for instance in part.instances:
            spec, place = specs[instance], plan.place(instance)
            assert serves(part, spec.argv)
            assert (spec.drain_s, spec.start_s, spec.ends_run) == (part.drain_s, part.start_s, part.ends_run)
            assert spec.address.endswith(f":{place.port()}")
            shown = spec.environment.get("CUDA_VISIBLE_DEVICES")
            assert shown == (",".join(names[number] for number in place.devices) or None)
            if part.name in COMPUTES:
                assert spec.environment["OMP_NUM_THREADS"] == str(part.threads)
