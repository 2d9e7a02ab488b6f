"""The plan as services of compose: one container per instance, in the images of `deploy/docker`.

`deploy/compose.yaml` is this rendering of the reverse_text example, with comments and shared blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from sluice.config import ConfigError
from sluice.plan.plan import Part, Plan, relay_flags

OVERLAY = "deploy/docker/run.toml"
"""Settings file of every container, with peers, certificates and directories."""

MARGIN_S = 5.0
"""Seconds between the end of a drain and SIGKILL."""

IMAGES = {"agents": "orchestrator", "envserver": "orchestrator"}
"""Services that run in the image of another service. That image has what the code of an environment needs."""

MOST_PROCESSES = 4096
"""Most processes and threads of a container. A trainer or an engine has several per core."""

_BUILD = {"context": "..", "dockerfile": "deploy/docker/Dockerfile"}
_SECRETS, _MODEL, _OUTPUTS = "/run/sluice/secrets", "model:/run/sluice/model", "outputs:/run/sluice/outputs"

_CONTAINER: dict[str, Any] = {
    "init": True,
    "read_only": True,
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    # exec, because torch may load compiled code from there.
    "tmpfs": ["/tmp:exec,mode=1777,size=${TMP_SIZE:-1g}"],  # noqa: S108 - a mount of the container
    "pids_limit": MOST_PROCESSES,
}
"""Options of every container: it cannot write to the image, and neither has nor gains capabilities."""

_PREPARE = {
    **_CONTAINER,
    "build": {**_BUILD, "target": "trainer"},
    "image": "sluice/trainer",
    "entrypoint": ["/bin/sh", "/app/deploy/docker/prepare.sh"],
    "environment": {"PREPARE": "${PREPARE:-examples/reverse_text/prepare.sh}"},
}
"""Makes certificates and the model, then exits."""

_PUBLISHED = {
    "orchestrator": {"grpc": "ORCHESTRATOR_PORT"},
    "gateway": {"grpc": "GATEWAY_PORT", "http": "GATEWAY_HTTP_PORT"},
}
"""Ports that are reachable from the machine, and the variables that move them."""


def compose(plan: Plan, settings: Sequence[str]) -> str:
    """Return a compose file.

    Args:
        plan: For one machine.
        settings: Words of the settings; files are paths inside of the images. The variable ``RUN_FILE`` replaces the first file.

    Raises:
        ConfigError: if the plan is for several machines, or there is no file.
    """
    return yaml.safe_dump(document(plan, settings), sort_keys=False, width=120)


def document(plan: Plan, settings: Sequence[str]) -> dict[str, Any]:
    """Return what `compose` returns, as data."""
    if plan.machines.nodes > 1:
        raise ConfigError(
            f"compose runs on one machine, and the plan is for {plan.machines.nodes}: give the --machines of one, or choose another engine"
        )
    if list(settings[:1]) != ["@"]:
        raise ConfigError("compose needs a file of settings first, as in `sluice plan @ rl.toml --as compose`")
    words = ["@", f"${{RUN_FILE:-{settings[1]}}}", *settings[2:], "@", OVERLAY]
    own = [f"secrets-{part.name}:/run/sluice/keys/{part.name}" for part in plan.parts]
    trains = next(part for part in plan.parts if part.name in ("trainer", "tuner"))
    services: dict[str, Any] = {
        "prepare": {
            **_PREPARE,
            "mem_limit": f"${{PREPARE_MEMORY:-{trains.memory_gib}g}}",
            "volumes": ["authority:/run/sluice/authority", *own, _MODEL],
        }
    }
    built = {"sluice/trainer"}
    for part in plan.parts:
        image = f"sluice/{IMAGES.get(part.service, part.service)}"
        service = _service(plan, part, words, image, build=image not in built)
        built.add(image)
        if part.devices:
            # Compose gives all containers of a service the same devices, so each instance is a service of its own.
            for place in plan.places_of(part.name):
                found = {
                    "driver": "nvidia",
                    "device_ids": [str(each) for each in place.devices],
                    "capabilities": ["gpu"],
                }
                alias = {"networks": {"default": {"aliases": [part.name]}}} if part.count > 1 else {}
                services[place.instance] = service | alias | _reservation(found)
        else:
            services[part.name] = service | ({"deploy": {"replicas": part.count}} if part.count > 1 else {})
    volumes = ["authority", *(f"secrets-{part.name}" for part in plan.parts), "model", "outputs"]
    return {"name": "sluice", "services": services, "volumes": dict.fromkeys(volumes)}


def _reservation(devices: dict[str, Any]) -> dict[str, Any]:
    return {"deploy": {"resources": {"reservations": {"devices": [devices]}}}}


def _service(plan: Plan, part: Part, words: Sequence[str], image: str, *, build: bool) -> dict[str, Any]:
    _, *command = part.command([*words, *_flags(part)])
    service: dict[str, Any] = {
        **_CONTAINER,
        # Includes shared memory and /tmp.
        "mem_limit": f"${{{part.name.upper()}_MEMORY:-{part.memory_gib}g}}",
        # serve.sh exits with 0 after failures that another start would not cure.
        "restart": "on-failure",
        "entrypoint": ["/bin/sh", "/app/deploy/docker/serve.sh"],
        "stop_grace_period": f"{part.drain_s + MARGIN_S:g}s",
        "volumes": [f"secrets-{part.name}:{_SECRETS}:ro", f"{_MODEL}:ro", _OUTPUTS],
        "image": image,
        "command": command,
        "depends_on": _waits(plan, part),
        "healthcheck": {
            "test": ["CMD", *part.health(f"localhost:{part.port()}"), "@", OVERLAY],
            "interval": "5s",
            "timeout": "30s",
            "retries": 12,
            "start_period": f"{part.start_s:g}s",
            "start_interval": "1s",
        },
    }
    if build:
        service["build"] = {**_BUILD, "target": image.partition("/")[2]}
    if part.name == "relay":
        service["profiles"] = ["relay"]
    if part.service == "rollout":
        # Versions are staged in shared memory, which needs room for the served version and the next one.
        service["shm_size"] = "${SHM_SIZE:-1gb}"
    if part.threads > 1:
        service["environment"] = {"OMP_NUM_THREADS": str(part.threads)}
    if part.service in _PUBLISHED:
        variables = _PUBLISHED[part.service].items()
        service["ports"] = [f"127.0.0.1:${{{name}:-{part.port(port)}}}:{part.port(port)}" for port, name in variables]
    return service


def _flags(part: Part) -> Sequence[str]:
    if part.name == "relay":
        return relay_flags("weightsync:7101", f"relay:{part.port()}", "/run/sluice/outputs/relay")
    if part.service == "agents":
        return ["--security.token-file=/run/sluice/secrets/agent.token"]
    if part.service == "gateway":
        url = f"${{GATEWAY_URL:-https://127.0.0.1:${{GATEWAY_HTTP_PORT:-{part.port('http')}}}}}"
        # Agents bring a token; all others show a certificate.
        return [f"--advertise-url={url}", "--security.require-client-cert=false"]
    return []


def _waits(plan: Plan, part: Part) -> dict[str, Any]:
    waits: dict[str, Any] = {"prepare": {"condition": "service_completed_successfully"}}
    for name in part.waits_for:
        other = plan.part(name)
        for service in other.instances if other.devices else (name,):
            waits[service] = {"condition": "service_healthy"}
    return waits
