"""PRIME-RL's rl.toml (Apache-2.0): its present names, and those that its files had before."""

from __future__ import annotations

from sluice_convert import prime_rl_rules as rules
from sluice_convert.prime_rl_rules import GROUP, LENGTH, MODEL, OLD_TABLES, SOURCES, STEPS, TEMPERATURE, TOKENS
from sluice_convert.table import Given, Set, System, missing, rule, run_name, same, template_file, to

DEFAULTS = {
    "orchestrator.group_size": 1,
    "orchestrator.max_off_policy_steps": 8,
    "trainer.optim.type": "adamw",
    "trainer.optim.lr": 1e-6,
    "trainer.optim.weight_decay": 0.01,
    "trainer.optim.max_norm": 1.0,
    "trainer.optim.betas1": 0.9,
    "trainer.optim.mu": 0.95,
    "trainer.loss.type": "default",
    "trainer.loss.dppo_mask_low": 0.2,
    "trainer.loss.dppo_mask_high": 0.2,
    "trainer.loss.ipo_threshold": 0.1,
    "trainer.loss.kl_tau": 1e-3,
    "trainer.model.lora.rank": 16,
    "trainer.model.lora.alpha": 32.0,
    "trainer.scheduler.type": "constant",
    "trainer.scheduler.warmup_steps": 10,
    "trainer.scheduler.decay_steps": 10,
    "orchestrator.algo.type": "grpo",
    "orchestrator.sampling.temperature": 1.0,
    "trainer.model.cp": 1,
}

ROWS = (
    missing(
        (
            "orchestrator.training_mode",
            "orchestrator.teacher.**",
            "orchestrator.student.**",
            "orchestrator.teacher_*.**",
        ),
        "trainer.objective.preset = distill with trainer.teacher.model follows a teacher, and `sluice synthesize` with `sluice sft` its texts",
    ),
    rule(rules.convert_model, (MODEL, "model")),
    to(("run.name", "monitors.wandb.name", "wandb.name"), "run", Given.text, by=run_name),
    to("output_dir", "output_dir", Given.text),
    to(("log.level", "trainer.log.level", "orchestrator.log.level"), "log_level", Given.text),
    rule(rules.convert_steps, (STEPS, "orchestrator.max_steps")),
    rule(
        rules.convert_batch,
        (
            "orchestrator.batch_size",
            "orchestrator.batch_size",
            "theirs are rollouts, ours tasks: batch_size / group_size",
        ),
        (GROUP, "orchestrator.group_size"),
        ("orchestrator.token_batch_size", "", "batches have a number of groups"),
    ),
    rule(
        rules.convert_staleness,
        ("orchestrator.max_off_policy_steps", "max_staleness"),
        (
            ("max_async_level", "*.max_async_level", "async_level", "*.async_level"),
            "max_staleness",
            "names that it had before",
        ),
    ),
    rule(
        rules.convert_environment,
        (
            tuple(
                f"{table}.*.{rest}"
                for table in SOURCES
                for rest in ("env.taskset.**", "env.id", "id", "env.args.**", "env.args", "args.**", "args")
            ),
            "orchestrator.environment, .environment_args",
            "environment verifiers: id, args; one per run, that with the largest ratio",
        ),
        (
            tuple(f"{table}.*.env.agent.harness.id" for table in SOURCES),
            "orchestrator.environment_args",
            "harness; null: the chat loop of Sluice",
        ),
        (
            tuple(f"{table}.*.{rest}" for table in SOURCES for rest in ("ratio", "name", "sampling.**")),
            "",
            "the run has one environment, and orchestrator.sampling",
        ),
        unread="the environment's package is used as it is",
    ),
    rule(
        rules.convert_curriculum,
        (
            tuple(f"{table}.*.curriculum.gates.**" for table in SOURCES),
            "orchestrator.filter.drop_degenerate",
            "advantage_range around 0, for the whole run",
        ),
        (
            ("orchestrator.buffer.online_difficulty_filtering", "buffer.online_difficulty_filtering"),
            "orchestrator.filter.drop_degenerate",
        ),
        lost="orchestrator.filter replaces groups (docs/curriculum.md)",
    ),
    missing(
        (*(f"{table}.*.curriculum.**" for table in SOURCES), "orchestrator.buffer.**", "buffer.**"),
        "orchestrator.pools draws tasks by how often they are solved (docs/curriculum.md)",
    ),
    missing(
        (*(f"{table}.*.env.agent.**" for table in SOURCES),),
        "environments run in processes of the run (orchestrator.environment_processes); the chat loop is Sluice's",
    ),
    missing(
        (*(f"{table}.*.**" for table in SOURCES),),
        "it is not a setting of the environment that can be passed on: see environment_args of verifiers",
    ),
    rule(
        rules.convert_length,
        (LENGTH, "rollout.max_model_len"),
        ("trainer.model.seq_len", "trainer.token_budget"),
        (TOKENS, "orchestrator.sampling.max_tokens"),
    ),
    to(TEMPERATURE, "orchestrator.sampling.temperature", Given.number),
    same(
        ("orchestrator.train.filter_zero_advantages",),
        "tokens of advantage 0 cost no forward pass, but count in the divisor; kl_tau leaves them out",
    ),
    missing(
        ("orchestrator.train.sampling.**", "orchestrator.sampling.**"),
        "orchestrator.sampling has temperature, max_tokens, stop and ignore_eos; training samples from the whole distribution",
        off=(1.0, -1, 0, "", False),
    ),
    rule(
        rules.convert_optimizer,
        ("trainer.optim.type", "trainer.optimizer", "adamw, muon"),
        ("trainer.optim.lr", "trainer.lr"),
        (("trainer.optim.betas1", "trainer.optim.betas2"), "trainer.betas"),
        ("trainer.optim.mu", "trainer.muon_momentum"),
        ("trainer.optim.weight_decay", "trainer.weight_decay"),
        ("trainer.optim.max_norm", "trainer.grad_clip"),
        ("trainer.optim.*", "", "it is not a setting of this optimizer here"),
        lost="it is not a setting of this optimizer here",
    ),
    rule(
        rules.convert_schedule,
        (
            "trainer.scheduler.type",
            "trainer.schedule",
            "constant, cosine; linear: wsd, constant and then a linear decay",
        ),
        ("trainer.scheduler.warmup_steps", "trainer.warmup_steps"),
        ("trainer.scheduler.decay_steps", "trainer.decay_steps"),
        ("trainer.scheduler.min_lr", "trainer.min_lr_ratio", "min_lr / lr"),
        unread="it has no effect with this schedule",
    ),
    rule(
        rules.convert_objective,
        (
            "orchestrator.algo.type",
            "orchestrator.advantage, trainer.objective.preset",
            "grpo: centered, max_rl: maxrl, opd: preset distill",
        ),
        ("orchestrator.algo.teacher.name", "trainer.teacher.model", "the trainer loads it"),
        ("trainer.loss.type", "trainer.objective.preset", "default: dppo, ipo: ipo_mask"),
        (("trainer.loss.dppo_mask_low", "trainer.loss.dppo_mask_high"), "trainer.objective.low, .high"),
        ("trainer.loss.ipo_threshold", "trainer.objective.threshold"),
        ("trainer.loss.kl_tau", "trainer.objective.kl_tau", "the term (log t/b)^2; divided by adv_tau"),
        ("trainer.loss.adv_tau", "", "it multiplies all advantages: kl_tau is divided by it"),
        unread="it does not apply to this loss",
    ),
    missing(
        ("trainer.loss.**", "loss.**"),
        "set trainer.objective (docs/objectives.md), or write the loss: trainer.objective.preset = module:function",
    ),
    missing(
        ("orchestrator.algo.length_penalty.**", "orchestrator.advantage.**"),
        "subtract the penalty in the environment's reward, or use orchestrator.overlong",
    ),
    missing(("orchestrator.algo.**",), "the run's own policy samples; a teacher is loaded by the trainer"),
    rule(
        rules.convert_devices,
        (
            ("deployment.*", "trainer_gpu_ids", "inference_gpu_ids"),
            "allocation_mode",
            "several nodes: start the services one by one",
        ),
        (("inference.vllm.tensor_parallel_size", "inference.parallel.tp"), "allocation_mode", "t of the engines"),
        (("inference.vllm.data_parallel_size", "inference.parallel.dp"), "allocation_mode", "d of the engines"),
        ("trainer.model.cp", "allocation_mode", "c of the trainer"),
        unread="it is part of their launcher",
    ),
    rule(
        rules.convert_lora,
        (
            (
                "trainer.model.lora",
                "trainer.model.lora.rank",
                "inference.vllm.enable_lora",
                "inference.vllm.max_lora_rank",
                "inference.enable_lora",
                "inference.max_lora_rank",
            ),
            "trainer.lora.rank, rollout.lora.enabled, rollout.lora.max_rank",
        ),
        ("trainer.model.lora.alpha", "trainer.lora.alpha"),
        ("trainer.model.lora.dropout", "trainer.lora.dropout"),
        ("trainer.model.lora.target_modules", "trainer.lora.target_modules"),
        ("trainer.model.experimental.lora.*", "trainer.lora", "a name that it had before"),
        unread="without trainer.model.lora it has no effect",
    ),
    missing("trainer.model.lora.modules_to_save", "only linear layers get adapters; nothing else is trained"),
    same("orchestrator.model.lora.**", "the trainer's adapter is the one that is served"),
    rule(
        rules.check_sourcepoints,
        (
            ("ckpt", "*.ckpt", "ckpt.interval", "*.ckpt.interval"),
            "orchestrator.checkpoint.every_steps",
            "without an interval only at the end",
        ),
        (("ckpt.keep_last", "*.ckpt.keep_last", "ckpt.keep", "*.ckpt.keep"), "trainer.checkpoint.keep", "at least 2"),
        unread="checkpoints are those of the whole run",
    ),
    missing(
        ("ckpt.**", "*.ckpt.**"),
        "checkpoints are in outputs/RUN/checkpoints, the newest are kept (docs/checkpoints.md)",
    ),
    missing(
        ("resume", "resume.**", "*.resume", "*.resume.**", "ckpt.resume_step"),
        "`sluice rl @ rl.toml --resume`, or --resume-from RUN/step_N",
    ),
    missing(
        ("orchestrator.eval.**", "orchestrator.val.**"),
        "`sluice eval` scores a model on an environment of verifiers, also each checkpoint of a run (docs/evaluation.md)",
    ),
    to("orchestrator.tasks_per_minute", "orchestrator.groups_per_s", Given.number, by=lambda value: value / 60),
    to(
        ("orchestrator.concurrency.max_inflight", "orchestrator.max_inflight_rollouts", "orchestrator.max_concurrent"),
        "orchestrator.concurrency.most_samples",
        Given.whole,
        remark="per replica",
    ),
    to(
        "orchestrator.concurrency.initial_inflight",
        "orchestrator.concurrency.initial_samples",
        Given.whole,
        remark="per replica",
    ),
    same(
        ("orchestrator.concurrency.min_inflight", "orchestrator.oversampling_factor"),
        "groups start when the trainer will need them (orchestrator.pacing)",
    ),
    to(
        ("trainer.model.optimization_dtype",),
        "trainer.dtype",
        Given.text,
        by=lambda value: "auto" if value == "float32" else "bfloat16",
        remark="weights and optimizer are float32 here",
    ),
    to("trainer.model.reshard_after_forward", "trainer.parallel.reshard", Given.flag),
    to("trainer.model.dp_replicate", "trainer.parallel.dp_replicate", Given.whole),
    rule(
        lambda given: (
            [
                Set(
                    "trainer.gradient_checkpointing",
                    True,
                    given.present("trainer.model.ac", "trainer.model.ac.freq", "trainer.model.ac.mode"),
                )
            ]
            if given.has("trainer.model.ac")
            else []
        ),
        (
            ("trainer.model.ac", "trainer.model.ac.**"),
            "trainer.gradient_checkpointing",
            "all layers are recomputed, or none",
        ),
        unread="all layers are recomputed, or none",
    ),
    to("trainer.model.optim_cpu_offload", "trainer.optimizer_offload", Given.flag),
    rule(
        lambda given: (
            [
                Set(
                    "trainer.compile",
                    given.value("trainer.model.compile") not in (False, "None"),
                    given.present("trainer.model.compile", *given.below("trainer.model.compile")),
                )
            ]
            if given.has("trainer.model.compile")
            else []
        ),
        (("trainer.model.compile", "trainer.model.compile.**"), "trainer.compile"),
    ),
    same(
        (
            "trainer.model.impl",
            "trainer.model.attn",
            "trainer.model.fused_lm_head_token_chunk_size",
            "trainer.model.reduce_dtype",
            "trainer.model.cp_style",
            "trainer.matmul_precision",
            "trainer.model.load_using_meta",
            "trainer.model.conversion_dir",
        ),
        "the trainer has one implementation: fused attention, logits in parts, sums in float32",
    ),
    missing(
        (
            "trainer.model.ep",
            "trainer.model.ep_*",
            "trainer.model.moe_*",
            "trainer.model.deepep_*",
            "trainer.model.freeze_moe_router",
            "trainer.enable_router_replay",
            "inference.vllm.enable_return_routed_experts",
            "orchestrator.pad_to_multiple_of",
        ),
        "there is no expert parallelism and no replay of routes",
        off=(False, 1, "auto", ""),
    ),
    missing(
        (
            "trainer.model.ac_offloading",
            "trainer.model.ac_offloading.**",
            "trainer.model.fsdp_cpu_offload",
            "trainer.model.full_offload",
            "trainer.model.full_offload.**",
        ),
        "the optimizer can be kept in host memory: trainer.optimizer_offload; activations cannot",
    ),
    missing(
        (
            "trainer.model.quantization.**",
            "trainer.model.vlm.**",
            "model.vlm.**",
            "trainer.model.index_cache.**",
            "trainer.model.debug.**",
            "trainer.data.**",
        ),
        "the trainer has text models in bfloat16 or float32",
    ),
    missing(
        ("trainer.model.trust_remote_code", "inference.vllm.trust_remote_code", "tokenizer.**", "*.tokenizer.**"),
        "the tokenizer of the model is used: save the one that you want with the model",
    ),
    template_file("inference.vllm.chat_template"),
    same(
        ("orchestrator.renderer.**", "orchestrator.renderer"),
        "the sampled token ids are kept, and only what follows them is rendered (docs/rollout.md)",
    ),
    to(("inference.vllm.dtype", "inference.model.dtype"), "rollout.dtype", Given.text, by=rules.convert_dtype),
    same(
        (
            "inference.vllm.api_server_count",
            "inference.vllm.max_loras",
            "inference.vllm.max_cpu_loras",
            "inference.vllm.lora_target_modules",
            "inference.vllm.data_parallel_*",
            "inference.vllm.logprobs_mode",
            "inference.vllm.worker_extension_cls",
            "inference.vllm.seed",
        ),
        "each replica is an engine of its own, which Sluice sets up",
    ),
    rule(
        rules.convert_engine_arguments,
        ("inference.vllm.tool_call_parser", "rollout.tool_parser"),
        ("inference.vllm.reasoning_parser", "rollout.reasoning_parser"),
        (
            ("inference.vllm.*", "inference.model.*", "inference.gpu_memory_utilization"),
            "rollout.engine_args",
            "by the same names",
        ),
        lost="it is no argument of vLLM's engine",
    ),
    same(
        (
            "inference",
            "trainer",
            "orchestrator",
            "inference.server.**",
            "inference.router",
            "inference.router.**",
            "inference.backend_port",
            "weight_broadcast.**",
            "*.weight_broadcast.**",
            "rollout_transport.**",
            "*.rollout_transport.**",
            "orchestrator.model.client.**",
            "orchestrator.client.**",
            "orchestrator.env_server_base_port",
            "orchestrator.num_train_workers",
            "trainer.dist_timeout_seconds",
            "clean",
            "dry_run",
        ),
        "`sluice rl` starts and connects the services",
    ),
    missing(("inference.**",), "replicas are started by `sluice rl`, or one by one (docs/rollout.md)"),
    missing(
        ("slurm.**", "env_vars.**", "*.env_vars.**"),
        "set variables and jobs where you start `sluice`: children inherit the environment",
    ),
    missing(
        (
            "monitors.**",
            "*.monitors.**",
            *(f"{table}.**" for table in OLD_TABLES),
            *OLD_TABLES,
            "monitors.prime",
            "*.heartbeat.**",
            "*.metrics_server.**",
        ),
        "metrics go to metrics.jsonl and TensorBoard in the run's directory, and to Prometheus (server.metrics_port)",
    ),
    same(
        (
            "log.**",
            "*.log.**",
            "trainer.gc",
            "trainer.gc.**",
            "trainer.trace_path",
            "trainer.memory_profiler_path",
            "trainer.enable_token_export",
            "bench",
            "*.bench",
        ),
        "it changes what is logged or measured, not what is trained",
    ),
    missing(
        ("orchestrator.pre_batch_filters.**", "orchestrator.post_batch_filters.**"),
        "orchestrator.filter replaces groups (docs/curriculum.md)",
    ),
    same(
        ("clean_output_dir", "orchestrator.pool_size", "orchestrator.use_token_client"),
        "a run has a directory of its own; the sampled token ids are kept",
    ),
    missing(
        ("orchestrator.prime_monitor", "orchestrator.prime_monitor.**"),
        "metrics go to metrics.jsonl and TensorBoard in the run's directory",
    ),
    missing(("run.dir",), "a run's directory is output_dir/run"),
)

SYSTEM = System("prime-rl", "PRIME-RL", ROWS, DEFAULTS, rules.check_source)
