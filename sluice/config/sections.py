"""The tables that all services share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from sluice.allocation import Allocation
from sluice.config.schema import Value, deep_merge

__all__ = ["CommonConfig", "PeersConfig", "Section", "SecurityConfig", "ServerConfig"]


class Section(BaseModel):
    """A table of settings. Unknown keys are errors, numbers are finite; every field has a description that names its unit."""

    model_config = ConfigDict(
        extra="forbid", validate_default=True, use_attribute_docstrings=False, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _complete_partial_tables(cls, data: Value) -> Value:
        """Merge a partial table with the field's default, so that ``[server] host = ...`` does not reset the port."""
        if not isinstance(data, Mapping):
            return data
        completed = dict(data)
        for name, field in cls.model_fields.items():
            given = completed.get(name)
            if not isinstance(given, Mapping) or field.default_factory_takes_validated_data:
                continue
            default = field.get_default(call_default_factory=True)
            if isinstance(default, Section) and field.annotation is type(default):
                completed[name] = deep_merge(default.model_dump(exclude_unset=True), given)
        return completed

    def check_start(self, run: CommonConfig) -> tuple[str, ...] | None:
        """Refuse settings that would make the service fail at its start, without loading anything.

        Services override it. A service calls it first, and `sluice rl` calls all before it starts any.

        Args:
            run: The run's settings.

        Returns:
            Lines that a dry run prints, if any.

        Raises:
            ConfigError: with the remedy.
        """
        return None

    def models_beside(self) -> dict[str, str]:
        """Return the models that the service loads besides the run's model, by the settings that name them."""
        return {}


class SecurityConfig(Section):
    """Who may call, and over what."""

    token_file: Path | None = Field(None, description="File with the bearer token of the role `agent`.")
    admin_token_file: Path | None = Field(None, description="File with the bearer token of the role `admin`.")
    tls_cert: Path | None = Field(None, description="PEM certificate chain that this process presents.")
    tls_key: Path | None = Field(None, description="PEM private key of `tls_cert`.")
    tls_ca: Path | None = Field(
        None, description="PEM authorities that the other side's certificate is checked against."
    )
    require_client_cert: bool = Field(
        False, description="Mutual TLS: refuse clients without a certificate of `tls_ca`."
    )
    insecure: bool = Field(
        False, description="Allow a bind address other than loopback without TLS and a token (flag `--insecure`)."
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: set both or neither")
        if self.require_client_cert and (self.tls_ca is None or self.tls_cert is None):
            raise ValueError(
                "require_client_cert needs tls_cert, tls_key and tls_ca: the authority that signs the clients"
            )
        return self


class PeersConfig(Section):
    """Where the services find each other: ``host:port``, ``dns:///name:port`` or ``unix:/path``."""

    weightsync: str = Field("127.0.0.1:7101", description="Address of the weight service.")
    trainer: str = Field("127.0.0.1:7102", description="Address of the trainer (rank 0).")
    rollout: list[str] = Field(
        default_factory=lambda: ["127.0.0.1:7103"],
        description="Addresses of the rollout replicas, one each; `dns:///name:port` is balanced round robin.",
    )
    orchestrator: str = Field("127.0.0.1:7104", description="Address of the orchestrator.")


class CommonConfig(Section):
    """The keys at the top level of a run's file, the same for every service."""

    run: str = Field(
        "default",
        pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$",
        description="Name of the run: lower-case letters, digits, `.`, `_`, `-`; at most 63 characters.",
    )
    output_dir: Path = Field(Path("outputs"), description="Directory that holds one directory per run.")
    model: str = Field("", description="Base model: a Hugging Face directory or hub id.")
    seed: int = Field(0, ge=0, description="Seed of everything random in the run.")
    max_staleness: int = Field(
        2,
        ge=0,
        description="Most policy versions that a token may lag behind the trainer; 0 is exact on-policy training.",
    )
    allocation_mode: str | None = Field(
        None,
        description="How devices are shared out, such as `vllm:d2t1+fsdp:d4` (rollout + trainer; d data, t tensor, c context,"
        " p pipeline) or `d4` (both on the same four); sets the dimensions of engines and trainer. none: their own settings.",
    )
    security: SecurityConfig = Field(default_factory=SecurityConfig, description="Tokens and TLS.")
    peers: PeersConfig = Field(default_factory=PeersConfig, description="Addresses of the services.")
    log_level: str = Field(
        "info",
        pattern=r"^(debug|info|warning|error|critical)$",
        description="Least severe log level that is written: debug, info, warning, error or critical.",
    )

    @field_validator("allocation_mode")
    @classmethod
    def _can_be_read(cls, text: str | None) -> str | None:
        if text is not None:
            Allocation.parse(text)
        return text

    @property
    def run_dir(self) -> Path:
        """Directory of this run: ``output_dir/run``."""
        return self.output_dir / self.run


class ServerConfig(Section):
    """Where one service listens and how much it takes on."""

    host: str = Field(
        "127.0.0.1", description="Address to bind, or `unix:/path` for a unix socket (then `port` is unused)."
    )
    port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 picks a free one.")
    http_port: int | None = Field(None, ge=0, le=65535, description="HTTP port, where the service has one.")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="Port of the Prometheus metrics; without it they are not served."
    )
    metrics_host: str = Field("127.0.0.1", description="Address to bind for the metrics: plain HTTP, no token.")
    max_concurrent_rpcs: int = Field(
        1024,
        ge=1,
        description="Calls in progress at once; more are answered RESOURCE_EXHAUSTED with a delay to retry after.",
    )
    drain_s: float = Field(5.0, ge=0, description="Seconds that calls in progress get to end after SIGTERM.")
