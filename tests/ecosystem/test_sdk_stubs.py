"""The contracts make stubs that compile in Java and Rust, with the libraries of each; Go has an agent of its own (test_example_agents.py).

Rust and Go build their libraries of gRPC first, a minute of CPU each: `make test-soak` does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import grpc_tools
import pytest

ROOT = Path(__file__).parents[2]
JAVA, RUST = ROOT / ".debian-ecosystem-java/usr", ROOT / ".debian-ecosystem-rust/usr"
WELL_KNOWN = Path(grpc_tools.__file__).parent / "_proto"
"""Contracts of google.protobuf, which ours import."""

BUILD_S = 1200
"""Seconds for one compiler: half a minute of two cores."""

pytestmark = [pytest.mark.ecosystem, pytest.mark.slow, pytest.mark.timeout(BUILD_S + 60)]


def run(*argv: str | Path, cwd: Path, **environment: str) -> None:
    done = subprocess.run(
        argv, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"


@pytest.mark.skipif(
    shutil.which("javac") is None or not JAVA.exists(),
    reason="javac, or gRPC for Java, is not here: install a JDK, and run `make install-ecosystem`, which needs apt",
)
def test_the_stubs_compile_in_java(tmp_path: Path) -> None:
    sources, classes = tmp_path / "src", tmp_path / "classes"
    sources.mkdir()
    protos = sorted((ROOT / "proto/sluice/v1").glob("*.proto"))
    plugin = f"--plugin=protoc-gen-grpc-java={JAVA}/bin/grpc_java_plugin"
    outputs = (f"--java_out={sources}", f"--grpc-java_out={sources}")
    libraries = str(JAVA / "lib/x86_64-linux-gnu")
    folders = ("-I", ROOT / "proto", "-I", WELL_KNOWN)
    run(JAVA / "bin/protoc", *folders, plugin, *outputs, *protos, cwd=tmp_path, LD_LIBRARY_PATH=libraries)
    jars = os.pathsep.join(map(str, sorted((JAVA / "share/java").glob("*.jar"))))
    run("javac", "-nowarn", "-cp", jars, "-d", classes, *sorted(sources.rglob("*.java")), cwd=tmp_path)
    stubs = {path.name for path in classes.rglob("*ServiceGrpc.class")}
    assert {"EpisodeServiceGrpc.class", "EnvironmentServiceGrpc.class", "RolloutServiceGrpc.class"} <= stubs


@pytest.mark.soak
@pytest.mark.skipif(
    shutil.which("cargo") is None or not RUST.exists(),
    reason="cargo, or tonic, is not here: install Rust, and run `make install-ecosystem`, which needs apt",
)
def test_the_stubs_compile_in_rust(tmp_path: Path) -> None:
    crate = tmp_path / "crate"
    shutil.copytree(Path(__file__).parent / "rust", crate)
    source = (
        f'[source.crates-io]\nreplace-with = "debian"\n[source.debian]\ndirectory = "{RUST}/share/cargo/registry"\n'
    )
    (crate / ".cargo").mkdir()
    (crate / ".cargo/config.toml").write_text(source)
    protoc = tmp_path / "protoc"
    protoc.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m grpc_tools.protoc "-I{WELL_KNOWN}" "$@"\n')
    protoc.chmod(0o755)
    run("cargo", "check", "--offline", "--quiet", cwd=crate, PROTOC=str(protoc), SLUICE_PROTOS=str(ROOT / "proto"))
