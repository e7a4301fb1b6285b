"""OpenRLHF's flags, with and without dots, and what they become here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainer.aliases import (
    ROLES,
    Context,
    Rule,
    both,
    function_in,
    nothing,
    number,
    only,
    refused,
    size,
    table,
    to,
    warmup,
    whole,
)


def _optims(name: str) -> tuple[str, ...]:
    return tuple(f"{role}.optim.{name}" for role in ROLES)


def _kl(value: Any, context: Context) -> Mapping[str, Any]:
    """The coefficient moves from the reward to the loss with ``--use_kl_loss``."""
    if "use_kl_loss" not in context.given:
        return {"algorithm.kl_coef": value}
    if "kl_target" in context.given:
        raise ValueError("a KL term in the loss has a fixed weight here: leave out the KL target")
    coef = context.given.get("init_kl_coef", "0.01")
    return {"algorithm.kl_coef": 0, "actor.kl_loss_coef": coef}


def _kl_target(value: Any, _: Context) -> Mapping[str, Any]:
    return {"algorithm.kl_controller": "adaptive", "algorithm.kl_target": value}


def _contents(_: Any, context: Context) -> Mapping[str, Any]:
    state = [] if "disable_ds_ckpt" in context.given else ["model", "optimizer", "extra"]
    model = ["hf_model"] if "save_hf_ckpt" in context.given else []
    if not state and not model:
        raise ValueError("nothing is left to save; trainer.save_freq=-1 saves at the end only")
    return {"storage.save_contents": state + model}


def _loggers(_: Any, context: Context) -> Mapping[str, Any]:
    flags = {"use_tensorboard": "tensorboard", "use_wandb": "wandb"}
    return {"trainer.loggers": [name for flag, name in flags.items() if flag in context.given]}


def _schedule(*roles: str) -> Rule:
    """``cosine_with_min_lr`` ends at a tenth of the peak in OpenRLHF."""
    words = {
        "constant": "constant",
        "constant_with_warmup": "constant",
        "linear": "linear",
        "cosine": "cosine",
        "cosine_with_min_lr": "cosine",
    }

    def apply(value: Any, context: Context) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for role in roles:
            found |= table(f"{role}.optim.schedule", words).apply(value, context)
            if value == "cosine_with_min_lr" and f"{role}.min_lr_ratio" not in context.given:
                found[f"{role}.optim.min_lr_ratio"] = 0.1
        return found

    return Rule(apply)


def _prompt_length(value: Any, context: Context) -> Mapping[str, Any]:
    if "generate_max_len" not in context.given:
        raise ValueError("it counts prompt and response: give --rollout.max_new_tokens too")
    return {"data.max_prompt_length": whole(value) - context.config.rollout.max_new_tokens}


def _clip_range(value: Any, _: Context) -> Mapping[str, Any]:
    low, high = str(value).split(" ")
    if number(low) != number(high):
        raise ValueError("there is one clip range for both sides here")
    return {"actor.clip_ratio": low}


def _files(value: Any) -> list[str]:
    return str(value).split(",")


def _modules(value: Any) -> Any:
    return value if value == "all-linear" else re.split(r"[ ,]+", str(value))


def _on(_: Any) -> bool:
    return True


def _betas(value: Any) -> list[str]:
    return str(value).split(" ")


_WANDB = "the key is not taken from here: set WANDB_API_KEY"
_COUNTS = "processes are counted by torchrun, or by ray.workers"
_RUN = "a run is named by storage.run, which a restart must find again"
_FINAL = "the last checkpoint holds the model; storage.save_contents with hf_model for other tools"
_BF16 = {"bf16": "bfloat16"}

_VALUES: Mapping[str, Rule] = {
    "pretrain": to("model.path"),
    "critic_pretrain": to("model.critic_path"),
    "reward_pretrain": to("reward.model"),
    "remote_rm_url": to("reward.function", by=lambda v: function_in(str(v), "reward_func")),
    "prompt_data": to("data.train_files", by=_files),
    "eval_dataset": to("data.val_files", by=_files),
    "input_key": to("data.prompt_key"),
    "label_key": to("data.answer_key"),
    "rollout_batch_size": to("data.batch_size", remark="prompts"),
    "train_batch_size": to(
        "actor.mini_batch_size", "critic.mini_batch_size", remark="samples an optimizer step"
    ),
    "micro_train_batch_size": to("actor.micro_batch_size", "critic.micro_batch_size"),
    "micro_rollout_batch_size": to("rollout.micro_batch_size"),
    "n_samples_per_prompt": to("rollout.n"),
    "max_epochs": to("actor.epochs", "critic.epochs", remark="passes over a batch"),
    "num_episodes": to("trainer.total_epochs", remark="passes over the data"),
    "prompt_max_len": to("data.max_prompt_length"),
    "generate_max_len": to("rollout.max_new_tokens"),
    "data.max_len": Rule(_prompt_length, stage=1),
    "temperature": to("rollout.temperature"),
    "top_p": to("rollout.top_p"),
    "eval_temperature": to("rollout.val_temperature"),
    "eval_n_samples_per_prompt": only("1", have="validates on one response a prompt"),
    "actor_learning_rate": to("actor.optim.lr"),
    "critic_learning_rate": to("critic.optim.lr"),
    "init_kl_coef": Rule(_kl),
    "kl_target": Rule(_kl_target),
    "kl_horizon": to("algorithm.kl_horizon"),
    "kl_estimator": to("algorithm.kl_estimator"),
    "gamma": to("algorithm.gamma"),
    "lambd": to("algorithm.lam"),
    "eps_clip": to("actor.clip_ratio"),
    "value_clip": to("critic.clip_value"),
    "entropy_loss_coef": to("actor.entropy_coef"),
    "l2": to(*_optims("weight_decay")),
    "max_norm": to(*_optims("grad_clip")),
    "lr_scheduler": _schedule(*ROLES),
    "lr_warmup_ratio": both(*(warmup(role, ratio=True, of_steps=False) for role in ROLES)),
    "seed": to("trainer.seed"),
    "freezing_actor_steps": to("critic.warmup_steps", by=lambda v: 0 if v == "-1" else v),
    "vllm_num_engines": to(
        "rollout.engine", by=lambda v: "hf" if v == "0" else "vllm", remark="one engine a worker"
    ),
    "vllm_tensor_parallel_size": to("rollout.tensor_parallel_size"),
    "vllm_gpu_memory_utilization": to("rollout.gpu_memory_utilization"),
    "lora_rank": to("model.lora.rank"),
    "lora_alpha": to("model.lora.alpha"),
    "lora_dropout": only("0", "0.0", have="has no dropout in adapters"),
    "ckpt_path": to("storage.uri"),
    "save_steps": to("trainer.save_freq"),
    "eval_steps": to("trainer.test_freq"),
    "max_ckpt_num": to("storage.keep_last"),
    "max_ckpt_mem": to("storage.max_size", by=size),
    "ckpt.best_metric_key": only("", "none", have="names it by storage.best_metric=NAME:max"),
    "save_path": nothing(_FINAL),
    "use_wandb": Rule(_loggers, remark=_WANDB, secret=True),
    "use_tensorboard": Rule(_loggers, remark="written below trainer.log_dir"),
    "wandb_project": to("trainer.project"),
    "wandb_run_name": nothing(_RUN),
    "param_dtype": table("model.dtype", _BF16),
    "advantage_estimator": only("gae", have="has generalized advantage estimation (gae) only"),
    "policy_loss_type": only("ppo", have="has PPO's loss only"),
    "aux_loss_coef": only("0", "0.0", have="has no balancing loss"),
    "dual_clip": refused("there is no second clipping here"),
    "max_samples": only("100000000", "1e8", have="trains on the whole file"),
    "prompt_data_probs": refused("every prompt is taken equally often here"),
    "input_template": refused("prompts are taken as they are, or by --apply_chat_template"),
    "agent_func_path": refused("there is one turn a prompt here"),
    "overlong_buffer_len": refused("the reward's function is what changes rewards here"),
    "overlong_penalty_factor": refused("the reward's function is what changes rewards here"),
    **{
        name: to(f"{role}.optim.{key}")
        for role in ROLES
        for name, key in (
            (f"{role}.adam.weight_decay", "weight_decay"),
            (f"{role}.adam.eps", "eps"),
            (f"{role}.min_lr_ratio", "min_lr_ratio"),
            (f"{role}.max_norm", "grad_clip"),
        )
    },
    **{f"{role}.lr_scheduler": _schedule(role) for role in ROLES},
    **{
        f"{role}.lr_warmup_ratio": warmup(role, ratio=True, of_steps=False) for role in ROLES
    },
    **{f"{role}.optim": only("adam", have="has AdamW only") for role in ROLES},
    **{
        f"{role}_{count}": nothing(_COUNTS)
        for role in (*ROLES, "ref", "reward")
        for count in ("num_nodes", "num_gpus_per_node")
    },
    **dict.fromkeys(
        (
            "attn_implementation", "ds_tensor_parallel_size", "eval_split", "grad_accum_dtype",
            "local_rank", "logging_steps", "prompt_split", "ring_attn_size", "ring_head_stride",
            "rollout_max_tokens_per_gpu", "rollout_tasks_per_gpu", "train_max_tokens_per_gpu",
            "value_head_prefix", "vllm_generate_batch_size", "vllm_sync_backend", "wandb_group",
            "wandb_org", "zero_stage", "zpg", "data.dataloader_num_workers",
            "ds.experts_implementation",
        ),
        nothing(),
    ),
}  # fmt: skip

_PAIRS: Mapping[str, Rule] = {
    "adam_betas": to(*_optims("betas"), by=_betas),
    "actor.adam.betas": to("actor.optim.betas", by=_betas),
    "critic.adam.betas": to("critic.optim.betas", by=_betas),
    "eps_clip_low_high": Rule(_clip_range),
    "reward_clip_range": refused("the reward's function is what changes rewards here"),
}

_SWITCHES: Mapping[str, Rule] = {
    "apply_chat_template": to("data.apply_chat_template", by=_on),
    "bf16": to("model.dtype", by=lambda _: "bfloat16"),
    "gradient_checkpointing": to("model.activation_checkpointing", by=_on),
    "vllm_enable_sleep": to("rollout.sleep", by=_on),
    "enforce_eager": to("rollout.enforce_eager", by=_on),
    "full_determinism": to("trainer.deterministic", by=_on),
    "load_checkpoint": to("trainer.resume_mode", by=lambda _: "auto"),
    "save_hf_ckpt": Rule(_contents),
    "disable_ds_ckpt": Rule(_contents),
    "use_kl_loss": Rule(_kl),
    "async_train": refused("generating and training take turns here"),
    "dynamic_filtering": refused("every group is trained on here"),
    "enable_ema": refused("no averaged weights are kept here"),
    "enable_vllm_is_correction": refused("log-probabilities are recomputed instead here"),
    "load_in_4bit": refused("weights are not quantized here"),
    "no_advantage_std_norm": refused("see algorithm.whiten_advantages, which does both or neither"),
    "normalize_reward": refused("the reward's function is what changes rewards here"),
    "use_ms": refused("models are loaded from directories here"),
    **dict.fromkeys(
        (
            "actor_init_on_gpu", "adam_offload", "colocate_actor_ref", "colocate_all_models",
            "colocate_critic_reward", "deepcompile", "deepspeed_enable_sleep",
            "disable_fast_tokenizer", "enable_prefix_caching", "flash_attn",
            "gradient_checkpointing_use_reentrant", "overlap_comm", "packing_samples", "perf",
            "ref_reward_offload", "reward.offload", "save_value_network", "use_ds_universal_ckpt",
            "use_dynamic_batch", "use_liger_kernel", "vllm_sync_with_ray",
        ),
        nothing(),
    ),
}  # fmt: skip

_LISTS: Mapping[str, Rule] = {"target_modules": to("model.lora.target_modules", by=_modules)}

RULES: Mapping[str, Rule] = {**_VALUES, **_PAIRS, **_SWITCHES, **_LISTS}

_OF_THE_ENGINE = (
    "adam_offload", "attn_implementation", "deepcompile", "grad_accum_dtype", "load_in_4bit",
    "overlap_comm", "packing_samples", "param_dtype", "ring_attn_size", "use_liger_kernel",
    "value_head_prefix", "zero_stage", "zpg",
)  # fmt: skip

_NEWER: Mapping[str, str] = {
    "actor.adam.lr": "actor_learning_rate",
    "actor.aux_loss_coef": "aux_loss_coef",
    "actor.dual_clip": "dual_clip",
    "actor.entropy_coef": "entropy_loss_coef",
    "actor.eps_clip": "eps_clip",
    "actor.eps_clip_low_high": "eps_clip_low_high",
    "actor.gradient_checkpointing_enable": "gradient_checkpointing",
    "actor.gradient_checkpointing_reentrant": "gradient_checkpointing_use_reentrant",
    "actor.model_name_or_path": "pretrain",
    "actor.policy_loss_type": "policy_loss_type",
    "algo.advantage.estimator": "advantage_estimator",
    "algo.advantage.gamma": "gamma",
    "algo.advantage.is_correction_enable": "enable_vllm_is_correction",
    "algo.advantage.lambd": "lambd",
    "algo.advantage.no_std_norm": "no_advantage_std_norm",
    "algo.dynamic_filtering_enable": "dynamic_filtering",
    "algo.kl.estimator": "kl_estimator",
    "algo.kl.horizon": "kl_horizon",
    "algo.kl.init_coef": "init_kl_coef",
    "algo.kl.target": "kl_target",
    "algo.kl.use_loss": "use_kl_loss",
    "ckpt.disable_ds": "disable_ds_ckpt",
    "ckpt.load_enable": "load_checkpoint",
    "ckpt.max_mem": "max_ckpt_mem",
    "ckpt.max_num": "max_ckpt_num",
    "ckpt.output_dir": "save_path",
    "ckpt.path": "ckpt_path",
    "ckpt.save_hf": "save_hf_ckpt",
    "ckpt.save_steps": "save_steps",
    "critic.adam.lr": "critic_learning_rate",
    "critic.freezing_steps": "freezing_actor_steps",
    "critic.model_name_or_path": "critic_pretrain",
    "critic.save_value_network": "save_value_network",
    "critic.value_clip": "value_clip",
    "data.apply_chat_template": "apply_chat_template",
    "data.disable_fast_tokenizer": "disable_fast_tokenizer",
    "data.input_key": "input_key",
    "data.input_template": "input_template",
    "data.label_key": "label_key",
    "data.max_samples": "max_samples",
    "data.prompt_dataset": "prompt_data",
    "data.prompt_probs": "prompt_data_probs",
    "data.prompt_split": "prompt_split",
    "eval.dataset": "eval_dataset",
    "eval.n_samples_per_prompt": "eval_n_samples_per_prompt",
    "eval.split": "eval_split",
    "eval.steps": "eval_steps",
    "eval.temperature": "eval_temperature",
    "logger.logging_steps": "logging_steps",
    "logger.tensorboard_dir": "use_tensorboard",
    "logger.wandb.group": "wandb_group",
    "logger.wandb.key": "use_wandb",
    "logger.wandb.org": "wandb_org",
    "logger.wandb.project": "wandb_project",
    "logger.wandb.run_name": "wandb_run_name",
    "ref.offload": "ref_reward_offload",
    "reward.clip_range": "reward_clip_range",
    "reward.model_name_or_path": "reward_pretrain",
    "reward.normalize_enable": "normalize_reward",
    "reward.overlong_buffer_len": "overlong_buffer_len",
    "reward.overlong_penalty_factor": "overlong_penalty_factor",
    "reward.remote_url": "remote_rm_url",
    "rollout.batch_size": "rollout_batch_size",
    "rollout.max_new_tokens": "generate_max_len",
    "rollout.max_tokens_per_gpu": "rollout_max_tokens_per_gpu",
    "rollout.micro_batch_size": "micro_rollout_batch_size",
    "rollout.n_samples_per_prompt": "n_samples_per_prompt",
    "rollout.temperature": "temperature",
    "rollout.top_p": "top_p",
    "rollout.vllm_generate_batch_size": "vllm_generate_batch_size",
    "train.agent_func_path": "agent_func_path",
    "train.async_enable": "async_train",
    "train.batch_size": "train_batch_size",
    "train.colocate_actor_ref": "colocate_actor_ref",
    "train.colocate_all": "colocate_all_models",
    "train.colocate_critic_reward": "colocate_critic_reward",
    "train.dynamic_batch_enable": "use_dynamic_batch",
    "train.enable_ema": "enable_ema",
    "train.full_determinism_enable": "full_determinism",
    "train.max_epochs": "max_epochs",
    "train.max_tokens_per_gpu": "train_max_tokens_per_gpu",
    "train.micro_batch_size": "micro_train_batch_size",
    "train.num_episodes": "num_episodes",
    "train.seed": "seed",
    "vllm.enable_prefix_caching": "enable_prefix_caching",
    "vllm.enable_sleep": "vllm_enable_sleep",
    "vllm.enforce_eager": "enforce_eager",
    "vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "vllm.num_engines": "vllm_num_engines",
    "vllm.sync_backend": "vllm_sync_backend",
    "vllm.sync_with_ray": "vllm_sync_with_ray",
    "vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
    **{
        f"{role}.{count}": f"{role}_{count}"
        for role in (*ROLES, "ref", "reward")
        for count in ("num_nodes", "num_gpus_per_node")
    },
    **{
        f"{engine}.{new}": old
        for engine in ("ds", "fsdp")
        for new, old in {
            **{name: name for name in _OF_THE_ENGINE},
            "enable_sleep": "deepspeed_enable_sleep",
            "lora.alpha": "lora_alpha",
            "lora.dropout": "lora_dropout",
            "lora.rank": "lora_rank",
            "lora.target_modules": "target_modules",
            "ring_attn_head_stride": "ring_head_stride",
            "tensor_parallel_size": "ds_tensor_parallel_size",
            "use_universal_ckpt": "use_ds_universal_ckpt",
        }.items()
    },
}
"""The dotted spelling of newer versions, and the older one."""


def canonical(flag: str) -> str:
    """The older spelling of a flag."""
    return _NEWER.get(flag, flag)


def _nargs(old: str) -> int | str | None:
    return 2 if old in _PAIRS else 0 if old in _SWITCHES else "*" if old in _LISTS else None


FLAGS: Mapping[str, int | str | None] = {n: _nargs(canonical(n)) for n in [*RULES, *_NEWER]}
"""Every flag, and how many words follow it (as argparse's ``nargs``)."""
