"""A service that is installed for one test: a package on the path with a real entry point."""

from __future__ import annotations

from pathlib import Path

CONFIG = """
from typing import Annotated, Any
from pydantic import Field, SecretStr
from sluice.config import Section, ServerConfig


class Optimizer(Section):
    betas: list[float] = Field([0.9, 0.95], description="Decay of the moments.")
    decay: float = Field(0.0, description="Weight decay.")


class Step(Section):
    at: int = Field(0, description="Step number.")
    factor: float = Field(1.0, description="Factor.")


class ToyConfig(Section):
    server: ServerConfig = Field(ServerConfig(port=7999), description="Where it listens.")
    lr: float = Field(1e-3, gt=0, description="Learning rate.")
    verbose: bool = Field(False, description="Talk more.")
    limit: int | None = Field(5, description="Most things.")
    tags: list[str] = Field(["a"], description="Names.")
    schedule: list[Step] = Field([], description="Factors by step.")
    engine: dict[str, Any] = Field({}, description="Passed through.")
    api_key: SecretStr | None = Field(None, description="Key of the judge.")
    url: str = Field("", description="Address of the judge.")
    optimizer: Optimizer = Field(Optimizer(), description="The optimizer.")
    late: Step | None = Field(None, description="A last factor.")
    named: dict[str, Annotated[str, Field(pattern="^[a-z]+$")]] = Field({}, description="Names by place.")


CONFIG = ToyConfig
"""

APP = """
from sluice.config import Service
from sluice.rpc import RpcServer
from toy_svc.config import ToyConfig


async def serve(common, config):
    server = RpcServer("toy", config.server, common.security, run=common.run)
    await server.start()
    print(server.target, flush=True)
    await server.serve_until_signal()
    print("put away", flush=True)


SERVICE = Service("toy", ToyConfig, serve)
"""


def install_toy(folder: Path) -> Path:
    """Write the package and its metadata; the folder then goes on the path."""
    package = folder / "toy_svc"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "config.py").write_text(CONFIG)
    (package / "app.py").write_text(APP)
    metadata = folder / "toy_svc-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-svc\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[sluice.services]\ntoy = toy_svc.app:SERVICE\nabsent = absent_svc.app:SERVICE\n"
    )
    return folder
