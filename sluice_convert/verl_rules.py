"""How settings of verl become ours, where one row of the table is not enough. `verl.py` has the table."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sluice.config.schema import Value
from sluice.errors import ConfigError
from sluice_convert.table import Drop, Given, NotConvertibleError, Outcome, Same, Set, Source, Todo, groups, home

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"

OPTIM, CRITIC, CORRECTION = f"{ACTOR}.optim", "critic", "algorithm.rollout_correction"

MEGATRON = f"{ACTOR}.megatron"

ASYNC = "async_training"


def _sizes(given: Given) -> tuple[int, int]:
    """Return the tasks of a batch, after which verl gives the engines new weights, and the mini-batches in it."""
    mini = given.count(f"{ACTOR}.ppo_mini_batch_size")
    if given.has(ASYNC):
        parts = given.whole(f"{ASYNC}.require_batches", 1) * given.whole(f"{ASYNC}.trigger_parameter_sync_step", 1)
        return mini * parts, parts
    batch = given.whole("data.train_batch_size")
    return batch, max(1, round(batch / mini)) if mini else 1


def _optimizer_steps(given: Given) -> int:
    """Return the optimizer steps of one batch."""
    return _sizes(given)[1] * given.count(f"{ACTOR}.ppo_epochs")


def _steps(given: Given) -> int:
    """Return the batches of the run; 0 if the file does not tell."""
    if given.whole("rollout.total_rollout_steps") and given.has(ASYNC):
        return max(1, given.whole("rollout.total_rollout_steps") // max(1, _sizes(given)[0]))
    steps = given.whole("trainer.total_training_steps")
    return steps if steps > 0 else given.options.get("steps", 0)


def convert_batch(given: Given) -> Iterator[Outcome]:
    batch, parts = _sizes(given)
    if batch < 1:
        raise ConfigError(f"data.train_batch_size is {batch}: give the prompts of a batch")
    if given.has(ASYNC):
        names = f"{ACTOR}.ppo_mini_batch_size", f"{ASYNC}.require_batches", f"{ASYNC}.trigger_parameter_sync_step"
        yield Set("orchestrator.batch_size", batch, names, "prompts until the engines get new weights")
        yield Drop("data.train_batch_size", "the fully asynchronous trainer counts mini-batches")
    else:
        yield Set("orchestrator.batch_size", batch, ("data.train_batch_size",), "prompts")
    if batch > 512:
        yield Set("orchestrator.max_concurrent", 2 * batch, ("data.train_batch_size",), "at least a batch")
    yield from groups(given.whole(f"{ROLLOUT}.n"), _estimator(given), f"{ROLLOUT}.n")
    yield Set("trainer.minibatches", parts, (f"{ACTOR}.ppo_mini_batch_size",), "batch / mini-batch")
    yield Set("trainer.epochs", given.count(f"{ACTOR}.ppo_epochs"), (f"{ACTOR}.ppo_epochs",))
    steps = _steps(given)
    if steps:
        yield Set(
            "orchestrator.max_steps",
            steps,
            given.present("trainer.total_training_steps", "rollout.total_rollout_steps"),
        )
    else:
        epochs = given.whole("trainer.total_epochs", 30)
        yield Todo(
            "orchestrator.max_steps",
            f"total_epochs = {epochs} passes over the data: rows x {epochs} / {batch}; convert again with --steps N, it is 100 until then",
        )
    yield Drop("trainer.total_epochs", "Sluice counts batches: set orchestrator.max_steps, or give --steps")
    yield Drop("rollout.total_epochs", "Sluice counts batches: set orchestrator.max_steps, or give --steps")


def convert_staleness(given: Given) -> Iterator[Outcome]:
    threshold = f"{ASYNC}.staleness_threshold"
    if given.has(ASYNC):
        yield Set(
            "max_staleness",
            math.ceil(given.number(threshold)),
            (threshold,),
            "versions that a token may lag, rounded up",
        )
    elif given.has("rollout.nnodes", "rollout.n_gpus_per_node"):
        yield Set("max_staleness", 1, given.present("rollout.nnodes"), "one step off-policy")
    else:
        yield Set(
            "max_staleness",
            0,
            (),
            "verl trains on what the present policy sampled; 1 or 2 overlaps sampling and training",
        )


def _estimator(given: Given) -> str:
    """Return our estimator; empty if there is none of that name."""
    kind = given.text("algorithm.adv_estimator").removeprefix("AdvantageEstimator.").lower()
    if kind in ("grpo", "grpo_vectorized"):
        return "grpo" if given.flag("algorithm.norm_adv_by_std_in_grpo") else "dr_grpo"
    return {
        "gae": "gae",
        "reinforce_plus_plus": "reinforce_pp",
        "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
        "rloo": "rloo",
        "rloo_vectorized": "rloo",
        "opo": "opo",
    }.get(kind, "")


def convert_advantage(given: Given) -> Iterator[Outcome]:
    name, ours = "algorithm.adv_estimator", _estimator(given)
    if not ours:
        kind = given.text(name)
        instead = {"remax": "rloo", "gpg": "dr_grpo"}.get(kind.lower(), "grpo")
        yield Drop(name, f"there is no estimator {kind}: {instead} stands in its place (docs/objectives.md)")
        yield Set("orchestrator.advantage", instead, (), f"not {kind}")
        return
    by_group = ours in ("grpo", "dr_grpo")
    yield Set("orchestrator.advantage", ours, (name, *(("algorithm.norm_adv_by_std_in_grpo",) if by_group else ())))
    if ours in ("gae", "reinforce_pp"):
        yield Set("trainer.objective.gamma", given.number("algorithm.gamma"), ("algorithm.gamma",))
    if ours == "gae":
        yield Set("trainer.objective.gae_lambda", given.number("algorithm.lam"), ("algorithm.lam",))


def convert_objective(given: Given) -> Iterator[Outcome]:
    mode = f"{ACTOR}.policy_loss.loss_mode"
    loss, kind = given.text(mode), given.text("algorithm.adv_estimator").lower()
    preset = {
        "vanilla": {"gae": "ppo", "reinforce_plus_plus": "reinforce_pp"}.get(kind, "grpo"),
        "gspo": "gspo",
        "sapo": "sapo",
        "cispo": "cispo",
    }.get(loss)
    if preset is None:
        preset = "grpo"
        yield Drop(
            mode,
            f"there is no loss {loss}: PPO's clip stands in its place (docs/objectives.md), or write it: trainer.objective.preset = module:function",
        )
        yield Set("trainer.objective.preset", preset, (), f"not {loss}")
    else:
        yield Set(
            "trainer.objective.preset", preset, (mode,) if loss != "vanilla" else (mode, "algorithm.adv_estimator")
        )
    if preset in ("gspo", "sapo", "cispo") and kind in ("gae", "reinforce_plus_plus"):
        yield Set("trainer.objective.advantage", {"gae": "gae"}.get(kind, "reinforce_pp"), ("algorithm.adv_estimator",))
    if preset == "sapo":
        yield Set("trainer.objective.tau_pos", given.number(f"{ACTOR}.tau_pos"), (f"{ACTOR}.tau_pos",))
        yield Set("trainer.objective.tau_neg", given.number(f"{ACTOR}.tau_neg"), (f"{ACTOR}.tau_neg",))
    else:
        for ours, side in (("eps_low", "low"), ("eps_high", "high")):
            name = f"{ACTOR}.clip_ratio_{side}" if given.has(f"{ACTOR}.clip_ratio_{side}") else f"{ACTOR}.clip_ratio"
            value = given.number(name)
            yield Set(
                f"trainer.objective.{ours}",
                min(value, 1.0) if side == "low" else value,
                (name,),
                "1: no lower bound" if side == "low" and value > 1 else "",
            )
        if preset in ("grpo", "ppo", "reinforce_pp") and given.number(f"{ACTOR}.clip_ratio_c") > 1:
            yield Set("trainer.objective.dual_clip", given.number(f"{ACTOR}.clip_ratio_c"), (f"{ACTOR}.clip_ratio_c",))
    if preset in ("gspo", "sapo"):
        yield Set("trainer.objective.aggregation", "sequence", (), f"as verl's {loss} does whatever loss_agg_mode says")
    else:
        yield from _aggregation(given)
    yield from _correction(given)
    yield Set("trainer.objective.entropy_coef", given.number(f"{ACTOR}.entropy_coeff"), (f"{ACTOR}.entropy_coeff",))


def _aggregation(given: Given) -> Iterator[Outcome]:
    name = f"{ACTOR}.loss_agg_mode"
    mode = given.text(name)
    ours = {
        "token-mean": "token",
        "seq-mean-token-mean": "sequence",
        "seq-mean-token-sum": "constant",
        "seq-mean-token-sum-norm": "constant",
    }.get(mode)
    if ours is None:
        raise ConfigError(
            f"{name} is {mode!r}: verl has token-mean, seq-mean-token-mean, seq-mean-token-sum and seq-mean-token-sum-norm"
        )
    yield Set("trainer.objective.aggregation", ours, (name,))
    if ours != "constant":
        return
    scale = f"{ACTOR}.loss_scale_factor"
    if mode == "seq-mean-token-sum":
        yield Set("trainer.objective.max_tokens", 1, (name,), "1: the sum over tokens")
    elif given.has(scale):
        yield Set("trainer.objective.max_tokens", given.whole(scale), (scale,))
    else:
        yield Set(
            "trainer.objective.max_tokens", given.whole("data.max_response_length"), ("data.max_response_length",)
        )


def _correction(given: Given) -> Iterator[Outcome]:
    if given.flag(f"{CORRECTION}.rollout_is_batch_normalize"):
        yield Drop(f"{CORRECTION}.rollout_is_batch_normalize", "weights are not normalised over the batch")
    weights, rejects = given.text(f"{CORRECTION}.rollout_is"), given.text(f"{CORRECTION}.rollout_rs")
    own = f"{ASYNC}.use_rollout_log_probs"
    if given.flag(f"{CORRECTION}.bypass_mode") or (
        given.flag(own) and not given.flag(f"{ASYNC}.compute_prox_log_prob")
    ):
        yield Set(
            "trainer.objective.proximal",
            "bypass",
            given.present(f"{CORRECTION}.bypass_mode", own, f"{ASYNC}.compute_prox_log_prob"),
        )
        for name in given.below(CORRECTION):
            if name == f"{CORRECTION}.bypass_mode" or given.value(name) in ("ppo_clip", False):
                yield Same(name, "the bypass form is converted")
                continue
            yield Drop(
                name,
                "in the bypass form the ratio itself corrects, and there is no further weight: set trainer.objective.proximal = recompute for one",
            )
        return
    yield Set(
        "trainer.objective.proximal",
        "recompute",
        given.present(f"{CORRECTION}.bypass_mode", own, f"{ASYNC}.compute_prox_log_prob"),
        "verl's old_log_prob: one forward pass per batch; bypass saves it",
    )
    threshold = f"{CORRECTION}.rollout_is_threshold"
    if weights in ("token", "sequence"):
        yield Set("trainer.objective.correction.kind", f"{weights}_tis", (f"{CORRECTION}.rollout_is",))
        yield Set("trainer.objective.correction.cap", given.number(threshold), (threshold,))
        if rejects:
            yield Drop(
                f"{CORRECTION}.rollout_rs", "there is one correction at a time: set trainer.objective.correction.kind"
            )
    elif rejects == "seq_mean_k3":
        yield Set("trainer.objective.correction.kind", "k3_mask", (f"{CORRECTION}.rollout_rs",))
        if given.has(f"{CORRECTION}.rollout_rs_threshold"):
            yield Set(
                "trainer.objective.correction.threshold",
                given.number(f"{CORRECTION}.rollout_rs_threshold"),
                (f"{CORRECTION}.rollout_rs_threshold",),
            )
    else:
        yield Set("trainer.objective.correction.kind", "none", (f"{CORRECTION}.rollout_is",))
        if rejects:
            yield Drop(
                f"{CORRECTION}.rollout_rs",
                "set trainer.objective.correction.kind to token_mask, sequence_mask or geometric_mask with bounds",
            )


def convert_kl(given: Given) -> Iterator[Outcome]:
    kinds = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    estimator = given.text("algorithm.adv_estimator").lower()
    in_loss, in_reward = given.flag(f"{ACTOR}.use_kl_loss"), given.flag("algorithm.use_kl_in_reward")
    written = given.text(f"{ACTOR}.kl_loss_type")
    kind = "k2" if written.endswith("+") else kinds.get(written)
    coefficient = given.number(f"{ACTOR}.kl_loss_coef")
    if in_loss and coefficient and kind in ("k2", "k3"):
        yield Set("trainer.objective.kl_coef", coefficient, (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef"))
        yield Set("trainer.objective.kl_kind", kind, (f"{ACTOR}.kl_loss_type",))
        yield Set("trainer.objective.kl_where", "loss", (f"{ACTOR}.use_kl_loss",))
        yield Set("trainer.reference.model", "base", (f"{ACTOR}.use_kl_loss",))
        if in_reward:
            yield Drop("algorithm.use_kl_in_reward", "there is one KL term: that of the loss is converted")
        return
    if in_loss and coefficient:
        yield Drop(
            f"{ACTOR}.kl_loss_type",
            f"{written} is no term of a loss here (its gradient regularises nothing, or is not known): set trainer.objective.kl_kind = k3, kl_coef and trainer.reference.model = base",
        )
    if in_reward and estimator in ("gae", "reinforce_plus_plus"):
        penalty = kinds.get(given.text("algorithm.kl_penalty"))
        if penalty is None:
            yield Drop(
                "algorithm.kl_penalty", "k1 (kl), k2 (mse) and k3 (low_var_kl) are known; k1 stands in its place"
            )
        yield Set(
            "trainer.objective.kl_coef",
            given.number("algorithm.kl_ctrl.kl_coef"),
            ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"),
        )
        yield Set("trainer.objective.kl_kind", penalty or "k1", ("algorithm.kl_penalty",) if penalty else ())
        yield Set("trainer.objective.kl_where", "reward", ("algorithm.use_kl_in_reward",))
        if given.number("algorithm.kl_ctrl.kl_coef"):
            yield Set("trainer.reference.model", "base", ("algorithm.use_kl_in_reward",))
        if given.text("algorithm.kl_ctrl.type") == "adaptive":
            yield Drop("algorithm.kl_ctrl.type", "the weight of the KL term is constant")
        return
    if in_reward:
        yield Drop(
            "algorithm.use_kl_in_reward",
            "in the reward it goes with the estimators gae and reinforce_pp: here use trainer.objective.kl_coef, a term of the loss, with trainer.reference.model = base",
        )
    yield Set(
        "trainer.objective.kl_coef",
        0.0,
        tuple(name for name in (f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward") if not given.flag(name)),
    )


def convert_optimizer(given: Given) -> Iterator[Outcome]:
    yield Set("trainer.lr", given.number(f"{OPTIM}.lr"), (f"{OPTIM}.lr",))
    betas = given.numbers(f"{OPTIM}.betas")
    if len(betas) != 2:
        raise ConfigError(f"{OPTIM}.betas is {given.value(f'{OPTIM}.betas')!r}: give two numbers, such as [0.9, 0.999]")
    yield Set("trainer.betas", betas, (f"{OPTIM}.betas",))
    yield Set("trainer.weight_decay", given.number(f"{OPTIM}.weight_decay"), (f"{OPTIM}.weight_decay",))
    clip = f"{OPTIM}.clip_grad" if given.has(f"{OPTIM}.clip_grad") else f"{ACTOR}.grad_clip"
    yield Set("trainer.grad_clip", given.number(clip), (clip,))
    yield from _schedule(given, OPTIM, "trainer")


def _schedule(given: Given, theirs: str, ours: str) -> Iterator[Outcome]:
    steps, per_batch = _steps(given), _optimizer_steps(given)
    warmup = max(0, given.whole(f"{theirs}.lr_warmup_steps"))
    share = given.number(f"{theirs}.lr_warmup_steps_ratio")
    remark = f"{per_batch} optimizer steps for each of verl's" if per_batch > 1 else ""
    if warmup:
        yield Set(f"{ours}.warmup_steps", warmup * per_batch, (f"{theirs}.lr_warmup_steps",), remark)
    elif share and steps:
        yield Set(
            f"{ours}.warmup_steps",
            math.ceil(share * steps * per_batch),
            (f"{theirs}.lr_warmup_steps_ratio",),
            f"of {steps} batches",
        )
    elif share:
        yield Drop(
            f"{theirs}.lr_warmup_steps_ratio",
            f"the number of steps is not known: convert again with --steps N, or set {ours}.warmup_steps",
        )
    else:
        yield Set(f"{ours}.warmup_steps", 0, (f"{theirs}.lr_warmup_steps", f"{theirs}.lr_warmup_steps_ratio"))
    name = next(
        (
            each
            for each in (f"{theirs}.lr_scheduler_type", f"{theirs}.warmup_style", f"{theirs}.lr_decay_style")
            if given.has(each)
        ),
        f"{theirs}.lr_scheduler_type",
    )
    kind = given.text(name) or "constant"
    if kind == "constant":
        yield Set(f"{ours}.schedule", "constant", (name,))
    elif kind not in ("cosine", "linear"):
        yield Drop(name, f"there is no schedule {kind}: set {ours}.schedule to constant, linear, cosine or wsd")
    elif not steps:
        yield Drop(
            name,
            f"the schedule {kind} needs the number of steps: convert again with --steps N; it is constant until then",
        )
    else:
        yield Set(f"{ours}.schedule", kind, (name,))
        yield Set(f"{ours}.max_steps", steps * per_batch, (), "optimizer steps until the end of the decay")
        if given.number(f"{theirs}.min_lr_ratio"):
            yield Set(f"{ours}.min_lr_ratio", given.number(f"{theirs}.min_lr_ratio"), (f"{theirs}.min_lr_ratio",))


def convert_critic(given: Given) -> Iterator[Outcome]:
    if given.text("algorithm.adv_estimator").lower() != "gae":
        for name in (*given.below(CRITIC), "trainer.critic_warmup"):
            yield Same(name, "only adv_estimator = gae has a critic")
        return
    for theirs, policy in (
        ("critic.ppo_epochs", f"{ACTOR}.ppo_epochs"),
        ("critic.ppo_mini_batch_size", f"{ACTOR}.ppo_mini_batch_size"),
        ("critic.loss_agg_mode", f"{ACTOR}.loss_agg_mode"),
        ("critic.model.lora_rank", f"{MODEL}.lora_rank"),
        ("critic.model.lora.rank", f"{MODEL}.lora.rank"),
    ):
        if not given.value(theirs) or given.value(theirs) == given.value(policy):
            yield Same(theirs, "it is that of the policy")
    yield Set("trainer.critic.lr", given.number("critic.optim.lr"), ("critic.optim.lr",))
    path, policy = given.text("critic.model.path"), given.text(f"{MODEL}.path")
    if path and path != policy:
        yield Set("trainer.critic.model", home(path), ("critic.model.path",))
    else:
        yield Set("trainer.critic.model", "base", ("critic.model.path",), "the policy's model with a value head")
    if given.has("critic.optim.weight_decay"):
        yield Set(
            "trainer.critic.weight_decay", given.number("critic.optim.weight_decay"), ("critic.optim.weight_decay",)
        )
    if given.has("critic.grad_clip"):
        yield Set("trainer.critic.grad_clip", given.number("critic.grad_clip"), ("critic.grad_clip",))
    yield from _schedule(given, "critic.optim", "trainer.critic")
    if given.text(f"{ACTOR}.policy_loss.loss_mode") == "vanilla":
        yield Set("trainer.objective.value_clip", given.number("critic.cliprange_value"), ("critic.cliprange_value",))
    if given.whole("trainer.critic_warmup"):
        yield Set(
            "trainer.critic.freeze_policy_steps",
            given.whole("trainer.critic_warmup") * _optimizer_steps(given),
            ("trainer.critic_warmup",),
            "optimizer steps",
        )


def convert_lengths(given: Given) -> Iterator[Outcome]:
    prompt, response = given.whole("data.max_prompt_length"), given.whole("data.max_response_length")
    yield Set("orchestrator.sampling.max_tokens", response, ("data.max_response_length",))
    longest = f"{ROLLOUT}.max_model_len"
    if given.whole(longest):
        yield Set("rollout.max_model_len", given.whole(longest), (longest,))
        yield Drop("data.max_prompt_length", "rollout.max_model_len bounds prompt and answer together")
    else:
        yield Set(
            "rollout.max_model_len",
            prompt + response,
            ("data.max_prompt_length", "data.max_response_length"),
            "prompt + answer",
        )
    packed = f"{ACTOR}.ppo_max_token_len_per_gpu"
    if given.has(packed):
        sequence = max(1, given.whole(f"{ACTOR}.ulysses_sequence_parallel_size", 1))
        yield Set(
            "trainer.token_budget",
            given.whole(packed) * sequence,
            (packed,),
            f"x {sequence} devices that share a row" if sequence > 1 else "",
        )


def convert_environment(given: Given) -> Iterator[Outcome]:
    arguments: dict[str, Value] = {}
    sources: list[str] = []
    for ours, name in (("dataset", "data.train_files"), ("eval_dataset", "data.val_files")):
        files = [home(each.strip()) for each in given.texts(name)]
        if files:
            arguments[ours] = files[0] if len(files) == 1 else files
            sources.append(name)
    if "dataset" not in arguments:
        arguments = {"dataset": "FILL-IN", **arguments}
        yield Todo("orchestrator.environment_args", "dataset: verl's Parquet file, or a list of them")
    path = "custom_reward_function.path"
    if given.has(path):
        arguments["reward"] = f"{home(given.text(path))}:{given.text('custom_reward_function.name') or 'compute_score'}"
        sources += [path, "custom_reward_function.name"]
    else:
        yield Todo(
            "orchestrator.environment_args",
            "reward: a function as path.py:compute_score, unless the data are gsm8k or mathematics, whose answers are compared",
        )
    for ours, name in (
        ("prompt", "data.prompt_key"),
        ("source", "data.reward_fn_key"),
        ("limit", "data.train_max_samples"),
    ):
        if given.has(name) and given.value(name) not in ("prompt", "data_source", -1):
            arguments[ours] = given.value(name)
            sources.append(name)
    table = "custom_reward_function.reward_kwargs"
    if given.below(table):
        arguments["reward_kwargs"] = {name.removeprefix(f"{table}."): given.value(name) for name in given.below(table)}
        sources += given.below(table)
    yield Set("orchestrator.environment", "verl", ("data.train_files",), "docs/environments.md")
    yield Set("orchestrator.environment_args", arguments, tuple(sources))
    for name in given.present("data.prompt_key", "data.reward_fn_key", "data.train_max_samples"):
        yield Same(name, "it is the default")


def convert_devices(given: Given) -> Iterator[Outcome]:
    devices = given.whole("trainer.n_gpus_per_node") * given.whole("trainer.nnodes")
    tensor = given.count(f"{ROLLOUT}.tensor_model_parallel_size")
    ulysses = f"{ACTOR}.ulysses_sequence_parallel_size"
    axes = {
        "t": given.count(f"{MEGATRON}.tensor_model_parallel_size", 1),
        "c": given.count(f"{MEGATRON}.context_parallel_size", 1) * max(1, given.whole(ulysses, 1)),
        "p": given.count(f"{MEGATRON}.pipeline_model_parallel_size", 1),
    }
    names = given.present(
        "trainer.n_gpus_per_node",
        "trainer.nnodes",
        f"{ROLLOUT}.tensor_model_parallel_size",
        ulysses,
        f"{MEGATRON}.tensor_model_parallel_size",
        f"{MEGATRON}.context_parallel_size",
        f"{MEGATRON}.pipeline_model_parallel_size",
        "rollout.nnodes",
        "rollout.n_gpus_per_node",
    )
    apart = given.has("rollout.n_gpus_per_node")
    sampling = (
        given.whole("rollout.n_gpus_per_node") * max(1, given.whole("rollout.nnodes", 1)) if apart else devices // 2
    )
    training = devices if apart else devices - sampling
    if devices < 2 and not apart:
        yield Set("rollout.engine_args.tensor_parallel_size", 1, names, "engine and trainer share the one device")
        return
    if given.whole(f"{MODEL}.lora_rank") or given.whole(f"{MODEL}.lora.rank"):
        axes |= {"t": 1, "p": 1}  # adapters train with data and context parallelism alone
    if given.text(f"{ROLLOUT}.name") == "hf":
        yield Todo(
            "allocation_mode", f"{devices} devices in verl; the engine transformers has one each (docs/parallelism.md)"
        )
        return
    tensor = max(1, min(tensor, sampling))
    replicas = max(1, sampling // tensor)
    together = math.prod(axes.values())
    trainer = f"d{max(1, training // together)}" + "".join(
        f"{letter}{size}" for letter, size in axes.items() if size > 1
    )
    remark = "" if apart else f"verl used the same {devices} devices in turns; here half sample and half train"
    yield Set(
        "allocation_mode",
        f"vllm:d{replicas}" + (f"t{tensor}" if tensor > 1 else "") + f"+fsdp:{trainer}",
        names,
        remark,
    )
    if not apart:
        yield Todo(
            "allocation_mode",
            f"which devices sample and which train: {remark}. Without the line both share what there is (docs/parallelism.md)",
        )


def convert_engine(given: Given) -> Iterator[Outcome]:
    name = given.text(f"{ROLLOUT}.name")
    if name in ("vllm", ""):
        yield Set("rollout.engine", "vllm", (f"{ROLLOUT}.name",))
    elif name == "hf":
        yield Set("rollout.engine", "transformers", (f"{ROLLOUT}.name",))
    else:
        yield Drop(f"{ROLLOUT}.name", f"there is no engine {name}: vllm takes its place")
    for theirs in (
        "gpu_memory_utilization",
        "enforce_eager",
        "max_num_batched_tokens",
        "max_num_seqs",
        "enable_chunked_prefill",
        "enable_prefix_caching",
    ):
        full = f"{ROLLOUT}.{theirs}"
        if given.has(full) and name != "hf":
            yield Set(
                f"rollout.engine_args.{theirs}",
                given.value(full),
                (full,),
                "0.9 is usual where the engine has its own device" if theirs == "gpu_memory_utilization" else "",
            )
    for full in given.below(f"{ROLLOUT}.engine_kwargs.vllm"):
        inner = full.removeprefix(f"{ROLLOUT}.engine_kwargs.vllm.")
        if "." not in inner:
            yield Set(f"rollout.engine_args.{inner}", given.value(full), (full,))


def convert_lora(given: Given) -> Iterator[Outcome]:
    flat, nested = f"{MODEL}.lora_rank", f"{MODEL}.lora.rank"
    rank_name = flat if given.has(flat) else nested
    rank = given.whole(rank_name)
    if not rank:
        if given.has(rank_name):
            yield Set("trainer.lora.rank", 0, (rank_name,))
        return
    alpha = f"{MODEL}.lora.alpha" if given.has(f"{MODEL}.lora.alpha") else f"{MODEL}.lora_alpha"
    yield Set("trainer.lora.rank", rank, (rank_name,))
    yield Set("trainer.lora.alpha", given.number(alpha), (alpha,))
    modules = f"{MODEL}.lora.target_modules" if given.has(f"{MODEL}.lora.target_modules") else f"{MODEL}.target_modules"
    wanted = [each for each in given.texts(modules) if each not in ("all-linear", "all_linear")]
    if given.has(modules):
        yield Set("trainer.lora.target_modules", wanted, (modules,), "" if wanted else "empty: all linear layers")
    yield Set("rollout.lora.enabled", True, (rank_name,))
    yield Set("rollout.lora.max_rank", rank, (rank_name,))


def convert_evaluation(given: Given) -> Iterator[Outcome]:
    frequency = next(iter(given.present("rollout.test_freq", "trainer.test_freq")), "trainer.test_freq")
    every = 0 if given.value(frequency) is False else given.whole(frequency, -1)
    table = f"{ROLLOUT}.val_kwargs"
    yield Set(
        "orchestrator.evaluation.every_steps", max(0, every), given.present("rollout.test_freq", "trainer.test_freq")
    )
    if every <= 0:
        return
    if given.flag(f"{table}.do_sample"):
        yield Set("orchestrator.evaluation.greedy", False, (f"{table}.do_sample",))
        yield Set("orchestrator.evaluation.samples", given.whole(f"{table}.n", 1), (f"{table}.n",))
        if given.number(f"{table}.temperature") > 0:
            yield Set(
                "orchestrator.evaluation.temperature", given.number(f"{table}.temperature"), (f"{table}.temperature",)
            )
    else:
        yield Set("orchestrator.evaluation.samples", 0, (f"{table}.n", f"{table}.do_sample"), "verl decodes greedily")
        yield Set("orchestrator.evaluation.metric", "greedy_reward_mean", ())
    yield Todo("orchestrator.evaluation.prompts", "tasks per evaluation: 64 here, the whole file in verl")


def convert_saves(given: Given) -> Iterator[Outcome]:
    every = 0 if given.value("trainer.save_freq") is False else given.whole("trainer.save_freq", -1)
    yield Set(
        "orchestrator.checkpoint.every_steps",
        max(0, every),
        ("trainer.save_freq",),
        "" if every > 0 else "only at the end",
    )
    keep = next(iter(given.present("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep")), "")
    if keep:
        yield Set("trainer.checkpoint.keep", max(2, given.whole(keep)), (keep,), "at least 2")


def convert_overlong(given: Given) -> Iterator[Outcome]:
    for table in ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg"):
        if given.flag(f"{table}.enable"):
            yield Set("orchestrator.overlong.policy", "penalise", (f"{table}.enable",))
            yield Set("orchestrator.overlong.buffer_tokens", given.whole(f"{table}.len"), (f"{table}.len",))
            yield Set(
                "orchestrator.overlong.penalty",
                given.number(f"{table}.penalty_factor", 1.0),
                (f"{table}.penalty_factor",),
            )


def convert_filter(given: Given) -> Iterator[Outcome]:
    table = "algorithm.filter_groups"
    if not given.flag(f"{table}.enable"):
        return
    yield Set(
        "orchestrator.filter.drop_degenerate",
        True,
        (f"{table}.enable", f"{table}.metric"),
        "groups whose rewards are all equal",
    )
    most = given.whole(f"{table}.max_num_gen_batches")
    if most > 0:
        each = given.whole("data.gen_batch_size") or given.whole("data.train_batch_size")
        yield Set(
            "orchestrator.max_refills",
            most * each,
            (f"{table}.max_num_gen_batches", *given.present("data.gen_batch_size")),
            "groups",
        )


def convert_dtype(value: Value) -> str:
    known = {
        "bf16": "bfloat16",
        "bfloat16": "bfloat16",
        "fp32": "float32",
        "float32": "float32",
        "fp16": "float16",
        "float16": "float16",
    }
    if str(value) not in known:
        raise NotConvertibleError("set rollout.dtype to bfloat16, float16 or float32")
    return known[str(value)]


def check_source(source: Source) -> None:
    names = {name.partition(".")[0] for name in source.leaves}
    if names & {"actor_rollout_ref", "algorithm"}:
        return
    if names & {"data", "model", "optim"} and "trainer" in names:
        raise ConfigError(
            f"{source.path} is a configuration of verl for SFT or generation: this converts those of its PPO trainer; `sluice sft` fine-tunes"
        )
    raise ConfigError(
        f"{source.path} has no setting of verl's PPO trainer (actor_rollout_ref.*, algorithm.*): give the script with its key=value settings, or its YAML"
    )
