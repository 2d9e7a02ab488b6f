"""The plan of a run: what is placed where, for every shape of machines; and what does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.console import Console

from sluice.cli.plan import as_json, print_tables
from sluice.config import ConfigError, RunConfig, load_run
from sluice.config import allocated as set_sizes
from sluice.plan import Machine, Machines, Place, Plan, Purpose, make_plan
from sluice.plan.compose import document

FOUR_NODES = Machines.alike(nodes=4, devices=4, cores=32)
AGENTS = ("--agents.agent", "a.py:Agent", "--agents.workers", "2")


@cache
def settings(*flags: str) -> RunConfig:
    return load_run(flags)


def allocated(text: str, *flags: str) -> RunConfig:
    """The settings with an allocation; they are loaded once."""
    return set_sizes(settings(*flags).model_copy(update={"allocation_mode": text}))


def devices_of(plan: Plan) -> list[tuple[int, int]]:
    return [(place.node, device) for place in plan.places for device in place.devices]


def spots(plan: Plan, part: str) -> list[tuple[int, tuple[int, ...]]]:
    return [(place.node, place.devices) for place in plan.places_of(part)]


@st.composite
def runs(draw: st.DrawFn) -> tuple[RunConfig, Machines, dict[str, int]]:
    """A run of any shape, and machines that may be too small for it."""
    replicas, tensor, ranks = (draw(st.integers(1, most)) for most in (12, 4, 12))
    shared = draw(st.booleans())
    text = f"d{replicas}" if shared else f"vllm:d{replicas}t{tensor}+fsdp:d{ranks}"
    each = st.builds(Machine, st.integers(0, 8), st.integers(1, 16))
    machines = Machines(tuple(draw(st.lists(each, min_size=1, max_size=4))))
    extra = draw(st.fixed_dictionaries({}, optional={"gateway": st.integers(1, 3), "relay": st.integers(1, 3)}))
    return allocated(text, *draw(st.sampled_from([(), AGENTS]))), machines, extra


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize(
    ("sizes", "flags", "told"),
    [
        ({"num_experts": 128}, ("--allocation-mode=vllm:d4+fsdp:d4",), "trains in one process only"),
        ({"num_experts": 128}, ("--trainer.lora.rank=8", "--tuner.lora.rank=8"), "128 experts of a layer are stacked"),
        ({}, ("--trainer.parallel.cp=3", "--tuner.parallel.cp=3"), "does not divide the 32 attention heads"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_for_machines_that_are_not_here(
    tmp_path: Path, purpose: Purpose, sizes: dict[str, int], flags: tuple[str, ...], told: str
) -> None:
    if purpose is Purpose.TRAINING_API and "allocation" in flags[0]:
        flags = ("--tuner.parallel.dp-shard=4",)
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 32} | sizes))
    run = load_run(("--model", str(tmp_path), *flags))
    with pytest.raises(ConfigError, match=told):
        make_plan(run, FOUR_NODES, purpose=purpose)
    make_plan(load_run(("--model", str(tmp_path), "--tuner.lora.target-modules=q_proj")), FOUR_NODES, purpose=purpose)


@given(runs())
def test_every_plan_places_everything_once_on_devices_and_ports_of_its_own(
    asked: tuple[RunConfig, Machines, dict[str, int]],
) -> None:
    run, machines, extra = asked
    try:
        plan = make_plan(run, machines, extra=extra)
    except ConfigError:
        assume(False)
        raise
    used = devices_of(plan)
    assert plan.shares_devices or len(set(used)) == len(used)
    for node in range(machines.nodes):
        ports = [port.number for place in plan.on_node(node) for port in place.ports]
        assert len(set(ports)) == len(ports)
    for part in plan.parts:
        places = plan.places_of(part.name)
        assert [(each.instance, each.rank) for each in places] == [
            (name, rank) for name in part.instances for rank in range(part.nodes)
        ]
        for place in places:
            assert 0 <= place.node < machines.nodes
            assert len(place.devices) == part.devices
            assert all(0 <= number < machines.devices[place.node] for number in place.devices)
        assert len({(each.instance, each.node) for each in places}) == len(places)
    trainer, rollout = plan.part("trainer"), plan.part("rollout")
    assert trainer.nodes * trainer.processes == run.section("trainer").processes()
    assert rollout.processes == run.section("rollout").processes()
    assert rollout.nodes == 1


@given(runs())
def test_the_order_of_the_parts_respects_what_they_wait_for(asked: tuple[RunConfig, Machines, dict[str, int]]) -> None:
    """It is also a proof that no part waits for itself through others."""
    run, machines, extra = asked
    plan = make_plan(run, Machines(tuple(replace(each, devices=0) for each in machines.each)), extra=extra)
    started: set[str] = set()
    for part in plan.parts:
        assert set(part.waits_for) <= started
        started.add(part.name)
    assert [place.part for place in plan.places] == list(
        chain.from_iterable([part.name] * part.count * part.nodes for part in plan.parts)
    )


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=4).filter(any),
    st.integers(1, 8),
    st.integers(1, 24),
    st.integers(1, 12),
)
def test_a_run_is_refused_only_if_no_placement_exists(
    devices: list[int], tensor: int, replicas: int, ranks: int
) -> None:
    """The trainer may use equal shares of any number of the last machines; the rest is for replicas."""

    def fits() -> bool:
        for span in range(1, len(devices) + 1):
            share = ranks // span if ranks % span == 0 else 1 << 30
            left = [has - share * (node >= len(devices) - span) for node, has in enumerate(devices)]
            if min(left) >= 0 and sum(each // tensor for each in left) >= replicas:
                return True
        return False

    run = allocated(f"vllm:d{replicas}t{tensor}+fsdp:d{ranks}")
    machines = Machines(tuple(map(Machine, devices)))
    if fits():
        make_plan(run, machines)
    else:
        with pytest.raises(ConfigError, match="devices"):
            make_plan(run, machines)


def test_the_trainer_takes_the_last_of_machines_that_differ() -> None:
    machines = Machines((Machine(4, 32, "L40S", 48), Machine(4, 32, "L40S", 48), Machine(8, 64, "H100", 80)))
    plan = make_plan(allocated("vllm:d8t1+fsdp:d8"), machines)
    assert spots(plan, "trainer") == [(2, tuple(range(8)))]
    assert {node for node, _ in spots(plan, "rollout")} == {0, 1}
    with pytest.raises(ConfigError, match=r"there are 16 \(2 nodes of 4, 1 node of 8\)"):
        make_plan(allocated("vllm:d9t1+fsdp:d8"), machines)


@pytest.fixture(scope="module")
def eight_billion(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Return settings for a model with the sizes of Qwen3-8B. Only its configuration exists on disk."""
    directory = tmp_path_factory.mktemp("sizes")
    sizes = {"num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}
    (directory / "config.json").write_text(json.dumps(sizes | {"model_type": "qwen3"}))
    return settings(
        "--model",
        str(directory),
        "--trainer.dtype",
        "bfloat16",
        "--trainer.token-budget",
        "16384",
        "--trainer.parallel.accumulate",
        "sharded",
    )


def test_memory_of_machines_that_are_not_there_is_checked(eight_billion: RunConfig) -> None:
    machines = partial(Machines.alike, 1, 8, 64, kind="H100")
    run = set_sizes(eight_billion.model_copy(update={"allocation_mode": "d4t1+fsdp:d4"}))
    plan = make_plan(run, machines(device_gb=80))
    trainer, rollout = plan.part("trainer"), plan.part("rollout")
    assert trainer.device_gb is not None
    assert rollout.device_gb is not None
    assert 40 < trainer.device_gb < 80, "docs/memory.md has 38 GB where eight devices divide it"
    assert 16 < rollout.device_gb < 25, "weights of 16 GB, and one sample of 40,960 tokens"
    assert trainer.memory_gib > 32, "a whole model in float32"
    larger = run.section("trainer").model_copy(update={"device_memory_gb": 64.0})
    assert make_plan(run.model_copy(update={"trainer": larger}), machines(device_gb=40)), "the settings know better"
    with pytest.raises(
        ConfigError,
        match=r"trainer does not fit on a machine of 8 GPUs \(H100, 40 GB\).*has 37\.3 GiB, of which it may use 0\.92: lower token_budget",
    ):
        make_plan(run, machines(device_gb=40))
    with pytest.raises(
        ConfigError, match=r"rollout does not fit .*of which it may use 0\.92: divide it over more devices"
    ):
        make_plan(run, Machines((Machine(4, 64, device_gb=16), Machine(4, 64, device_gb=80))))
    with pytest.raises(ConfigError, match=r"trainer, rollout are estimated to need \d+ GiB of main memory together"):
        make_plan(run, machines(device_gb=80, memory_gb=32))


def test_twelve_replicas_and_a_trainer_of_four_fill_four_nodes_of_four() -> None:
    plan = make_plan(allocated("vllm:d12t1+fsdp:d4"), FOUR_NODES)
    assert spots(plan, "rollout") == [(node, (device,)) for node in range(3) for device in range(4)]
    assert spots(plan, "trainer") == [(3, (0, 1, 2, 3))]
    assert {place.node for name in ("weightsync", "orchestrator") for place in plan.places_of(name)} == {0}
    hosts = [f"n{number}" for number in range(4)]
    peers = plan.peers(hosts)
    assert (peers.weightsync, peers.trainer) == ("n0:7101", "n3:7102")
    assert peers.rollout[:2] + peers.rollout[-1:] == ["n0:7103", "n0:7123", "n2:7163"]


def test_the_same_allocation_on_a_laptop_computes_on_the_cpu() -> None:
    plan = make_plan(allocated("vllm:d12t1+fsdp:d4"), Machines.alike(cores=2))
    assert devices_of(plan) == []
    assert plan.part("trainer").processes == 4
    assert plan.part("rollout").threads == 1


def test_a_trainer_that_spans_nodes_has_one_command_a_node_and_a_rendezvous_on_the_first() -> None:
    plan = make_plan(allocated("vllm:d2t4+fsdp:d16"), Machines.alike(nodes=3, devices=8))
    assert spots(plan, "trainer") == [(1, tuple(range(8))), (2, tuple(range(8)))]
    assert plan.addresses("trainer", ["a", "b", "c"], "rendezvous") == ["b:7112"]
    assert plan.place("trainer", 1).ports == ()
    command = plan.part("trainer").command(["@", "rl.toml"], rank="1", rendezvous="b:7112")
    assert " ".join(command) == (
        "sluice ranks --processes 8 --grace 6 --nodes 2 --node-rank 1 --rendezvous b:7112 --join 600 trainer @ rl.toml"
    )


def test_ranks_that_share_matrix_products_stay_on_one_node() -> None:
    plan = make_plan(allocated("d1+d3t4"), Machines.alike(nodes=4, devices=8))
    assert plan.part("trainer").nodes == 3  # two nodes of six would split a group of four


def test_one_allocation_for_both_sides_uses_each_device_twice() -> None:
    plan = make_plan(allocated("d8"), Machines.alike(nodes=2, devices=4))
    assert plan.shares_devices
    assert sorted(devices_of(plan)) == sorted([(node, device) for node in range(2) for device in range(4)] * 2)


def test_without_an_allocation_a_small_machine_is_shared() -> None:
    plan = make_plan(settings(), Machines.alike(devices=1))
    assert plan.shares_devices
    assert devices_of(plan) == [(0, 0), (0, 0)]


def test_on_cpus_replicas_go_where_least_computes() -> None:
    run = settings("--trainer.parallel.dp-shard", "2")
    plan = make_plan(run, Machines.alike(nodes=3, cores=2), replicas=3)
    assert [place.node for place in plan.places_of("trainer")] == [2]
    assert [place.node for place in plan.places_of("rollout")] == [0, 1, 0]


def test_metrics_of_replicas_on_one_node_have_ports_of_their_own() -> None:
    plan = make_plan(settings("--rollout.server.metrics-port", "9103"), Machines(), replicas=2)
    assert [place.port("metrics") for place in plan.places_of("rollout")] == [9103, 9123]


def test_relays_stand_beside_replicas_on_other_nodes_than_weightsync() -> None:
    plan = make_plan(allocated("vllm:d12t1+fsdp:d4"), FOUR_NODES, extra={"relay": 2})
    assert [place.node for place in plan.places_of("relay")] == [1, 2]


@pytest.mark.parametrize(
    ("allocation", "machines", "message"),
    [
        ("vllm:d12t1+fsdp:d4", Machines.alike(devices=8), "it needs 16 devices (12 x 1 for rollout, 4 for the trainer), and there are 8 (1 node of 8)"),
        ("vllm:d1t8+fsdp:d1", FOUR_NODES, "a rollout replica needs 8 devices on one node, and a node has 4"),
        ("vllm:d1t1+fsdp:d7", FOUR_NODES, "7 ranks of the trainer cannot be divided evenly over 16 (4 nodes of 4) devices"),
        ("vllm:d5t3+fsdp:d1", FOUR_NODES, "what the trainer leaves of each node does not hold whole replicas of 3"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_numbers_and_the_remedy(
    allocation: str, machines: Machines, message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make_plan(allocated(allocation), machines)
    assert message in str(refused.value)
    assert ": use " in str(refused.value)


def test_the_ports_of_a_machine_run_out_with_a_message() -> None:
    run = settings("--rollout.server.port", "65500")
    with pytest.raises(
        ConfigError, match=r"no port left for rollout-2 beyond 65500: set a lower rollout\.server\.port"
    ):
        make_plan(run, Machines(), replicas=3)


def test_the_json_of_a_plan_is_the_plan() -> None:
    plan = make_plan(allocated("vllm:d2t4+fsdp:d16"), Machines.alike(nodes=3, devices=8))
    read = json.loads(as_json(plan, ["@", "rl.toml"]))
    assert [tuple(each["devices"]) for each in read["places"]] == [each.devices for each in plan.places]
    assert [each["name"] for each in read["parts"]] == [each.name for each in plan.parts]
    assert read["parts"][-1]["command"] == ["sluice", "orchestrator", "@", "rl.toml"]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_table_names_every_instance_whole_within_the_width_of_a_terminal(width: int) -> None:
    plan = make_plan(allocated("d16", *AGENTS), Machines.alike(nodes=2, devices=8, cores=32), extra={"relay": 2})
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123 - only the record is read
    print_tables(plan, ["@", "rl.toml"], console)
    lines = console.export_text().splitlines()
    table = [line for line in lines if "sluice " not in line]
    assert max(map(len, table)) <= width
    for place in plan.places:
        assert any(_shows(line, place) for line in table), place


def _shows(line: str, place: Place) -> bool:
    return place.instance in line.split() and all(str(port.number) in line for port in place.ports[:1])


def test_compose_gives_each_replica_with_devices_a_service_of_its_own_under_one_name() -> None:
    services = document(make_plan(allocated("vllm:d2t2+fsdp:d4"), Machines.alike(devices=8)), ["@", "rl.toml"])[
        "services"
    ]
    asked = {
        name: each["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name, each in services.items()
        if "deploy" in each
    }
    assert asked == {"rollout-0": ["0", "1"], "rollout-1": ["2", "3"], "trainer": ["4", "5", "6", "7"]}
    assert services["rollout-1"]["networks"]["default"]["aliases"] == ["rollout"]
    assert {"rollout-0", "rollout-1"} < services["orchestrator"]["depends_on"].keys()


def test_compose_is_for_one_machine() -> None:
    with pytest.raises(ConfigError, match="compose runs on one machine, and the plan is for 4"):
        document(make_plan(allocated("vllm:d12t1+fsdp:d4"), FOUR_NODES), ["@", "rl.toml"])
