"""Settings of the orchestrator. Imports nothing heavy: every command loads them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from ipaddress import ip_network
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from sluice.advantages import ESTIMATORS, TRAINER_ESTIMATORS
from sluice.chat_template import check_chat_template
from sluice.config import CHAT_TEMPLATE_KWARGS, CommonConfig, Section, ServerConfig, TemplateArguments
from sluice.config.schema import OWN_WORKFLOWS, Value, deep_merge, not_repeatable
from sluice.config.tables import EnvironmentTable, OrchestratorDeadlinesTable, OrchestratorTable, SamplingTable
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.loading import PLAYING, locate
from sluice.limits import (
    FLOAT32_MAX,
    MAX_BATCH_BYTES,
    MAX_BRANCHES,
    MAX_REWARD,
    MAX_TEMPERATURE,
    MAX_TRAJECTORIES,
    MIN_TEMPERATURE,
)
from sluice.sampling.config import ConcurrencyConfig, ReplicasConfig

NO_ADVANTAGE = "none"
"""Value of `advantage` with which batches bring no advantages and name no estimator."""

EXTERNAL = "external"
"""The workflow whose episodes are run by agents that call a gateway."""

WORKFLOWS = ("auto", "single_turn", "multi_turn", "retry", EXTERNAL)
"""Workflows that come with Sluice; others are named by their import path."""

_ROUND_S = 0.02
"""Default of `replicas.coalesce_s` in a deterministic run: after so many seconds an engine confirms that it has a request of a round."""

_MOST_WEIGHT = 1e6
"""Greatest weight of a mix; only proportions matter, and sums of weights stay exact enough."""


class SamplingConfig(SamplingTable):
    """How training episodes are sampled. Plain on purpose: the engine's log-probabilities are then the policy's."""

    temperature: float = Field(
        1.0,
        ge=MIN_TEMPERATURE,
        le=MAX_TEMPERATURE,
        description="Softmax temperature; trained tokens need at least 0.01.",
    )
    max_tokens: int = Field(256, ge=1, description="Most tokens sampled per turn.")
    stop: list[str] = Field(default_factory=list, description="Strings that end a turn; their tokens are kept.")
    ignore_eos: bool = Field(False, description="Ignore the tokens that end a turn and sample up to `max_tokens`.")
    seeded: bool = Field(False, description="Send seeds with requests, from the run's seed, group, episode and turn.")
    chat_template_kwargs: TemplateArguments = Field(
        default_factory=dict,
        description=f"{CHAT_TEMPLATE_KWARGS} They take precedence over the run's `chat_template_kwargs`, and those of an agent's request over these.",
    )


class AttemptsConfig(Section):
    """What an evaluation attempts."""

    split: str = Field("eval", description="Split of the environment that is evaluated.")
    prompts: int = Field(64, ge=1, description="Tasks per evaluation, the first ones of the split.")
    samples: int = Field(1, ge=0, description="Samples per task at `temperature`; 0 leaves them out.")
    temperature: float = Field(1.0, gt=0, le=MAX_TEMPERATURE, description="Softmax temperature of the samples.")
    greedy: bool = Field(True, description="Also decode each task once without randomness.")
    concurrency: int = Field(16, ge=1, description="Tasks evaluated at a time.")
    deadline_s: float = Field(600.0, gt=0, description="Seconds for one evaluation; a longer one is given up.")


class EvaluationConfig(AttemptsConfig):
    """Evaluation inside the run, pinned to one version of the weights."""

    every_steps: int = Field(0, ge=0, description="Steps between evaluations; 0: see `every_s`.")
    every_s: float = Field(
        0,
        ge=0,
        description="Seconds between evaluations, looked at after each step; 0: see `every_steps`. With neither the run does not evaluate.",
    )
    metric: str = Field(
        "reward_mean",
        description="Result by which evaluations are compared, such as `greedy_exact_share` or `pass_at_4`; of several environments the mean.",
    )
    keep_best: bool = Field(
        False,
        description="Write a checkpoint of the version that is evaluated, and keep the one with the best result beside the newest ones.",
    )
    patience: int = Field(
        0,
        ge=0,
        description="Evaluations in a row without a better result after which the run ends in order; 0: it does not.",
    )
    min_gain: float = Field(0.0, ge=0, description="By how much a result must exceed the best one to count as better.")

    @property
    def wanted(self) -> bool:
        """Whether the run evaluates."""
        return self.every_steps > 0 or self.every_s > 0


class CheckpointConfig(Section):
    """When the trainer is asked for checkpoints."""

    every_steps: int = Field(
        25, ge=0, description="Steps between checkpoints, the most that a crash of the trainer costs; 0: see `every_s`."
    )
    every_s: float = Field(
        0, ge=0, description="Seconds between checkpoints, looked at after each step; 0: see `every_steps`."
    )
    every_mb: int = Field(
        16_384,
        ge=0,
        description="Most MiB of payloads in the journal: a checkpoint is due when half of it was written since the last one, whatever `every_steps` and `every_s` say, because only checkpoints release payloads. 0: no bound.",
    )
    final: bool = Field(True, description="Write a checkpoint after the last step.")
    deadline_s: float = Field(1800.0, gt=0, description="Seconds that one checkpoint may take.")


class FilterConfig(Section):
    """Which scored groups are trained. Another task of the same environment takes the place of one that is not (dynamic sampling)."""

    drop_degenerate: bool = Field(
        False, description="Replace groups whose rewards are all equal: most objectives learn nothing from them."
    )
    min_reward_mean: float | None = Field(None, description="Replace groups whose mean reward is below this.")
    max_reward_mean: float | None = Field(None, description="Replace groups whose mean reward is above this.")
    should_accept: str = Field(
        "",
        description="Function `module:function` or `path.py:function` of a group's trajectories, a sequence of `TrajectoryRecord`. Groups for which it returns false are replaced. Empty: none.",
    )

    @model_validator(mode="after")
    def _leaves_some(self) -> Self:
        low, high = self.min_reward_mean, self.max_reward_mean
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_reward_mean ({low:g}) above max_reward_mean ({high:g}) would replace every group")
        return self

    @property
    def replaces(self) -> bool:
        """Whether any group may be replaced."""
        bounded = self.min_reward_mean is not None or self.max_reward_mean is not None
        return self.drop_degenerate or bounded or bool(self.should_accept)


class OverlongConfig(Section):
    """What becomes of episodes that were cut off by a limit of length or turns."""

    policy: Literal["none", "mask", "penalise", "filter"] = Field(
        "none",
        description="none: train them as they are. mask: their rewards count in the group's statistics, their tokens are not trained. penalise: lower the reward of long turns. filter: drop them, rewards included.",
    )
    buffer_tokens: int = Field(
        0,
        ge=0,
        description="penalise: the penalty grows linearly over the last this many tokens before the limit of a turn, from 0 to `penalty`. 0: only episodes that were cut off get it.",
    )
    penalty: float = Field(
        1.0,
        gt=0,
        description="penalise: what a turn of full length, or an episode that was cut off, loses of its reward.",
    )


class PoolSharesConfig(Section):
    """How often tasks of each pool are drawn; only the proportions matter. A pool without tasks passes its share on."""

    new: float = Field(0.3, ge=0, le=_MOST_WEIGHT, description="Weight of tasks without a result.")
    easy: float = Field(0.05, ge=0, le=_MOST_WEIGHT, description="Weight of tasks that are almost always solved.")
    medium: float = Field(0.5, ge=0, le=_MOST_WEIGHT, description="Weight of the tasks between easy and hard.")
    hard: float = Field(0.15, ge=0, le=_MOST_WEIGHT, description="Weight of tasks that are almost never solved.")


class PoolsConfig(Section):
    """Tasks by how often they are solved."""

    enabled: bool = Field(
        False, description="Draw tasks by pool. Otherwise every task comes once per pass, whatever its solve rate."
    )
    solved_reward: float = Field(1.0, description="An episode is solved if its reward is at least this.")
    easy_from: float = Field(0.9, gt=0, le=1, description="Least solve rate of an easy task.")
    hard_to: float = Field(0.1, ge=0, lt=1, description="Greatest solve rate of a hard task.")
    shares: PoolSharesConfig = Field(default_factory=PoolSharesConfig, description="How often each pool is drawn.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.hard_to >= self.easy_from:
            raise ValueError(f"hard_to ({self.hard_to:g}) must be below easy_from ({self.easy_from:g})")
        if not any(self.shares.model_dump().values()):
            raise ValueError("every weight of shares is 0, so that no task could be drawn: raise one")
        return self


class FoundReplicasConfig(ReplicasConfig):
    """How rollout replicas are found, watched and chosen."""

    lease_s: float = Field(
        30.0, gt=0, description="Seconds that an announced replica is used after its last heartbeat."
    )
    most_announced: int = Field(1024, ge=1, description="Most replicas that are announced at a time.")
    most_per_principal: int = Field(256, ge=1, description="Most replicas that one principal may announce at a time.")
    networks: list[str] = Field(
        default_factory=list,
        description="Networks that the addresses of announced replicas must lie in, such as 10.0.0.0/8. Empty: all networks. Link-local, multicast and unspecified addresses are refused in any case. A loopback address or a unix socket may be announced from the orchestrator's machine alone.",
    )

    @field_validator("networks")
    @classmethod
    def _are_networks(cls, networks: list[str]) -> list[str]:
        for each in networks:
            ip_network(each)  # raises a ValueError that says what is wrong
        return networks


class PacingConfig(Section):
    """When groups start: just early enough that the trainer never waits for them, or as early as `max_staleness` allows."""

    enabled: bool = Field(
        True,
        description="Start groups when the measured times of generation and training say so, so that they do not age before they are trained; false: as early as `max_staleness` allows.",
    )
    batches: int = Field(
        16,
        ge=4,
        description="Batches whose times are measured, the last ones; the slowest decides. Until there are as many, groups start as early as they may.",
    )
    reserve: float = Field(
        0.25,
        ge=0,
        description="By how much earlier a batch is to be complete than the trainer needs it, as a share of the time of a step.",
    )


class DeadlinesConfig(OrchestratorDeadlinesTable):
    """How long the orchestrator waits before something counts as failed."""

    start_s: float = Field(
        900.0,
        gt=0,
        description="Seconds to construct the environment, for it to list its tasks, and for the trainer and one replica to start.",
    )
    lost_s: float = Field(
        600.0, gt=0, description="Seconds that the trainer or all replicas may be away during the run."
    )
    update_s: float = Field(
        3600.0,
        gt=0,
        description="Seconds that the run may wait for a replica that has taken a version which is new enough; then it ends, and can be continued.",
    )
    begin_epoch_s: float = Field(900.0, gt=0, description="Seconds for the trainer to restore and publish its weights.")
    submit_s: float = Field(120.0, gt=0, description="Seconds for one attempt to submit a batch.")
    step_s: float = Field(
        7200.0,
        gt=0,
        description="Seconds between two reports of a trainer that has a batch; then the run ends, and can be continued.",
    )
    generate_s: float = Field(600.0, gt=0, description="Seconds for one generation request.")
    episode_s: float = Field(
        900.0,
        gt=0,
        description="Seconds for an episode, and for a group whose episodes are one request. A later one is lost and counted; its group keeps the other episodes, unless a single one is left and `advantage` compares episodes. Time in which its requests wait for a replica does not count, nor does scoring, which has limits of its own (`environment_processes.score_s`).",
    )
    outage_s: float = Field(
        3600.0,
        gt=0,
        description="Seconds that a run pauses because group after group fails (`max_failed_tasks`), before it fails with `max_failed_groups`.",
    )
    first_outage_s: float = Field(
        300.0,
        gt=0,
        description="The same, at most, while no group of the run has succeeded: then it fails, however few groups failed. Raise it where a judge takes longer to start.",
    )
    set_aside_s: float = Field(
        3600.0,
        gt=0,
        description="Seconds that a run waits for `sluice resume` when it has paused because of `max_set_aside`; then it writes a checkpoint and ends with exit code 5.",
    )
    hold_s: float = Field(
        600.0, gt=0, description="Seconds after which a replica held for an evaluation is free again."
    )
    watchers_s: float = Field(3.0, ge=0, description="Seconds that watchers get to read the last event.")


class JournalConfig(Section):
    """The journal of facts, in the run's directory."""

    segment_mb: int = Field(64, ge=1, description="Size at which a new segment file is begun, in MiB.")
    queue_mb: int = Field(
        512,
        ge=1,
        description="Size of the payloads that may wait for the disk, in MiB; with more, the run fails as well.",
    )


class DiskConfig(Section):
    """What the run may take of its disks (docs/disk.md)."""

    min_free_mb: int = Field(
        2048,
        ge=0,
        description="Free space to keep, in MiB, on each file system with the run's directory, checkpoints or weights. The run pauses while there is less, and goes on by itself when there is a quarter more than this. 0: it never pauses.",
    )
    trajectories_mb: int = Field(
        16_384,
        ge=0,
        description="Size of trajectories/step_*.jsonl in all, in MiB; with more, those of the oldest steps are removed. Only `sluice rescore` and people read them. 0: no bound.",
    )
    dropped_mb: int = Field(
        64,
        ge=0,
        description="Size of trajectories/dropped.jsonl, the trajectories that never reached a batch, in MiB; when it is full it becomes dropped.1.jsonl, in place of the one before. 0: they are not written.",
    )


class ExternalConfig(Section):
    """Episodes that external agents run (`workflow = "external"`)."""

    lease_s: float = Field(
        600.0,
        gt=0,
        description="Seconds that a lease lasts unless it is renewed; then its episodes are on offer again.",
    )
    idle_s: float = Field(
        300.0,
        gt=0,
        description="Seconds without a call after which an open episode is given up, and is on offer again.",
    )
    group_s: float = Field(
        7200.0,
        gt=0,
        description="Seconds from the first lease of a group until its episodes that are not submitted are given up, and the others are trained.",
    )
    notice_s: float = Field(
        60.0,
        gt=0,
        description="Seconds in which no agent has an episode of an environment, although some are on offer, after which the log and GetRun say so. If other environments can be played, those episodes are put off until an agent asks; otherwise the run waits on.",
    )
    absent_s: float = Field(
        0,
        ge=0,
        description="Seconds in which no agent has an episode of an environment and none asks for one, after which the run writes a checkpoint and fails; started again it continues. 0: never.",
    )
    attempts: int = Field(
        4,
        ge=1,
        description="Times that an episode may be opened; after that it is given up for good if it is not submitted.",
    )
    most_sessions: int = Field(16_384, ge=1, description="Most episodes that are open at a time.")
    most_leased: int = Field(4096, ge=1, description="Most episodes that one principal has leased at a time.")
    most_generations: int = Field(1024, ge=1, description="Most requests that are recorded in one session.")
    most_branches: int = Field(
        MAX_BRANCHES,
        ge=1,
        le=MAX_TRAJECTORIES,
        description="Most samples of one session: each may end a branch, and each branch is a trajectory.",
    )
    branches_mb: int = Field(
        256,
        ge=1,
        le=MAX_BATCH_BYTES >> 20,
        description="Most MiB that the branches of one session take in a batch, where each holds its prompts whole: 4 bytes a token. Then it samples no more. Requests that are under way by then may add as much again.",
    )
    most_requests: int = Field(64, ge=1, description="Most requests of one session that are under way at a time.")
    session_mb: int = Field(
        64,
        ge=1,
        le=1024,
        description="Most MiB that are recorded in one session, and most of one request; then it samples no more. Requests that are under way by then may add as much again.",
    )
    one_key: bool = Field(
        False,
        description="Let the session key reward, end and renew its episode, too, and in a run without principals no key at all, as clients of v0.1.0 do. Then an agent that looks for it can set its own reward.",
    )


class RetryConfig(Section):
    """Episodes that ask again until the answer is good enough (`workflow = "retry"`)."""

    message: str = Field(
        "Your answer is wrong. Think again, then give another answer.",
        min_length=1,
        description="What is said to an answer that is not good enough.",
    )
    discount: float = Field(
        0.9, gt=0, le=1, description="An answer is worth its score times this to the power of the tries before it."
    )
    enough: float = Field(1.0, description="Score from which on an answer is good enough.")


class EpisodeConfig(Section):
    """What may differ between the environments of a run. A table of `environments` takes over what `[orchestrator]` sets."""

    split: str = Field("train", description="Split of the environment that tasks are drawn from.")
    workflow: str = Field(
        "auto",
        description="How an episode runs: `auto` (chosen by the environment), `single_turn`, `multi_turn`, `retry` (a question again until its answer is good enough), `external` (by agents that call a gateway), or `module:Class`.",
    )
    max_turns: int = Field(8, ge=1, description="Most assistant turns of a multi-turn episode.")
    retry: RetryConfig = Field(default_factory=RetryConfig, description="Episodes that ask again.")
    group_size: int = Field(8, ge=1, le=256, description="Episodes per group: attempts at one task.")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="How training episodes are sampled.")
    advantage: str = Field(
        "centered",
        description=f"Advantage estimator: {', '.join(ESTIMATORS)}, from rewards alone; {', '.join(TRAINER_ESTIMATORS)}, which the trainer runs and `trainer.objective` must name as well; or {NO_ADVANTAGE}, for an objective that reads no advantages.",
    )
    environment_processes: EnvironmentProcessesConfig = Field(
        default_factory=EnvironmentProcessesConfig, description="Processes that run the environment's code."
    )
    objective: str = Field(
        "",
        description="Name of the objective of `trainer.objectives` that trains the episodes. Empty: `trainer.objective`.",
    )
    filter: FilterConfig = Field(default_factory=FilterConfig, description="Which scored groups are trained.")
    overlong: OverlongConfig = Field(default_factory=OverlongConfig, description="Episodes that were cut off.")
    pools: PoolsConfig = Field(default_factory=PoolsConfig, description="Tasks by how often they are solved.")
    quarantine_after: int = Field(
        3,
        ge=1,
        description="Groups of one task that may fail one after the other (the environment died, hung or raised, no reward, the deadline); then the task is not drawn any more.",
    )
    groups_per_s: float | None = Field(
        None, gt=0, description="Most groups of an environment that start per second. none: no limit."
    )

    @model_validator(mode="after")
    def _estimates(self) -> Self:
        names = (*ESTIMATORS, *TRAINER_ESTIMATORS, NO_ADVANTAGE)
        if self.advantage not in names:
            raise ValueError(f"there is no advantage estimator {self.advantage!r}; choose one of {', '.join(names)}")
        if self.group_size < 2 and self.advantage in ESTIMATORS:
            raise ValueError(
                f"{self.advantage} compares the episodes of a group: with a single episode every advantage is 0 and nothing is"
                " learned; set group_size to 2 or more"
            )
        if self.filter.drop_degenerate and self.advantage not in ESTIMATORS:
            raise ValueError(
                f"filter.drop_degenerate drops groups of equal rewards, from which {self.advantage} still learns: set it to false"
            )
        return self


_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"
"""What the name of an environment within a run may be."""


class EnvironmentConfig(EpisodeConfig, EnvironmentTable):
    """One environment of a run, an entry `[[orchestrator.environments]]`. What it does not set, it has from `[orchestrator]`."""

    name: str = Field(
        "",
        pattern=rf"^({_NAME})?$",
        description="Name within the run, in reports and metrics. Empty: what `environment` ends with.",
    )
    environment: str = Field(
        description="Environment: an installed id, `module:Attr`, or `path/to/env.py:Attr` (a class or a function)."
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the environment's class or function."
    )
    ratio: float = Field(
        1.0,
        gt=0,
        le=_MOST_WEIGHT,
        description="Weight in the mix: groups are drawn from the environments in the proportion of their ratios.",
    )
    max_running: int | None = Field(
        None, ge=1, description="Most of its groups whose episodes are under way at a time. none: only the run's limit."
    )

    @model_validator(mode="after")
    def _named(self) -> Self:
        self.name = self.name or _last_part(self.environment)
        return self

    def plays(self) -> bool:
        """Return whether the environment plays its episodes itself."""
        return self.environment in PLAYING


def _last_part(reference: str) -> str:
    """Return the default name of an environment: the attribute or the id at the end of its reference."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", reference.rpartition(":")[2])[:63].lstrip("_.-") or "environment"


class OrchestratorConfig(EpisodeConfig, OrchestratorTable):
    """The table `[orchestrator]`."""

    environment: str = Field(
        "",
        description="The run's only environment: an installed id, `module:Attr`, or `path/to/env.py:Attr` (a class or a function).",
    )
    environment_args: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of its class or function."
    )
    environments: list[EnvironmentConfig] = Field(
        default_factory=list,
        description="Environments that tasks are drawn from by ratio, in place of `environment`; see docs/curriculum.md.",
    )
    batch_size: int = Field(16, ge=1, description="Groups per training batch.")
    max_steps: int = Field(100, ge=1, description="Batches to train in all.")
    max_concurrent: int = Field(
        512,
        ge=1,
        description="Most groups between dispatch and the end of their training, whatever the staleness allows.",
    )
    max_running: int = Field(
        1024,
        ge=1,
        description="Most groups whose episodes are under way at a time, however much room the replicas have (see `concurrency`).",
    )
    on_stale: Literal["drop", "truncate", "requeue"] = Field(
        "drop",
        description="Trajectories with tokens beyond max_staleness: drop them, train only their fresh tokens, or draw the task again.",
    )
    window_fraction: float = Field(
        0.3,
        ge=0,
        le=1,
        description="Share of a batch by which younger groups may pass an older one; 0: first in, first out.",
    )
    max_failed_tasks: int = Field(
        8,
        ge=1,
        description="Different tasks whose groups may fail one after the other; then something is down that they share, such as a judge, and the run pauses: it tries one group at a time until one succeeds, and these failures do not count towards quarantine.",
    )
    max_failed_groups: int = Field(
        64,
        ge=1,
        description="Groups that may fail or end without a reward, one after the other; after as many the run pauses in any case, and it fails if the pause has lasted for `deadlines.outage_s`.",
    )
    release_quarantine: bool = Field(
        False,
        description="Release at each start all tasks that an earlier process of the run put in quarantine: they are drawn again.",
    )
    max_refills: int = Field(
        1024,
        ge=1,
        description="Groups that `filter` may replace from one batch to the next. Bounds the wait for groups that teach something.",
    )
    on_max_refills: Literal["fail", "train"] = Field(
        "fail",
        description="What follows after `max_refills`: the run fails, or groups that `filter` would replace are trained until the batch is made.",
    )
    max_reward: float = Field(
        MAX_REWARD,
        gt=0,
        le=FLOAT32_MAX,
        description="Largest absolute value of a reward. An agent that gives a larger one is refused; of an environment it counts as missing.",
    )
    max_set_aside: float = Field(
        0.05,
        ge=0,
        le=1,
        description="Largest share of the trajectories of 20 batches that may be set aside because they can never be trained; with more, the run pauses and says why.",
    )
    max_lost_epochs: int = Field(
        5,
        ge=1,
        description="Times that the trainer may be lost before the run fails, with no new batch in between that changed the weights.",
    )
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="Evaluation inside the run.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Checkpoints.")
    replicas: FoundReplicasConfig = Field(default_factory=FoundReplicasConfig, description="Rollout replicas.")
    concurrency: ConcurrencyConfig = Field(default_factory=ConcurrencyConfig, description="Samples in flight.")
    pacing: PacingConfig = Field(default_factory=PacingConfig, description="When groups start.")
    deadlines: DeadlinesConfig = Field(default_factory=DeadlinesConfig, description="Deadlines.")
    journal: JournalConfig = Field(default_factory=JournalConfig, description="The journal.")
    disk: DiskConfig = Field(default_factory=DiskConfig, description="Room on disks.")
    external: ExternalConfig = Field(default_factory=ExternalConfig, description="Episodes of external agents.")
    existing_run: Literal["resume", "refuse"] = Field(
        "resume", description="What to do if the run's directory holds a journal: resume the run, or refuse to start."
    )
    serve_after_end: bool = Field(
        False,
        description="When the run has ended, keep answering questions about it (GetRun, metrics) until a signal; false: end too. For engines that start whatever ends again, such as a Deployment of Kubernetes.",
    )
    write_trajectories: bool = Field(
        True,
        description="Write trajectories, with text, to trajectories/step_*.jsonl, and some of them for TensorBoard.",
    )
    write_tokens: int = Field(
        0,
        ge=0,
        description="Trajectories of each step whose row in trajectories/step_*.jsonl also has its token ids, mask and log-probabilities of the sampler, taken from as many groups as possible. A token takes about 15 bytes. 0: none.",
    )
    load_report_s: float = Field(1.0, gt=0, description="Seconds between two reports of the load.")
    server: ServerConfig = Field(
        default_factory=lambda: ServerConfig(port=7104), description="Where the orchestrator listens."
    )

    _mix: tuple[EnvironmentConfig, ...] = PrivateAttr()

    @model_validator(mode="before")
    @classmethod
    def _pass_on(cls, data: Value) -> Value:
        """Give each environment what the table `[orchestrator]` sets and the environment itself does not."""
        if not isinstance(data, Mapping) or not isinstance(data.get("environments"), list):
            return data
        shared = {name: data[name] for name in EpisodeConfig.model_fields if name in data}
        given = [deep_merge(shared, each) if isinstance(each, Mapping) else each for each in data["environments"]]
        return {**data, "environments": given}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.environment and self.environments:
            raise ValueError(
                "environment names the only environment of a run, and environments several: set one of them"
            )
        own = {name: getattr(self, name) for name in EpisodeConfig.model_fields}
        reference = self.environment
        alone = EnvironmentConfig.model_construct(
            **own, name=_last_part(reference), environment=reference, args=self.environment_args
        )
        self._mix = tuple(self.environments) or (alone,)
        twice = [name for name, times in Counter(each.name for each in self._mix).items() if times > 1]
        if twice:
            raise ValueError(
                f"two environments are called {twice[0]!r}: give each a name of its own (environments[].name)"
            )
        estimators = {each.advantage for each in self._mix}
        if len(estimators) > 1 and not estimators <= set(ESTIMATORS):
            foreign = ", ".join(sorted(estimators - set(ESTIMATORS)))
            raise ValueError(
                f"advantage {foreign} must be that of all environments, because the trainer computes it for whole batches: give each"
                f" environment the same advantage, or one of {', '.join(ESTIMATORS)}"
            )
        is_external = any(each.workflow == "external" for each in self._mix)
        if is_external and 2 * self.external.session_mb > self.journal.queue_mb:
            raise ValueError(
                f"external.session_mb ({self.external.session_mb}) is more than half of journal.queue_mb ({self.journal.queue_mb}):"
                " a recording of that size would not fit the journal's queue beside what the run itself writes"
            )
        if self.max_concurrent < self.batch_size:
            raise ValueError(
                f"max_concurrent ({self.max_concurrent}) below batch_size ({self.batch_size}) could never fill a batch"
            )
        return self

    @property
    def mix(self) -> tuple[EnvironmentConfig, ...]:
        """The environments of the run: `environments`, or the one that `environment` names."""
        return self._mix

    def repeatable(self) -> Self:
        """Return a copy with the values that a deterministic run needs; see `Section.repeatable`."""
        for each in self.mix:
            if each.workflow not in OWN_WORKFLOWS:
                raise not_repeatable("orchestrator.workflow", each.workflow, "one of Sluice's own")
            # What is drawn next must depend neither on the clock nor on which of two groups ends first.
            for name, value in (("groups_per_s", each.groups_per_s), ("max_running", each.max_running)):
                if value is not None:
                    raise not_repeatable(f"{name} of environment {each.name}", value, "none")
            if each.filter.replaces and (len(self.mix) > 1 or each.pools.enabled):
                raise not_repeatable(
                    f"filter of environment {each.name}", "set, beside pools or another environment", "unset"
                )
        for name, value in (("every_steps", self.evaluation.every_steps), ("every_s", self.evaluation.every_s)):
            if value:
                raise not_repeatable(f"orchestrator.evaluation.{name}", value, "0")
        data = self.model_dump(exclude_unset=True)
        data.setdefault("sampling", {})["seeded"] = True
        for table in data.get("environments", ()):
            table.setdefault("sampling", {})["seeded"] = True
        data.setdefault("concurrency", {})["adapt"] = False
        data.setdefault("replicas", {}).setdefault("coalesce_s", _ROUND_S)
        return type(self).model_validate(data)

    def check_start(self, run: CommonConfig) -> None:
        """Refuse settings that would make the orchestrator fail at start; see `Section.check_start`."""
        from sluice.loading import check_there  # noqa: PLC0415

        if any(each.workflow == "external" for each in self.mix):
            if run.deterministic:
                raise ValueError(
                    'deterministic cannot hold for agents outside: set it to false, or choose another workflow than "external"'
                )
            if self.evaluation.wanted:
                raise ValueError(
                    "external agents run no evaluations: set evaluation.every_steps and evaluation.every_s to 0, or choose another"
                    ' workflow than "external"'
                )
        for each in self.mix:
            check_there(locate(each.environment), "environment")
            if each.workflow not in WORKFLOWS:
                check_there(each.workflow, "workflow")
            if each.filter.should_accept:
                check_there(each.filter.should_accept, "filter")
            # The replica reads the file, which need not be on this host.
            if each.sampling.chat_template_kwargs and (run.chat_template is None or run.chat_template.is_file()):
                setting = f"sampling.chat_template_kwargs of environment {each.name}"
                check_chat_template(run.model, run.chat_template, each.sampling.chat_template_kwargs, setting)


CONFIG = OrchestratorConfig
