"""What `sluice rl` decides before it starts anything."""

import asyncio
from pathlib import Path

import pytest

from sluice.cli import rl
from sluice.cli.rl import claim, newest_checkpoint, write_settings
from sluice.config import ConfigError, RunConfig, SecurityConfig, ServerConfig, load_run
from sluice.rpc import RpcServer
from sluice.rpc.channel import wait_until_serving
from sluice.supervise.plan import Place, child_environment, child_specs, choose_addresses


def a_run(tmp_path: Path, *flags: str) -> RunConfig:
    return load_run(["--output-dir", str(tmp_path), "--run", "r", *flags])


def test_every_child_has_a_port_of_its_own(tmp_path: Path) -> None:
    addresses = choose_addresses(a_run(tmp_path), replicas=3)
    ports = [*addresses.grpc.values(), *addresses.http.values()]
    assert len(set(ports)) == len(ports) == 6 + 3
    assert len(addresses.peers().rollout) == 3


def test_a_run_with_external_agents_has_a_gateway_at_the_ports_of_the_settings(tmp_path: Path) -> None:
    assert "gateway" not in choose_addresses(a_run(tmp_path), 1).grpc
    run = a_run(tmp_path, "--orchestrator.workflow", "external", "--gateway.server.http-port", "7999")
    addresses = choose_addresses(run, 1)
    assert (addresses.grpc["gateway"], addresses.http["gateway"]) == (7105, 7999)
    specs = child_specs(
        run,
        addresses,
        tmp_path / "c.toml",
        tmp_path / "logs",
        threads=None,
        places={"rollout": Place(1), "trainer": Place(1)},
    )
    assert next(spec.argv for spec in specs if spec.name == "gateway")[-2:] == ("--server.http-port", "7999")


def test_a_run_with_an_agent_of_its_own_has_a_gateway_and_processes_that_play(tmp_path: Path) -> None:
    run = a_run(tmp_path, "--agents.agent", "a.py:Agent", "--agents.workers", "2", "--gateway.server.port", "7998")
    addresses = choose_addresses(run, 1)
    assert addresses.peers().gateway == "127.0.0.1:7998"
    assert {"agents-0", "agents-1"} < set(addresses.grpc)
    assert "agents-0" not in addresses.http
    assert "agents" in choose_addresses(a_run(tmp_path, "--agents.agent", "a.py:Agent"), 1).grpc


def test_children_that_compute_divide_the_cores_and_the_others_take_one_thread() -> None:
    trainer = child_environment("trainer", 4, 2, {})
    assert {**trainer, "PYTHONWARNINGS": ""} == {
        "OMP_NUM_THREADS": "4",
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "PYTHONWARNINGS": "",
    }
    assert child_environment("weightsync", 4, 2, {})["OMP_NUM_THREADS"] == "1"
    assert int(child_environment("rollout-1", None, 10_000, {})["OMP_NUM_THREADS"]) == 1


def test_exported_variables_stay_unless_a_flag_overrides_them() -> None:
    exported = {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "active", "PYTHONWARNINGS": "error"}
    assert child_environment("trainer", None, 2, exported) == {"GOMP_SPINCOUNT": "0"}
    assert child_environment("trainer", 2, 2, exported) == {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "0"}


def test_every_child_gets_the_seconds_to_drain_that_its_service_is_set_to(tmp_path: Path) -> None:
    run = a_run(tmp_path, "--rollout.server.drain-s", "30", "--trainer.server.drain-s", "45")
    places = {"rollout-0": Place(1), "rollout-1": Place(1), "trainer": Place(4)}
    specs = child_specs(
        run, choose_addresses(run, 2), tmp_path / "c.toml", tmp_path / "logs", threads=None, places=places
    )
    drains = {spec.name: spec.drain_s for spec in specs}
    assert drains == {"rollout-0": 30, "rollout-1": 30, "trainer": 45, "orchestrator": 5, "weightsync": 5}
    trainer = next(spec.argv for spec in specs if spec.name == "trainer")
    assert trainer[1:6] == ("-m", "sluice.supervise.rank_launcher", "4", "46.0", "trainer")


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
    waiting = asyncio.create_task(wait_until_serving(server.target, SecurityConfig()))
    done, _ = await asyncio.wait({waiting}, timeout=0.5)
    assert not done
    server.set_serving(True)
    async with asyncio.timeout(10):
        await waiting
    await server.stop(0)
