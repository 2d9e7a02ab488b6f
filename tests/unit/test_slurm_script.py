"""The batch script of a plan, and how the job that runs finds its nodes."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.certificates import read_leaf
from sluice.cli import slurm
from sluice.config import ConfigError, RunConfig, load_run
from sluice.plan import Machines, Plan, make_plan
from sluice.plan.slurm import Host, Job, groups_of, hosts_of, script, step, with_control_node
from sluice.supervise import slurm_step

JOB = Job(Path("/shared/out put/50%/job.log"), Path("/home/me"), ("sluice", "slurm", "job", "@", "a b.toml"), 7.0)


def settings(*words: str) -> RunConfig:
    return load_run(["--model", "m", *words])


def plan_of(machines: Machines, *words: str) -> Plan:
    return make_plan(settings(*words), machines)


def components(text: str) -> list[list[str]]:
    """The options of each component of a script."""
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    found: list[list[str]] = [[]]
    for line in lines:
        if line == "hetjob":
            found.append([])
        else:
            found[-1].append(line)
    return found


def test_nodes_that_need_the_same_are_one_simple_job() -> None:
    plan = plan_of(Machines.alike(2, 8, 64), "--allocation-mode", "vllm:d8t1+fsdp:d8")
    (group,) = groups_of(plan, ["--partition=gpu"])
    assert (group.name, group.nodes, group.devices) == ("rollout+trainer", 2, 8)
    (options,) = components(script(plan, [group], JOB))
    needs = {"--nodes=2", "--gpus-per-node=8", "--cpus-per-task=64", "--ntasks-per-node=1", "--partition=gpu"}
    assert needs <= set(options)


def test_a_heterogeneous_job_has_a_component_for_each_kind_of_node_with_options_of_its_own() -> None:
    plan = with_control_node(plan_of(Machines.alike(2, 8, 64), "--allocation-mode", "vllm:d12t1+fsdp:d4"))
    text = script(plan, groups_of(plan, ["--account=lab", "trainer:--constraint=h100"]), JOB)
    control, rollout, both = components(text)
    assert {"--nodes=1", "--cpus-per-task=8", "--account=lab"} <= set(control)
    assert not [each for each in control if "gpus" in each or "h100" in each]
    assert {"--gpus-per-node=8", "--account=lab"} <= set(rollout)
    assert "--constraint=h100" not in rollout
    assert {"--gpus-per-node=8", "--constraint=h100"} <= set(both)


def test_the_script_is_requeued_signalled_in_time_and_appends_to_its_log() -> None:
    plan = plan_of(Machines.alike(1, 0, 2))
    text = script(plan, groups_of(plan), JOB)
    (options,) = components(text)
    assert {"--requeue", "--open-mode=append", "--signal=B:USR1@67", '--chdir="/home/me"'} <= set(options)
    assert '--output="/shared/out put/50%%/job.log"' in options
    assert text.endswith("exec sluice slurm job @ 'a b.toml'\n")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nobody:--partition=x"], "no nodes for 'nobody'; it has rollout, trainer"),
        (["partition=x"], "write an option of sbatch"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        groups_of(plan_of(Machines.alike(2, 1, 8), "--allocation-mode", "d1+d1"), options)


def test_nodes_that_would_run_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"of 3 nodes, 1 would run nothing \(1\): ask for 2"):
        groups_of(plan_of(Machines.alike(3, 1, 8), "--allocation-mode", "d1+d1"))


def test_a_job_finds_its_nodes_in_its_variables_and_refuses_other_numbers() -> None:
    plan = plan_of(Machines.alike(2, 8, 64), "--allocation-mode", "vllm:d8t1+fsdp:d4")
    groups = groups_of(plan)
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_ID_HET_GROUP_0": "7",
        "SLURM_JOB_ID_HET_GROUP_1": "8",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "a",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "b",
    }
    hosts = hosts_of(groups, variables, lambda listed: [listed], lambda name: f"{name}.net")
    assert hosts == [Host("a", "a.net", 0, "7", 8, 64), Host("b", "b.net", 1, "8", 4, 64)]
    assert plan.peers([each.address for each in hosts]).trainer == "b.net:7102"
    with pytest.raises(ConfigError, match="2 nodes for rollout"):
        hosts_of(groups, variables, lambda listed: [listed, "x"], str)
    with pytest.raises(ConfigError, match=r"SLURM_JOB_NODELIST_HET_GROUP_0 .* not set"):
        hosts_of(groups, {}, lambda listed: [listed], str)


def test_a_part_gets_those_of_the_devices_of_its_step_that_the_plan_gives_it() -> None:
    plan = plan_of(Machines.alike(1, 4, 32), "--allocation-mode", "vllm:d1t2+fsdp:d2")
    (place,) = plan.places_of("trainer")
    words = step(Host("a", "a.net", None, "7", 4, 32), place, ("printenv", "CUDA_VISIBLE_DEVICES"))
    assert "--gpus-per-node=4" in words
    assert not [word for word in words if word.startswith("--het-group")]
    command = words[words.index("bash") :]
    seen = subprocess.run(command, env={"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, capture_output=True, text=True, check=True)
    assert seen.stdout == "6,7\n"
    missing = subprocess.run(command, env={"CUDA_VISIBLE_DEVICES": "4"}, capture_output=True, text=True, check=False)
    assert missing.returncode


def test_a_dry_run_shows_the_script_without_secrets_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    example = "examples/reverse_text/rl.toml"
    words = ["rl", "@", example, "--model", "a/b", "--rollout.engine", "transformers", "--output-dir", str(tmp_path)]
    secret = ("--orchestrator.environment-args.api-key", "hidden-from-the-script")
    assert slurm.run([*words, *secret, "--machines", "2x0", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^#   node 1: trainer :7102$", said, re.MULTILINE)
    assert "hidden-from-the-script" not in said
    assert not list(tmp_path.iterdir()), "a dry run writes nothing"


def test_a_job_has_certificates_that_name_its_nodes_unless_it_has_others_or_wants_none(tmp_path: Path) -> None:
    for nodes in (["10.0.0.1", "gpu-2"], ["10.0.0.3"]):  # a requeued job has other nodes
        made = slurm._with_certificates(settings(), tmp_path, nodes).security
        assert made.require_client_cert
        assert made.principals_file == tmp_path / "certs/principals.toml"
        trainer = made.of_service("trainer").tls_cert
        assert trainer is not None
        assert set(nodes) <= set(read_leaf(trainer).hosts)
        assert not {"10.0.0.1", "10.0.0.3"} - set(nodes) & set(read_leaf(trainer).hosts)
        assert trainer.with_suffix(".key").stat().st_mode & 0o077 == 0
    assert not list(tmp_path.rglob("ca*.key")), "nobody can issue further ones"
    for words in (["--insecure"], ["--security.certs-dir", str(tmp_path / "certs")]):
        own = settings(*words)
        assert slurm._with_certificates(own, tmp_path / "none", ["a"]) == own


def test_tokens_of_a_job_are_new_at_each_start_and_only_their_user_may_read_them(tmp_path: Path) -> None:
    tokens = []
    for _ in range(2):
        security = slurm._with_tokens(settings(), tmp_path).security
        tokens.append({name: path.read_text() for name, path in security.service_token_files.items()})
    assert set(tokens[0]) == set(slurm.ROLES)
    assert not set(tokens[0].values()) & set(tokens[1].values())
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    own = tmp_path / "own.toml"
    own.write_text((tmp_path / "principals.toml").read_text())
    kept = settings("--security.principals-file", str(own))
    assert slurm._with_tokens(kept, tmp_path).security.principals_file == own


def test_a_gateway_alone_may_drain_for_minutes_and_does_not_make_the_whole_job_end_earlier() -> None:
    run = settings("--rollout.server.drain-s", "30")
    plan = make_plan(run, Machines(), extra={"gateway": 1})
    assert plan.part("gateway").drain_s == 600.0
    options = slurm._parser().parse_args([])
    assert slurm.job_of(run, plan, options).stop_s == 30.0 + slurm.STOP_MARGIN_S


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A command that Slurm, whose nodes are idle, refuses to start as a step as often as there are files in ``refusals``."""
    monkeypatch.setattr(slurm_step, "REFUSAL_S", 0.0)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, text in {
        "sinfo": "echo idle",
        "srun": f"""
            one=$(ls {tmp_path}/refusals | head -n 1)
            if [ -n "$one" ]; then
                rm {tmp_path}/refusals/$one
                echo "srun: error: Unable to create step for job 6: Memory required by task is not available" >&2
                exit 1
            fi
            echo started >> {tmp_path}/started
            exit $1""",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "refusals").mkdir()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield [str(tmp_path / "srun")]
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("code", "refusals"), [(0, 2), (7, 1), (7, 0)])
def test_a_step_that_slurm_does_not_start_is_asked_for_again_and_one_that_ended_is_not(
    srun: list[str], tmp_path: Path, code: int, refusals: int
) -> None:
    for number in range(refusals):
        (tmp_path / "refusals" / str(number)).touch()
    assert slurm_step.main("6", "n0", "rollout", [*srun, str(code)]) == code
    assert (tmp_path / "started").read_text() == "started\n"


def test_a_step_that_slurm_never_starts_fails_in_the_end(
    srun: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_step, "REFUSALS_S", 0.0)
    (tmp_path / "refusals/0").touch()
    assert slurm_step.main("6", "n0", "rollout", [*srun, "0"]) == 1
    assert not (tmp_path / "started").exists()
