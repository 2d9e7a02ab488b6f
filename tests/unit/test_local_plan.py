"""What `sluice rl` decides before it starts anything."""

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from rich.console import Console
from simulated_clock import LIMIT_S, SimulatedClock
from tiny_policy import tiny_model

from sluice.cli import rl
from sluice.cli.live_view import RunView
from sluice.cli.rl import claim, describe_finished, listed_metrics, newest_checkpoint, run_on_free_ports, write_settings
from sluice.config import ConfigError, RunConfig, SecurityConfig, ServerConfig, load_run
from sluice.plan import Machines, Part, Plan, Purpose, make_plan
from sluice.plan.local import HOSTS, child_environment, child_specs, metrics_targets, on_free_ports, unused_ports
from sluice.rpc import RpcServer
from sluice.rpc.channel import wait_until_serving
from sluice.rpc.server import LOOPBACK
from sluice.supervise.supervisor import ChildSpec, Ending, LogLimit, Outcome

EXAMPLE = Path(__file__).parents[2] / "examples" / "reverse_text"


def a_run(tmp_path: Path, *flags: str) -> RunConfig:
    return load_run(["--output-dir", str(tmp_path), "--run", "r", *flags])


def local(run: RunConfig, replicas: int = 1) -> Plan:
    return on_free_ports(make_plan(run, Machines.alike(cores=2), replicas=replicas), run)


def children(run: RunConfig, plan: Plan, tmp_path: Path, devices: tuple[str, ...] = ()) -> dict[str, ChildSpec]:
    specs = child_specs(plan, run, tmp_path / "c.toml", tmp_path / "logs", devices=devices)
    return {spec.name: spec for spec in specs}


def test_every_child_has_a_port_of_its_own(tmp_path: Path) -> None:
    plan = local(a_run(tmp_path), replicas=3)
    ports = [port.number for place in plan.places for port in place.ports]
    assert len(set(ports)) == len(ports) == 6 + 3
    assert len(plan.peers(HOSTS).rollout) == 3


def test_with_metrics_ports_each_service_has_one_and_prometheus_can_find_it(tmp_path: Path) -> None:
    assert metrics_targets(local(a_run(tmp_path)), a_run(tmp_path)) == []
    run = a_run(tmp_path, "--metrics-ports", "true", "--trainer.server.metrics-port", "7999")
    plan = local(run, replicas=2)
    found = metrics_targets(plan, run)
    labels = {each["labels"]["replica"]: each["labels"] for each in found}
    assert labels["rollout-1"] == {"run": "r", "service": "rollout", "replica": "rollout-1", "__scheme__": "http"}
    assert set(labels) == {"weightsync", "trainer", "rollout-0", "rollout-1", "orchestrator"}
    addresses = {each["labels"]["replica"]: each["targets"] for each in found}
    assert addresses["trainer"] == ["127.0.0.1:7999"]
    assert len({target for targets in addresses.values() for target in targets}) == 5
    flags = children(run, plan, tmp_path)["rollout-1"].argv
    assert flags[flags.index("--server.metrics-port") + 1] == addresses["rollout-1"][0].rpartition(":")[2]
    tls = run.model_copy(update={"security": run.security.model_copy(update={"tls_cert": tmp_path})})
    assert metrics_targets(plan, tls)[0]["labels"]["__scheme__"] == "https"


def test_the_list_for_prometheus_is_there_while_the_run_lasts(tmp_path: Path) -> None:
    run = a_run(tmp_path, "--metrics-ports", "true")
    plan, path = local(run), tmp_path / "r.metrics_targets.json"
    with listed_metrics(plan, run) as count:
        assert count == len(json.loads(path.read_text())) == 4
    assert not path.exists()
    run = a_run(tmp_path)
    with listed_metrics(local(run), run) as count:
        assert (count, path.exists()) == (0, False)


def test_the_logs_of_the_children_are_as_large_as_the_settings_allow(tmp_path: Path) -> None:
    run = a_run(tmp_path, "--log-mb", "3", "--log-files", "7")
    assert {each.log_limit for each in children(run, local(run), tmp_path).values()} == {LogLimit(3 << 20, 7)}


def test_a_run_with_external_agents_has_a_gateway_at_the_ports_of_the_settings(tmp_path: Path) -> None:
    assert not local(a_run(tmp_path)).has("gateway")
    run = a_run(tmp_path, "--orchestrator.workflow", "external", "--gateway.server.http-port", "7999")
    gateway = children(run, local(run), tmp_path)["gateway"]
    assert gateway.argv[-4:] == ("--server.port", "7105", "--server.http-port", "7999")


def test_a_gateway_whose_settings_leave_its_ports_open_gets_free_ones(tmp_path: Path) -> None:
    flags = ("--orchestrator.workflow=external", "--gateway.server.port=0", "--gateway.server.http-port=0")
    place = local(a_run(tmp_path, *flags)).place("gateway")
    assert place.port() != 7107
    assert place.port("http") != 7117


def test_the_training_api_has_the_port_of_the_tuners_settings_and_the_rest_are_free_ones(tmp_path: Path) -> None:
    run = a_run(tmp_path, "--tuner.server.host", "0.0.0.0", "--tuner.server.port", "7999")
    plan = on_free_ports(make_plan(run, Machines.alike(devices=2), purpose=Purpose.TRAINING_API), run)
    assert {each.name for each in plan.parts} == {"weightsync", "rollout", "tuner"}
    assert plan.place("rollout").devices == (0,)
    assert plan.place("tuner").devices == (1,)
    tuner = children(run, plan, tmp_path, ("a", "b"))["tuner"]
    assert tuner.argv[-4:] == ("--server.host", "0.0.0.0", "--server.port", "7999")
    assert tuner.environment["CUDA_VISIBLE_DEVICES"] == "b"
    assert plan.place("weightsync").port() != 7101


def test_a_run_with_an_agent_of_its_own_has_a_gateway_and_processes_that_play(tmp_path: Path) -> None:
    run = a_run(tmp_path, "--agents.agent", "a.py:Agent", "--agents.workers", "2", "--gateway.server.port", "7998")
    plan = local(run)
    assert plan.peers(HOSTS).gateway == "127.0.0.1:7998"
    assert {"agents-0", "agents-1"} < children(run, plan, tmp_path).keys()
    assert "agents" in children(run, local(a_run(tmp_path, "--agents.agent", "a.py:Agent")), tmp_path)


def test_children_that_compute_divide_the_cores_and_the_others_take_one_thread(tmp_path: Path) -> None:
    plan = make_plan(a_run(tmp_path), Machines.alike(cores=8), replicas=3)
    assert child_environment(plan.part("trainer"), {})["OMP_NUM_THREADS"] == "2"
    assert child_environment(plan.part("weightsync"), {})["OMP_NUM_THREADS"] == "1"
    crowded = make_plan(a_run(tmp_path), Machines.alike(cores=2), replicas=100)
    assert child_environment(crowded.part("rollout"), {})["OMP_NUM_THREADS"] == "1"


def test_exported_variables_stay_unless_a_flag_overrides_them() -> None:
    exported = {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "active", "PYTHONWARNINGS": "error"}
    trainer = Part("trainer", "trainer", threads=2)
    assert child_environment(trainer, exported) == {"GOMP_SPINCOUNT": "0"}
    again = child_environment(trainer, exported, own_threads=True)
    assert again == {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "0"}


def test_every_child_gets_the_seconds_to_drain_that_its_service_is_set_to(tmp_path: Path) -> None:
    flags = ("--rollout.server.drain-s", "30", "--trainer.server.drain-s", "45", "--trainer.parallel.dp-shard", "4")
    run = a_run(tmp_path, *flags)
    specs = children(run, local(run, replicas=2), tmp_path)
    drains = {name: spec.drain_s for name, spec in specs.items()}
    assert drains == {"rollout-0": 30, "rollout-1": 30, "trainer": 45, "orchestrator": 5, "weightsync": 5}
    launcher = ("ranks", "--processes", "4", "--grace", "46", "trainer", "@")
    assert specs["trainer"].argv[3:10] == launcher


def test_children_see_the_devices_of_their_places_by_the_names_of_the_machine(tmp_path: Path) -> None:
    run = a_run(tmp_path, "--allocation-mode", "vllm:d2t2+fsdp:d2")
    plan = on_free_ports(make_plan(run, Machines.alike(devices=8)), run)
    names = tuple(f"GPU-{number}" for number in range(8))
    seen = {
        name: spec.environment.get("CUDA_VISIBLE_DEVICES")
        for name, spec in children(run, plan, tmp_path, names).items()
    }
    assert seen == {
        "rollout-0": "GPU-0,GPU-1",
        "rollout-1": "GPU-2,GPU-3",
        "trainer": "GPU-4,GPU-5",
        "weightsync": None,
        "orchestrator": None,
    }


def test_a_run_that_exists_is_refused_with_both_remedies_or_resumed(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    with claim(run, resume=False) as directory:
        (directory / "journal.sqlite").touch()
    with pytest.raises(ConfigError, match=r"--resume.*--run NAME"), claim(run, resume=False):
        pass
    with claim(run, resume=True) as directory:
        assert directory == tmp_path / "r"


def test_a_run_that_never_began_can_be_started_without_resume(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    with claim(run, resume=False):
        write_settings(run)
    with claim(run, resume=False):
        pass


def test_the_newest_checkpoint_is_the_newest_complete_one(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) == ""
    for step in (9, 10):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
        manifest = f'{{"checkpoint": {{"name": "step_{step}", "policyVersion": {{"epoch": "1", "number": "{step}"}}}}}}'
        (tmp_path / "checkpoints" / f"step_{step}" / "manifest.json").write_text(manifest)
    (tmp_path / "checkpoints" / "step_11").mkdir()
    assert newest_checkpoint(tmp_path) == "step_10"


def finished(tmp_path: Path, *, state: str = "succeeded", saved: int = 10) -> None:
    """The files of a run of 10 steps that has ended."""
    directory = tmp_path / "r"
    (directory / "checkpoints" / f"step_{saved}").mkdir(parents=True)
    manifest = f'{{"checkpoint": {{"name": "step_{saved}", "policyVersion": {{"epoch": "1", "number": "{saved}"}}}}}}'
    (directory / "checkpoints" / f"step_{saved}" / "manifest.json").write_text(manifest)
    (directory / "journal.sqlite").write_text("kept as it is")
    (directory / "report.json").write_text(json.dumps({"state": state, "steps": 10}))


@pytest.mark.parametrize("steps", [10, 3])
def test_a_resume_of_a_run_with_nothing_left_to_do_says_so_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    monkeypatch.setattr(rl, "run_on_free_ports", lambda *_: pytest.fail("services were started"))
    finished(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    flags = ["--output-dir", str(tmp_path), "--run", "r", "--model", str(tiny_model(tmp_path / "m"))]
    flags += ["--orchestrator.environment", f"{EXAMPLE / 'env.py'}:ReverseText", "--rollout.engine", "transformers"]
    assert rl.run([*flags, "--orchestrator.max-steps", str(steps), "--resume"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"run r has made 10 steps, and orchestrator.max_steps is {steps}: nothing is left to do" in shown
    assert {path: path.read_bytes() for path in before} == before
    assert not (tmp_path / "r" / "config.toml").exists()


@pytest.mark.parametrize(
    ("ended", "flags"),
    [
        ({"state": "stopped"}, ()),
        ({"state": "failed"}, ()),
        ({}, ("--orchestrator.max-steps", "11")),
        ({"saved": 8}, ()),
    ],
    ids=["stopped", "failed", "more steps", "without its last checkpoint"],
)
def test_a_resume_starts_a_run_with_something_left_to_do(
    tmp_path: Path, ended: dict[str, Any], flags: tuple[str, ...]
) -> None:
    finished(tmp_path, **ended)
    assert describe_finished(a_run(tmp_path, "--orchestrator.max-steps", "10", *flags)) == ""


@pytest.mark.parametrize("report", ["", "[]", "{}", '{"state": "succeeded"}', '{"state": "succeeded", "steps": null}'])
def test_a_report_that_says_nothing_stops_no_resume(tmp_path: Path, report: str) -> None:
    finished(tmp_path)
    (tmp_path / "r" / "report.json").write_text(report)
    assert describe_finished(a_run(tmp_path)) == ""


def test_a_run_that_wants_no_last_checkpoint_is_done_without_one(tmp_path: Path) -> None:
    finished(tmp_path, saved=8)
    flags = ("--orchestrator.max-steps", "10", "--orchestrator.checkpoint.final", "false")
    assert "nothing is left to do" in describe_finished(a_run(tmp_path, *flags))


class Services:
    """Stands for the services of a run, and for another program that takes a port of one of them at each of the first starts."""

    def __init__(self, instance: str, starts: int) -> None:
        self.plans: list[Plan] = []
        self._instance, self._starts, self._taken = instance, starts, contextlib.ExitStack()

    def __call__(self, plan: Plan, config: RunConfig) -> Outcome:
        assert config.peers.trainer == f"{LOOPBACK}:{plan.place('trainer').port()}"
        self.plans.append(plan)
        if len(self.plans) > self._starts:
            return Outcome(Ending.SUCCEEDED, "orchestrator", "exit code 0")
        with contextlib.suppress(OSError):  # another program has it already
            self._taken.enter_context(socket.create_server((LOOPBACK, plan.place(self._instance).port())))
        return Outcome(Ending.FAILED, self._instance, "ended with exit code 4", cannot_bind=True)

    def run(self, run: RunConfig) -> Outcome:
        with self._taken:
            view = RunView(run.run, Console(), live=False, verbose=False)
            return run_on_free_ports(make_plan(run, Machines.alike(cores=2)), run, view, self)


def test_ports_of_the_settings_that_are_not_used_are_named(tmp_path: Path) -> None:
    assert unused_ports(local(a_run(tmp_path)), a_run(tmp_path)) == []
    run = a_run(
        tmp_path,
        "--rollout.server.port",
        "9999",
        "--gateway.server.port",
        "9998",
        "--orchestrator.workflow",
        "external",
    )
    (line,) = unused_ports(local(run), run)
    assert line.startswith("rollout.server.port = 9999 is not used")


def test_a_run_of_which_another_program_takes_a_port_starts_again_on_others(tmp_path: Path, capsys) -> None:
    services = Services("trainer", starts=2)
    assert services.run(a_run(tmp_path)).ending is Ending.SUCCEEDED
    assert len({plan.place("trainer").port() for plan in services.plans}) == 3
    assert capsys.readouterr().out.count("trainer cannot listen") == 2


def test_a_run_that_finds_its_ports_taken_again_and_again_fails(tmp_path: Path) -> None:
    services = Services("trainer", starts=100)
    assert services.run(a_run(tmp_path)).cannot_bind
    assert len(services.plans) == 3


def test_a_port_of_the_settings_that_is_taken_ends_the_run(tmp_path: Path) -> None:
    services = Services("gateway", starts=100)
    assert services.run(a_run(tmp_path, "--orchestrator.workflow", "external")).child == "gateway"
    assert len(services.plans) == 1


def test_two_supervisors_cannot_hold_one_run(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    with claim(run, resume=True), pytest.raises(ConfigError, match="another process runs 'r'"), claim(run, resume=True):
        pass


def test_the_settings_on_disk_load_back(tmp_path: Path) -> None:
    run = a_run(tmp_path, "--model", "m", "--max-staleness", "1")
    with claim(run, resume=False):
        path = write_settings(run)
    again = load_run(["@", str(path)])
    assert again.model_dump() == run.model_dump()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "model is not set"),
        (["--model", "/not/there"], "there is no directory /not/there"),
        (["--model", "/"], "no config.json"),
        (["--model", "m", "--orchestrator.group-size", "1"], "set group_size to 2 or more"),
        (["--model", "m", "--trainer.lrr", "1"], "did you mean 'trainer.lr'"),
        (["--model", "m", "--peers.rollout", "[]"], "at least one rollout replica"),
    ],
)
def test_wrong_settings_are_found_before_anything_starts(tmp_path: Path, argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rl.run(["--output-dir", str(tmp_path), *argv])
    assert list(tmp_path.iterdir()) == []


async def test_a_child_serves_when_its_health_says_so_not_when_its_port_is_open() -> None:
    server = RpcServer("test", ServerConfig(), SecurityConfig())
    await server.start()
    server.set_serving(False)
    before = health_checks()
    waiting = asyncio.create_task(wait_until_serving(server.target, SecurityConfig()))
    await SimulatedClock().until(lambda: waiting.done() or health_checks() >= before + 2)
    assert not waiting.done(), "the second question follows an answer to the first one"
    server.set_serving(True)
    await asyncio.wait_for(waiting, LIMIT_S)
    await server.stop(0)


def health_checks() -> float:
    labels = {"service": "grpc.health.v1.Health", "method": "Check", "code": "OK"}
    return REGISTRY.get_sample_value("sluice_rpc_total", labels) or 0.0
