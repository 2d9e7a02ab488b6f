"""Runs the pods of rendered manifests as processes of this machine, as far as a kernel can: no kubelet and no API server are here.

What is as on a node: the command with its variables, the files of ConfigMaps and Secrets and their modes, volumes, a root that is
read-only, the user and group, no capabilities, a network address and a host name of its own, Service names, SIGTERM after preStop and
SIGKILL after the grace. What is not: scheduling, admission, the effects of probes, NetworkPolicies, limits of CPU and memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helm_chart import ROOT, Manifest

NAMESPACE = "rl"
BRIDGE = "10.231.0.1"

CHECKS = """
import json, sys, time
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
wanted, deadline = json.loads(sys.argv[1]), time.monotonic() + float(sys.argv[2])
state = dict.fromkeys(wanted, "not asked")
while state and time.monotonic() < deadline:
    for name in list(state):
        address, service = wanted[name]
        with grpc.insecure_channel(address) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            try:
                status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status
            except grpc.RpcError as error:
                state[name] = error.code().name
                continue
        if status == health_pb2.HealthCheckResponse.SERVING:
            del state[name]
        else:
            state[name] = "NOT_SERVING"
    time.sleep(0.3 if state else 0)
print(json.dumps(state))
"""
"""Asks health checks until all are SERVING; prints the others."""

FETCH = """
import json, sys, urllib.request
answers = []
for url in json.load(sys.stdin):
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            answers.append(json.load(answer))
    except urllib.error.HTTPError as error:
        answers.append(json.load(error))
print(json.dumps(answers))
"""


def why_not() -> str:
    """Return why pods cannot run here; empty if they can."""
    if os.geteuid() != 0:
        return "pods need root: they get network and mount namespaces of their own"
    missing = [each for each in ("ip", "nsenter", "unshare", "setpriv", "chroot") if shutil.which(each) is None]
    if missing:
        return f"pods need {', '.join(missing)}"
    tried = subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else f"no namespaces here: {tried.stderr.decode().strip()}"


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)


@dataclass
class Pod:
    """One pod: what its manifest says, its address, and its process."""

    name: str
    host: str
    address: str
    labels: Mapping[str, str]
    spec: Manifest
    claims: Mapping[str, str]
    index: int
    process: subprocess.Popen[bytes] | None = None
    volumes: dict[str, Path] = field(default_factory=dict)

    @property
    def container(self) -> Manifest:
        (container,) = self.spec["containers"]
        return container

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    def check(self, probe: str) -> tuple[str, str]:
        """Address and service that a probe asks."""
        grpc = self.container[probe]["grpc"]
        return f"{self.address}:{grpc['port']}", grpc.get("service", "")

    def terminate(self) -> int:
        """End it as a kubelet does: preStop, SIGTERM, SIGKILL when the grace is over. Return the exit code."""
        assert self.process is not None
        sleep = self.container["lifecycle"]["preStop"]["sleep"]["seconds"]
        time.sleep(sleep)
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(self.spec["terminationGracePeriodSeconds"] - sleep)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(10)


class Cluster:
    """The pods of one release.

    Args:
        manifests: As rendered.
        scratch: Directory for volumes and logs.
        claims: Directories of claims that the manifests do not make.
    """

    def __init__(self, manifests: Sequence[Manifest], scratch: Path, claims: Mapping[str, Path] | None = None) -> None:
        self._scratch, self._claims = scratch, dict(claims or {})
        self._prefix = f"sluice-{os.getpid()}"
        self.pods: dict[str, Pod] = {}
        self._by_name = {(each["kind"], each["metadata"]["name"]): each for each in manifests}
        self.manifests = manifests
        self._next = 2
        self._hosts = scratch / "hosts"
        self._etc = scratch / "etc"

    def __enter__(self) -> Cluster:
        self._scratch.chmod(0o755)
        shutil.copytree("/etc", self._etc, symlinks=True, ignore=shutil.ignore_patterns("ssl.*", "shadow*", "ssh"))
        (self._etc / "sluice").mkdir()
        self._hosts.write_text("127.0.0.1 localhost\n")
        run("ip", "netns", "add", self._prefix)
        self.inside("ip", "link", "set", "lo", "up")
        self.inside("ip", "link", "add", "br0", "type", "bridge")
        self.inside("ip", "addr", "add", f"{BRIDGE}/16", "dev", "br0")
        self.inside("ip", "link", "set", "br0", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods.values():
            if pod.process is not None and pod.process.poll() is None:
                pod.process.kill()
                pod.process.wait(10)
        for name in [self._prefix, *(f"{self._prefix}-{pod.index}" for pod in self.pods.values())]:
            with contextlib.suppress(subprocess.CalledProcessError):
                run("ip", "netns", "del", name)

    def inside(self, *words: str) -> None:
        """Run a program of the cluster's own network."""
        run("nsenter", f"--net=/run/netns/{self._prefix}", *words)

    def popen(self, words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a program in the cluster's network."""
        with log.open("ab") as out:
            return subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self._prefix}", *words], stdout=out, stderr=subprocess.STDOUT
            )

    def ask(self, program: str, *words: str, given: str = "", timeout_s: float = 120) -> Any:
        """Run a Python program in the cluster's network; return the JSON that it prints."""
        done = subprocess.run(
            ["nsenter", f"--net=/run/netns/{self._prefix}", sys.executable, "-c", program, *words],
            input=given,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def fetch(self, urls: Iterable[str]) -> list[Any]:
        """Return the JSON of some URLs of the cluster."""
        answers: list[Any] = self.ask(FETCH, given=json.dumps(list(urls)))
        return answers

    def wait(self, probe: str, pods: Iterable[Pod], deadline_s: float) -> dict[str, str]:
        """Ask a probe of each pod until all succeed; return what the others said."""
        checks = {pod.name: pod.check(probe) for pod in pods}
        found: dict[str, str] = self.ask(CHECKS, json.dumps(checks), str(deadline_s), timeout_s=deadline_s + 30)
        return found

    def create(self, kind: str, component: str, replicas: int | None = None) -> list[Pod]:
        """Make the pods of a workload; they start with `start`. `replicas`: not as many as the manifest says."""
        made = []
        for each in self.manifests:
            labels = each.get("spec", {}).get("template", {}).get("metadata", {}).get("labels", {})
            if each["kind"] == kind and labels.get("app.kubernetes.io/component") == component:
                spec = each["spec"]
                count = replicas or spec.get("replicas") or spec.get("completions") or 1
                made += [self._make(each, number) for number in range(count)]
        self._publish()
        return made

    def _make(self, workload: Manifest, number: int) -> Pod:
        template = workload["spec"]["template"]
        name = workload["metadata"]["name"]
        labels = dict(template["metadata"]["labels"])
        pod_name = f"{name}-{number}"
        while pod_name in self.pods:
            number += 1
            pod_name = f"{name}-{number}"
        if workload["kind"] == "Job":
            labels["batch.kubernetes.io/job-completion-index"] = str(number)
        claims = {
            each["metadata"]["name"]: f"{each['metadata']['name']}-{pod_name}"
            for each in workload["spec"].get("volumeClaimTemplates", [])
        }
        index, self._next = self._next, self._next + 1
        pod = Pod(pod_name, pod_name, f"10.231.0.{index}", labels, template["spec"], claims, index)
        self.pods[pod_name] = pod
        net, veth = f"{self._prefix}-{index}", f"v{index}"
        run("ip", "netns", "add", net)
        self.inside("ip", "link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", f"/run/netns/{net}")
        self.inside("ip", "link", "set", veth, "master", "br0", "up")
        enter = ("nsenter", f"--net=/run/netns/{net}")
        run(*enter, "ip", "link", "set", "lo", "up")
        run(*enter, "ip", "addr", "add", f"{pod.address}/16", "dev", "eth0")
        run(*enter, "ip", "link", "set", "eth0", "up")
        return pod

    def remove(self, pod: Pod) -> None:
        """Forget a pod that has ended."""
        del self.pods[pod.name]
        run("ip", "netns", "del", f"{self._prefix}-{pod.index}")
        self._publish()

    def _publish(self) -> None:
        """Let names of Services stand for the addresses of their pods, in the file that all pods have as /etc/hosts."""
        lines = ["127.0.0.1 localhost"]
        for service in self.services():
            name = service["metadata"]["name"]
            pods = list(self.selected(service))
            headless = service["spec"].get("clusterIP") == "None"
            for pod in pods if headless else pods[:1]:
                lines.append(f"{pod.address} {name} {name}.{NAMESPACE}.svc")
                if pod.spec.get("subdomain") == name:
                    lines.append(f"{pod.address} {pod.host}.{name}")
        self._hosts.write_text("\n".join(lines) + "\n")  # in place: it is mounted

    def secret(self, name: str, key: str) -> str:
        """Return what a Secret holds."""
        return str(self._by_name["Secret", name]["stringData"][key])

    def services(self) -> Iterator[Manifest]:
        """The Services of the release."""
        yield from (each for each in self.manifests if each["kind"] == "Service")

    def selected(self, service: Manifest) -> Iterator[Pod]:
        """The pods of a Service."""
        wanted = service["spec"]["selector"].items()
        yield from (pod for pod in self.pods.values() if wanted <= pod.labels.items())

    def start(self, pod: Pod) -> None:
        """Start the process of a pod, again if it has ended. Its volumes stay."""
        user = pod.spec["securityContext"]["runAsUser"]
        variables = self._variables(pod)
        words = [*pod.container["command"], *pod.container["args"]]
        for name, value in variables.items():
            words = [word.replace(f"$({name})", value) for word in words]
        root = self._scratch / "roots" / pod.name
        root.mkdir(parents=True, exist_ok=True)
        script = [f"hostname {shlex.quote(pod.host)}", f"mount -t tmpfs -o mode=755 tmpfs {root}"]
        for directory in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/opt"):
            if Path(directory).is_symlink():
                script.append(f"ln -s {Path(directory).readlink()} {root}{directory}")
            elif Path(directory).exists():
                script += _bind(directory, root, directory, read_only=True)
        script += [line for each in ("/proc", "/sys", "/dev") for line in _bind(each, root, each)]
        script += _bind(str(self._etc), root, "/etc")
        script += _bind(str(self._hosts), root, "/etc/hosts")
        for mount in pod.container["volumeMounts"]:
            source = self._volume(pod, mount["name"], user)
            script += _bind(str(source), root, mount["mountPath"], read_only=mount.get("readOnly", False))
        for place in _code():  # after the volumes: one is /tmp, where the checkout may lie
            script += _bind(place, root, place, read_only=True)
        script.append(f"mount -o remount,bind,ro {root}/etc")
        script.append(f"mount -o remount,ro {root}")
        environment = " ".join(shlex.quote(f"{name}={value}") for name, value in variables.items())
        drop = (
            f"setpriv --reuid {user} --regid {user} --groups {user} --no-new-privs --bounding-set=-all --inh-caps=-all"
        )
        script.append(f"exec chroot {root} {drop} env -i -C {ROOT} {environment} {shlex.join(words)}")
        file = self._scratch / "roots" / f"{pod.name}.sh"
        file.write_text("set -eu\n" + "\n".join(script) + "\n")
        with self.log(pod).open("ab") as out:
            pod.process = subprocess.Popen(
                [
                    *("nsenter", f"--net=/run/netns/{self._prefix}-{pod.index}"),
                    *("unshare", "--mount", "--uts", "--propagation", "private", "sh", str(file)),
                ],
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def log(self, pod: Pod) -> Path:
        """What a pod writes."""
        return self._scratch / f"{pod.name}.log"

    def _variables(self, pod: Pod) -> dict[str, str]:
        path = f"{Path(sys.prefix) / 'bin'}:/usr/bin:/bin"
        variables = {"PATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        for each in pod.container["env"]:
            field = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            variables[each["name"]] = pod.address if field == "status.podIP" else each["value"]
        if "batch.kubernetes.io/job-completion-index" in pod.labels:
            variables["JOB_COMPLETION_INDEX"] = pod.labels["batch.kubernetes.io/job-completion-index"]
        return variables

    def _volume(self, pod: Pod, name: str, user: int) -> Path:
        """Make a volume of a pod, or return the one that is there."""
        if name in pod.volumes:
            return pod.volumes[name]
        if name in pod.claims:
            volume = {"persistentVolumeClaim": {"claimName": pod.claims[name]}}
        else:
            (volume,) = (each for each in pod.spec["volumes"] if each["name"] == name)
        path = self._scratch / "volumes" / pod.name / name
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            path = self._claims.setdefault(claim, self._scratch / "claims" / claim)
        path.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            data = self._by_name["ConfigMap", volume["configMap"]["name"]]["data"]
            _write(path, data, 0o644, 0)
        elif "secret" in volume:
            data = self._by_name["Secret", volume["secret"]["secretName"]]["stringData"]
            _write(path, data, volume["secret"]["defaultMode"], user)
        elif "projected" in volume:
            for source in volume["projected"]["sources"]:
                data = self._by_name["Secret", source["secret"]["name"]]["stringData"]
                items = {each["key"]: each["path"] for each in source["secret"].get("items", [])}
                chosen = {items.get(key, key): text for key, text in data.items() if not items or key in items}
                _write(path, chosen, volume["projected"]["defaultMode"], user)
        elif not any(path.iterdir()):
            os.chown(path, user, user)
            path.chmod(0o2775)
        pod.volumes[name] = path
        return path


def _write(directory: Path, files: Mapping[str, str], mode: int, group: int) -> None:
    for name, text in files.items():
        file = directory / name
        file.write_text(text)
        os.chown(file, 0, group)
        file.chmod(mode)


def _bind(source: str, root: Path, target: str, *, read_only: bool = False) -> list[str]:
    place = shlex.quote(f"{root}{target}")
    make = "true" if target == "/etc/hosts" else f"mkdir -p {place}"
    lines = [make, f"mount --rbind {shlex.quote(source)} {place}"]
    return [*lines, f"mount -o remount,bind,ro {place}"] if read_only else lines


def _code() -> list[str]:
    """Directories that hold Python, what is installed, and our own code: in a container they are the image."""
    places = {Path(each).resolve() for each in (sys.base_prefix, sys.prefix, ROOT, *sys.path) if each}
    places = {each for each in places if each.is_dir() and not each.is_relative_to("/usr")}
    return sorted(
        str(each) for each in places if not any(each != other and each.is_relative_to(other) for other in places)
    )
