"""A release of the chart as processes with the pods' commands, files, users and networks, and a real Prometheus that scrapes them."""

from __future__ import annotations

import itertools
import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml
from helm_chart import CHART, ROOT, TOOLS, Manifest, example, rendered
from pods import BRIDGE, NAMESPACE, Cluster, Pod, why_not

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not all((TOOLS / each).exists() for each in ("helm", "prometheus")),
        reason="Helm and Prometheus are not installed: run `make install-ecosystem`",
    ),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

START_S = 420
PROMETHEUS = f"http://{BRIDGE}:9090"

SETTINGS = """
run = "pods"
allocation_mode = "fsdp:d2"
max_staleness = 1

[orchestrator]
environment = "grpc://sluice-env-letters:7106"
environment_args = { dispatcher_token_file = "/run/sluice/secrets/dispatcher.token", tls_ca = "/run/sluice/tls/ca.crt", tls_cert = "/run/sluice/tls/tls.crt", tls_key = "/run/sluice/tls/tls.key" }
batch_size = 4
group_size = 4
max_steps = 100000

[orchestrator.sampling]
max_tokens = 8

[trainer]
lr = 1e-4

[rollout]
engine = "transformers"
max_model_len = 64
"""

VALUES = {
    "security": {"tls": {"mode": "secret", "secretName": "certificates", "mutual": True}},
    "trainer": {"nodes": 2, "storage": {"accessModes": ["ReadWriteMany"]}, "drainSeconds": 10},
    "rollout": {"drainSeconds": 10, "autoscaling": {"kind": "keda"}},
    "model": {"name": "/run/sluice/model/base", "claim": "models"},
    "gateway": {"enabled": True, "replicas": 1, "drainSeconds": 5},
    "environments": [{"name": "letters", "source": "examples/reverse_text/env.py:ReverseText"}],
    "pods": {"preStopSeconds": 1, "userId": 10001},
    "monitoring": {"serviceMonitor": {"enabled": True}, "alerts": {"enabled": True}, "dashboard": {"enabled": True}},
}

PARTS = (
    ("StatefulSet", "weightsync"),
    ("Deployment", "env-letters"),
    ("Job", "trainer"),
    ("Deployment", "rollout"),
    ("Job", "orchestrator"),
    ("Deployment", "gateway"),
)

sys.path.append(str(ROOT / "tests/contract"))
from certificates import Authority  # noqa: E402 - lies beside the tests of the contracts

MAY_BE_EMPTY = re.compile(
    r"needs a (fault|checkpoint)|needs an evaluation|sampling_events|alert:|dropped|failed|preemptions|fallbacks|relay|security_files"
)
"""Queries about what this run does not have as long as nothing goes wrong."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    scratch = tmp_path_factory.mktemp("pods")
    for parent in scratch.parents:
        if parent.is_relative_to("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o011)  # the pods' user has to come through
    values, toml, models = scratch / "values.yaml", scratch / "rl.toml", scratch / "models"
    values.write_text(yaml.safe_dump(VALUES))
    toml.write_text(SETTINGS)
    small = ("--hidden", "32", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--mlp", "64")
    done = subprocess.run(
        [sys.executable, "-m", "sluice.cli.main", "init-model", str(models / "base"), *small],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    manifests = (
        *rendered("--values", str(values), "--set-file", f"run.settings={toml}"),
        certificates(scratch / "authority"),
    )
    with Cluster(manifests, scratch, {"models": models}) as cluster:
        for kind, component in PARTS:
            cluster.create(kind, component)
        for pod in cluster.pods.values():
            cluster.start(pod)
        yield cluster


def certificates(directory: Path) -> Manifest:
    """The Secret with certificates, for the names that docs/kubernetes.md lists."""
    authority = Authority(directory)
    parts = ("weightsync", "trainer", "rollout", "orchestrator", "gateway", "env-letters")
    certificate, key = authority.issue("sluice", hosts=["localhost", *(f"sluice-{part}" for part in parts)])
    files = {"tls.crt": certificate, "tls.key": key, "ca.crt": authority.path}
    data = {name: file.read_text() for name, file in files.items()}
    return {"kind": "Secret", "metadata": {"name": "certificates"}, "stringData": data}


def tails(cluster: Cluster, names: list[str]) -> str:
    return "\n".join(
        f"--- {name}\n" + "\n".join(cluster.log(cluster.pods[name]).read_text(errors="replace").splitlines()[-15:])
        for name in names
    )


def pods_of(cluster: Cluster, component: str) -> list[Pod]:
    return [pod for pod in cluster.pods.values() if pod.component == component]


def scrape_config(cluster: Cluster, directory: Path) -> Path:
    """What the Prometheus operator makes of the ServiceMonitor."""
    (monitor,) = (each for each in cluster.manifests if each["kind"] == "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    targets = []
    for service in cluster.services():
        labels = service["metadata"]["labels"]
        if not wanted <= labels.items():
            continue
        (port,) = (each for each in service["spec"]["ports"] if each["name"] == endpoint["port"])
        meta = {
            "__meta_kubernetes_service_label_" + re.sub(r"[^a-zA-Z0-9_]", "_", name): value
            for name, value in labels.items()
        }
        targets += [
            {
                "targets": [f"{pod.address}:{port['port']}"],
                "labels": {**meta, "namespace": NAMESPACE, "pod": pod.name, "service": service["metadata"]["name"]},
            }
            for pod in cluster.selected(service)
        ]
    token = directory / "token"
    credentials = endpoint["authorization"]["credentials"]
    token.write_text(cluster.secret(credentials["name"], credentials["key"]))
    tls = endpoint["tlsConfig"]
    (directory / "ca.crt").write_text(cluster.secret(tls["ca"]["secret"]["name"], tls["ca"]["secret"]["key"]))
    (directory / "targets.json").write_text(json.dumps(targets))
    snake = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    job = {
        "job_name": "sluice",
        "scrape_interval": "3s",
        "scrape_timeout": "3s",
        "scheme": endpoint["scheme"],
        "tls_config": {"ca_file": str(directory / "ca.crt"), "server_name": tls["serverName"]},
        "authorization": {"credentials_file": str(token)},
        "file_sd_configs": [{"files": [str(directory / "targets.json")]}],
        "relabel_configs": [
            {snake.get(key, key): value for key, value in each.items()} for each in endpoint["relabelings"]
        ],
    }
    config = directory / "prometheus.yml"
    shutil.copy(CHART / "alerts.yaml", directory / "alerts.yaml")
    rules = [str(directory / "alerts.yaml")]
    settings = {"global": {"evaluation_interval": "1s"}, "rule_files": rules, "scrape_configs": [job]}
    config.write_text(yaml.safe_dump(settings))
    return config


def queries(cluster: Cluster) -> dict[str, str]:
    """Every PromQL line of the dashboards, the alerts and the autoscaling, by where it is; for the HPA, what its adapter asks."""
    found = {}
    table = runpy.run_path(str(ROOT / "deploy/observability/dashboards.py"))
    for title, rows in table["DASHBOARDS"].values():
        for panel in itertools.chain(*rows.values()):
            for query in panel.queries:
                name = f"{title}: {panel.title}: {query.legend}" + (f", needs {query.needs}" if query.needs else "")
                found[name] = table["filled"](query.expr, f"{NAMESPACE}/sluice")
    for group in yaml.safe_load((CHART / "alerts.yaml").read_text())["groups"]:
        found |= {f"alert: {rule['alert']}": rule["expr"] for rule in group["rules"]}
    (scaled,) = (each for each in cluster.manifests if each["kind"] == "ScaledObject")
    for trigger in scaled["spec"]["triggers"]:
        found[f"KEDA: {trigger['metadata']['query']}"] = trigger["metadata"]["query"]
    adapter = re.search(r"metricsQuery: (.*)", (ROOT / "docs/kubernetes.md").read_text())
    assert adapter is not None
    (scaler,) = (each for each in rendered(*example("gpu")) if each["kind"] == "HorizontalPodAutoscaler")
    for metric in scaler["spec"]["metrics"]:
        parts = {"<<.Series>>": metric["pods"]["metric"]["name"], "<<.GroupBy>>": "pod"}
        parts["<<.LabelMatchers>>"] = f'namespace="{NAMESPACE}",pod=~"sluice-rollout-.*"'
        text = adapter[1]
        for part, filled in parts.items():
            text = text.replace(part, filled)
        found[f"HPA: {text}"] = text
    return found


def value(cluster: Cluster, query: str) -> float:
    """The sum of what a query gives now."""
    (answer,) = cluster.fetch([f"{PROMETHEUS}/api/v1/query?query={quote(query)}"])
    assert answer["status"] == "success", answer
    return sum(float(row["value"][1]) for row in answer["data"]["result"])


def until(cluster: Cluster, query: str, at_least: float, deadline_s: float) -> float:
    """Wait until a query gives as much."""
    end = time.monotonic() + deadline_s
    while (now := value(cluster, query)) < at_least:
        running = {name: pod.process.poll() for name, pod in cluster.pods.items() if pod.process is not None}
        ended = [name for name, code in running.items() if code is not None]
        assert not ended, f"{running}\n{tails(cluster, ended)}"
        assert time.monotonic() < end, f"{query} is {now} after {deadline_s} s\n{tails(cluster, list(cluster.pods))}"
        time.sleep(0.5)
    return now


def scraped(cluster: Cluster, directory: Path, deadline_s: float = 60) -> None:
    """Wait until Prometheus has scraped every pod. Of the trainer the first one alone has metrics."""
    wanted = len(cluster.pods) - len(pods_of(cluster, "trainer")) + 1
    end, faults = time.monotonic() + deadline_s, ["it was not asked"]
    while faults:
        assert time.monotonic() < end, f"{faults}\n{(directory / 'log').read_text()}"
        try:
            (answer,) = cluster.fetch([f"{PROMETHEUS}/api/v1/targets"])
        except AssertionError:  # it starts
            continue
        targets = answer["data"]["activeTargets"]
        faults = [f"{each['labels']}: {each['lastError']}" for each in targets if each["health"] != "up"]
        faults += [f"{len(targets)} targets of {wanted}"] * (len(targets) != wanted)


@pytest.fixture(scope="module")
def prometheus(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Prometheus that scrapes every pod, since all are ready."""
    unready = cluster.wait("readinessProbe", cluster.pods.values(), START_S)
    assert not unready, f"{unready}\n{tails(cluster, list(unready))}"
    directory = tmp_path_factory.mktemp("prometheus")
    config = scrape_config(cluster, directory)
    checked = subprocess.run(
        [str(TOOLS / "promtool"), "check", "config", str(config)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    process = cluster.popen(
        [
            str(TOOLS / "prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={directory}/data",
            f"--web.listen-address={BRIDGE}:9090",
            "--log.level=warn",
        ],
        directory / "log",
    )
    try:
        scraped(cluster, directory)
        yield directory
    finally:
        process.terminate()
        process.wait(20)


def test_pods_are_ready_and_alive_by_their_own_probes(cluster: Cluster, prometheus: Path) -> None:
    """Both pods of the trainer too: the second one serves nothing but its probes."""
    assert len(pods_of(cluster, "trainer")) == 2
    assert cluster.wait("livenessProbe", cluster.pods.values(), 20) == {}


def test_processes_have_no_privileges(cluster: Cluster, prometheus: Path) -> None:
    for pod in cluster.pods.values():
        assert pod.process is not None
        lines = Path(f"/proc/{pod.process.pid}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        assert status["Uid"].split() == ["10001"] * 4
        assert (status["CapEff"], status["CapBnd"], status["NoNewPrivs"]) == ("0" * 16, "0" * 16, "1")
        with pytest.raises(OSError, match="Read-only file system"):
            Path(f"/proc/{pod.process.pid}/root/etc/written").touch()


def test_the_run_goes_on_and_every_query_has_an_answer(cluster: Cluster, prometheus: Path) -> None:
    until(cluster, "sluice_run_policy_number", 3, 240)
    asked = queries(cluster)
    # On a busy machine a scrape may come too late, and what it would have brought is missing for a moment.
    empty, end = dict(asked), time.monotonic() + 120
    while {name for name in empty if not MAY_BE_EMPTY.search(name)} and time.monotonic() < end:
        urls = [f"{PROMETHEUS}/api/v1/query?query={quote(text)}" for text in empty.values()]
        answers = dict(zip(empty, cluster.fetch(urls), strict=True))
        refused = {name: answer.get("error") for name, answer in answers.items() if answer["status"] != "success"}
        assert not refused
        empty = {name: asked[name] for name, answer in answers.items() if not answer["data"]["result"]}
    assert [name for name in empty if not MAY_BE_EMPTY.search(name)] == []
    names = {
        each
        for name, text in asked.items()
        for each in re.findall(r"\b(?:sluice|process)_[a-z_0-9]+", text)
        if not MAY_BE_EMPTY.search(name)
    }
    (known,) = cluster.fetch([f"{PROMETHEUS}/api/v1/label/__name__/values"])
    unknown = {each for each in names if each not in known["data"] and not MAY_BE_EMPTY.search(each)}
    assert not unknown
    (alerts,) = cluster.fetch([f"{PROMETHEUS}/api/v1/alerts"])
    assert [each["labels"]["alertname"] for each in alerts["data"]["alerts"] if each["state"] == "firing"] == []


def test_replicas_come_and_go_while_the_run_goes_on(cluster: Cluster, prometheus: Path) -> None:
    (first,) = pods_of(cluster, "rollout")
    (second,) = cluster.create("Deployment", "rollout", replicas=1)
    cluster.start(second)
    assert cluster.wait("readinessProbe", [second], START_S) == {}
    until(cluster, 'sluice_run_replicas{state="fit"}', 2, 60)
    assert first.terminate() == 0
    cluster.remove(first)
    step = value(cluster, "sluice_run_policy_number")
    until(cluster, "sluice_run_policy_number", step + 2, 120)


def test_a_trainer_that_loses_a_pod_starts_again_as_a_whole(cluster: Cluster, prometheus: Path) -> None:
    first, second = pods_of(cluster, "trainer")
    assert first.process is not None
    assert second.process is not None
    before = value(cluster, "sluice_run_policy_number")
    second.process.kill()
    second.process.wait(10)
    assert first.process.wait(120) not in (0, 2, 3), tails(cluster, [first.name])  # the Job makes another pod of both
    for pod in (first, second):
        cluster.start(pod)
    assert cluster.wait("readinessProbe", [first, second], START_S) == {}
    until(cluster, "sluice_trainer_policy_number", before + 1, 180)


@pytest.mark.parametrize("component", ["gateway", "env-letters", "weightsync", "orchestrator"])
def test_a_pod_that_is_replaced_drains_in_time_and_the_run_goes_on(
    cluster: Cluster, prometheus: Path, component: str
) -> None:
    (pod,) = pods_of(cluster, component)
    step = value(cluster, "sluice_run_policy_number")
    assert pod.terminate() in (0, 143)  # 143: a run that goes on when it is started again
    cluster.start(pod)
    assert cluster.wait("readinessProbe", [pod], START_S) == {}
    until(cluster, "sluice_run_policy_number", step + 1, 180)


def test_a_run_that_has_ended_completes_its_job_and_every_trajectory_is_accounted_for(
    cluster: Cluster, prometheus: Path, tmp_path: Path
) -> None:
    (orchestrator,) = pods_of(cluster, "orchestrator")
    token = tmp_path / "operator.token"
    token.write_text(cluster.secret("sluice-token-operator", "token"))
    assert (
        cluster.ask(STOP, f"{orchestrator.address}:7104", str(token), str(orchestrator.volumes["tls"])) == "runs/pods"
    )
    assert orchestrator.process is not None
    assert orchestrator.process.wait(120) == 0, tails(cluster, [orchestrator.name])
    trainers = pods_of(cluster, "trainer")
    for pod in [*pods_of(cluster, "rollout"), *trainers]:
        assert pod.process is not None
        pod.process.send_signal(signal.SIGTERM)
    for pod in trainers:
        assert pod.process is not None
        assert pod.process.wait(60) == 143, f"0 would complete its Job: {tails(cluster, [pod.name])}"
    # An operator gathers both disks in one place to audit the run.
    whole = tmp_path / "pods"
    shutil.copytree(orchestrator.volumes["state"] / "pods", whole)
    shutil.copytree(trainers[0].volumes["state"] / "pods", whole, dirs_exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "sluice.cli.main", "audit", str(whole)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


STOP = """
import asyncio, json, sys
from pathlib import Path
from sluice.client import OrchestratorClient
from sluice.config import SecurityConfig

async def stop():
    tls = Path(sys.argv[3])
    security = SecurityConfig(
        token_file=Path(sys.argv[2]),
        tls_ca=tls / "ca.crt",
        tls_cert=tls / "tls.crt",
        tls_key=tls / "tls.key",
        tls_address_name="sluice-orchestrator",
    )
    async with OrchestratorClient(sys.argv[1], security) as client:
        return (await client.stop("pods", "enough")).name

print(json.dumps(asyncio.run(stop())))
"""
