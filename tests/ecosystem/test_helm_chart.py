"""The chart as Helm renders it: schemas of Kubernetes and of others, wrong values, and our own command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helm_chart import (
    CHART,
    CUSTOM,
    EXAMPLES,
    NODE,
    ROOT,
    TOOLS,
    VERSIONS,
    Manifest,
    example,
    helm,
    pod_specs,
    rendered,
    services,
    settings,
)

from sluice.cli import ranks
from sluice.config import load_run

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.slow,
    pytest.mark.skipif(not (TOOLS / "helm").exists(), reason="Helm is not installed: run `make install-ecosystem`"),
]


def with_custom(*, custom: bool, words: tuple[str, ...], version: str = VERSIONS[-1]) -> list:
    """Manifests of custom resources, or all others."""
    manifests = rendered(*words, version=version)
    return [each for each in manifests if (each["apiVersion"].split("/")[0] in CUSTOM) is custom]


def validated(versions: list[str], manifests: list) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(TOOLS / "python"), str(Path(__file__).with_name("validate_manifests.py"))],
        input=json.dumps({"versions": versions, "manifests": manifests}),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_helm_finds_no_fault(name: str) -> None:
    done = helm("lint", "--strict", str(CHART), *example(name))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_manifest_has_the_schema_of_every_version(name: str) -> None:
    manifests = with_custom(custom=False, words=example(name))
    assert len(manifests) > 25
    kinds = [each["kind"] for each in manifests]
    for version in VERSIONS:
        assert [each["kind"] for each in with_custom(custom=False, words=example(name), version=version)] == kinds
    done = validated(VERSIONS, manifests)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_relays_have_the_schema_too() -> None:
    words = ("--set", "relay.enabled=true", "--set", "rollout.autoscaling.kind=keda")
    manifests = with_custom(custom=False, words=words)
    assert "DaemonSet" in {each["kind"] for each in manifests}
    done = validated(VERSIONS[-1:], manifests)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_the_check_finds_unknown_fields_and_kinds() -> None:
    good = with_custom(custom=False, words=example("cpu"))
    service = next(each for each in good if each["kind"] == "Service")
    typo = {**service, "spec": {**service["spec"], "selektor": {}}}
    strange = {**service, "kind": "Servise"}
    done = validated(["1.37"], [typo, strange])
    assert done.returncode == 1
    assert "'selektor' was unexpected" in done.stdout
    assert "Couldn't find schema for kind Servise" in done.stdout


@pytest.mark.skipif(
    not (NODE / "node_modules/@kubernetes-models").exists(), reason="no npm: run `make install-ecosystem`"
)
@pytest.mark.parametrize("name", ["gpu", "multinode"])
def test_custom_resources_have_the_schemas_of_their_projects(name: str) -> None:
    manifests = with_custom(custom=True, words=example(name))

    def check(given: list) -> tuple[int, str]:
        program = ["node", str(Path(__file__).with_name("custom_resources.mjs")), str(NODE)]
        done = subprocess.run(program, input=json.dumps(given), capture_output=True, text=True, timeout=60, check=False)
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout

    assert check(manifests) == (0, "")
    for each in manifests:
        assert check([{**each, "spec": {**each["spec"], "typo": 1}}]) == (
            1,
            f"{each['kind']} {each['metadata']['name']}: unknown field /spec/typo\n",
        )


@pytest.mark.parametrize(
    ("value", "path", "why"),
    [
        ("rollout.gpu=2", "/rollout", "additional properties 'gpu' not allowed"),
        ("rollout.replicas=two", "/rollout/replicas", "got string, want integer"),
        ("trainer.port=70000", "/trainer/port", "maximum"),
        ("trainer.nodes=2", "/trainer/storage/accessModes", "ReadWriteMany"),
        ("rollout.autoscaling.kind=vpa", "/rollout/autoscaling/kind", "'none', 'hpa', 'keda'"),
        ("rollout.autoscaling.kvCacheUsage=85", "/rollout/autoscaling/kvCacheUsage", "maximum"),
        ("security.tls.mode=secret", "/security/tls/secretName", "minLength"),
        ("security.tls.mode=certManager", "/security/tls/issuerRef/name", "minLength"),
        ("weightsync.storage.size=lots", "/weightsync/storage/size", "does not match pattern"),
        ("environments[0].name=Letters", "/environments/0/name", "does not match pattern"),
        ("run.name=My Run", "/run/name", "does not match pattern"),
        ("monitor.enabled=true", "", "additional properties 'monitor' not allowed"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(value: str, path: str, why: str) -> None:
    done = helm("template", "sluice", str(CHART), "--set", value)
    assert done.returncode != 0
    assert f"at '{path}'" in done.stderr
    assert why in done.stderr


VARIANTS = {
    **{name: example(name) for name in EXAMPLES},
    "relay": ("--set", "relay.enabled=true"),
    "one node of two ranks": ("--set", "trainer.processes=2"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_command_is_one_of_ours_and_its_settings_load(variant: str, tmp_path: Path) -> None:
    """The drain of the settings and the patience of Kubernetes come from one value, and cannot drift apart."""
    manifests = rendered(*VARIANTS[variant])
    settings(manifests, tmp_path)
    seen = set()
    for manifest, container, words in services(manifests):
        known = {"/etc/sluice": str(tmp_path), "$(POD_IP)": "10.0.0.7", "$(JOB_COMPLETION_INDEX)": "0"}
        for variable, value in known.items():
            words = [word.replace(variable, value) for word in words]  # noqa: PLW2901
        processes = 1
        if words[0] == "ranks":
            options = ranks._parser().parse_args(words[1:])
            words, processes = options.words, options.processes * options.nodes  # noqa: PLW2901
            assert options.nodes == manifest["spec"]["completions"] == manifest["spec"]["parallelism"]
        service, *flags = words
        run = load_run(flags, service)
        if service == "orchestrator" and variant in EXAMPLES:
            run.section(service).check_start(run)
        server = run.section(service).server
        spec = manifest["spec"]["template"]["spec"]
        sleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert spec["terminationGracePeriodSeconds"] >= sleep + server.drain_s + 30
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert (ports["grpc"], ports["probe"], ports["metrics"]) == (
            server.port,
            server.probe_port,
            server.metrics_port,
        )
        assert ports.get("http") == server.http_port
        assert (server.host, server.metrics_host) == ("0.0.0.0", "0.0.0.0")
        if service == "trainer":
            assert run.section(service).processes() in (
                1,
                processes,
            )  # settings of one rank fit any number of data-parallel ones
        seen.add(service)
    assert seen >= {"weightsync", "trainer", "rollout", "orchestrator"}
    if variant == "multinode":
        assert seen >= {"gateway", "agents", "envserver"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_have_no_privileges(variant: str) -> None:
    for manifest, spec in pod_specs(rendered(*VARIANTS[variant])):
        assert spec["automountServiceAccountToken"] is False
        pod = spec["securityContext"]
        assert (pod["runAsNonRoot"], pod["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
        for container in (*spec["containers"], *spec.get("initContainers", [])):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"].get("requests"), (manifest["metadata"]["name"], container["name"])
            mounted = {each["name"] for each in container["volumeMounts"]}
            assert mounted <= {each["name"] for each in spec["volumes"]} | claims(manifest)


def claims(manifest: dict) -> set[str]:
    return {each["metadata"]["name"] for each in manifest["spec"].get("volumeClaimTemplates", [])}


def test_a_pod_holds_the_tokens_that_it_sends_and_no_others() -> None:
    held = {}
    for manifest, spec in pod_specs(rendered(*example("multinode"))):
        sources = next((each["projected"]["sources"] for each in spec["volumes"] if each["name"] == "secrets"), [])
        names = {each["secret"]["name"].removeprefix("sluice-") for each in sources}
        held[manifest["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]] = names
    assert held == {
        "weightsync": {"principals"},
        "relay": {"principals", "token-relay"},
        "env-tools": {"principals"},
        "trainer": {"principals", "token-trainer"},
        "rollout": {"principals", "token-replica"},
        "orchestrator": {"principals", "token-orchestrator", "token-dispatcher"},
        "gateway": {"principals", "token-gateway", "token-dispatcher"},
        "agents": {"principals", "token-agent"},
    }


CHANGES = (
    *(
        "rollout.replicas=3",
        "rollout.drainSeconds=7",
        "gateway.enabled=true",
        "gateway.port=7777",
        "relay.enabled=true",
    ),
    *(
        "trainer.processes=2",
        "trainer.drainSeconds=7",
        "trainer.gpus=2",
        "orchestrator.drainSeconds=7",
        "weightsync.port=7777",
    ),
    *(
        "image.tag=v2",
        "model.name=other",
        "run.settings=seed=3",
        "pods.preStopSeconds=9",
        "network.metricsPort=9999",
        "network.bindHost=::",
    ),
    *("security.tls.mutual=false", "agents.resources.requests.cpu=3", "trainer.nodeSelector.zone=a", "run.name=other"),
)


def test_a_job_whose_name_stays_is_not_changed_by_an_upgrade() -> None:
    """Kubernetes refuses to change the pods of a Job, and with them the upgrade."""
    always = ("--set", "agents.replicas=2")

    def jobs(*words: str) -> dict[str, Manifest]:
        return {each["metadata"]["name"]: each for each in rendered(*always, *words) if each["kind"] == "Job"}

    before = jobs()
    assert {name.split("-")[1] for name in before} == {"trainer", "orchestrator", "agents"}
    kept = {}
    for change in CHANGES:
        after = jobs("--set", change)
        same = before.keys() & after.keys()
        assert all(before[name]["spec"] == after[name]["spec"] for name in same), change
        kept[change] = {name.split("-")[1] for name in same}
    assert kept["rollout.replicas=3"] == kept["gateway.enabled=true"] == {"trainer", "orchestrator", "agents"}
    assert kept["trainer.processes=2"] == {"orchestrator", "agents"}
    assert kept["gateway.port=7777"] == {"trainer", "orchestrator"}
    assert (
        kept["network.bindHost=::"]
        == kept["image.tag=v2"]
        == kept["run.settings=seed=3"]
        == kept["weightsync.port=7777"]
        == set()
    )


def test_scaling_belongs_to_one_of_both() -> None:
    def replicas(kind: str) -> int | None:
        manifests = rendered("--set", f"rollout.autoscaling.kind={kind}", "--set", "rollout.replicas=3")
        (found,) = (each for each in manifests if each["kind"] == "Deployment")
        return found["spec"].get("replicas")

    assert (replicas("none"), replicas("hpa"), replicas("keda")) == (3, None, None)


PLANS = {
    "a laptop": ((), ("--machines", "0")),
    "one node of GPUs": (("--allocation-mode", "vllm:d4t1+fsdp:d4"), ("--machines", "8xH100-80")),
    "four nodes": (("--allocation-mode", "vllm:d12t1+fsdp:d4"), ("--machines", "4x4xH100-80")),
    "a trainer of two nodes": (
        ("--allocation-mode", "vllm:d4t2+fsdp:d16"),
        ("--machines", "4x8", "--with", "gateway=2"),
    ),
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_is_installed_with_its_values(plan: str, tmp_path: Path) -> None:
    flags, machines = PLANS[plan]
    words = ["@", "examples/reverse_text/rl.toml", *flags, *machines, "--as", "helm"]
    program = [sys.executable, "-m", "sluice.cli.main", "plan", *words]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    values = tmp_path / "values.yaml"
    values.write_text(done.stdout)
    manifests = rendered("--values", str(values))
    settings(manifests, tmp_path)
    planned = yaml.safe_load(done.stdout)
    found = {}
    for manifest, container, args in services(manifests):
        part = manifest["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        spec = manifest["spec"]
        found[part] = spec.get("replicas") or spec.get("completions")
        gpus = container["resources"].get("limits", {}).get("nvidia.com/gpu", 0)
        assert gpus == planned[part].get("gpus", 0)
        service, *given = (
            args
            if args[0] != "ranks"
            else ranks._parser().parse_args([word.replace("$(JOB_COMPLETION_INDEX)", "0") for word in args[1:]]).words
        )
        run = load_run([word.replace("/etc/sluice", str(tmp_path)) for word in given], service)
        assert run.allocation_mode == (flags[1] if flags else None)
    counts = {name: planned[name].get("replicas", planned[name].get("nodes", 1)) for name in found}
    assert found == counts
    assert ("gateway" in found) is ("gateway=2" in machines)
