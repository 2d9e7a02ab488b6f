"""The simulated fleets of `sluice bench scale`: nothing is lost, a limit is found, and the same inputs give the same run."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fleet.costs import Costs, Line, OrchestratorCosts, WeightCosts, from_json, line_through, read_costs
from benchmarks.fleet.fleet import Fleet, Limits, Network, Work
from benchmarks.fleet.model import NEVER, Limit, Result, Simulation, simulate
from benchmarks.fleet.network import Clock, Process, Uplink
from benchmarks.fleet.node import last_arrival, served_at
from benchmarks.simulated_services import Counts
from orchestrator_svc.config import FoundReplicasConfig
from sluice.versions import Version

ORCHESTRATOR = """
{"trajectory_s": 0.00025, "message_s": 0.00014, "idle": 0.02, "poll_s": 0.00015, "pick_s": [1e-5, 1e-6], "picks": 2.0,
 "request_bytes": 600.0, "message_bytes": 150.0, "token_bytes": 8.5, "poll_bytes": 120.0, "trajectory_bytes": 400.0,
 "trained_token_bytes": 8.0}
"""
WEIGHTS = """
{"encode_s": [0.005, 0.0008], "push_s": [0.01, 0.003], "pull_s": [0.01, 0.001], "stage_s": [0.01, 0.001], "share_s": 0.002,
 "hop_s": [0.02, 0.003], "take_in_cpu_s": [0.01, 0.002], "give_out_cpu_s": [0.003, 0.0005], "report_s": 0.0001,
 "list_s": [0.0001, 2e-6], "watch_s": 0.0001, "manifest_bytes": [300.0, 120.0], "report_bytes": 120.0,
 "list_bytes": [60.0, 70.0], "reports": 2.0, "delta_over_dense": 0.03}
"""
COSTS = Costs(from_json(OrchestratorCosts, json.loads(ORCHESTRATOR)), from_json(WeightCosts, json.loads(WEIGHTS)))
SLOW_POLL = {"poll_s": 0.02}
WORK = Work(weights_bytes=1e9, delta_bytes=3e7, generation_s=10.0, train_s=2.0, groups_per_replica=2)
VERSIONS = 4


def simulated(fleet: Fleet, work: Work = WORK, limits: Limits | None = None, *, seed: int = 0) -> Result:
    return Simulation(fleet, work, COSTS, Network(), limits, seed=seed).run(VERSIONS)


def test_the_same_inputs_give_the_same_run() -> None:
    once, again = simulated(Fleet(40)), simulated(Fleet(40))
    assert asdict(once) == asdict(again)
    assert asdict(simulated(Fleet(40), seed=1)) != asdict(once)


@given(
    fleet=st.builds(Fleet, st.integers(2, 60), per_host=st.just(4), relays=st.booleans(), fan_out=st.integers(0, 4)),
    staleness=st.integers(0, 3),
    groups=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_every_group_ends_once_and_every_replica_gets_the_newest_version(
    fleet: Fleet, staleness: int, groups: int, seed: int
) -> None:
    work = replace(WORK, max_staleness=staleness, groups_per_replica=groups)
    found = simulated(fleet, work, seed=seed)
    assert found.started == found.ended + found.waiting, "a group was lost, or ended twice"
    batches = found.newest * work.batch_of(fleet)
    assert found.ended >= batches, "a batch was made of groups that never ended"
    assert len(found.served) == fleet.replicas
    assert min(found.served) >= found.newest, "a replica stayed on an old version"
    assert 0 <= found.staleness <= staleness


def test_a_version_reaches_each_host_once() -> None:
    fleet = Fleet(64, per_host=8, fan_out=2)
    found = simulated(fleet)
    from_root = found.sizes["pulls"] / WORK.delta_bytes
    from_relays = found.sizes["pulls of relays"] / WORK.delta_bytes
    assert from_root == pytest.approx(2), "the root gives it to two relays"
    assert from_relays == pytest.approx(6 + fleet.hosts), "these to the other six, and each to its own machine"


def test_a_small_limit_is_the_first_one_and_says_where_it_is_reached() -> None:
    limits = Limits(max_watchers=4)
    found = simulated(Fleet(64, per_host=8, fan_out=0), limits=limits)
    assert found.first_limit.name == "weightsync.max_watchers"
    assert found.first_limit.share == pytest.approx(2.0), (
        "eight relays, a watcher each, and eight replicas at each relay"
    )
    assert found.first_limit.reached_at(64) == 32
    assert simulated(Fleet(64, per_host=8, fan_out=0)).first_limit.name != "weightsync.max_watchers"


def test_an_orchestrator_that_is_asked_for_more_than_it_can_is_the_first_limit() -> None:
    slow = replace(COSTS, orchestrator=replace(COSTS.orchestrator, **SLOW_POLL))
    found = simulate(Fleet(64), WORK, slow, Network())
    assert found.first_limit.name == "the orchestrator's core"
    assert found.cores["orchestrator"] == pytest.approx(64 * 2 * 0.02, rel=0.1), "polls, two a second of each replica"
    assert found.busy["orchestrator"] <= 1.1, "it cannot do them"
    assert found.first_limit.reached_at(64) < 64
    often = Limits(replicas=FoundReplicasConfig(poll_s=2.5))
    relieved = simulate(Fleet(64), WORK, slow, Network(), often)
    assert relieved.cores["orchestrator"] < 0.7, "what moves it is how often they are polled"


def test_a_limit_whose_use_grows_with_the_square_is_reached_sooner() -> None:
    assert Limit("a", 4.0, 1.0, "").reached_at(100) == 25
    assert Limit("a", 4.0, 1.0, "", squared=4.0).reached_at(100) == 50
    assert Limit("a", 0.25, 1.0, "", squared=0.25).reached_at(100) == 200
    assert Limit("a", 0.5, 1.0, "", grows=False).reached_at(100) == NEVER
    assert Limit("a", 1.5, 1.0, "", grows=False).reached_at(100) == 100


def test_a_tree_of_relays_brings_a_large_version_sooner_than_a_star() -> None:
    work = replace(WORK, weights_bytes=15e9, delta_bytes=5e8)
    star = simulated(Fleet(256, fan_out=0), work)
    tree = simulated(Fleet(256, fan_out=4), work)
    assert tree.fan_out_s < star.fan_out_s
    assert tree.sizes["pulls"] < star.sizes["pulls"]


def test_transfers_share_an_uplink() -> None:
    clock, ended = Clock(), []
    link = Uplink(clock, bytes_per_s=100.0)
    for size in (100.0, 300.0):
        link.send(size, lambda size=size: ended.append((size, clock.now)))
    clock.run(lambda: len(ended) == 2)
    assert ended == [(100.0, pytest.approx(2.0)), (300.0, pytest.approx(4.0))]


def test_one_transfer_is_no_faster_than_a_stream_can_be() -> None:
    clock, ended = Clock(), []
    link = Uplink(clock, bytes_per_s=100.0, one_bytes_per_s=10.0)
    link.send(100.0, lambda: ended.append(clock.now))
    clock.run(lambda: bool(ended))
    assert ended == [pytest.approx(10.0)]


def test_a_process_does_one_thing_after_the_other() -> None:
    process = Process()
    assert [process.do(0.0, 1.0), process.do(0.5, 1.0), process.do(5.0, 1.0)] == [1.0, 2.0, 6.0]
    assert (process.busy_s, process.lag_s) == (3.0, 0.5)


def test_a_cost_that_grows_with_a_size_is_found_from_its_points() -> None:
    assert line_through([(1.0, 3.0), (2.0, 5.0), (10.0, 21.0)]) == pytest.approx(Line(1.0, 2.0))
    assert line_through([(1.0, 5.0), (2.0, 4.0)]).each == 0.0, "no work costs less for more"
    assert line_through([(1.0, 1.0), (2.0, 3.0)]).fixed == 0.0
    with pytest.raises(ValueError, match="no cost"):
        line_through([])


def test_costs_are_read_from_the_last_lines_of_benchmarks(tmp_path) -> None:
    file = tmp_path / "costs.json"
    with pytest.raises(OSError, match=r"costs\.json"):
        read_costs(file)
    file.write_text("a table\n")
    with pytest.raises(ValueError, match="sluice bench orchestrator"):
        read_costs(file)
    lines = [
        {"bench": "orchestrator", "costs": asdict(COSTS.orchestrator)},
        {"all_costs": {"weightsync": asdict(COSTS.weights)}},
    ]
    file.write_text("\n".join(json.dumps(each) for each in lines))
    found = read_costs(file)
    assert from_json(OrchestratorCosts, found["orchestrator"]) == COSTS.orchestrator
    assert from_json(WeightCosts, found["weightsync"]) == COSTS.weights
    with pytest.raises(ValueError, match="poll_s"):
        from_json(OrchestratorCosts, {"trajectory_s": 1.0})


def test_a_machine_has_a_version_when_its_last_replica_serves_it() -> None:
    served = {"makes": [(1, 3, 5.0), (2, 0, 10.0)], "finds": [(1, 3, 5.5), (2, 0, 10.25)], "late": [(1, 3, 5.5)]}
    updates = {"makes": (1.5, 3.0), "finds": (0.0, 3.5)}  # seconds of the transfer, and of all
    counts = Counts({}, {}, {"served": served, "updates": updates})
    assert served_at(counts, Version(1, 2)) == [5.0, 5.5, 5.5]
    assert served_at(counts, Version(2, 0)) == [10.0, 10.25], "a number of an earlier epoch is no newer version"
    del served["late"]
    assert last_arrival(counts) == (6.75, 1.75, 10.25), "the one that finds the copy learned of the version first"
