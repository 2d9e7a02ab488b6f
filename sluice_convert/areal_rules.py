"""How settings of AReaL become ours, where one row of the table is not enough. `areal.py` has the table."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from sluice.config.schema import Value
from sluice.errors import ConfigError
from sluice_convert.table import Drop, Given, NotConvertibleError, Outcome, Same, Set, Source, Todo, groups, home

_SIDE = re.compile(r"(?:(?P<backend>[a-z_]+)\s*[:.]\s*)?\(?(?:attn\s*:\s*)?(?P<sizes>(?:[a-z]\d+)+).*", re.ASCII)

REJECTION = "actor.rejection_sampling"

OLD_CAP = ("actor.behave_imp_weight_cap", "actor.behav_imp_weight_cap")
"""What rejection_sampling.upper was called before."""


def convert_batch(given: Given) -> Iterator[Outcome]:
    batch = given.whole("train_dataset.batch_size")
    yield Set("orchestrator.batch_size", batch, ("train_dataset.batch_size",), "prompts")
    if batch > 512:
        yield Set("orchestrator.max_concurrent", 2 * batch, ("train_dataset.batch_size",), "at least a batch")
    if given.has("rollout.consumer_batch_size"):
        if given.whole("rollout.consumer_batch_size") == batch:
            yield Set("orchestrator.batch_size", batch, ("rollout.consumer_batch_size",))
        else:
            yield Drop(
                "rollout.consumer_batch_size", "train_dataset.batch_size is converted; here they are one setting"
            )
    yield from groups(given.whole("gconfig.n_samples"), _advantage(given), "gconfig.n_samples")
    yield Set("trainer.minibatches", given.count("actor.ppo_n_minibatches"), ("actor.ppo_n_minibatches",))
    steps = _steps(given)
    if steps:
        yield Set("orchestrator.max_steps", steps, given.present("total_train_steps"))
        yield Drop("total_train_epochs", "the number of steps is converted, which ends the run")
    else:
        epochs = given.whole("total_train_epochs", 1)
        yield Todo(
            "orchestrator.max_steps",
            f"total_train_epochs = {epochs} passes over the data: rows x {epochs} / {batch}; convert again with --steps N, it is 100 until then",
        )
        yield Drop("total_train_epochs", "Sluice counts batches: set orchestrator.max_steps, or give --steps")


def _steps(given: Given) -> int:
    return given.whole("total_train_steps") or given.options.get("steps", 0)


def _normalisation(given: Given, name: str) -> tuple[str, str, bool]:
    """Return the levels of mean and deviation of a normalisation (group, batch or none), and whether it leaves one out."""
    if not given.below(name):
        return "", "", False
    levels = []
    for each in ("mean_level", "std_level"):
        full = f"{name}.{each}"
        value = given.value(full) if given.has(full) else "" if full in given.nulls else "batch"
        levels.append("" if value in (None, "none") else str(value))
    return levels[0], levels[1], given.flag(f"{name}.mean_leave1out")


def _advantage(given: Given) -> str:
    mean, deviation, leaves_one_out = _normalisation(given, "actor.reward_norm")
    if given.has("critic"):
        return "gae"
    if mean == "group":
        if leaves_one_out:
            return "rloo"
        whitened = _normalisation(given, "actor.adv_norm")[:2] == ("batch", "batch")
        return {"group": "grpo", "batch": "lite_ppo"}.get(deviation, "reinforce_pp_baseline" if whitened else "dr_grpo")
    return "reinforce_pp"


def convert_estimator(given: Given) -> Iterator[Outcome]:
    ours = _advantage(given)
    reward, advantage = given.below("actor.reward_norm"), given.below("actor.adv_norm")
    exact = {"reinforce_pp_baseline", "reinforce_pp"}
    yield Set(
        "orchestrator.advantage",
        ours,
        tuple(name for name in reward if name.endswith(("_level", "_leave1out", "group_size")))
        + (tuple(advantage) if ours in exact else ()),
        "whitened over the batch, which AReaL does only with adv_norm"
        if ours == "reinforce_pp" and not advantage
        else "normalisation of rewards by group"
        if reward
        else "no normalisation of rewards by group",
    )
    if ours not in exact:
        for name in advantage:
            yield Drop(
                name,
                f"advantages are those of the estimator {ours}, which are not whitened once more: reinforce_pp_baseline whitens them over the batch",
            )
    for name in ("actor.reward_norm.eps", "actor.reward_norm.std_unbiased"):
        yield Drop(name, "the estimator has its own constant, and an unbiased deviation")
    if ours in ("gae", "reinforce_pp"):
        yield Set("trainer.objective.gamma", given.number("actor.discount"), ("actor.discount",))
    if ours == "gae":
        yield Set("trainer.objective.gae_lambda", given.number("actor.gae_lambda"), ("actor.gae_lambda",))
    for name in given.present("actor.reward_scaling", "actor.reward_bias"):
        if ours in ("grpo", "reinforce_pp_baseline", "reinforce_pp", "lite_ppo"):
            yield Same(name, "normalised advantages do not change with the scale and the zero of the reward")
        else:
            yield Drop(name, "scale the reward in the environment's score")


def convert_objective(given: Given) -> Iterator[Outcome]:
    estimator = _advantage(given)
    preset, source = {"gae": "ppo", "reinforce_pp": "reinforce_pp"}.get(estimator, "grpo"), ""
    if given.flag("actor.use_sapo_loss"):
        preset, source = "sapo", "actor.use_sapo_loss"
    elif given.number("actor.m2_threshold"):
        preset, source = "m2po", "actor.m2_threshold"
    elif given.text("actor.importance_sampling_level") == "sequence":
        preset, source = "gspo", "actor.importance_sampling_level"
    yield Set(
        "trainer.objective.preset",
        preset,
        (source,) if source else given.present("actor.importance_sampling_level", "actor.use_sapo_loss"),
    )
    if preset in ("sapo", "m2po", "gspo") and estimator in ("gae", "reinforce_pp"):
        yield Set("trainer.objective.advantage", estimator, ())
    low = given.number("actor.eps_clip")
    higher = "actor.eps_clip_higher"
    if preset == "sapo":
        yield Set("trainer.objective.tau_pos", given.number("actor.sapo_tau_pos"), ("actor.sapo_tau_pos",))
        yield Set("trainer.objective.tau_neg", given.number("actor.sapo_tau_neg"), ("actor.sapo_tau_neg",))
    else:
        yield Set("trainer.objective.eps_low", low, ("actor.eps_clip",))
        yield Set(
            "trainer.objective.eps_high",
            given.number(higher, low),
            (higher,) if given.has(higher) else ("actor.eps_clip",),
        )
    if preset == "m2po":
        yield Set("trainer.objective.tau", given.number("actor.m2_threshold"), ("actor.m2_threshold",))
    if given.number("actor.c_clip") > 1 and preset in ("grpo", "ppo", "reinforce_pp", "m2po"):
        yield Set("trainer.objective.dual_clip", given.number("actor.c_clip"), ("actor.c_clip",))
    yield Set("trainer.objective.aggregation", "token", (), "of the whole batch")
    yield from _correction(given, preset)
    yield from _kl(given, estimator)


def _correction(given: Given, preset: str) -> Iterator[Outcome]:
    decoupled, recomputed = given.flag("actor.use_decoupled_loss"), given.flag("actor.recompute_logprob")
    sources = given.present("actor.use_decoupled_loss", "actor.recompute_logprob", "actor.prox_logp_method")
    form = "recompute" if decoupled or recomputed or preset == "m2po" else "bypass"
    if decoupled and given.text("actor.prox_logp_method") == "loglinear" and preset != "m2po":
        form = "loglinear"
    yield Set("trainer.objective.proximal", form, sources)
    if not decoupled:
        if form != "bypass":
            yield Set("trainer.objective.correction.kind", "none", sources)
        for name in given.below(REJECTION):
            yield Same(name, "it has no effect without use_decoupled_loss")
    elif given.has(*OLD_CAP):
        cap, mode = (given.present(*OLD_CAP) or OLD_CAP)[0], "actor.behave_imp_weight_mode"
        kind = {"token_truncate": "token_tis", "sequence_mask": "geometric_mask"}.get(given.text(mode), "token_mask")
        yield Set("trainer.objective.correction.kind", kind, (mode, *sources))
        yield Set(f"trainer.objective.correction.{'cap' if kind == 'token_tis' else 'high'}", given.number(cap), (cap,))
        if kind != "token_tis":
            yield Set("trainer.objective.correction.low", 1e-9, (), "no lower bound")
    elif not given.below(REJECTION):
        yield Set("trainer.objective.correction.kind", "none", sources, "without rejection_sampling there is no weight")
    else:
        yield from _rejection(given)


def _rejection(given: Given) -> Iterator[Outcome]:
    level, action, metric, gathered = (
        given.text(f"{REJECTION}.{name}") or default
        for name, default in (("level", "token"), ("action", "mask"), ("metric", "ratio"), ("agg", "mean"))
    )
    kind = {
        ("token", "mask", "ratio"): "token_mask",
        ("token", "clamp", "ratio"): "token_tis",
        ("sequence", "mask", "ratio"): "geometric_mask" if gathered == "mean" else "sequence_mask",
        ("sequence", "mask", "kl_k3"): "k3_mask",
    }.get((level, action, metric))
    if kind is None:
        yield Set("trainer.objective.correction.kind", "token_mask", (), "theirs does not exist here")
        for name in given.below(REJECTION):
            yield Drop(
                name,
                "there is no such correction: token_mask stands in its place; choose trainer.objective.correction.kind (docs/objectives.md)",
            )
        return
    yield Set(
        "trainer.objective.correction.kind",
        kind,
        tuple(f"{REJECTION}.{name}" for name in ("level", "action", "metric", "agg")),
        "" if level == "token" else "kept sequences weigh 1 here, and their ratio in AReaL",
    )
    upper, lower = f"{REJECTION}.upper", f"{REJECTION}.lower"
    most, least = given.number(upper, 5.0), given.number(lower)
    if kind == "token_tis":
        yield Set("trainer.objective.correction.cap", most, (upper,))
        yield Drop(lower, "a truncated weight has no lower bound here")
    elif kind == "k3_mask":
        yield Set("trainer.objective.correction.threshold", most, (upper,))
    else:
        yield Set("trainer.objective.correction.high", most, (upper,))
        yield Set("trainer.objective.correction.low", least or 1e-9, (lower,), "" if least else "no lower bound")


def _kl(given: Given, estimator: str) -> Iterator[Outcome]:
    weight = given.number("actor.kl_ctl") if given.has("ref") else 0.0
    kind = given.text("actor.kl_estimator")
    if weight and estimator in ("gae", "reinforce_pp"):
        yield Set("trainer.objective.kl_coef", weight, ("actor.kl_ctl",))
        yield Set("trainer.objective.kl_kind", kind, ("actor.kl_estimator",))
        yield Set("trainer.objective.kl_where", "reward", ("actor.kl_ctl",))
        yield Set("trainer.reference.model", _reference(given), given.present("ref.path"))
        return
    if weight:
        yield Drop(
            "actor.kl_ctl",
            "AReaL takes it from the reward, which here goes with the estimators gae and reinforce_pp: use a term of the loss, trainer.objective.kl_coef with kl_kind = k3 and trainer.reference.model = base",
        )
    yield Set(
        "trainer.objective.kl_coef",
        0.0,
        () if weight else ("actor.kl_ctl",),
        "" if given.has("ref") else "there is no ref",
    )
    for name in ("ref.path", "actor.kl_estimator"):
        yield Same(name, "without a KL term there is no reference policy")


def _reference(given: Given) -> str:
    path = given.text("ref.path")
    return "base" if path in ("", given.text("actor.path")) else home(path)


def convert_optimizer(given: Given) -> Iterator[Outcome]:
    table = "actor.optimizer"
    kind = given.text(f"{table}.type")
    if kind.startswith("adam"):
        yield Set("trainer.optimizer", "adamw", (f"{table}.type",), "" if kind == "adam" else "its state is float32")
    else:
        yield Drop(f"{table}.type", f"there is no {kind}: adamw stands in its place")
    yield Set("trainer.lr", given.number(f"{table}.lr"), (f"{table}.lr",))
    yield Set(
        "trainer.betas",
        [given.number(f"{table}.beta1"), given.number(f"{table}.beta2")],
        (f"{table}.beta1", f"{table}.beta2"),
    )
    yield Set("trainer.eps", given.number(f"{table}.eps"), (f"{table}.eps",))
    yield Set("trainer.weight_decay", given.number(f"{table}.weight_decay"), (f"{table}.weight_decay",))
    yield Set("trainer.grad_clip", given.number(f"{table}.gradient_clipping"), (f"{table}.gradient_clipping",))
    yield from _schedule(given, table, "trainer")


def _schedule(given: Given, theirs: str, ours: str) -> Iterator[Outcome]:
    per_batch = given.count("actor.ppo_n_minibatches")
    steps = _steps(given) * per_batch
    kind = given.text(f"{theirs}.lr_scheduler_type") or "constant"
    share = given.number(f"{theirs}.warmup_steps_proportion", 0.001)
    name = f"{theirs}.warmup_steps_proportion"
    if steps:
        yield Set(f"{ours}.warmup_steps", int(share * steps), (name,), f"of {steps} optimizer steps")
    elif share * 1000 <= 1:
        yield Set(f"{ours}.warmup_steps", 0, (name,), "less than a step in 1000")
    else:
        yield Drop(name, f"the number of steps is not known: convert again with --steps N, or set {ours}.warmup_steps")
    if kind == "constant":
        yield Set(f"{ours}.schedule", "constant", (f"{theirs}.lr_scheduler_type",))
    elif not steps:
        yield Drop(
            f"{theirs}.lr_scheduler_type",
            f"the schedule {kind} needs the number of steps: convert again with --steps N; it is constant until then",
        )
    else:
        yield Set(f"{ours}.schedule", kind, (f"{theirs}.lr_scheduler_type",))
        yield Set(f"{ours}.max_steps", steps, (), "optimizer steps until the end of the decay")
        if given.number(f"{theirs}.min_lr_ratio"):
            yield Set(f"{ours}.min_lr_ratio", given.number(f"{theirs}.min_lr_ratio"), (f"{theirs}.min_lr_ratio",))


def convert_critic(given: Given) -> Iterator[Outcome]:
    if not given.has("critic"):
        return
    path = given.text("critic.path")
    yield Set(
        "trainer.critic.model",
        "base" if path in ("", given.text("actor.path")) else home(path),
        given.present("critic.path"),
    )
    if given.text("critic.optimizer.type").startswith("adam"):
        yield Same("critic.optimizer.type", "AdamW is the default")
    if given.has("critic.optimizer.lr"):
        yield Set("trainer.critic.lr", given.number("critic.optimizer.lr"), ("critic.optimizer.lr",))
    for name, ours in (("weight_decay", "weight_decay"), ("gradient_clipping", "grad_clip"), ("eps", "eps")):
        if given.has(f"critic.optimizer.{name}"):
            yield Set(f"trainer.critic.{ours}", given.number(f"critic.optimizer.{name}"), (f"critic.optimizer.{name}",))
    if given.has("critic.optimizer.beta1", "critic.optimizer.beta2"):
        yield Set(
            "trainer.critic.betas",
            [given.number("critic.optimizer.beta1", 0.9), given.number("critic.optimizer.beta2", 0.999)],
            ("critic.optimizer.beta1", "critic.optimizer.beta2"),
        )
    yield from _schedule(given, "critic.optimizer", "trainer.critic")
    if not given.flag("actor.use_sapo_loss"):
        yield Set("trainer.objective.value_clip", given.number("critic.eps_clip"), ("critic.eps_clip",))


def convert_devices(given: Given) -> Iterator[Outcome]:
    rollout, actor = given.text("rollout.backend"), given.text("actor.backend")
    names = given.present("rollout.backend", "actor.backend")
    if not rollout and not actor and given.has("allocation_mode"):
        names = ("allocation_mode",)
        rollout, _, actor = given.text("allocation_mode").partition("+")
    engines, trainer = _side(rollout, "p"), _side(actor, "tp" if given.flag("actor.use_lora") else "")
    if engines is None or trainer is None:
        for name in names:
            yield Drop(
                name, "cannot read both sides as backend:dimensions: set allocation_mode, such as vllm:d4+fsdp:d4"
            )
        return
    yield Set("allocation_mode", f"vllm:{engines}+fsdp:{trainer}", names)
    as_written = rollout.startswith("vllm") and actor.startswith("fsdp") and not re.search(r"e([2-9]|1\d)", actor)
    if not as_written or engines != _side(rollout, "") or trainer != _side(actor, ""):
        yield Todo(
            "allocation_mode",
            f"{rollout} and {actor} became vllm:{engines} and fsdp:{trainer}: there are no other backends, no expert parallelism, no pipeline in"
            " engines, and no t or p with adapters (docs/parallelism.md)",
        )


def _side(text: str, folded: str) -> str | None:
    """Return the dimensions of `backend:dimensions`; those of `folded` become data parallelism. None if it has none."""
    match = _SIDE.fullmatch(text.strip().lower())
    if match is None:
        return None
    sizes = {letter: int(size) for letter, size in re.findall(r"([a-z])(\d+)", match["sizes"])}
    data = sizes.get("d", 1) * math.prod(sizes.get(letter, 1) for letter in folded)
    return f"d{data}" + "".join(
        f"{letter}{sizes[letter]}" for letter in "tcp" if letter not in folded and sizes.get(letter, 1) > 1
    )


def convert_environment(given: Given) -> Iterator[Outcome]:
    path = given.text("train_dataset.path")
    if not path:
        yield Todo("orchestrator.environment", "the environment of your workflow: docs/environments.md")
        return
    named = path.rstrip("/").lower()
    known = "gsm8k" if named.endswith("gsm8k") else "hendrycks_math" if named.endswith("math-lighteval") else ""
    arguments: dict[str, Value] = {"format": known} if known else {"reward": "math"}
    if path not in ("openai/gsm8k", "DigitalLearningGmbH/MATH-lighteval"):
        arguments = {"dataset": home(path), **arguments}
    if not known:
        yield Todo(
            "orchestrator.environment_args",
            f"check how {path} is read: its fields (question, answer) or a format, and the reward (docs/rewards.md), or name an environment of your own",
        )
    if given.text("valid_dataset.path") == path:
        yield Same("valid_dataset.path", "it is the same data set: orchestrator.evaluation.split")
    yield Set(
        "orchestrator.environment", "question_answer", ("train_dataset.path",), "questions and answers of a data set"
    )
    yield Set("orchestrator.environment_args", arguments, ("train_dataset.path",))
    if given.has("workflow", "rollout.agent", "econfig", "agent"):
        yield Todo(
            "orchestrator.environment",
            "the file names a workflow or an agent of its own: make it an environment, or an agent (docs/external-episodes.md)",
        )


def convert_lengths(given: Given) -> Iterator[Outcome]:
    tokens = given.whole("gconfig.max_new_tokens")
    yield Set("orchestrator.sampling.max_tokens", tokens, ("gconfig.max_new_tokens",))
    engine = "vllm" if given.text("rollout.backend").startswith("vllm") or not given.has("sglang") else "sglang"
    name = {"vllm": "vllm.max_model_len", "sglang": "sglang.context_length"}[engine]
    prompt = given.whole("train_dataset.max_length")
    if given.whole(name):
        yield Set("rollout.max_model_len", given.whole(name), (name,))
        yield Drop(
            "train_dataset.max_length",
            "rollout.max_model_len bounds prompt and answer; a prompt that is too long is refused",
        )
    elif prompt:
        yield Set(
            "rollout.max_model_len",
            prompt + tokens,
            ("train_dataset.max_length", "gconfig.max_new_tokens"),
            "prompt + answer",
        )
    memory = {"vllm": "vllm.gpu_memory_utilization", "sglang": "sglang.mem_fraction_static"}[engine]
    if given.has(memory):
        yield Set("rollout.engine_args.gpu_memory_utilization", given.number(memory), (memory,))
    for each in ("max_num_seqs", "enforce_eager") if engine == "vllm" else ():
        if given.has(f"vllm.{each}"):
            yield Set(f"rollout.engine_args.{each}", given.value(f"vllm.{each}"), (f"vllm.{each}",))
    if engine == "sglang" and given.has("sglang.max_running_requests"):
        yield Set(
            "rollout.engine_args.max_num_seqs",
            given.whole("sglang.max_running_requests"),
            ("sglang.max_running_requests",),
        )


def convert_lora(given: Given) -> Iterator[Outcome]:
    if not given.flag("actor.use_lora"):
        return
    rank = given.whole("actor.lora_rank")
    yield Set("trainer.lora.rank", rank, ("actor.use_lora", "actor.lora_rank"))
    yield Set("trainer.lora.alpha", given.number("actor.lora_alpha"), ("actor.lora_alpha",))
    modules = [each for each in given.texts("actor.target_modules") if each != "all-linear"]
    yield Set(
        "trainer.lora.target_modules", modules, ("actor.target_modules",), "" if modules else "empty: all linear layers"
    )
    yield Set("rollout.lora.enabled", True, given.present("rollout.use_lora", "vllm.enable_lora", "sglang.enable_lora"))
    yield Set("rollout.lora.max_rank", rank, given.present("vllm.max_lora_rank", "sglang.max_lora_rank"))


def convert_timers(given: Given) -> Iterator[Outcome]:
    saves = next(
        (table for table in ("recover", "saver") if given.has(f"{table}.freq_steps", f"{table}.freq_secs")), ""
    )
    for unit, ours, read in (("freq_steps", "every_steps", Given.whole), ("freq_secs", "every_s", Given.number)):
        if saves and given.has(f"{saves}.{unit}"):
            yield Set(f"orchestrator.checkpoint.{ours}", read(given, f"{saves}.{unit}"), (f"{saves}.{unit}",))
        if given.has(f"evaluator.{unit}"):
            yield Set(f"orchestrator.evaluation.{ours}", read(given, f"evaluator.{unit}"), (f"evaluator.{unit}",))
    for name in given.present("recover.freq_epochs", "saver.freq_epochs", "evaluator.freq_epochs"):
        table = "evaluation" if name.startswith("evaluator") else "checkpoint"
        yield Drop(name, f"there are no epochs: set orchestrator.{table}.every_steps or every_s")
    if saves == "recover":
        for name in given.present("saver.freq_steps", "saver.freq_secs"):
            yield Drop(
                name,
                "checkpoints are those of recover; every version's weights are kept by the weight service for a while (weightsync.keep)",
            )


def convert_overlong(given: Given) -> Iterator[Outcome]:
    if given.flag("actor.overlong_reward_penalty"):
        yield Set("orchestrator.overlong.policy", "penalise", ("actor.overlong_reward_penalty",))
        yield Set(
            "orchestrator.overlong.buffer_tokens", given.whole("actor.overlong_tokens"), ("actor.overlong_tokens",)
        )
        yield Set(
            "orchestrator.overlong.penalty",
            given.number("actor.overlong_penalty_factor", 1.0),
            ("actor.overlong_penalty_factor",),
        )
        if given.flag("actor.mask_no_eos_with_zero"):
            yield Drop("actor.mask_no_eos_with_zero", "orchestrator.overlong.policy is penalise; mask is another one")
    elif given.flag("actor.mask_no_eos_with_zero"):
        yield Set("orchestrator.overlong.policy", "mask", ("actor.mask_no_eos_with_zero",))


def convert_dtype(value: Value) -> str:
    if value not in ("bfloat16", "float32"):
        raise NotConvertibleError("the trainer computes in bfloat16 or float32: set trainer.dtype")
    return str(value)


def check_source(source: Source) -> None:
    names = {name.partition(".")[0] for name in source.leaves}
    if "actor" not in names:
        raise ConfigError(
            f"{source.path} is not a configuration of AReaL: it has no table actor; choose another system with --from"
        )
    if "gconfig" not in names and "rollout" not in names:
        raise ConfigError(
            f"{source.path} is a configuration of AReaL without rollout: this converts those of RL; `sluice sft`, `dpo` and `reward-model` train without it"
        )
