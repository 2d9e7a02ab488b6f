"""`sluice slurm rl` on a real Slurm of three nodes: runs to their end, and through each fault. `-s` shows recovery times and memory."""

from __future__ import annotations

import contextlib
import json
import shlex
import stat
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from learning_run import STEPS, learned, make_model, settings
from slurm_cluster import SlurmCluster, require_slurm, slurm_cluster, until

from sluice.certificates import read_leaf
from sluice.config import load_run
from sluice.plan import Machines, make_plan
from sluice.plan.slurm import Host, step

ROOT = Path(__file__).parents[2]
SLUICE = (sys.executable, "-m", "sluice.cli.main")

STALL_S = 2.0
"""Seconds without a step after which a run stands still; a step takes a tenth of it on a machine that does nothing else."""

HETEROGENEOUS = (
    "--machines",
    "2x0",
    "--control-node",
    "--sbatch=trainer:--comment=trains",
    "--sbatch=control:--comment=controls",
)
"""Three nodes with other options each: a heterogeneous job of three components. Control is n0, rollout n1, trainer n2."""

pytestmark = [pytest.mark.ecosystem, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    require_slurm()
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model")


class Run:
    """A run as a job of the cluster."""

    def __init__(self, cluster: SlurmCluster, model: Path, output_dir: Path, name: str, *flags: str) -> None:
        self.cluster, self.name, self.directory = cluster, name, output_dir / name
        words = (*SLUICE, "slurm", "rl", *settings(model, output_dir, name), "--cores", "2", *flags)
        with contextlib.chdir(ROOT):
            self.said = cluster.command(*words, environment={"OMP_NUM_THREADS": "1"})
        self.job = self.said.split()[1]
        self.begin = time.monotonic()

    @property
    def step(self) -> int:
        """The last step that was applied."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.directory / "metrics.jsonl").read_text().splitlines(keepends=True)
            return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)
        return 0

    @property
    def log(self) -> str:
        return (self.directory / "slurm" / "job.log").read_text()

    @property
    def state(self) -> str:
        return self.cluster.job(self.job)["JobState"]

    @property
    def starts(self) -> int:
        return 1 + int(self.cluster.job(self.job).get("Restarts", "0"))

    def until_step(self, number: int) -> None:
        def reached() -> bool:
            state = self.state
            assert state in {"PENDING", "RUNNING", "CONFIGURING", "COMPLETING"}, self.describe()
            if state == "PENDING" and set(self.cluster.states().values()) == {"idle"}:
                self._release()  # requeued once more, by a crash of slurmctld
            return self.step >= number

        until(reached, f"step {number}", self.describe, 120)

    def until_requeued(self) -> None:
        """Wait until the job waits for another start."""
        until(lambda: self.state == "PENDING", "the job to be requeued", self.describe, 120)

    def start_now(self) -> None:
        """Let a requeued job start as soon as all nodes are free: Slurm would wait for two minutes."""
        until(lambda: set(self.cluster.states().values()) == {"idle"}, "free nodes", self.describe)
        self._release()

    def _release(self) -> None:
        """Let the job start. That is refused if it has just done so."""
        self.cluster.command("scontrol", "update", f"JobId={self.job}", "StartTime=now", check=False)

    def started(self, times: int) -> bool:
        """Whether the job was started so often, not counting starts after a crash of slurmctld."""
        return self.starts - self.cluster.crashes <= times <= self.starts

    def stalls(self) -> bool:
        """Whether the run makes no step for some seconds: none of its replicas answers."""
        before, deadline = self.step, time.monotonic() + STALL_S
        while time.monotonic() < deadline:
            if self.step > before:
                return False
            time.sleep(0.1)
        return True

    def until_end(self) -> None:
        until(lambda: self.state not in {"PENDING", "RUNNING", "COMPLETING"}, "the job's end", self.describe, 200)
        assert self.state == "COMPLETED", self.describe()

    def audit(self) -> dict[str, object]:
        done = subprocess.run(
            [*SLUICE, "audit", str(self.directory), "--json"], capture_output=True, text=True, cwd=ROOT, check=False
        )
        told: dict[str, object] = json.loads(done.stdout)
        assert told["exact"], told["differences"]
        return told

    def service(self, node: str, service: str) -> psutil.Process:
        """The process of a service on a node."""

        def found() -> list[psutil.Process]:
            return [
                each
                for each in self.cluster.processes(node)
                if "sluice.cli.main" in (words := each.cmdline())
                and words[words.index("sluice.cli.main") + 1] == service
                and words[0] == sys.executable
            ]

        (process,) = found()
        return process

    def describe(self) -> str:
        logs = "".join(
            f"\n--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-12:])
            for path in [self.directory / "slurm" / "job.log", *sorted(self.directory.glob("logs/*.log"))]
            if path.exists()
        )
        return f"job {self.cluster.job(self.job)} at step {self.step}, nodes {self.cluster.states()}{logs}"


class PeakMemory:
    """The most memory that the processes of all nodes have held together, in MiB, until the block ends."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self._cluster, self._end = cluster, threading.Event()
        self.mib = 0.0

    def __enter__(self) -> PeakMemory:
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._end.wait(0.5):
            held = 0
            for name in self._cluster.names:
                with contextlib.suppress(KeyError, psutil.NoSuchProcess):
                    for process in self._cluster.processes(name):
                        with contextlib.suppress(psutil.NoSuchProcess):
                            held += process.memory_info().rss
            self.mib = max(self.mib, held / 2**20)


def interrupted(run: Run, what: str, inject: Callable[[], None], repair: Callable[[], None] = lambda: None) -> None:
    """Inject a fault that requeues the job, wait until the run makes steps again, and print how long that took."""
    begin, starts = time.monotonic(), run.starts
    with PeakMemory(run.cluster) as peak:
        inject()
        run.until_requeued()
        waited, stopped_at = time.monotonic() - begin, run.step
        run.audit()
        repair()
        run.start_now()
        again = time.monotonic()
        run.until_step(stopped_at + 3)
    assert run.started(starts + 1)
    print(
        f"{run.name}: {what} at step {stopped_at}: requeued after {waited:.1f} s, further steps {time.monotonic() - again:.1f} s"
        f" after the next start; peak {peak.mib:.0f} MiB"
    )


def disturbed(run: Run, what: str, inject: Callable[[], None]) -> None:
    """Inject a fault that the job survives, wait until the run makes steps again, and print how long that took."""
    begin = time.monotonic()
    with PeakMemory(run.cluster) as peak:
        inject()
        before = run.step
        run.until_step(before + 10)  # more than what was ready before the fault
    print(
        f"{run.name}: {what} at step {before}: further steps after {time.monotonic() - begin:.1f} s; peak {peak.mib:.0f} MiB"
    )


def test_a_trainer_on_two_nodes_ends_as_a_simple_job_without_tls_whose_tokens_are_for_its_user_alone(
    cluster: SlurmCluster, model: Path, tmp_path: Path
) -> None:
    with PeakMemory(cluster) as peak:
        run = Run(
            cluster,
            model,
            tmp_path,
            "plain",
            "--machines",
            "2x0",
            "--cores",
            "1",
            "--allocation-mode",
            "d1+d2",
            "--insecure",
        )
        run.until_end()
    reward = learned(run.directory)
    print(f"plain: {STEPS} steps in {time.monotonic() - run.begin:.1f} s, reward {reward:.3f}, peak {peak.mib:.0f} MiB")
    told = run.audit()
    assert (told["batches"], run.starts) == (STEPS, 1)
    folder = run.directory / "slurm"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    tokens = {path.name: path.read_text() for path in folder.glob("*.token")}
    assert {"operator.token", "rollout.token", "trainer.token", "dispatcher.token"} <= set(tokens)
    assert all(stat.S_IMODE((folder / name).stat().st_mode) == 0o600 for name in tokens)
    said = (folder / "job.sh").read_text() + run.log + (run.directory / "config.toml").read_text()
    assert not [name for name, token in tokens.items() if token in said]
    peers = tomllib.loads((folder / "job.toml").read_text())["peers"]
    assert peers["orchestrator"] == "10.77.0.1:7104"
    assert [peers["trainer"], peers["rollout"]] == ["10.77.0.1:7102", ["10.77.0.1:7103"]]
    assert '"trainer.1"' in (run.directory / "logs" / "trainer.1.log").read_text(), (
        "the second rank, on the second node"
    )


def test_a_run_goes_on_through_a_cut_link_and_a_killed_process_without_another_start(
    cluster: SlurmCluster, model: Path, tmp_path: Path
) -> None:
    run = Run(cluster, model, tmp_path, "cut", *HETEROGENEOUS)
    run.until_step(10)

    def cut() -> None:
        cluster.cut_link("n1")
        try:
            until(run.stalls, "the run to stand still without its replica", run.describe, 12)
        finally:
            cluster.join_link("n1")

    disturbed(run, "link of the rollout node cut", cut)
    disturbed(run, "rollout killed", lambda: run.service("n1", "rollout").kill())
    run.until_end()
    learned(run.directory)
    assert (run.audit()["batches"], run.starts) == (STEPS, 1)
    certificates = run.directory / "slurm/certs"
    assert {"10.77.0.1", "10.77.0.2", "10.77.0.3"} <= set(read_leaf(certificates / "trainer.pem").hosts)
    assert "rollout ended with signal SIGKILL; restart 1 of 3" in run.log


@pytest.mark.soak  # `make test-cluster`; make test-ecosystem has one requeue, after a node was lost
def test_a_run_is_requeued_before_its_time_limit_and_when_it_is_preempted(
    cluster: SlurmCluster, model: Path, tmp_path: Path
) -> None:
    run = Run(cluster, model, tmp_path, "requeued", *HETEROGENEOUS)
    run.until_step(10)

    def near_the_limit() -> None:  # what Slurm itself sends at the time of --signal
        cluster.command("scancel", "--signal=USR1", "--batch", run.job)

    interrupted(run, "USR1 before the time limit", near_the_limit)
    assert "stopping the services" in run.log
    assert '"stopped"' in (run.directory / "logs" / "rollout.log").read_text(), "it drained"

    def preempt() -> None:
        urgent = ("--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap", "true")
        cluster.command("sbatch", *urgent)

    interrupted(run, "preempted", preempt)
    run.until_end()
    learned(run.directory)
    assert run.audit()["batches"] == STEPS
    assert run.started(3)
    assert run.log.count("resuming from step_") == 2


def test_a_run_is_requeued_and_resumed_when_a_node_is_lost(cluster: SlurmCluster, model: Path, tmp_path: Path) -> None:
    run = Run(cluster, model, tmp_path, "lost", *HETEROGENEOUS)
    run.until_step(10)
    interrupted(run, "node of the trainer killed", lambda: cluster.kill_node("n2"), lambda: cluster.start_node("n2"))
    run.until_end()
    learned(run.directory)
    assert run.audit()["batches"] == STEPS
    assert run.started(2)


def test_a_part_that_does_not_serve_ends_the_job_with_its_name_node_and_port(
    cluster: SlurmCluster, model: Path, tmp_path: Path
) -> None:
    run = Run(cluster, model, tmp_path, "late", "--machines", "2x0", "--start-deadline", "0.5")
    until(lambda: run.state not in {"PENDING", "RUNNING", "COMPLETING"}, "the job's end", run.describe)
    assert (run.state, cluster.job(run.job)["ExitCode"], run.starts) == ("FAILED", "1:0", 1)
    assert "did not serve at 10.77.0." in run.log
    assert "(node n" in run.log


def test_slurm_shows_a_part_the_devices_that_the_plan_gives_it(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = load_run(["--model", "m", "--allocation-mode", "vllm:d1t2+fsdp:d2"])
    plan = make_plan(run, Machines.alike(1, cluster.gpus, cluster.cpus))
    (place,) = plan.places_of("trainer")
    host = Host("n0", "10.77.0.1", None, "", cluster.gpus, cluster.cpus)
    words = shlex.join(step(host, place, ("printenv", "CUDA_VISIBLE_DEVICES")))
    shape = (f"--gpus-per-node={cluster.gpus}", f"--cpus-per-task={cluster.cpus}", "--nodelist=n0")
    job = cluster.command("sbatch", "--parsable", *shape, f"--output={tmp_path}/log", "--wrap", words).strip()
    until(lambda: cluster.job(job)["JobState"] == "COMPLETED", "the step", lambda: cluster.job(job))
    assert (tmp_path / "log").read_text().splitlines()[-1] == "2,3"
