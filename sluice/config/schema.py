"""The tables that all services share, and how keys of any table are looked up, parsed and merged."""

from __future__ import annotations

import difflib
import json
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from sluice.config.allocation import Allocation
from sluice.config.footprint import Footprint
from sluice.errors import ConfigError
from sluice.limits import MAX_CONNECTIONS

Value: TypeAlias = Any
"""A value in a TOML document, a flag or a field. Only the field that validates it knows the type."""

FieldType: TypeAlias = Any
"""A field's annotation: a class, a union, a generic alias or `Any`."""


def deep_merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `upper` into `lower`. Tables merge key by key; any other value of `upper`, lists included, replaces that of `lower`."""
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        merged[key] = deep_merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def alternatives(annotation: FieldType) -> tuple[Any, ...]:
    """Return the members of a union, without `Annotated`."""
    origin: object = get_origin(annotation)
    if origin is Annotated:
        return alternatives(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return tuple(part for member in get_args(annotation) for part in alternatives(member))
    return (annotation,)


def table_class(annotation: FieldType) -> type[BaseModel] | None:
    """Return the class of the table that a field of this type holds; None for a plain value."""
    tables = [each for each in alternatives(annotation) if isinstance(each, type) and issubclass(each, BaseModel)]
    return tables[0] if len(tables) == 1 else None


def entry_class(annotation: FieldType) -> type[BaseModel] | None:
    """Return the class of the tables in a list; None for other types."""
    origin: object = get_origin(annotation)
    return table_class(get_args(annotation)[0]) if origin is list else None


def accepts_none(annotation: FieldType) -> bool:
    """Return whether the field may be unset, by ``none`` in a file or a flag."""
    return type(None) in alternatives(annotation)


def unsets(annotation: FieldType, text: Value) -> bool:
    """Return whether a text in a file or a flag unsets the field: ``none``, unless that is one of the field's choices."""
    if not isinstance(text, str) or text.lower() != "none" or not accepts_none(annotation):
        return False
    return not any("none" in get_args(part) for part in alternatives(annotation) if get_origin(part) is Literal)


def is_flag(annotation: FieldType) -> bool:
    """Return whether the field is a boolean, so that ``--key`` without a value means true."""
    return set(alternatives(annotation)) - {type(None)} == {bool}


def is_open(annotation: FieldType) -> bool:
    """Return whether the type of a value is inferred from its text, as in a table with the user's own keys."""
    return annotation is Any or (bool in alternatives(annotation) and not is_flag(annotation))


def _mapping(annotation: FieldType) -> FieldType:
    """Return the member of a type that is a mapping with the user's own keys (or `Any`); None if there is none."""
    for part in alternatives(annotation):
        container = get_origin(part) or part
        if part is Any or (isinstance(container, type) and issubclass(container, Mapping)):
            return part
    return None


def _is_sequence(annotation: FieldType) -> bool:
    return any(
        (get_origin(part) or part) in (list, tuple, set, frozenset, Sequence) for part in alternatives(annotation)
    )


def resolve(model: type[BaseModel], path: Sequence[str]) -> FieldType:
    """Return the type of the field at a dotted path.

    Raises:
        ConfigError: if there is no such field; the message suggests the nearest one.
    """
    annotation: Any = model
    for depth, key in enumerate(path):
        table = table_class(annotation)
        if table is not None:
            if key not in table.model_fields:
                raise ConfigError(f"unknown key {'.'.join(path)!r}{suggestion(model, path[: depth + 1])}")
            annotation = table.model_fields[key].annotation
        elif (mapping := _mapping(annotation)) is not None:
            annotation = (*get_args(mapping), Any)[1] if get_args(mapping) else Any
        else:
            raise ConfigError(f"unknown key {'.'.join(path)!r}: {'.'.join(path[:depth])!r} is a value, not a table")
    return annotation


def leaf_paths(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Yield every field that holds a value, not a table, with its path, in order of declaration."""
    for name, field in model.model_fields.items():
        table = table_class(field.annotation)
        if table is None:
            yield (*prefix, name), field
        else:
            yield from leaf_paths(table, (*prefix, name))


def suggestion(model: type[BaseModel], path: Sequence[str]) -> str:
    """Return the end of a message about an unknown key: the most similar key of its table, or of all tables."""
    table = table_class(resolve(model, path[:-1]))
    siblings = sorted(table.model_fields) if table is not None else []
    near = difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {'.'.join((*path[:-1], near[0]))!r}?"
    everywhere = [".".join(leaf) for leaf, _ in leaf_paths(model)]
    same_name = [full for full in everywhere if full.rpartition(".")[2] == path[-1]]
    near = same_name[:1] or difflib.get_close_matches(".".join(path), everywhere, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; valid keys here: {', '.join(siblings)}" if siblings else ""


def parse_text(annotation: FieldType, text: str) -> Value:
    """Parse the text of a flag or a variable for a field: lists by commas or as JSON, tables as JSON, the rest as text.

    Raises:
        ConfigError: if a list or a table is malformed JSON.
    """
    if unsets(annotation, text):
        return None
    if _is_sequence(annotation):
        return _json(text) if text.startswith("[") else [part.strip() for part in text.split(",") if part.strip()]
    if is_open(annotation):
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text
    if text.startswith("{") and (_mapping(annotation) is not None or table_class(annotation) is not None):
        return _json(text)
    return text


def _json(text: str) -> Value:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        # The text is not shown, since it may contain a secret.
        raise ConfigError(f"the value is not JSON: {error.msg} at character {error.pos + 1}") from error


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

        Returns:
            Lines that a dry run prints, if any.

        Raises:
            ConfigError: with the remedy.
        """
        return None

    def check_trainable(self, run: CommonConfig) -> None:
        """Refuse models on disk that the service cannot train with its settings on any machine.

        Services that train override it. It reads only each model's config.json. `check_start` calls it, and a plan does, too.

        Raises:
            ConfigError: with the reason and the remedy.
        """

    def processes(self) -> int:
        """Return the number of processes of one child that compute."""
        return 1

    def uses_devices(self) -> bool:
        """Return whether the service computes on GPUs if the machine has some."""
        return True

    def repeatable(self) -> Self:
        """Return a copy with the values that a deterministic run needs.

        Raises:
            ConfigError: if an explicit setting contradicts such a value; see `not_repeatable`.
        """
        return self

    def footprint(self, run: CommonConfig, *, cuda: bool) -> Footprint | None:
        """Estimate the memory that a child needs at its peak; None if the settings do not say enough.

        Args:
            run: The settings of the run.
            cuda: Whether the child computes on CUDA devices if its settings leave that open.
        """
        return None

    def fitted(self, run: CommonConfig, *, cuda: bool, memory: int | None) -> Mapping[str, tuple[object, str]]:
        """Decide the settings that are `auto` and depend on the memory of the devices.

        Args:
            run: The settings of the run.
            cuda: As for `footprint`.
            memory: Bytes of the smallest device; None if unknown.

        Returns:
            Values and reasons by the dotted names of the settings. Settings other than `auto` are left out.
        """
        return {}

    def longest_sample(self, run: CommonConfig, *, cuda: bool, memory: int | None) -> int | None:
        """Return the most tokens of prompt and response that fit in the memory of the service's devices.

        None if that is not known, or if a sample as long as the model allows fits.

        Args:
            run: The settings of the run.
            cuda: As for `footprint`.
            memory: As for `fitted`.
        """
        return None

    def models_beside(self) -> dict[str, str]:
        """Return the models that the service loads besides the run's model, by the settings that name them."""
        return {}


OWN_WORKFLOWS = frozenset({"auto", "single_turn", "multi_turn"})
"""Workflows of ours. Their trajectories have no log-probabilities of a reference or a teacher; those of other workflows may."""


def not_repeatable(setting: str, given: object, needed: object) -> ConfigError:
    """Return the error about a setting with which the run would not be deterministic."""
    return ConfigError(
        f"deterministic = true needs {setting} = {needed}, but it is {given}: leave it out, or set deterministic = false"
    )


def check_repeatable(table: Section, setting: str, needed: object) -> None:
    """Refuse a setting that was explicitly set to another value than a deterministic run needs. Its default may differ from that value.

    Raises:
        ConfigError: with both values.
    """
    name = setting.rpartition(".")[2]
    given = dict(table)[name]
    if name in table.model_fields_set and given != needed:
        raise not_repeatable(setting, given, needed)


OPERATOR = "operator"
"""Name of the certificate that commands present. Each service presents one with its own name."""


def _certificate_files(directory: Path, name: str) -> dict[str, Path]:
    return {"tls_cert": directory / f"{name}.pem", "tls_key": directory / f"{name}.key", "tls_ca": directory / "ca.pem"}


class SecurityConfig(Section):
    """Who may call a service: tokens and TLS."""

    principals_file: Path | None = Field(
        None,
        description="TOML file of the principals that may call the servers of this process, with roles and quotas (docs/security.md); `sluice token new` adds one. Unset: there are two, `agent` and `admin`, if their token files are set.",
    )
    token_file: Path | None = Field(
        None,
        description="File with the bearer token that this process sends. Without `principals_file` it is also the token of the principal `agent`.",
    )
    service_token_files: dict[str, Path] = Field(
        default_factory=dict,
        description="Files to use as `token_file` in the process of a service, by the name of the service, so that one file of settings gives each service a principal of its own.",
    )
    admin_token_file: Path | None = Field(
        None,
        description="File with the bearer token that this process sends instead where the role `agent` is not enough. Without `principals_file` it is also the token of the principal `admin`.",
    )
    dispatcher_token_file: Path | None = Field(
        None,
        description="File with the bearer token that the orchestrator and gateways send to replicas, of a principal with the role `dispatcher`: it opens nothing at the other services. A server that has this setting admits it as the principal `dispatcher`, with or without `principals_file`. `sluice rl` makes one.",
    )
    call_log_mb: int = Field(
        16, ge=1, description="Size at which the log of calls that change something begins a new file, in MiB."
    )
    call_log_files: int = Field(4, ge=0, description="Older files of that log to keep.")
    certs_dir: Path | None = Field(
        None,
        description="Folder that `sluice certs init` made, or one with ca.pem, and certificate and key of the processes that use it. It stands for mutual TLS with `tls_ca` = ca.pem, and `tls_cert` and `tls_key` of the service, or `operator` in a command. Unless other principals are set, `principals_file` = principals.toml.",
    )
    tls_cert: Path | None = Field(None, description="PEM certificate chain that this process presents.")
    tls_key: Path | None = Field(None, description="PEM private key of `tls_cert`.")
    tls_ca: Path | None = Field(
        None, description="PEM authorities that the other side's certificate is checked against."
    )
    tls_address_name: str | None = Field(
        None,
        min_length=1,
        description="Name that the certificate of a server must have which this process calls by an IP address: a replica or a relay that a name service or a list gave. Unset: the address itself must be in the certificate.",
    )
    require_client_cert: bool = Field(
        False, description="Mutual TLS: refuse clients without a certificate of `tls_ca`."
    )
    connection_age_s: float = Field(
        300.0,
        ge=0.1,
        description="Seconds, more or less by a tenth, after which a server ends a connection, so that its client connects again. It may then reach a server that was added behind the same name, and its certificate and token are looked at again. Calls in progress end on the old connection.",
    )
    insecure: bool = Field(
        False, description="Allow a bind address other than loopback without TLS and a token (flag `--insecure`)."
    )

    @model_validator(mode="before")
    @classmethod
    def _of_folder(cls, data: Value) -> Value:
        """Set the paths that `certs_dir` implies."""
        if not isinstance(data, Mapping) or data.get("certs_dir") is None:
            return data
        directory = Path(data["certs_dir"])
        for name in ("tls_cert", "tls_key", "tls_ca"):
            if data.get(name) is not None and Path(data[name]).parent != directory:
                raise ValueError(f"certs_dir stands for {name}: set only one of the two")
        own_principals = {} if data.get("admin_token_file") else {"principals_file": directory / "principals.toml"}
        return {**own_principals, **data, **_certificate_files(directory, OPERATOR), "require_client_cert": True}

    def of_service(self, name: str) -> SecurityConfig:
        """Return the settings for the process of a service, with that service's token and certificate."""
        changes: dict[str, object] = {}
        if name in self.service_token_files:
            changes |= {"token_file": self.service_token_files[name], "admin_token_file": None}
        if self.certs_dir is not None:
            changes |= _certificate_files(self.certs_dir, name)
        return self.model_copy(update=changes)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: set both or neither")
        if self.service_token_files and self.principals_file is None:
            raise ValueError("service_token_files needs principals_file: without it servers know no tokens of services")
        if self.require_client_cert and (self.tls_ca is None or self.tls_cert is None):
            raise ValueError(
                "require_client_cert needs tls_cert, tls_key and tls_ca: the authority that signs the clients"
            )
        return self


class PeersConfig(Section):
    """Addresses of the services: ``host:port``, ``dns:///name:port`` or ``unix:/path``."""

    weightsync: str = Field("127.0.0.1:7101", description="Address of the weight service.")
    trainer: str = Field("127.0.0.1:7102", description="Address of the trainer (rank 0).")
    rollout: list[str] = Field(
        default_factory=lambda: ["127.0.0.1:7103"],
        description="Addresses of the rollout replicas, one each; `dns:///name:port` is balanced round robin.",
    )
    orchestrator: str = Field("127.0.0.1:7104", description="Address of the orchestrator.")
    gateway: str = Field("127.0.0.1:7105", description="Address of the gateway that agents lease episodes from.")


def _of_json(value: Value) -> Value:
    """Refuse values that JSON cannot represent, and nulls, which TOML cannot represent."""
    match value:
        case Mapping():
            return {str(key): _of_json(inner) for key, inner in value.items()}
        case list():
            return [_of_json(inner) for inner in value]
        case float() if not math.isfinite(value):
            raise ValueError(f"{value} is not a number of JSON")
        case None:
            raise ValueError("null has no form in TOML: leave the argument out")
        case str() | bool() | int() | float():
            return value
        case _:
            raise ValueError(f"{value} is neither text, number, list nor table: write it in quotes")


TemplateArguments: TypeAlias = Annotated[dict[str, Any], AfterValidator(_of_json)]
"""Arguments of a chat template by their names: JSON without nulls."""

CHAT_TEMPLATE = (
    "File with a Jinja template, UTF-8, which replaces the chat template of the model. Unset: the model's own."
)
"""Description of the settings `chat_template`."""

CHAT_TEMPLATE_KWARGS = (
    "Arguments of the chat template, such as `enable_thinking = false`; only variables that the template reads."
)
"""Description of the settings `chat_template_kwargs`."""

RUN_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"
"""Pattern of the names of runs."""


class WatchConfig(Section):
    """Limits of the rules that say what is wrong with a run (docs/monitor.md)."""

    mismatch_kl: float = Field(
        0.01, gt=0, description="Largest mismatch between engine and trainer, in nats a token (`trainer/mismatch_kl`)."
    )
    log_difference: float = Field(
        0.3,
        gt=0,
        description="Largest difference of two log-probabilities of a token of the trainer's own version, in nats (`trainer/max_abs_log_difference` of steps without staleness).",
    )
    effective_samples: float = Field(
        0.5, gt=0, le=1, description="Least share of the tokens that may count (`trainer/effective_sample_size`)."
    )
    entropy_share: float = Field(
        0.2,
        gt=0,
        le=1,
        description="Least entropy, as a share of that of the first steps, unless the reward is at its best.",
    )
    no_signal_share: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Most groups that may have one reward which is not the best, as a share of a batch.",
    )
    length_factor: float = Field(
        2.5,
        gt=1,
        description="How many times as long as in the first steps completions may get if the longer ones get more reward; its square if they do not.",
    )
    truncated_share: float = Field(
        0.2, gt=0, le=1, description="Most completions that may be cut off, as a share of a batch."
    )
    repetition_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Largest share of a completion that may repeat what stands before it (`completion/repetition`).",
    )
    reward_fall: float = Field(
        0.2,
        gt=0,
        description="Most that the mean reward of 10 steps may lie below the best such mean, as a share of it.",
    )
    times_usual: float = Field(
        5.0,
        gt=1,
        description="How many times as large as usual the norm of a gradient or the seconds of a step may be.",
    )
    idle_share: float = Field(
        0.8, gt=0, le=1, description="Most of the time that trainer or replicas may wait for the others."
    )
    slow_replica_factor: float = Field(
        4.0,
        gt=1,
        description="How many times as many tokens a second as a sample of one replica those of the others may get.",
    )
    failed_share: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Most groups of an environment that may fail, as a share of the last ones, and most calls of environments, as a share of the trajectories.",
    )
    failed_groups: int = Field(3, ge=1, description="Fewest failed groups, or failed calls, that count.")
    disk_gb: float = Field(5.0, ge=0, description="Least space on the disk of the run, in GB.")
    memory_share: float = Field(0.05, ge=0, le=1, description="Least available memory of the machine, as a share.")


class CommonConfig(Section):
    """The keys at the top level of a run's file, the same for every service."""

    run: str = Field(
        "default",
        pattern=RUN_PATTERN,
        description="Name of the run: lower-case letters, digits, `.`, `_`, `-`; at most 63 characters.",
    )
    output_dir: Path = Field(Path("outputs"), description="Directory that holds one directory per run.")
    model: str = Field("", description="Base model: a Hugging Face directory or hub id.")
    chat_template: Path | None = Field(
        None, description=f"{CHAT_TEMPLATE} The directories of the run's versions and checkpoints have it too."
    )
    chat_template_kwargs: TemplateArguments = Field(
        default_factory=dict,
        description=f"{CHAT_TEMPLATE_KWARGS} Those of an environment and of a request take precedence.",
    )
    seed: int = Field(0, ge=0, description="Seed of everything random in the run.")
    max_staleness: int = Field(
        2,
        ge=0,
        description="Most policy versions that a token may lag behind the trainer; 0 is exact on-policy training.",
    )
    deterministic: bool = Field(
        False,
        description="Two runs with the same seed and settings give the same metrics and weights, bit for bit. Slower: max_staleness 0, one replica, one trainer process, one thread each, and requests in rounds.",
    )
    allocation_mode: str | None = Field(
        None,
        description="How devices are assigned, such as `vllm:d2t1+fsdp:d4` (rollout + trainer; d data, t tensor, c context,"
        " p pipeline) or `d4` (both on the same four); sets the dimensions of engines and trainer. none: their own settings.",
    )
    security: SecurityConfig = Field(default_factory=SecurityConfig, description="Tokens and TLS.")
    peers: PeersConfig = Field(default_factory=PeersConfig, description="Addresses of the services.")
    watch: WatchConfig = Field(
        default_factory=WatchConfig, description="Limits of the rules that say what is wrong with a run."
    )
    peers_start_s: float = Field(
        600.0,
        gt=0,
        description="Seconds that a service waits at its start for another one that it needs, until it logs which one is missing, where and why. It continues to wait, and logs again after the same time.",
    )
    peers_give_up_s: float = Field(
        1800.0,
        ge=0,
        description="Seconds after which a service whose peer has never served ends with exit code 6, so that nothing is held for a part that does not come; what restarts services starts it again. 0: it waits for ever. The orchestrator and agents have deadlines of their own: `orchestrator.deadlines.start_s`, `agents.gateway_s`.",
    )
    metrics_ports: bool = Field(
        False,
        description="Whether each service that `sluice rl` starts serves its Prometheus metrics on a free port of its own, at `server.metrics_host`, unless `server.metrics_port` names one. `RUN.metrics_targets.json` in `output_dir` lists them for Prometheus while the run lives.",
    )
    log_level: Literal["debug", "info", "warning", "error", "critical"] = Field(
        "info", description="Least severe log level that is written."
    )
    log_mb: int = Field(
        64, ge=1, description="Size at which the log of a service (`logs/SERVICE.log`) begins a new file, in MiB."
    )
    log_files: int = Field(4, ge=0, description="Older files of such a log to keep; still older lines are lost.")

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
    """Where one service listens, and its limits."""

    host: str = Field(
        "127.0.0.1", description="Address to bind, or `unix:/path` for a unix socket (then `port` is unused)."
    )
    port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 picks a free one.")
    http_port: int | None = Field(None, ge=0, le=65535, description="HTTP port, where the service has one.")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="Port of the Prometheus metrics; without it they are not served."
    )
    metrics_host: str = Field(
        "127.0.0.1",
        description="Address to bind for the metrics, by HTTPS if there is a certificate; any principal may read them, everyone if there are none.",
    )
    probe_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port, at `host`, that answers health checks (grpc.health.v1) and nothing else, without TLS and for everyone: for probes that know neither certificates nor tokens, as those of Kubernetes. Unset: health checks are answered at `port` alone.",
    )
    max_concurrent_rpcs: int = Field(
        1024,
        ge=1,
        description="Calls in progress at once; more are answered RESOURCE_EXHAUSTED with a delay to retry after. Calls that wait for others do not count.",
    )
    max_waiting_rpcs: int = Field(
        8192,
        ge=1,
        description="Calls of one method in progress at once that wait for others: of each kind of watch, of LeaseTasks, with which agents wait for a task, of the streams of gateways. More are answered RESOURCE_EXHAUSTED with a delay to retry after.",
    )
    max_connections: int = Field(
        MAX_CONNECTIONS,
        ge=16,
        description="Connections of each port at once, at most three quarters of the files that the process may open. One more is refused by gRPC; to make room, HTTP closes the connection that has waited longest for a request.",
    )
    drain_s: float = Field(
        5.0,
        ge=0,
        description="Seconds that what is under way (calls, samples, episodes, a step) gets to end after SIGTERM or `sluice drain`. A service ends as soon as nothing is left; `sluice rl` kills it two seconds after that time.",
    )
