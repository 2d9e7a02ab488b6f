"""A Slurm cluster of several nodes on this machine. Each node has its own network, processes, host name and shared memory.

A node is a set of Linux namespaces with a `slurmd` in it, joined by a bridge, so that it can lose its power (`kill_node`) or its
link (`cut_link`) as a machine does. The controller runs in a network namespace of its own, from which `command` calls Slurm's
programs. Everything is made in a scratch folder and ends with the cluster. Needs root and Debian's packages.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

PACKAGES = ("slurm-wlm", "munge", "iproute2", "util-linux")
"""Debian packages with the programs."""

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged", "ip", "unshare", "nsenter", "setpriv")

_WITH_US = ("setpriv", "--pdeathsig", "KILL")
"""Runs a program that ends with this process, however that ends."""

COMMAND_S = 30.0

NETWORK = "10.77.0"
CONTROLLER = f"{NETWORK}.254"

_NODE = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount --bind "$SCRATCH/$NODE/boot_id" /proc/sys/kernel/random/boot_id
hostname "$NODE"
ip link set lo up
read -r linked
ip addr add "$ADDRESS/24" dev eth0
ip link set eth0 up
slurmd -D -f "$SLURM_CONF" -N "$NODE" >>"$SCRATCH/$NODE/slurmd.log" 2>&1 &
wait
"""
"""What the first process of a node does. It stays, because it must reap the processes that lose their parent."""

_CONTROLLER = """
set -e
ulimit -c 0
ip link set lo up
ip link add br0 type bridge
ip addr add "$ADDRESS/24" dev br0
ip link set br0 up
slurmctld -D -i -f "$SLURM_CONF" >"$SCRATCH/slurmctld.out" 2>&1 || true
while true; do
  echo "slurmctld ended; it starts again" >>"$SCRATCH/slurmctld.out"
  slurmctld -D -f "$SLURM_CONF" >>"$SCRATCH/slurmctld.out" 2>&1 || true
done
"""
"""What the first process of the controller's machine does. It starts slurmctld again, as systemd does: that of Debian 12 (22.05.8) sometimes
ends by SIGSEGV in `build_job_info_resp`, when srun asks about a heterogeneous job that has lost a node."""


def require_slurm() -> None:
    """Skip the test if a cluster cannot be made here."""
    if os.name != "posix" or not Path("/proc/self/ns/net").exists():
        pytest.skip("a Slurm cluster of namespaces needs Linux")
    if os.geteuid() != 0:
        pytest.skip("a Slurm cluster of namespaces needs root: network and process namespaces are made for its nodes")
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        pytest.skip(f"no {', '.join(missing)}: apt-get install --no-install-recommends {' '.join(PACKAGES)}")
    probe = ("unshare", "--net", "--pid", "--mount", "--uts", "--fork", "true")
    made = subprocess.run(probe, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if made.returncode:
        pytest.skip(f"this container may not make namespaces (needs CAP_SYS_ADMIN): {made.stderr.strip()}")


class SlurmCluster:
    """A cluster under way; `close` ends it.

    Args:
        scratch: An empty folder, for everything that Slurm writes.
        nodes: Number of nodes, named ``n0``, ``n1``, ...
        cpus: Processors that each node claims to have.
        gpus: Devices that each node claims to have. They are null devices: programs see their numbers, and cannot compute on them.
    """

    def __init__(self, scratch: Path, nodes: int = 3, cpus: int = 8, gpus: int = 4) -> None:
        self.scratch, self.cpus, self.gpus = scratch, cpus, gpus
        self.names = [f"n{number}" for number in range(nodes)]
        self.conf = scratch / "slurm.conf"
        self._daemons: list[subprocess.Popen[str]] = []
        self._nodes: dict[str, subprocess.Popen[str]] = {}

    def start(self) -> None:
        """Start the daemons, and wait until all nodes are idle."""
        for folder in ("state", *self.names):
            (self.scratch / folder).mkdir(parents=True)
        for number in range(self.gpus):
            os.mknod(self.scratch / f"gpu{number}", 0o666 | 0o020000, os.makedev(1, 3))
        self._write_settings()
        self._start_munge()
        self._controller = subprocess.Popen(
            [*_WITH_US, "unshare", "--net", "--pid", "--fork", "--kill-child=KILL", "bash", "-c", _CONTROLLER],
            env={**self.environment, "SCRATCH": str(self.scratch), "ADDRESS": CONTROLLER},
            stdin=subprocess.DEVNULL,
            text=True,
        )
        self._daemons.append(self._controller)
        until(lambda: self._has_own_network(self._controller.pid), "the controller's network namespace")
        until(lambda: "UP" in self.command("ip", "link", "show", "br0", check=False), "the bridge")
        for name in self.names:
            self.start_node(name)
        until(lambda: set(self.states().values()) == {"idle"}, "all nodes to be idle", self.states)

    def _write_settings(self) -> None:
        devices = f"{self.scratch}/gpu[0-{self.gpus - 1}]"
        (self.scratch / "gres.conf").write_text(f"Name=gpu File={devices}\n")
        nodes = [
            f"NodeName={name} NodeAddr={self._address(name)} NodeHostname={name} CPUs={self.cpus} RealMemory=16000"
            f" Gres=gpu:{self.gpus} State=UNKNOWN"
            for name in self.names
        ]
        listed = ",".join(self.names)
        self.conf.write_text(
            "\n".join(
                [
                    "ClusterName=sluice",
                    f"SlurmctldHost={socket.gethostname()}({CONTROLLER})",
                    "SlurmUser=root",
                    f"AuthInfo=socket={self.scratch}/munge.socket",
                    f"StateSaveLocation={self.scratch}/state",
                    f"SlurmdSpoolDir={self.scratch}/%n/spool",
                    f"SlurmctldPidFile={self.scratch}/slurmctld.pid",
                    f"SlurmdPidFile={self.scratch}/%n/slurmd.pid",
                    f"SlurmctldLogFile={self.scratch}/slurmctld.log",
                    "ProctrackType=proctrack/linuxproc",
                    "TaskPlugin=task/none",
                    "MpiDefault=none",
                    "SelectType=select/cons_tres",
                    "SelectTypeParameters=CR_CPU",
                    "SlurmdParameters=config_overrides",
                    "GresTypes=gpu",
                    "ReturnToService=2",
                    "SlurmdTimeout=20",
                    "KillWait=3",
                    "SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0",
                    "PreemptType=preempt/partition_prio",
                    "PreemptMode=REQUEUE",
                    *nodes,
                    f"PartitionName=batch Nodes={listed} Default=YES PriorityTier=1 MaxTime=INFINITE",
                    f"PartitionName=urgent Nodes={listed} PriorityTier=10 MaxTime=INFINITE",
                    "",
                ]
            )
        )

    def _start_munge(self) -> None:
        key = self.scratch / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = (f"--{kind}-file={self.scratch}/munge.{kind}" for kind in ("key", "pid", "log", "seed"))
        # --force: the scratch folder's parents may be writable by others, which a key of one test may be.
        munge = (
            *_WITH_US,
            "munged",
            "--foreground",
            "--force",
            "--num-threads=2",
            f"--socket={self.scratch}/munge.socket",
            *files,
        )
        self._daemons.append(subprocess.Popen(munge, stderr=subprocess.DEVNULL, text=True))
        until((self.scratch / "munge.socket").exists, "munged's socket")

    def close(self) -> None:
        """End all processes of the cluster."""
        for name in list(self._nodes):
            self.kill_node(name)
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait(timeout=COMMAND_S)

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which Slurm's programs find this cluster."""
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    @property
    def crashes(self) -> int:
        """How often slurmctld has ended by itself."""
        return (self.scratch / "slurmctld.out").read_text().count("it starts again")

    def command(self, *words: str, environment: Mapping[str, str] | None = None, check: bool = True) -> str:
        """Run a program in the controller's network, and return what it prints. Ask again if the controller does not answer."""
        deadline = time.monotonic() + COMMAND_S
        while True:
            done = subprocess.run(
                self.words(*words),
                env={**self.environment, **(environment or {})},
                capture_output=True,
                text=True,
                timeout=COMMAND_S,
                check=False,
            )
            if "Unable to contact slurm controller" not in done.stderr or time.monotonic() > deadline:
                break
        assert not check or not done.returncode, f"{words} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def words(self, *words: str) -> list[str]:
        """Return the command line that runs a program in the controller's network."""
        return ["nsenter", f"--net=/proc/{self._controller.pid}/ns/net", *words]

    def states(self) -> dict[str, str]:
        """Return the state of each node, such as ``idle``; a star at its end says that the node does not answer."""
        return dict(
            line.split() for line in self.command("sinfo", "-h", "-N", "-p", "batch", "-o", "%N %T").splitlines()
        )

    def job(self, job: str) -> dict[str, str]:
        """Return what `scontrol show job` knows about a job, or about the first component of a heterogeneous one."""
        shown = self.command("scontrol", "--oneliner", "show", "job", job).splitlines()[0]
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def start_node(self, name: str) -> None:
        """Start a node, which must not run."""
        address = self._address(name)
        (self.scratch / name / "boot_id").write_text(f"{uuid.uuid4()}\n")
        new = ("--net", "--uts", "--pid", "--mount", "--fork", "--kill-child=KILL")
        process = subprocess.Popen(
            [*_WITH_US, "unshare", *new, "bash", "-c", _NODE],
            env={**self.environment, "SCRATCH": str(self.scratch), "NODE": name, "ADDRESS": address},
            stdin=subprocess.PIPE,
            text=True,
        )
        self._nodes[name] = process
        until(lambda: self._has_own_network(process.pid), f"the network namespace of {name}")
        link = f"v-{name}"
        self.command("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
        self.command("ip", "link", "set", link, "master", "br0", "up")
        assert process.stdin is not None
        process.stdin.write("linked\n")
        process.stdin.flush()

    def kill_node(self, name: str) -> None:
        """Kill all processes of a node at once, as a power failure does."""
        node = self._nodes.pop(name)
        node.kill()  # its namespaces end with it (--kill-child)
        node.wait(timeout=COMMAND_S)
        assert node.stdin is not None
        node.stdin.close()

    def cut_link(self, name: str) -> None:
        """Cut a node off from all others."""
        self.command("ip", "link", "set", f"v-{name}", "down")

    def join_link(self, name: str) -> None:
        """Connect a node again."""
        self.command("ip", "link", "set", f"v-{name}", "up")

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the processes of a node."""
        return psutil.Process(self._nodes[name].pid).children(recursive=True)

    def _address(self, name: str) -> str:
        return f"{NETWORK}.{self.names.index(name) + 1}"

    def _has_own_network(self, process: int) -> bool:
        return Path(f"/proc/{process}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()


def until(
    reached: Callable[[], bool], what: str, state: Callable[[], object] = lambda: "", deadline_s: float = 60.0
) -> float:
    """Poll until something is reached, and return how many seconds that took. Fail at the deadline with the state."""
    begin = time.monotonic()
    while not reached():
        waited = time.monotonic() - begin
        assert waited < deadline_s, f"waited {waited:.0f} s for {what}: {state()}"
        time.sleep(0.1)
    return time.monotonic() - begin


@contextlib.contextmanager
def slurm_cluster(scratch: Path, **shape: int) -> Iterator[SlurmCluster]:
    """A cluster while the block lasts."""
    cluster = SlurmCluster(scratch, **shape)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
