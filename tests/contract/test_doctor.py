"""`sluice doctor` on broken installs, machines and runs: it names what is wrong, and what to do."""

from __future__ import annotations

import json
import os
import resource
import socket
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
from certificates import Authority
from trainer_double import start_double

from sluice import file_systems
from sluice.cli import doctor
from sluice.cli.init_model import ModelShape, init_model
from sluice.config import SecurityConfig, ServerConfig
from sluice.doctor import machine, peers, settings
from sluice.doctor.finding import Finding, State
from sluice.run_files import JOURNAL_FILE

GIB = 1 << 30
Usage = namedtuple("Usage", "total used free")


def one(findings, state: State) -> Finding:
    """The only finding of a state."""
    (found,) = [each for each in findings if each.state is state]
    return found


async def asked(target: str, security: SecurityConfig | None = None, name: str = "trainer") -> Finding:
    return await peers.check_peer(name, target, security or SecurityConfig())


# The machine and what is installed.


@pytest.mark.slow
def test_a_sound_machine_has_no_findings() -> None:
    assert all(each.state is not State.WRONG for each in machine.check_machine())


def test_packages_that_are_missing_or_too_old_are_named_with_the_command() -> None:
    found = list(machine.check_packages(["numpy>=2", "numpy>=9000", "no-such-package>=1.2", 'other; extra == "gpu"']))
    assert [each.state for each in found] == [State.WRONG, State.WRONG, State.OK]
    assert found[0].remedy.endswith('-m pip install "numpy>=9000"')
    assert found[1].found == "no-such-package is not installed"


def test_two_packages_with_the_same_files_are_found(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "sluice_client-0.1.0.dist-info").mkdir()
    (tmp_path / "sluice_client-0.1.0.dist-info/METADATA").write_text("Name: sluice-client\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "uninstall sluice-client" in one(machine.check_packages([]), State.WRONG).remedy


def test_an_engine_that_cannot_be_imported_is_said_with_the_reason(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "broken_engine.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = machine.check_engine("broken_engine", "install it")
    assert found.state is State.WRONG
    assert "libcudart.so.13" in found.found
    (tmp_path / "half_engine.py").touch()
    assert "has no version" in machine.check_engine("half_engine", "install it").found


def test_a_library_that_kills_the_process_at_its_import_is_survived(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "deadly_engine.py").write_text("import os; os.kill(os.getpid(), 11)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = machine.check_engine("deadly_engine", "install it")
    assert (found.state, "ended with code -11" in found.found) == (State.WRONG, True)


def test_devices_that_are_hidden_or_that_torch_cannot_use(monkeypatch) -> None:
    monkeypatch.setattr(machine, "Path", lambda name: SimpleNamespace(exists=lambda: True))
    monkeypatch.setattr(machine, "_import", lambda program: ('{"version": "2", "cuda": "13.0", "devices": []}', ""))
    assert "driver" in one(machine.check_torch(), State.WRONG).remedy
    monkeypatch.setattr(machine, "_import", lambda program: ('{"version": "2", "cuda": null, "devices": []}', ""))
    assert "built for CPUs" in one(machine.check_torch(), State.WRONG).found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hides all devices" in one(machine.check_torch(), State.WARNING).found


def test_few_open_files_and_no_compiler_are_warned_of(monkeypatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 100_000))
    assert "ulimit -n 65536" in machine.check_open_files().remedy
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    assert "raise the hard limit" in machine.check_open_files().remedy
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert machine.check_compiler().state is State.WARNING


# The settings on this machine.


def test_a_disk_without_room_or_that_is_none(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    assert "no directory" in settings.check_disk(tmp_path / "file/run", 0).found
    assert settings.check_disk(tmp_path / "a/b", 0).state is State.OK
    monkeypatch.setattr(settings.shutil, "disk_usage", lambda path: Usage(9 * GIB, 6 * GIB, 3 * GIB))
    found = settings.check_disk(tmp_path, GIB)
    assert (found.state, "needs 8.0 GiB" in found.remedy) == (State.WRONG, True)
    assert "a run pauses" not in found.found
    assert "with less than 2.0 GiB a run pauses" in one([settings.check_disk(tmp_path, 0, 2 * GIB)], State.OK).found
    assert "lower that setting" in one([settings.check_disk(tmp_path, 0, 4 * GIB)], State.WRONG).remedy


def test_a_network_file_system_is_warned_of_and_an_object_store_wrong(tmp_path: Path, monkeypatch) -> None:
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(file_systems, "MOUNTS", mounts)
    for kind, state in (("nfs4", State.WARNING), ("fuse.s3fs", State.WRONG)):
        mounts.write_text(f"1 0 0:1 / {tmp_path.resolve()} rw - {kind} there rw\n")
        assert kind in one(settings.check_file_systems(tmp_path / "run"), state).found
    mounts.write_text("1 0 0:1 / / rw - ext4 here rw\n")
    assert not list(settings.check_file_systems(tmp_path / "run"))


def test_shared_memory_that_two_versions_do_not_fit_into(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(settings.shutil, "disk_usage", lambda path: Usage(GIB, 0, GIB))
    assert settings.check_stage(tmp_path, GIB // 4).state is State.OK
    assert "--shm-size" in settings.check_stage(tmp_path, GIB).remedy
    assert settings.check_stage(tmp_path / "nowhere", 0).state is State.WRONG


def test_the_tokens_that_end_a_turn_are_named_with_their_places(tmp_path: Path) -> None:
    model = tmp_path / "model"
    init_model(model, ModelShape(layers=1))
    generation = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [4, 0]}))
    found = settings.check_ends(str(model))
    assert found.state is State.OK
    assert found.found == (
        "sampling stops at, and training teaches: <|pad|> (0: generation_config.json);"
        " <|end|> (1: config.json, tokenizer, chat template); <|assistant|> (4: generation_config.json);"
        " padding: <|pad|> (0: config.json)"
    )
    for name, change in (
        ("config.json", {"eos_token_id": None}),
        ("generation_config.json", {"eos_token_id": None}),
        ("tokenizer_config.json", {"eos_token": None}),
    ):
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | change))
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert "eos_token" in settings.check_ends(str(model)).remedy
    assert settings.check_ends("someone/no-such-model").state is State.WARNING


def test_a_port_that_another_process_has_is_named_with_that_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = list(settings.check_ports("trainer", ServerConfig(port=port)))
    assert f"process {os.getpid()} " in one(found, State.WRONG).found
    assert one(settings.check_ports("trainer", ServerConfig(port=port)), State.OK).found.endswith("is free")


def test_certificates_that_expired_or_do_not_belong_together(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    certificate, key = authority.issue("fine")
    old, old_key = authority.issue("old", days=-1)
    problem = settings.handshake_problem
    assert problem(certificate, key, authority.path) == ""
    assert problem(old, old_key, authority.path) == "certificate has expired"
    assert problem(certificate, key, stranger.path) == "certificate signature failure"
    assert "mismatch" in problem(certificate, old_key, authority.path)
    assert problem(tmp_path / "none.pem", key, authority.path) == "No such file or directory".lower()


def test_tokens_that_others_can_read(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret-secret-secret\n")
    token.chmod(0o644)
    assert f"chmod 600 {token}" == one(settings.check_tokens(SecurityConfig(token_file=token)), State.WARNING).remedy
    token.chmod(0o600)
    assert one(settings.check_tokens(SecurityConfig(token_file=token)), State.OK)
    gone = SecurityConfig(token_file=tmp_path / "gone")
    assert "gone" in one(settings.check_tokens(gone), State.WRONG).found


# The services of a run.


async def test_a_sound_peer_and_ones_that_are_not_there() -> None:
    server, _ = await start_double(SecurityConfig())
    try:
        assert (await asked(server.target)).state is State.OK
        assert "answers where orchestrator should" in (await asked(server.target, name="orchestrator")).found
        server.set_serving(False)
        assert "does not serve yet" in (await asked(server.target)).found
    finally:
        await server.stop(0)
    assert "nothing listens there" in (await asked(server.target)).found
    assert "cannot be resolved" in (await asked("no-such-host.invalid:7102")).found
    assert "no port" in (await asked("trainer")).found


async def test_a_peer_of_another_release_or_with_another_time(monkeypatch) -> None:
    server, _ = await start_double(SecurityConfig())
    try:
        now = peers.time.time
        monkeypatch.setattr(peers, "time", SimpleNamespace(time=lambda: now() - 100))
        found = await asked(server.target)
        assert (found.state, "100 s ahead" in found.found, "NTP" in found.remedy) == (State.WRONG, True, True)
        monkeypatch.setattr(peers, "time", SimpleNamespace(time=now))
        monkeypatch.setattr(peers.metadata, "version", lambda name: "9.9")
        assert "here are 9.9" in (await asked(server.target)).found
    finally:
        await server.stop(0)


@pytest.mark.slow
async def test_what_is_wrong_with_the_tls_of_a_peer(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    trusting = SecurityConfig(tls_ca=authority.path)

    async def found(name: str, **given) -> str:
        certificate, key = authority.issue(name, **given)
        server, _ = await start_double(SecurityConfig(tls_cert=certificate, tls_key=key))
        try:
            return (await asked(server.target, trusting)).found
        finally:
            await server.stop(0)

    assert (await found("fine")).endswith("serves")
    assert "certificate has expired" in await found("old", days=-1)
    assert "IP address mismatch" in await found("elsewhere", address="10.0.0.1")
    certificate, key = authority.issue("server")
    mutual = SecurityConfig(tls_cert=certificate, tls_key=key, tls_ca=authority.path, require_client_cert=True)
    server, _ = await start_double(mutual)
    plain, _ = await start_double(SecurityConfig())
    try:
        assert "signature failure" in (await asked(server.target, SecurityConfig(tls_ca=stranger.path))).found
        assert "client certificate" in (await asked(server.target, trusting)).remedy
        assert "client certificate" in (await asked(server.target)).remedy
        assert "does the server have TLS at all" in (await asked(plain.target, trusting)).found
    finally:
        await server.stop(0)
        await plain.stop(0)


async def test_a_peer_that_does_not_know_the_token(tmp_path: Path) -> None:
    for name in ("right", "other"):
        (tmp_path / name).write_text(f"{name}-token-of-some-length\n")
    tokens = SecurityConfig(token_file=tmp_path / "right", admin_token_file=tmp_path / "right")
    server, _ = await start_double(tokens)
    try:
        assert (await asked(server.target, SecurityConfig(token_file=tmp_path / "right"))).state is State.OK
        refused = await asked(server.target, SecurityConfig(token_file=tmp_path / "other"))
        assert (refused.state, "does not know the token" in refused.found) == (State.WRONG, True)
    finally:
        await server.stop(0)


# The command.


@pytest.mark.slow
def test_the_command_says_what_is_wrong_and_exits_with_1(monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "check_machine", lambda: [machine.check_python()])
    assert doctor.run([]) == 0
    assert "0 wrong" in capsys.readouterr().out
    assert doctor.run(["--orchestrator.batch-sise", "3"]) == 1
    said = capsys.readouterr().out
    assert "batch_size" in said
    assert "-> " in said
    assert doctor.run(["--json", "--model", "/no/such/model", "--orchestrator.environment", "question_answer"]) == 1
    found = {each["check"]: each for each in json.loads(capsys.readouterr().out)}
    assert "there is no directory /no/such/model" in found["run"]["found"]


@pytest.mark.slow
def test_a_run_that_exists_is_not_said_to_begin(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "check_machine", list)
    init_model(tmp_path / "model", ModelShape(layers=1))
    (tmp_path / "rl.toml").write_text(f"""
run = "words"
output_dir = "{tmp_path}"
model = "{tmp_path / "model"}"
rollout.engine = "transformers"
[orchestrator]
environment = "examples/reverse_text/env.py:ReverseText"
sampling.max_tokens = 8
""")
    words = ["--json", "@", str(tmp_path / "rl.toml")]

    def said() -> str:
        doctor.run(words)
        return next(each["found"] for each in json.loads(capsys.readouterr().out) if each["check"] == "run")

    assert said() == "`sluice rl` would begin run words"
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / JOURNAL_FILE).touch()
    assert said().startswith(f"run 'words' exists in {tmp_path / 'words'}: continue it with --resume")
