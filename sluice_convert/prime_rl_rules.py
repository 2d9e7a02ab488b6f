"""How settings of PRIME-RL become ours, where one row of the table is not enough. `prime_rl.py` has the table."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.config.schema import Value
from sluice.errors import ConfigError
from sluice_convert.table import Drop, Given, NotConvertibleError, Outcome, Same, Set, Source, Todo, groups, home

TEMPERATURE = ("orchestrator.train.sampling.temperature", "orchestrator.sampling.temperature")

TOKENS = (
    "orchestrator.train.sampling.max_completion_tokens",
    "orchestrator.train.sampling.max_tokens",
    "orchestrator.sampling.max_completion_tokens",
    "orchestrator.sampling.max_tokens",
)

GROUP = ("orchestrator.group_size", "orchestrator.rollouts_per_example", "orchestrator.rollouts_per_prompt")

MODEL = ("model.name", "trainer.model.name", "orchestrator.model.name", "inference.vllm.model", "inference.model.name")

STEPS = ("max_steps", "trainer.max_steps", "orchestrator.max_steps")

LENGTH = ("inference.vllm.max_model_len", "inference.model.max_model_len", "seq_len", "orchestrator.seq_len")

SOURCES = ("orchestrator.train.source", "orchestrator.train.env", "orchestrator.env")


def _first(given: Given, names: tuple[str, ...]) -> str:
    """Return the first of these names that the file sets; the first of all if it sets none."""
    return (given.present(*names) or names)[0]


def _same_elsewhere(given: Given, names: tuple[str, ...]) -> Iterator[Outcome]:
    """Account for further names of one setting: with the same value they say nothing new."""
    chosen = _first(given, names)
    for name in given.present(*names):
        if name != chosen and given.value(name) != given.value(chosen):
            yield Drop(name, f"{chosen} = {given.value(chosen)} is converted, and Sluice has one setting for both")


def convert_batch(given: Given) -> Iterator[Outcome]:
    group = _first(given, GROUP)
    size = given.whole(group, 1)
    rollouts = given.whole("orchestrator.batch_size", 128)
    if given.has("orchestrator.token_batch_size"):
        yield Drop("orchestrator.token_batch_size", "batches have a number of groups: set orchestrator.batch_size")
        yield Todo("orchestrator.batch_size", "groups per batch: the file has tokens per batch (token_batch_size)")
    if size < 1 or rollouts % size:
        raise ConfigError(
            f"orchestrator.batch_size = {rollouts} rollouts are no whole groups of {group} = {size}: correct one of them"
        )
    yield Set(
        "orchestrator.batch_size", rollouts // size, ("orchestrator.batch_size", group), f"{rollouts} rollouts / {size}"
    )
    estimator = {"opd": "none"}.get(given.text("orchestrator.algo.type"), "centered")
    yield from groups(size, estimator, group)
    if rollouts // size > 512:
        yield Set(
            "orchestrator.max_concurrent", 2 * (rollouts // size), ("orchestrator.batch_size",), "at least a batch"
        )


def convert_steps(given: Given) -> Iterator[Outcome]:
    name = _first(given, STEPS)
    if given.has(name):
        yield Set("orchestrator.max_steps", given.whole(name), given.present(*STEPS))
    elif "steps" in given.options:
        yield Set("orchestrator.max_steps", given.options["steps"], (), "--steps")
    else:
        yield Todo(
            "orchestrator.max_steps",
            "the file has none, and PRIME-RL would not end: convert again with --steps N, it is 100 until then",
        )


def convert_model(given: Given) -> Iterator[Outcome]:
    name = _first(given, MODEL)
    yield Set(
        "model",
        home(given.text(name) or "Qwen/Qwen3-0.6B"),
        tuple(each for each in given.present(*MODEL) if given.value(each) == given.value(name)) or (name,),
    )
    yield from _same_elsewhere(given, MODEL)


def convert_staleness(given: Given) -> Iterator[Outcome]:
    old = _first(
        given,
        (
            "max_async_level",
            "orchestrator.max_async_level",
            "trainer.max_async_level",
            "async_level",
            "orchestrator.async_level",
        ),
    )
    names = ("orchestrator.max_off_policy_steps", old)
    if given.has(old) and not given.has(names[0]):
        yield Set("max_staleness", given.whole(old), (old,), "versions that a token may lag")
    else:
        yield Set("max_staleness", given.whole(names[0]), (names[0],), "versions that a token may lag")
        yield Drop(old, "orchestrator.max_off_policy_steps is converted, which bounds the lag of tokens")


def convert_length(given: Given) -> Iterator[Outcome]:
    name = _first(given, LENGTH)
    if given.has(name):
        yield Set(
            "rollout.max_model_len",
            given.whole(name),
            tuple(each for each in given.present(*LENGTH) if given.value(each) == given.value(name)),
        )
        yield from _same_elsewhere(given, LENGTH)
    packed = _first(given, ("trainer.model.seq_len", "seq_len"))
    if given.has(packed):
        yield Set("trainer.token_budget", given.whole(packed), (packed,), "tokens of a micro-batch")
    tokens = _first(given, TOKENS)
    if given.has(tokens):
        yield Set("orchestrator.sampling.max_tokens", given.whole(tokens), (tokens,))
        yield from _same_elsewhere(given, TOKENS)
    elif given.has(name):
        yield Set(
            "orchestrator.sampling.max_tokens",
            given.whole(name),
            (name,),
            "PRIME-RL has no limit but that of the context",
        )
    else:
        yield Todo(
            "orchestrator.sampling.max_tokens",
            "tokens of one answer; the file sets no limit, and the default here is 256",
        )


def convert_optimizer(given: Given) -> Iterator[Outcome]:
    kind = given.text("trainer.optim.type")
    if kind not in ("adamw", "muon"):
        yield Drop(
            "trainer.optim.type", f"there is no {kind}: adamw stands in its place; trainer.optimizer has adamw and muon"
        )
        kind = "adamw"
    yield Set("trainer.optimizer", kind, ("trainer.optim.type",) if kind == given.text("trainer.optim.type") else ())
    yield Set("trainer.lr", given.number("trainer.optim.lr"), ("trainer.optim.lr",))
    second = given.number("trainer.optim.betas2", 0.95 if kind == "muon" else 0.999)
    yield Set(
        "trainer.betas",
        [given.number("trainer.optim.betas1"), second],
        ("trainer.optim.betas1", "trainer.optim.betas2"),
    )
    if kind == "muon":
        yield Set("trainer.muon_momentum", given.number("trainer.optim.mu"), ("trainer.optim.mu",))
    yield Set("trainer.weight_decay", given.number("trainer.optim.weight_decay"), ("trainer.optim.weight_decay",))
    yield Set("trainer.grad_clip", given.number("trainer.optim.max_norm"), ("trainer.optim.max_norm",))


def convert_schedule(given: Given) -> Iterator[Outcome]:
    kind = given.text("trainer.scheduler.type")
    steps = given.whole(_first(given, STEPS)) or given.options.get("steps", 0)
    table = "trainer.scheduler"
    if kind == "constant":
        yield Set("trainer.schedule", "constant", (f"{table}.type",))
        return
    if not steps:
        yield Todo(
            "trainer.schedule",
            f"the schedule {kind} needs the number of steps: convert again with --steps N; it is constant until then",
        )
        for name in given.below(table):
            yield Drop(name, "the number of steps is not known: convert again with --steps N")
        return
    warmup, decay = given.whole(f"{table}.warmup_steps"), given.whole(f"{table}.decay_steps")
    yield Set("trainer.warmup_steps", warmup, (f"{table}.warmup_steps",))
    if kind == "cosine":
        yield Set("trainer.schedule", "cosine", (f"{table}.type",))
    elif decay:
        yield Set("trainer.schedule", "wsd", (f"{table}.type",), "constant, then a linear decay")
        yield Set("trainer.decay_steps", decay, (f"{table}.decay_steps",))
    else:
        yield Set("trainer.schedule", "constant", (f"{table}.type", f"{table}.decay_steps"))
    yield Set("trainer.max_steps", steps, given.present(*STEPS)[:1], "optimizer steps until the end of the decay")
    if given.number(f"{table}.min_lr"):
        yield Set(
            "trainer.min_lr_ratio",
            given.number(f"{table}.min_lr") / (given.number("trainer.optim.lr") or 1.0),
            (f"{table}.min_lr",),
        )


def convert_objective(given: Given) -> Iterator[Outcome]:
    kind, loss = given.text("orchestrator.algo.type"), "trainer.loss"
    if kind == "opd":
        yield Set("trainer.objective.preset", "distill", ("orchestrator.algo.type",), "reverse KL to a teacher")
        yield Set("orchestrator.advantage", "none", ("orchestrator.algo.type",))
        teacher = "orchestrator.algo.teacher.name"
        if given.has(teacher):
            yield Set(
                "trainer.teacher.model", given.text(teacher), (teacher,), "the trainer loads it; no server is asked"
            )
        else:
            yield Set("trainer.teacher.model", "FILL-IN", (teacher,))
            yield Todo("trainer.teacher.model", "the teacher: a directory or a hub id")
        yield Todo(
            "trainer.objective.preset",
            "PRIME-RL's opd adds 0.001 (log t/b)^2, weighs tokens by t/b, and drops those whose probability fell by more than 0.2;"
            " distill does none of these",
        )
        return
    advantage = {"grpo": "centered", "max_rl": "maxrl"}.get(kind)
    if advantage is None:
        yield Drop(
            "orchestrator.algo.type",
            f"there is no {kind}: centered (their grpo) stands in its place; docs/objectives.md has the estimators"
            + (", and `sluice distill` trains on a teacher's tokens" if kind == "sft" else ""),
        )
    yield Set(
        "orchestrator.advantage",
        advantage or "centered",
        ("orchestrator.algo.type",) if advantage else (),
        "reward - mean of the group" if not advantage or kind == "grpo" else "",
    )
    which = given.text(f"{loss}.type")
    if which == "ipo":
        yield Set("trainer.objective.preset", "ipo_mask", (f"{loss}.type",))
        yield Set("trainer.objective.threshold", given.number(f"{loss}.ipo_threshold"), (f"{loss}.ipo_threshold",))
    else:
        if which != "default":
            yield Drop(
                f"{loss}.type",
                f"the loss {which} is not known; PRIME-RL's default stands in its place: write yours as trainer.objective.preset = module:function",
            )
        yield Set("trainer.objective.preset", "dppo", (f"{loss}.type",) if which == "default" else ())
        yield Set("trainer.objective.low", given.number(f"{loss}.dppo_mask_low"), (f"{loss}.dppo_mask_low",))
        yield Set("trainer.objective.high", given.number(f"{loss}.dppo_mask_high"), (f"{loss}.dppo_mask_high",))
    yield from _pull(given)


def _pull(given: Given) -> Iterator[Outcome]:
    """Convert the term kl_tau (log t/b)^2, and the factor of the advantages that it stands beside."""
    term, factor, pruned = "trainer.loss.kl_tau", "trainer.loss.adv_tau", "orchestrator.train.filter_zero_advantages"
    weight, scale = given.number(term), given.number(factor, 1.0)
    if scale == 1.0:
        yield Set("trainer.objective.kl_tau", weight, (term,), "weight of (log t/b)^2")
        if given.has(factor):
            yield Set("trainer.objective.aggregation", "token", (factor,))
    elif scale > 0:
        yield Set("trainer.objective.kl_tau", weight / scale, (term,), "weight of (log t/b)^2: kl_tau / adv_tau")
        yield Drop(
            factor,
            "it multiplies all advantages. kl_tau is divided by it instead: the loss differs by this factor alone, which AdamW and"
            " Muon divide out; check trainer.grad_clip",
        )
    else:
        yield Set("trainer.objective.kl_tau", weight, (term,), "weight of (log t/b)^2")
        yield Drop(factor, "0 switches the advantages off there; here they train")
    if weight and given.has(pruned) and not given.flag(pruned):
        yield Drop(pruned, "kl_tau then holds for tokens of advantage 0, too; here it leaves them out")


def convert_environment(given: Given) -> Iterator[Outcome]:
    table = next((table for table in SOURCES if given.below(table)), None)
    if table is None:
        yield Todo(
            "orchestrator.environment",
            'the file names none: set it, such as "verifiers" with environment_args = { id = "..." }',
        )
        return
    numbers = sorted({int(name.removeprefix(f"{table}.").partition(".")[0]) for name in given.below(table)})
    chosen = max(numbers, key=lambda number: given.number(f"{table}.{number}.ratio", 1.0))
    for number in numbers:
        for name in given.below(f"{table}.{number}") if number != chosen else ():
            yield Drop(
                name,
                "a run plays one environment of verifiers: train on the others in runs of their own, or mix them inside one package",
            )
    yield from _source(given, f"{table}.{chosen}")


def _source(given: Given, prefix: str) -> Iterator[Outcome]:
    """Convert the one source of tasks that a run has."""
    identity = _first(given, (f"{prefix}.env.taskset.id", f"{prefix}.env.id", f"{prefix}.id"))
    name = given.text(identity) or "FILL-IN"
    arguments: dict[str, Value] = {"id": name}
    inside: dict[str, Value] = {}
    taken = [identity]
    for place in (f"{prefix}.env.taskset", f"{prefix}.args", f"{prefix}.env.args"):
        for each in given.below(place):
            if each != identity:
                _put(inside, each.removeprefix(f"{place}.").split("."), given.value(each))
                taken.append(each)
    if inside:
        arguments["args"] = inside
    harness = f"{prefix}.env.agent.harness.id"
    if given.text(harness) not in ("", "null"):
        arguments["harness"] = given.text(harness)
        taken.append(harness)
    yield Same(harness, "the chat loop of Sluice takes its place")
    yield Set("orchestrator.environment", "verifiers", (identity,), "docs/environments.md")
    yield Set("orchestrator.environment_args", arguments, tuple(taken))
    yield Todo(
        "orchestrator.environment_processes.python",
        f"an interpreter with verifiers and the package of {name}; unset: Sluice's own must have them",
    )
    yield Same(f"{prefix}.name", "the run has one environment")
    yield Same(f"{prefix}.ratio", "the run has one environment")
    for each in given.below(f"{prefix}.sampling"):
        yield Drop(each, "orchestrator.sampling holds for the run's only environment: set it there")


def _put(table: dict[str, Value], path: list[str], value: Value) -> None:
    for key in path[:-1]:
        inner = table.setdefault(key, {})
        table = inner
    table[path[-1]] = value


def convert_curriculum(given: Given) -> Iterator[Outcome]:
    gates = [name for name in given.leaves if name.startswith(SOURCES) and ".curriculum.gates." in name]
    kinds = [name for name in gates if name.endswith(".type") and given.value(name) == "advantage_range"]
    bounds = [name for name in gates if name.endswith((".reject_min", ".reject_max")) and given.number(name)]
    if kinds and not bounds:
        yield Set("orchestrator.filter.drop_degenerate", True, tuple(gates), "for the whole run")
    for name in gates if bounds else ():
        yield Drop(
            name,
            "groups are replaced if all rewards are equal (orchestrator.filter.drop_degenerate), or by a function (filter.should_accept)",
        )
    old = ("orchestrator.buffer.online_difficulty_filtering", "buffer.online_difficulty_filtering")
    if given.flag(_first(given, old)):
        yield Set("orchestrator.filter.drop_degenerate", True, given.present(*old))


def convert_devices(given: Given) -> Iterator[Outcome]:
    tensor = _first(given, ("inference.vllm.tensor_parallel_size", "inference.parallel.tp"))
    data = _first(given, ("inference.vllm.data_parallel_size", "inference.parallel.dp"))
    per_replica, context = given.count(tensor), given.count("trainer.model.cp")
    node = given.count("deployment.gpus_per_node", 8)
    if given.text("deployment.type") == "multi_node" or given.has("deployment.num_train_nodes"):
        train = given.whole("deployment.num_train_nodes", 1) * node
        infer = given.whole("deployment.num_infer_nodes", 1) * given.whole("deployment.num_infer_replicas", 1) * node
        remark = "several machines: start the services one by one (docs/parallelism.md)"
    else:
        train = given.whole("deployment.num_train_gpus") or len(given.texts("trainer_gpu_ids")) or 1
        infer = (
            given.whole("deployment.num_infer_gpus")
            or len(given.texts("inference_gpu_ids"))
            or given.count(data) * per_replica
        )
        remark = ""
    names = given.present(
        tensor,
        data,
        "trainer.model.cp",
        "trainer_gpu_ids",
        "inference_gpu_ids",
        *(name for name in given.below("deployment")),
    )
    if train == infer == per_replica == context == 1:
        if given.has("trainer_gpu_ids") or given.below("deployment"):
            yield Set("allocation_mode", "vllm:d1+fsdp:d1", names)
        return
    if infer % per_replica or train % context:
        raise ConfigError(
            f"{infer} devices for inference are no multiple of {tensor} = {per_replica}, or {train} for training none of trainer.model.cp = {context}: correct the file"
        )
    rollout = f"d{infer // per_replica}" + (f"t{per_replica}" if per_replica > 1 else "")
    trainer = f"d{train // context}" + (f"c{context}" if context > 1 else "")
    yield Set("allocation_mode", f"vllm:{rollout}+fsdp:{trainer}", names, remark)
    if given.whole("deployment.nodes_per_fsdp_group"):
        yield Set(
            "trainer.parallel.dp_replicate",
            train // node // given.count("deployment.nodes_per_fsdp_group"),
            ("deployment.nodes_per_fsdp_group",),
        )


def convert_lora(given: Given) -> Iterator[Outcome]:
    table = "trainer.model.lora" if given.has("trainer.model.lora") else "trainer.model.experimental.lora"
    if not given.has(table):
        return
    rank = given.whole(f"{table}.rank", 16)
    yield Set("trainer.lora.rank", rank, (f"{table}.rank",) if given.has(f"{table}.rank") else (table,))
    yield Set("trainer.lora.alpha", given.number(f"{table}.alpha", 32.0), (f"{table}.alpha",))
    if given.has(f"{table}.dropout"):
        yield Set("trainer.lora.dropout", given.number(f"{table}.dropout"), (f"{table}.dropout",))
    if given.has(f"{table}.target_modules"):
        yield Set("trainer.lora.target_modules", given.texts(f"{table}.target_modules"), (f"{table}.target_modules",))
    yield Set("rollout.lora.enabled", True, given.present("inference.vllm.enable_lora", "inference.enable_lora"))
    yield Set("rollout.lora.max_rank", rank, given.present("inference.vllm.max_lora_rank", "inference.max_lora_rank"))


def check_sourcepoints(given: Given) -> Iterator[Outcome]:
    tables = ("ckpt", "trainer.ckpt", "orchestrator.ckpt")
    interval = _first(given, tuple(f"{table}.interval" for table in tables))
    if given.has(interval):
        yield Set(
            "orchestrator.checkpoint.every_steps",
            given.whole(interval),
            tuple(name for name in given.present(*(f"{table}.interval" for table in tables))),
        )
    elif given.has("ckpt"):
        yield Set("orchestrator.checkpoint.every_steps", 0, ("ckpt",), "only at the end")
    keep = _first(given, tuple(f"{table}.{name}" for table in tables for name in ("keep_last", "keep")))
    if given.has(keep):
        yield Set("trainer.checkpoint.keep", max(2, given.whole(keep)), (keep,), "at least 2")


def convert_engine_arguments(given: Given) -> Iterator[Outcome]:
    ours = {
        "model",
        "max_model_len",
        "tensor_parallel_size",
        "data_parallel_size",
        "enable_lora",
        "max_lora_rank",
        "dtype",
        "seed",
        "tool_call_parser",
        "reasoning_parser",
        "trust_remote_code",
        "chat_template",
        "max_loras",
        "max_cpu_loras",
        "lora_target_modules",
        "data_parallel_size_local",
        "data_parallel_rpc_port",
        "api_server_count",
        "enable_return_routed_experts",
        "worker_extension_cls",
        "logprobs_mode",
    }
    for table in ("inference.vllm", "inference.model"):
        for name in given.below(table):
            argument = name.removeprefix(f"{table}.")
            if "." not in argument and argument not in ours and argument != "name":
                yield Set(f"rollout.engine_args.{argument}", given.value(name), (name,))
    for name in given.present("inference.gpu_memory_utilization"):
        yield Set("rollout.engine_args.gpu_memory_utilization", given.number(name), (name,))
    for ours_name, theirs in (("tool_parser", "tool_call_parser"), ("reasoning_parser", "reasoning_parser")):
        for name in given.present(f"inference.vllm.{theirs}", f"inference.model.{theirs}"):
            value = given.text(name)
            yield Set(f"rollout.{ours_name}", "none" if value == "None" else value, (name,))


def convert_dtype(value: Value) -> str:
    if value not in ("auto", "bfloat16", "float32", "float16"):
        raise NotConvertibleError("set rollout.dtype to auto, bfloat16, float16 or float32")
    return str(value)


def check_source(source: Source) -> None:
    names = {name.partition(".")[0] for name in source.leaves}
    if {"batch_size", "train"} <= names or ("optim" in names and "orchestrator" not in names):
        raise ConfigError(
            f"{source.path} is the file of one process of PRIME-RL: give the rl.toml of the whole run, with [orchestrator] and [trainer]"
        )
    if not names & {"orchestrator", "trainer"}:
        raise ConfigError(
            f"{source.path} is not an rl.toml of PRIME-RL: it has neither [orchestrator] nor [trainer]; choose another system with --from"
        )


OLD_TABLES = ("wandb", "trainer.wandb", "orchestrator.wandb")
