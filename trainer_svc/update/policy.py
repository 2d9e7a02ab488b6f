"""The update of a policy: load its networks; then, for each batch, prepare the rows, make the optimizer steps, and report.

A batch is trained `epochs` times, each time in `minibatches` optimizer steps. The columns that the objective reads are computed
once, before the first step: log-probabilities of the reference, the teacher and the proximal policy, the critic's values, and
the advantages that depend on these or on the whole batch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Literal, Self

import numpy as np
import structlog
import torch

from trainer_svc.batch.rows import TrainingRow
from trainer_svc.compute_config import LoraConfig
from trainer_svc.config import BASE, IN_BATCH, ReferenceConfig, TeacherConfig, TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.logprob import Entropy
from trainer_svc.engine.metrics import StepMetrics
from trainer_svc.objectives.advantages import with_advantages
from trainer_svc.objectives.config import ResolvedObjective
from trainer_svc.objectives.objective import (
    CAUSES,
    Objective,
    among,
    check_columns,
    finish,
    keep_trainable,
    mixed,
    with_common_columns,
    with_group_tokens,
    with_selection,
)
from trainer_svc.parallel.mesh import ALONE, SINGLE, Mesh, Ranks, agree
from trainer_svc.update.critic import CRITIC, Critic, value_facts, with_values

log = structlog.get_logger(__name__)

FrozenColumn = Literal["reference_logprobs", "teacher_logprobs"]


@dataclass(frozen=True, slots=True)
class Passes:
    """How often an update trains on its batch.

    Attributes:
        minibatches: Optimizer steps per epoch. A batch with fewer groups makes one step per group.
        seed: Decides, together with the number of earlier optimizer steps, which groups share a minibatch.
    """

    epochs: int = 1
    minibatches: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Updated:
    """The outcome of an update.

    Attributes:
        metrics: One report of all its steps, over all ranks.
        rows: For each of this rank's rows, in order: the number of its tokens in the loss, and the number of applied optimizer
            steps that it was part of; int64 of shape [rows, 2].
        critic_only: Whether the critic learned alone, so that the policy did not change.
        skipped_steps: Optimizer steps of policy and critic that were skipped because something was not finite.
        unfit: Names of weights that the steps made unfit to be published or written, the same on every rank.
    """

    metrics: StepMetrics
    rows: torch.Tensor
    critic_only: bool
    skipped_steps: int
    unfit: tuple[str, ...] = ()


@dataclass(slots=True)
class PolicyUpdate:
    """The networks of one trainer and its objective: a batch of samples in, optimizer steps out.

    Attributes:
        engine: The policy in training, with a second head for values if the critic shares its network.
        named: Objectives by name, for rows that name one. `objective` is for all other rows.
        critic: Computes the values that gae reads, and learns.
        reference: The frozen policy of a KL term, for rows without its log-probabilities. It only runs forward passes.
        teacher: The model that distillation follows. It only runs forward passes.
    """

    engine: TrainEngine
    objective: Objective
    passes: Passes = field(default_factory=Passes)
    critic: Critic | None = None
    reference: TrainEngine | None = None
    teacher: TrainEngine | None = None
    named: Mapping[str, Objective] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.objective.resolved.needs_critic and self.critic is None:
            raise ValueError("gae needs the values of a critic: give one, or choose another advantage estimator")
        if self.critic is not None and self.critic.shared and self.critic.engine is not self.engine:
            raise ValueError("a critic with a language head shares the policy's network: give it the policy's engine")
        if self.critic is not None and self.critic.shared and self.critic.freeze_policy_steps:
            raise ValueError(
                "a critic on the policy's network cannot learn before the policy: set freeze_policy_steps to 0, or give it its own"
            )

    @classmethod
    def load(
        cls,
        config: TrainerConfig,
        model: str | Path,
        seed: int = 0,
        *,
        mesh: Mesh = SINGLE,
        frozen: Mapping[str, TrainEngine] | None = None,
        chat_template: str | None = None,
    ) -> Self:
        """Load the policy and its critic as they are before the first step; `frozen` comes from `load_frozen`.

        Exported models have `chat_template`; None: the model's own.

        The seed sets PyTorch's generators, which draw the weights of a value head, and the choice of minibatches.

        Raises:
            ValueError: if a model cannot be trained packed, or cannot have a value head.
        """
        objective = Objective.of(config.objective)
        settings, own = config.critic, None
        needs_critic = objective.resolved.needs_critic
        if needs_critic and not settings.shared:
            source = model if settings.model == BASE else settings.model
            own = TrainEngine(config.for_critic(config), source, seed, head="value", mesh=mesh)
        # The policy comes last: it leaves the generators in the state of the run's seed.
        policy = TrainEngine(
            config,
            model,
            seed,
            head="both" if needs_critic and settings.shared else "language",
            mesh=mesh,
            chat_template=chat_template,
        )
        critic = None
        if needs_critic:
            clip = objective.resolved.other_parameters.get("value_clip")
            critic = Critic(own or policy, clip, settings.shared_coef, settings.freeze_policy_steps)
        passes = Passes(config.epochs, config.minibatches, seed)
        named = {name: Objective.of(each) for name, each in config.objectives.items()}
        return cls(policy, objective, passes, critic, **(frozen or {}), named=named)

    @property
    def objectives(self) -> dict[str, Objective]:
        """All objectives by the name that rows have; "" stands for rows that name none."""
        return {"": self.objective, **self.named}

    def contributes(self, sequence: TrainingRow) -> bool:
        """Return whether a sequence can have a gradient under its objective."""
        return self.objectives[sequence.objective].contributes(sequence)

    @property
    def engines(self) -> dict[str, TrainEngine]:
        """The networks that optimizers change and checkpoints hold, by name."""
        own = {} if self.critic is None or self.critic.shared else {"critic": self.critic.engine}
        return {"policy": self.engine} | own

    def unfit_weights(self, dtype: torch.dtype | None = None) -> tuple[str, ...]:
        """Return the names of weights that must be neither published in a precision nor written; every rank calls it."""
        critic = self.critic
        own = () if critic is None or critic.shared else critic.engine.unfit_weights()
        return (*self.engine.unfit_weights(dtype), *(f"{name} of the critic" for name in own))

    @property
    def networks(self) -> list[TrainEngine]:
        """All networks, each once, including the frozen ones."""
        frozen = [each for each in (self.reference, self.teacher) if each is not None]
        return [*self.engines.values(), *frozen]

    def apply(self, sequences: Sequence[TrainingRow], *, halved: bool = False) -> Updated:
        """Train on a batch.

        Tokens that cannot be trained are taken out of the loss and its divisor, and are counted. Sequences whose advantages are
        all zero are counted. They are not forwarded if the objective gives them no gradient.

        Args:
            sequences: This rank's rows of the batch; with `proximal_share` if the objective has `proximal = loglinear`.
            halved: Whether to begin with half the token budget, because the batch ran out of memory before.

        Raises:
            ValueError: if a token id is outside of the vocabulary, or a row lacks a column that the objective reads and that no
                model computes. If one rank raises it, all ranks do.
            MemoryShortError: if memory runs out and the pass cannot be repeated.
        """
        began = perf_counter()
        for each in self.networks:
            each.budget.halved = halved
        seconds: dict[str, float] = {}
        with _timed(seconds, "frozen"):
            rows = self._with_frozen(sequences)
        rows, dropped = agree(self.engine.ranks, partial(self._trainable, rows))
        rows = self._prepared(with_group_tokens(rows), seconds)
        losses = {f"dropped_tokens/{cause}": float(dropped.get(cause, 0)) for cause in CAUSES}
        measured = _with_fractions(self.engine.ranks.total(_advantage_sums(rows) | losses))
        if self.critic is not None:
            judged = value_facts(rows, self.engine.ranks)
            measured |= {CRITIC + name: value for name, value in judged.items()}
        updated = self._train(rows)
        if any(each.budget.halved for each in self.networks):
            measured["token_budget_halved"] = 1.0
        metrics = replace(
            updated.metrics,
            measured={**updated.metrics.measured, **measured},
            seconds={**updated.metrics.seconds, **seconds, "total": perf_counter() - began},
        )
        return replace(updated, metrics=metrics)

    def _with_frozen(self, sequences: Sequence[TrainingRow]) -> list[TrainingRow]:
        """Add the log-probabilities of the models that never change."""
        rows = list(sequences)
        readers = self._readers(lambda each: each.needs_reference)
        if readers and self.reference is not None:
            rows = among(rows, readers, partial(with_logprobs, column="reference_logprobs", engine=self.reference))
        readers = self._readers(lambda each: each.needs_teacher)
        if readers and self.teacher is not None:
            rows = among(rows, readers, partial(with_logprobs, column="teacher_logprobs", engine=self.teacher))
        return rows

    def _readers(self, reads: Callable[[ResolvedObjective], bool]) -> list[str]:
        """Return the names of the objectives for which `reads` returns true."""
        return [name for name, each in self.objectives.items() if reads(each.resolved)]

    def _trainable(self, sequences: Sequence[TrainingRow]) -> tuple[list[TrainingRow], dict[str, int]]:
        dropped: Counter[str] = Counter()

        def kept(rows: list[TrainingRow], objective: ResolvedObjective) -> list[TrainingRow]:
            check_columns(rows, objective)
            trainable, lost = keep_trainable(rows, objective)
            dropped.update(lost)
            return trainable

        rows = list(sequences)
        for name, each in self.objectives.items():
            rows = among(rows, [name], partial(kept, objective=each.resolved))
        return rows, dict(dropped)

    def _prepared(self, rows: list[TrainingRow], seconds: dict[str, float]) -> list[TrainingRow]:
        """Add columns that the present weights compute (values, proximal log-probabilities), advantages, and selections of tokens.

        Advantages decide which rows the update forwards. They therefore come before the proximal log-probabilities, unless the reward
        reads these.
        """
        objective, ranks = self.objective.resolved, self.engine.ranks
        after = None
        if self.critic is not None:
            with _timed(seconds, "values"):
                rows, after = with_values(rows, self.critic.engine)
        estimate = partial(with_advantages, objective=objective, bootstraps=after, ranks=ranks)
        if objective.runs_estimator and not objective.reward_reads_proximal:
            with _timed(seconds, "prepare"):
                rows = estimate(rows)
        if readers := self._readers(lambda each: each.needs_proximal):
            with _timed(seconds, "proximal"):
                rows = self._with_proximal(rows, readers)
        with _timed(seconds, "prepare"):
            if objective.runs_estimator and objective.reward_reads_proximal:
                rows = estimate(rows)
            for name in self._readers(lambda each: each.selects_tokens):
                reader = self.objectives[name].resolved
                rows = among(rows, [name], partial(with_selection, objective=reader, ranks=ranks))
            return with_common_columns(rows) if self.named else rows

    def _with_proximal(self, rows: list[TrainingRow], readers: Sequence[str]) -> list[TrainingRow]:
        """Add log o to the rows of these objectives that lack it, computed in the micro-batches of the update's first epoch.

        The rounding of a row's products depends on the other rows of its micro-batch. With the same micro-batches, t / o is exactly 1 in
        the first optimizer step, so that bounds as narrow as gspo's do not clip rounding errors. Rows that the update does not forward
        get micro-batches of their own.
        """
        contributes = None if self.objective.resolved.reward_reads_proximal else self._contributes
        forwarded = [contributes is None or contributes(row) for row in rows]
        wanting = [row.proximal_logprobs is None and row.objective in readers for row in rows]
        parts = [[place for place in part if forwarded[place]] for part in self._minibatches(rows, epoch=0)]
        parts.append([place for place in range(len(rows)) if wanting[place] and not forwarded[place]])
        wanted = self.engine.ranks.total(
            {str(number): float(sum(wanting[place] for place in part)) for number, part in enumerate(parts)}
        )
        filled = list(rows)
        for part in (part for number, part in enumerate(parts) if wanted[str(number)]):  # the same ones on all ranks
            for place, logprobs in zip(part, self.engine.forward([rows[place] for place in part]), strict=True):
                if wanting[place]:
                    filled[place] = replace(rows[place], proximal_logprobs=logprobs)
        return filled

    def _train(self, rows: list[TrainingRow]) -> Updated:
        """Train the policy for all epochs, then a critic with its own network.

        A batch belongs to the critic's warm-up as a whole or not at all.
        """
        own, alone = self._own_critic, self._learns_alone
        places = [self._minibatches(rows, epoch) for epoch in range(self.passes.epochs)]
        epochs = [[[rows[place] for place in part] for part in parts] for parts in places]
        policy_steps = [] if alone else [[self._policy_step(part) for part in parts] for parts in epochs]
        critic_steps = [] if own is None else [own.step(part) for parts in epochs for part in parts]
        metrics = warmup_report(self._judged(rows), critic_steps) if alone else update_report(policy_steps)
        if self.critic is not None:
            learned = critic_report(critic_steps or list(chain(*policy_steps)), shared=own is None)
            if self.critic.freeze_policy_steps:
                learned[f"{CRITIC}warmup"] = float(alone is not None)
            critic_s = sum((step.seconds["total"] for step in critic_steps), 0.0)
            metrics = replace(
                metrics, measured={**metrics.measured, **learned}, seconds={**metrics.seconds, "critic": critic_s}
            )
        return Updated(
            metrics,
            rows=_row_outcomes(rows, chain(*places), critic_steps if alone else chain(*policy_steps)),
            critic_only=alone is not None,
            skipped_steps=sum(step.skipped for step in (*chain(*policy_steps), *critic_steps)),
        )

    @property
    def _own_critic(self) -> Critic | None:
        """The critic, if it has its own network."""
        return None if self.critic is None or self.critic.shared else self.critic

    @property
    def _learns_alone(self) -> Critic | None:
        """The critic, if this batch belongs to its warm-up."""
        own = self._own_critic
        return own if own is not None and own.warming_up else None

    @property
    def _contributes(self) -> Callable[[TrainingRow], bool] | None:
        """Whether a policy step forwards a sequence; None: it forwards all."""
        if self.critic is not None and self.critic.shared:
            return None  # with a shared network every sequence trains the value head
        return self.contributes

    def _minibatches(self, rows: Sequence[TrainingRow], epoch: int) -> list[list[int]]:
        """Return the places of the rows in each minibatch of an epoch.

        The seed includes the number of earlier steps, so that a resumed run cuts the same minibatches.
        """
        before = (self._learns_alone or self).engine.optimizer_steps
        seed = f"{self.passes.seed}/{before}/{epoch}"
        return split_by_group(rows, self.passes.minibatches, seed=seed, ranks=self.engine.ranks)

    def _judged(self, rows: Sequence[TrainingRow]) -> StepMetrics:
        """Measure the policy's loss and its distance from the sampler with a forward pass; nothing is trained."""
        objective = self.objective
        return self.engine.eval_batch(rows, objective.loss, objective.weight, entropy=objective.entropy)

    def _policy_step(self, part: Sequence[TrainingRow]) -> StepMetrics:
        objective = self.objective
        if self.named:
            entropy: Entropy = "train" if self._readers(lambda each: each.entropy_coef > 0) else "measure"
            loss, weight = mixed(self.objectives, part, self.engine.ranks)
            return self.engine.train_batch(part, loss, weight, contributes=self._contributes, entropy=entropy)
        loss = objective.loss
        if self.critic is not None and self.critic.shared:
            loss = self.critic.beside(objective, part, self.engine.ranks)
        return self.engine.train_batch(
            part, loss, objective.weight, contributes=self._contributes, entropy=objective.entropy
        )


def load_frozen(config: TrainerConfig, model: str | Path, *, mesh: Mesh = SINGLE) -> dict[str, TrainEngine]:
    """Load the reference and the teacher, if the objective reads them and batches do not bring their log-probabilities.

    Frozen models only compute log-probabilities: each takes 4 bytes per parameter (2 in bfloat16), and nothing for an optimizer.

    Raises:
        ValueError: if a model cannot compute packed rows.
    """
    objectives = config.all_objectives.values()
    tables: dict[str, ReferenceConfig | TeacherConfig] = {}
    if any(each.needs_reference for each in objectives):
        tables["reference"] = config.reference
    if any(each.needs_teacher for each in objectives):
        tables["teacher"] = config.teacher
    # AdamW on the device holds nothing before its first step. The other choices allocate memory at once.
    settings = config.model_copy(update={"optimizer": "adamw", "optimizer_offload": False, "lora": LoraConfig()})
    engines = {}
    for name, table in tables.items():
        if table.model in ("", IN_BATCH):
            continue
        source = model if table.model == BASE else table.model
        engines[name] = TrainEngine(settings, source, head="language", mesh=mesh, frozen=table.dtype)
        weights = list(engines[name].network.model.parameters())
        log.info(
            "frozen model loaded",
            use=name,
            model=str(source),
            parameters=sum(each.numel() for each in weights),
            gib=round(sum(each.numel() * each.element_size() for each in weights) / 2**30, 3),
        )
    return engines


def _row_outcomes(
    rows: Sequence[TrainingRow], parts: Iterable[Sequence[int]], steps: Iterable[StepMetrics]
) -> torch.Tensor:
    """Return, for each row, the number of its loss tokens and the number of applied steps that it was part of."""
    applied = [0] * len(rows)
    for part, step in zip(parts, steps, strict=True):
        for place in part:
            applied[place] += not step.skipped
    tokens = [each.loss_tokens for each in rows]
    return torch.tensor([tokens, applied], dtype=torch.int64).T.contiguous()


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + perf_counter() - start


def _advantage_sums(sequences: Sequence[TrainingRow]) -> dict[str, float]:
    trained = [each.advantages.numpy()[each.loss_mask.numpy()] for each in sequences]
    values = np.concatenate([np.zeros(0, np.float32), *trained])
    return {
        "zero_advantage_sequences": float(sum(not each.any() for each in trained)),
        "tokens": float(len(values)),
        "positive": float(np.count_nonzero(values > 0)),
        "negative": float(np.count_nonzero(values < 0)),
    }


def _with_fractions(facts: Mapping[str, float]) -> dict[str, float]:
    """Replace the counts of tokens with positive and negative advantages by fractions, and drop causes without dropped tokens."""
    measured = {name: value for name, value in facts.items() if value or not name.startswith("dropped_tokens/")}
    tokens = measured.pop("tokens")
    positive, negative = measured.pop("positive"), measured.pop("negative")
    if tokens:
        measured |= {"advantage_positive": positive / tokens, "advantage_negative": negative / tokens}
    return measured


def with_logprobs(sequences: Sequence[TrainingRow], column: FrozenColumn, engine: TrainEngine) -> list[TrainingRow]:
    """Add a model's log-probabilities to this rank's rows that lack them.

    Every rank calls this, even if its rows lack nothing, because the model may be sharded over ranks.

    Raises:
        ValueError: if a token id is outside of the model's vocabulary.
    """
    wanting = [index for index, each in enumerate(sequences) if getattr(each, column) is None]
    found = engine.forward([sequences[index] for index in wanting])
    filled = list(sequences)
    for index, logprobs in zip(wanting, found, strict=True):
        filled[index] = replace(sequences[index], **{column: logprobs})
    return filled


# Minibatches: they consist of whole groups, have about equally many loss tokens, and are the same on any number of ranks.

KEY_BYTES = 7
"""Bytes of a group's digest: as a number, it is not negative and fits int64."""


def split_by_group(sequences: Sequence[TrainingRow], count: int, *, seed: str, ranks: Ranks = ALONE) -> list[list[int]]:
    """Cut this rank's rows of a batch into minibatches.

    Groups are assigned from large to small, each to the minibatch with the fewest loss tokens so far. The seed decides the order
    of groups of about the same size. Every rank makes the same assignment, even if a group lies on several ranks.

    Args:
        sequences: This rank's rows.
        count: Number of minibatches; a batch with fewer groups gets one per group.
        seed: Decides which groups share a minibatch.
        ranks: All ranks that train on the batch.

    Returns:
        For each minibatch the places of this rank's sequences in it. Every rank gets the same number of minibatches, at least one;
        this rank's part of a minibatch can be empty.
    """
    keys = [_key(each) for each in sequences]
    own = torch.tensor(
        [[key, each.loss_tokens] for key, each in zip(keys, sequences, strict=True)], dtype=torch.int64
    ).reshape(-1, 2)
    tokens: Counter[int] = Counter()
    for key, loss_tokens in ranks.gather(own).tolist():
        tokens[key] += loss_tokens
    places = _places(tokens, count, seed)
    parts: list[list[int]] = [[] for _ in range(max(places.values(), default=0) + 1)]
    for place, key in enumerate(keys):
        parts[places[key]].append(place)
    return parts


def _places(tokens: Counter[int], count: int, seed: str) -> dict[int, int]:
    """Return the minibatch of each group."""
    drawn = sorted(tokens, key=lambda key: (-tokens[key].bit_length(), _digest(f"{seed}/{key}".encode())))
    filled = [0] * min(count, len(drawn))
    held = [0] * len(filled)
    places = {}
    for key in drawn:
        place = min(range(len(filled)), key=lambda index: (filled[index], held[index]))
        places[key] = place
        filled[place] += tokens[key]
        held[place] += 1
    return places


def _key(sequence: TrainingRow) -> int:
    """Return a number for a sequence's group. Without a group it is made from the trajectory's id, else from the tokens."""
    if sequence.group_id:
        return _digest(b"group/" + sequence.group_id.encode())
    if sequence.trajectory_id:
        return _digest(b"trajectory/" + sequence.trajectory_id.encode())
    return _digest(b"tokens/" + sequence.input_ids.numpy().tobytes())


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=KEY_BYTES).digest())


# Reports.

FIRST_FORWARD = ("mismatch_kl", "max_abs_log_difference", "effective_sample_size", "chi_square")
"""Measures of the distance between trainer and sampler. They are reported for the weights at the start of the update."""


def update_report(epochs: Sequence[Sequence[StepMetrics]]) -> StepMetrics:
    """Return the report of a whole update.

    Loss and gradient norm are means over the steps that were applied (over all steps, if none was). Sizes are the batch's; work
    and seconds are sums. `mismatch_kl` and the other measures of `FIRST_FORWARD` come from the first step that forwarded any
    tokens, because its forward pass uses the weights at the start of the update. If there were several steps,
    `mismatch_kl_last` is the `mismatch_kl` of the last step.

    Args:
        epochs: The steps of each epoch, at least one step. Sums whose names begin with ``critic/`` are left out.
    """
    steps = [step for epoch in epochs for step in epoch]
    applied = [step for step in steps if not step.skipped] or steps
    began = next((step for step in steps if step.sums.get("gap_tokens")), steps[0])
    first, last = finish(_policy_sums([began])), finish(_policy_sums(steps[-1:]))
    measured = finish(_policy_sums(steps)) | {name: first[name] for name in FIRST_FORWARD if name in first}
    if len(steps) > 1:
        measured |= {f"{name}_last": last[name] for name in ("mismatch_kl",) if name in last}
    return replace(
        steps[0],
        loss=_mean(step.loss for step in applied),
        grad_norm=_mean(step.grad_norm for step in applied),
        learning_rate=steps[-1].learning_rate,
        skipped=all(step.skipped for step in steps),
        sequences=sum(step.sequences for step in epochs[0]),
        tokens=sum(step.tokens for step in epochs[0]),
        loss_tokens=sum(step.loss_tokens for step in epochs[0]),
        forward_tokens=sum(step.forward_tokens for step in steps),
        micro_batches=sum(step.micro_batches for step in steps),
        padding_fraction=_weighted([step.padding_fraction for step in steps], [step.forward_tokens for step in steps]),
        seconds=_merged(step.seconds for step in steps),
        sums=_policy_sums(steps),
        flops=None if steps[0].flops is None else sum(step.flops or 0.0 for step in steps),
        peak_memory_bytes=max((step.peak_memory_bytes or 0.0 for step in steps), default=None),
        measured=measured
        | {
            "optimizer_steps": float(sum(not step.skipped for step in steps)),
            "skipped_steps": float(sum(step.skipped for step in steps)),
        },
    )


def warmup_report(judged: StepMetrics, critic_steps: Sequence[StepMetrics]) -> StepMetrics:
    """Return the report of an update in which the critic learned alone.

    Gradient norm and learning rate are the policy's, so they are 0. The batch counts as skipped if all steps of the critic were skipped.

    Args:
        judged: A forward pass of the policy on the batch.
        critic_steps: The critic's steps, at least one.
    """
    report = update_report([[judged]])
    none_made = {"optimizer_steps": 0.0, "skipped_steps": 0.0}
    return replace(
        report, skipped=all(step.skipped for step in critic_steps), measured={**report.measured, **none_made}
    )


def critic_report(steps: Sequence[StepMetrics], *, shared: bool) -> dict[str, float]:
    """Return the metrics of the critic's steps.

    Returns:
        `critic/value_loss`, `critic/value_error` (root mean square, in reward units) and `critic/value_clip_fraction`; for a
        critic with its own network also `critic/grad_norm`, `critic/learning_rate` and `critic/skipped_steps`.
    """
    sums = _merged([_critic_sums(step) if shared else step.sums for step in steps])
    tokens = sums.get("tokens", 0.0)
    report: dict[str, float] = {}
    if tokens:
        report = {
            "value_loss": sums["loss"] / tokens,
            "value_error": (sums["error"] / tokens) ** 0.5,
            "value_clip_fraction": sums["value_clipped"] / tokens,
        }
    if steps and not shared:
        report |= {
            "grad_norm": _mean(step.grad_norm for step in steps),
            "learning_rate": steps[-1].learning_rate,
            "skipped_steps": float(sum(step.skipped for step in steps)),
        }
    return {CRITIC + name: value for name, value in report.items()}


def _policy_sums(steps: Sequence[StepMetrics]) -> dict[str, float]:
    return _merged([{k: v for k, v in step.sums.items() if not k.startswith(CRITIC)} for step in steps])


def _critic_sums(step: StepMetrics) -> dict[str, float]:
    return {name.removeprefix(CRITIC): value for name, value in step.sums.items() if name.startswith(CRITIC)}


def _merged(tables: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up sums by name; for names that begin with ``max_`` take the maximum."""
    merged: dict[str, float] = {}
    for table in tables:
        for name, value in table.items():
            before = merged.get(name)
            merged[name] = (
                value if before is None else max(before, value) if name.startswith("max_") else before + value
            )
    return merged


def _mean(values: Iterable[float]) -> float:
    given = list(values)
    return sum(given) / len(given)


def _weighted(values: Sequence[float], weights: Sequence[int]) -> float:
    total = sum(weights)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total if total else 0.0
