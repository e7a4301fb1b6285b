from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptstore.errors import NotFoundError, UsageError
from ckptstore.maintenance import Policy
from trainer.aliases_openrlhf import FLAGS, RULES, canonical
from trainer.aliases_verl import VERL as VERL_RULES
from trainer.checkpointing import retention_policy
from trainer.checks import check_ranks
from trainer.config import Config
from trainer.merging import Merged
from trainer.schema import KEYS
from trainer.settings import (
    Options,
    check,
    config_digest,
    differences,
    load_config,
    read_config,
    to_dict,
    to_yaml,
)

VERL = """
algorithm.adv_estimator=gae data.train_files="['/d/a.parquet', '/d/b.parquet']"
data.val_files=/d/test.parquet data.train_batch_size=1024 data.max_prompt_length=512
data.max_response_length=256 data.filter_overlong_prompts=True data.truncation='error'
actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 actor_rollout_ref.actor.ppo_epochs=2
actor_rollout_ref.actor.clip_ratio=0.1 actor_rollout_ref.actor.entropy_coeff=0.001
actor_rollout_ref.actor.grad_clip=0.5 actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.3
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.4 actor_rollout_ref.rollout.n=2
actor_rollout_ref.rollout.temperature=0.8 actor_rollout_ref.rollout.top_k=-1
actor_rollout_ref.rollout.free_cache_engine=False
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32
actor_rollout_ref.actor.checkpoint.save_contents=['model','optimizer','extra','hf_model']
critic.optim.lr=1e-5 critic.model.path=c critic.ppo_micro_batch_size_per_gpu=8
critic.cliprange_value=0.4 algorithm.gamma=0.9 algorithm.lam=0.8
algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.02 algorithm.kl_ctrl.type=adaptive
algorithm.kl_ctrl.target_kl=0.2 algorithm.kl_ctrl.horizon=5000 trainer.critic_warmup=3
trainer.logger=['console','tensorboard'] trainer.project_name=p trainer.experiment_name=e
trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.save_freq=20 trainer.test_freq=5
trainer.total_epochs=15 trainer.total_training_steps=100 trainer.default_local_dir=/ckpts/p
trainer.default_hdfs_dir=null trainer.resume_mode=disable trainer.esi_redundant_time=90
trainer.max_actor_ckpt_to_keep=3 trainer.max_critic_ckpt_to_keep=3
trainer.del_local_ckpt_after_load=False trainer.val_before_train=False
custom_reward_function.path=/r/score.py custom_reward_function.name=mine
"""

VERL_MEANS = {
    "data.train_files": ["/d/a.parquet", "/d/b.parquet"],
    "data.val_files": ["/d/test.parquet"],
    "data.batch_size": 1024,
    "data.max_prompt_length": 512,
    "rollout.max_new_tokens": 256,
    "model.path": "deepseek-ai/deepseek-llm-7b-chat",
    "model.critic_path": "c",
    "model.activation_checkpointing": True,
    "actor.optim.lr": 1e-6,
    "actor.optim.grad_clip": 0.5,
    "actor.mini_batch_size": 512,  # 256 prompts, two samples each
    "actor.micro_batch_size": 16,
    "actor.epochs": 2,
    "actor.clip_ratio": 0.1,
    "actor.entropy_coef": 0.001,
    "actor.kl_loss_coef": 0.0,
    "rollout.engine": "vllm",
    "rollout.n": 2,
    "rollout.temperature": 0.8,
    "rollout.top_k": 0,
    "rollout.gpu_memory_utilization": 0.4,
    "rollout.sleep": False,
    "critic.optim.lr": 1e-5,
    "critic.micro_batch_size": 8,
    "critic.clip_value": 0.4,
    "critic.warmup_steps": 3,
    "algorithm.gamma": 0.9,
    "algorithm.lam": 0.8,
    "algorithm.kl_coef": 0.02,
    "algorithm.kl_controller": "adaptive",
    "algorithm.kl_target": 0.2,
    "algorithm.kl_horizon": 5000.0,
    "reward.function": "/r/score.py:mine",
    "storage.uri": "/ckpts/p",
    "storage.run": "e",
    "storage.mirrors": [],
    "storage.keep_last": 3,
    "storage.save_contents": ["model", "optimizer", "extra", "hf_model"],
    "storage.load_contents": ["model", "optimizer", "extra"],
    "trainer.loggers": ["tensorboard"],
    "trainer.project": "p",
    "trainer.save_freq": 20,
    "trainer.test_freq": 5,
    "trainer.total_epochs": 15,
    "trainer.total_steps": 100,
    "trainer.resume_mode": "none",
    "trainer.expires_margin": 90.0,
}

OPENRLHF = """
--pretrain m --critic_pretrain c --reward_pretrain r --prompt_data a.jsonl,b.jsonl
--input_key question --label_key answer --apply_chat_template --rollout_batch_size 1024
--train_batch_size 128 --micro_train_batch_size 4 --micro_rollout_batch_size 8
--n_samples_per_prompt 2 --max_epochs 3 --num_episodes 5 --prompt_max_len 300
--generate_max_len 400 --temperature 0.9 --top_p 0.95 --actor_learning_rate 5e-7
--critic_learning_rate 9e-6 --init_kl_coef 0.02 --kl_target 0.3 --kl_horizon 9000
--kl_estimator k3 --gamma 0.99 --lambd 0.97 --eps_clip 0.15 --value_clip 0.4
--entropy_loss_coef 0.01 --l2 0.1 --adam_betas 0.9 0.95 --lr_scheduler cosine_with_min_lr
--lr_warmup_ratio 0.01 --max_norm 0.7 --seed 42 --bf16 --gradient_checkpointing
--vllm_num_engines 4 --vllm_tensor_parallel_size 2 --vllm_gpu_memory_utilization 0.6
--vllm_enable_sleep --enforce_eager --lora_rank 8 --lora_alpha 32
--target_modules q_proj k_proj trainer.total_steps=50 --save_path /out
--ckpt_path s3://team/ckpts --save_steps 100 --eval_steps -1 --max_ckpt_num 3
--max_ckpt_mem 500 --load_checkpoint --save_hf_ckpt --use_wandb topsecret --wandb_project w
--wandb_run_name ppo_0131T10:00 --use_tensorboard /tb --logging_steps 1 --zero_stage 3
--flash_attn --packing_samples --colocate_all_models
"""

OPENRLHF_MEANS = {
    "model.path": "m",
    "model.critic_path": "c",
    "model.dtype": "bfloat16",
    "model.activation_checkpointing": True,
    "model.lora.rank": 8,
    "model.lora.alpha": 32.0,
    "model.lora.target_modules": ["q_proj", "k_proj"],
    "reward.model": "r",
    "data.train_files": ["a.jsonl", "b.jsonl"],
    "data.prompt_key": "question",
    "data.answer_key": "answer",
    "data.apply_chat_template": True,
    "data.batch_size": 1024,
    "data.max_prompt_length": 300,
    "rollout.engine": "vllm",
    "rollout.n": 2,
    "rollout.max_new_tokens": 400,
    "rollout.temperature": 0.9,
    "rollout.top_p": 0.95,
    "rollout.micro_batch_size": 8,
    "rollout.tensor_parallel_size": 2,
    "rollout.gpu_memory_utilization": 0.6,
    "rollout.sleep": True,
    "rollout.enforce_eager": True,
    "actor.mini_batch_size": 128,
    "actor.micro_batch_size": 4,
    "actor.epochs": 3,
    "actor.clip_ratio": 0.15,
    "actor.entropy_coef": 0.01,
    "actor.optim.lr": 5e-7,
    "actor.optim.betas": [0.9, 0.95],
    "actor.optim.weight_decay": 0.1,
    "actor.optim.grad_clip": 0.7,
    "actor.optim.schedule": "cosine",
    "actor.optim.min_lr_ratio": 0.1,
    "actor.optim.warmup_steps": 24,  # 1 % of 50 steps of 2048 / 128 × 3 updates each
    "critic.mini_batch_size": 128,
    "critic.clip_value": 0.4,
    "critic.optim.lr": 9e-6,
    "critic.optim.weight_decay": 0.1,
    "critic.optim.warmup_steps": 24,
    "algorithm.kl_coef": 0.02,
    "algorithm.kl_controller": "adaptive",
    "algorithm.kl_target": 0.3,
    "algorithm.kl_horizon": 9000.0,
    "algorithm.kl_estimator": "k3",
    "algorithm.gamma": 0.99,
    "algorithm.lam": 0.97,
    "storage.uri": "s3://team/ckpts",
    "storage.run": "ppo",
    "storage.keep_last": 3,
    "storage.max_size": "500GiB",
    "storage.save_contents": ["model", "optimizer", "extra", "hf_model"],
    "trainer.save_freq": 100,
    "trainer.test_freq": -1,
    "trainer.total_epochs": 5,
    "trainer.seed": 42,
    "trainer.resume_mode": "auto",
    "trainer.loggers": ["tensorboard", "wandb"],
    "trainer.project": "w",
}

OPENRLHF_DOTTED = """
--actor.model_name_or_path m --data.prompt_dataset a.jsonl --data.max_len 2048
--rollout.max_new_tokens 1024 --rollout.batch_size 32 --rollout.n_samples_per_prompt 8
--train.batch_size 64 --train.micro_batch_size 1 --actor.adam.lr 1e-6 --critic.adam.lr 2e-6
--actor.adam.betas 0.9 0.98 --critic.lr_scheduler linear --critic.max_norm 0.3
--algo.kl.init_coef 0.05 --algo.kl.use_loss --algo.advantage.lambd 0.9 --ds.param_dtype bf16
--ds.zero_stage 3 --fsdp.packing_samples --ckpt.load_enable --ckpt.output_dir /o
--ckpt.path /ckpts --ckpt.save_hf --ckpt.disable_ds --ckpt.max_num 3 --ckpt.max_mem inf
--ckpt.save_steps 10 --eval.steps 5 --train.seed 7 --critic.freezing_steps -1
--ds.lora.target_modules all-linear
"""

OPENRLHF_DOTTED_MEANS = {
    "model.path": "m",
    "model.dtype": "bfloat16",
    "model.lora.target_modules": "all-linear",
    "data.train_files": ["a.jsonl"],
    "data.max_prompt_length": 1024,
    "data.batch_size": 32,
    "rollout.max_new_tokens": 1024,
    "rollout.n": 8,
    "actor.mini_batch_size": 64,
    "actor.micro_batch_size": 1,
    "actor.optim.lr": 1e-6,
    "actor.optim.betas": [0.9, 0.98],
    "actor.optim.schedule": "constant",
    "actor.kl_loss_coef": 0.05,
    "critic.optim.lr": 2e-6,
    "critic.optim.betas": [0.9, 0.999],
    "critic.optim.schedule": "linear",
    "critic.optim.grad_clip": 0.3,
    "critic.warmup_steps": 0,
    "algorithm.kl_coef": 0.0,
    "algorithm.lam": 0.9,
    "storage.uri": "/ckpts",
    "storage.save_contents": ["hf_model"],
    "storage.keep_last": 3,
    "storage.max_size": None,
    "trainer.save_freq": 10,
    "trainer.test_freq": 5,
    "trainer.seed": 7,
    "trainer.resume_mode": "auto",
}


def value_of(config: Config, key: str) -> Any:
    found: Any = to_dict(config)
    for part in key.split("."):
        found = found[part]
    return found


def read(line: str) -> Config:
    return read_config(shlex.split(line))[0]


def notes_of(line: str) -> tuple[str, ...]:
    return read_config(shlex.split(line))[1].notes


def refusal(line: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_config(shlex.split(line))
    return str(caught.value)


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_nothing_given_is_the_default_configuration() -> None:
    assert load_config([]) == (Config(), Options())


def test_overrides_reach_every_kind_of_value() -> None:
    config = read(
        "storage.uri=s3://team/ckpts trainer.save_freq=10 data.train_files=[a.parquet,b.parquet] "
        "trainer.total_steps=null actor.optim.lr=1e-6 actor.optim.betas=[0.8,0.9] "
        "trainer.deterministic=no storage.run=007 model.lora.target_modules=[q,k] "
        "+trainer.resume_mode=120 ++rollout.n=4 ray.init.num_cpus=4 ray.init.x.y=[1,z]"
    )
    assert config.storage.uri == "s3://team/ckpts"
    assert config.trainer.save_freq == 10
    assert config.data.train_files == ["a.parquet", "b.parquet"]
    assert config.trainer.total_steps is None
    assert config.actor.optim.lr == 1e-6
    assert config.actor.optim.betas == (0.8, 0.9)
    assert config.trainer.deterministic is False
    assert config.storage.run == "007"
    assert config.model.lora.target_modules == ["q", "k"]
    assert config.trainer.resume_mode == "120"
    assert config.rollout.n == 4
    assert config.ray.init == {"num_cpus": 4, "x": {"y": ["1", "z"]}}


def test_one_word_where_a_list_is_expected_is_a_list_of_one() -> None:
    assert read("data.train_files=a.parquet").data.train_files == ["a.parquet"]
    assert read("storage.mirrors=[]").storage.mirrors == []


def test_text_is_not_read_as_yaml() -> None:
    assert read("model.path='/a: b #c'").model.path == "/a: b #c"
    assert read("trainer.expires_at=2026-01-31T18:00:00").trainer.expires_at == (
        "2026-01-31T18:00:00"
    )


def test_a_changed_key_leaves_its_neighbours_defaults() -> None:
    assert read("critic.optim.eps=1e-6").critic.optim.lr == Config().critic.optim.lr


def test_files_merge_left_to_right_and_the_command_line_comes_last(tmp_path: Path) -> None:
    one = write(
        tmp_path / "1.yaml",
        "actor: {optim: {lr: 1e-6, eps: 1e-7}}\ntrainer:\n  save_freq: 5\n  expires_at: "
        "2026-01-31T18:00:00Z\nstorage.run: 007\nray:\n",
    )
    two = write(tmp_path / "2.yaml", "actor.optim.lr: 2e-6\ntrainer: {total_steps: ~, seed: 3}\n")
    config, _ = read_config(["trainer.seed=4", "--config", one, "--config", two])
    assert config.actor.optim.lr == 2e-6
    assert config.actor.optim.eps == 1e-7
    assert config.trainer.save_freq == 5
    assert config.trainer.expires_at == "2026-01-31T18:00:00Z"
    assert config.storage.run == "007"
    assert config.trainer.seed == 4


def test_the_printed_configuration_is_a_file_that_gives_it_back(tmp_path: Path) -> None:
    config = read(
        "trainer.resume_mode=120 actor.optim.lr=1e-6 storage.run=1e5 trainer.total_steps=3 "
        "actor.optim.betas=[0.1,0.2] data.val_files=[a,b] ray.init.num_cpus=2"
    )
    path = write(tmp_path / "c.yaml", to_yaml(config))
    assert read_config(["--config", path])[0] == config


def test_options() -> None:
    _, options = load_config(["--print-config", "--dry-run"])
    assert (options.print_config, options.dry_run) == (True, True)


def test_help_names_the_options_and_no_foreign_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "--print-config" in text
    assert "--zero_stage" not in text


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("trainer.save_frq=1", "trainer.save_frq: no such key; did you mean trainer.save_freq?"),
        ("save_freq=1", "save_freq: no such key; did you mean trainer.save_freq?"),
        ("actor_rollout_ref.rollout.nn=1", "did you mean actor_rollout_ref.rollout.n?"),
        ("trainer=1", "trainer is a section of keys and takes no value itself"),
        ("--save_step 100", "--save_step: no such option; did you mean --save_steps?"),
        ("--trainer.save_freq 5", "a key is given without dashes: trainer.save_freq=VALUE"),
        ("config.yaml", "'config.yaml' is neither an option nor key=value"),
        ("--save_steps", "argument --save_steps: expected one argument"),
        ("trainer.save_freq=often", "trainer.save_freq is often; it must be a whole number"),
        ("trainer.save_freq=1.5", "trainer.save_freq is 1.5; it must be a whole number"),
        ("trainer.save_freq=null", "trainer.save_freq is null; it must be a whole number"),
        ("trainer.total_steps=x", "it must be a whole number or null"),
        ("actor.optim.lr=[1]", "actor.optim.lr is [1]; it must be a number"),
        ("actor.optim.lr=nan", "actor.optim.lr is nan; it must be a number"),
        ("actor.optim.betas=[0.9]", "it must be a list of 2 numbers"),
        ("trainer.deterministic=perhaps", "it must be true or false"),
        ("rollout.engine=sglang", "rollout.engine is sglang; it must be one of hf, vllm"),
        ("'storage.uri={a: b}'", "storage.uri is {a: b}; it must be text"),
        ("data.train_files=[a,[b]]", "it must be a list of words such as [a,b]"),
        ("data.train_files=[a", "data.train_files is not valid YAML"),
        ("storage.uri=/c/${trainer.project}", "a reference such as ${key} is not resolved here"),
    ],
)
def test_mistakes_are_named(line: str, sentence: str) -> None:
    assert sentence in refusal(line)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("trainer:\n  sav_freq: 1\n", "did you mean trainer.save_freq?"),
        ("- a\n", "holds no keys with values"),
        ("a: [\n", "is not valid YAML"),
        (
            "storage: {uri: a}\ntrainer: {}\nstorage: {run: b}\n",
            "the key storage stands here twice",
        ),
        ("a: !!python/object/apply:os.getcwd []\n", "a: no such key"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, text: str, sentence: str) -> None:
    assert sentence in refusal(f"--config {write(tmp_path / 'c.yaml', text)}")


def test_a_missing_file_is_not_found() -> None:
    with pytest.raises(NotFoundError, match=r"no\.yaml"):
        load_config(["--config", "no.yaml"])


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("data.batch_size=0", "data.batch_size is 0; it must be greater than 0"),
        ("actor.clip_ratio=0", "actor.clip_ratio is 0.0; it must be greater than 0"),
        ("critic.optim.betas=[0.9,1]", "it must be two numbers from 0 to below 1"),
        ("rollout.top_p=0", "it must be greater than 0 and at most 1"),
        ("trainer.save_freq=0", "it must be greater than 0, or -1 for never"),
        ("trainer.test_freq=-2", "it must be greater than 0, or -1 for never"),
        ("actor.mini_batch_size=48", "which does not divide the 128 samples of a step"),
        ("critic.mini_batch_size=48", "critic.mini_batch_size is 48"),
        ("actor.mini_batch_size=256", "actor.mini_batch_size is 256"),
        ("storage.run=a/b", "storage.run: 'a/b' cannot be the name of a run"),
        ("storage.uri=s3://k:hush@b/c", "storage.uri: s3://k:…@b/c carries a secret"),
        ("trainer.resume_mode=s3://k:hush@b/r@5", "s3://k:…@b carries a secret"),
        ("trainer.resume_mode=s3://k:hush@b/r", "trainer.resume_mode is s3://k:…@b/r; it must be"),
        ("trainer.resume_mode=newest", "it must be auto, latest, none, a step, RUN@STEP"),
        ("trainer.resume_mode=1" + "0" * 15, "cannot be"),
        ("trainer.resume_from=a@-1", "trainer.resume_from: "),
        ("trainer.expires_at=5h", "it must be a time such as"),
        ("trainer.log_dir=logs/{date}", "{run} in it is the run's name"),
        ("storage.best_metric=reward", "it must be NAME:max or NAME:min"),
        ("storage.save_contents=[]", "one or more, each once"),
        ("storage.load_contents=[model,model]", "one or more, each once"),
        ("storage.load_contents=[optimizer]", "it must hold model"),
        ("storage.load_contents=[model,hf_model]", "it must hold model"),
        ("trainer.seed=-1", "trainer.seed is -1"),
    ],
)
def test_values_that_cannot_be_are_refused(line: str, sentence: str) -> None:
    message = refusal(line)
    assert sentence in message
    assert "hush" not in message


@pytest.mark.parametrize(
    "line",
    [
        "trainer.resume_mode=latest",
        "trainer.resume_mode=ppo@120",
        "trainer.resume_mode=s3://team/ckpts/ppo@best",
        "trainer.resume_from=other",
        "trainer.resume_from=/ckpts/other@5",
        "trainer.expires_at=SLURM_JOB_END_TIME",
        "trainer.expires_at=1767225600",
        "trainer.expires_at=2026-01-31T18:00:00+01:00",
        "storage.best_metric=val/reward:max",
        "rollout.n=3 actor.mini_batch_size=48",
        "trainer.loggers=[tensorboard]",
        "storage.load_contents=[model,extra]",
    ],
)
def test_values_that_can_be_are_taken(line: str) -> None:
    load_config(line.split())


def test_retention() -> None:
    config, _ = load_config([])
    assert retention_policy(config.storage) is None, "all is kept unless something else is said"
    given = "storage.keep_last=3 storage.keep_every=10 storage.max_size=5GiB storage.keep_best=2"
    given += " storage.best_metric=val/reward:max storage.owed_limit=4"
    config, _ = load_config(given.split())
    assert retention_policy(config.storage) == Policy(
        keep_last=3, keep_every=10, keep_best=2, max_size=5 * 2**30, owed_limit=4
    )
    message = refusal("storage.max_size=many")
    assert message.startswith("storage.max_size: 'many' is no amount of bytes")


@pytest.mark.parametrize(
    ("arguments", "rules"),
    [
        ("trainer.max_actor_ckpt_to_keep=2", {"keep_last": 2}),
        ("--max_ckpt_num 4", {"keep_last": 4}),
        ("--max_ckpt_mem 2 --max_ckpt_num 4", {"keep_last": 4, "max_size": 2 * 2**30}),
        ("--max_ckpt_mem 100000000 --max_ckpt_num 4", {"keep_last": 4}),
    ],
)
def test_retention_in_others_words(arguments: str, rules: dict[str, int]) -> None:
    config, _ = load_config(arguments.split())
    assert retention_policy(config.storage) == Policy(**rules)  # type: ignore[arg-type]


def test_ranks_that_cannot_share_an_engine_are_refused() -> None:
    shared = "rollout.tensor_parallel_size=2"
    message = refusal(shared)
    assert message.startswith("rollout.tensor_parallel_size is 2, and rollout.engine=hf generates")
    message = refusal(f"{shared} rollout.engine=vllm runtime=ray ray.workers=3")
    assert "the number of ranks, 3, is no multiple of it" in message
    load_config(f"{shared} rollout.engine=vllm runtime=ray ray.workers=4".split())
    config, _ = load_config([shared, "rollout.engine=vllm"])
    with pytest.raises(UsageError, match="the number of ranks, 1, is no multiple"):
        check_ranks(config, 1)


@pytest.mark.parametrize(
    ("line", "means"),
    [
        pytest.param(VERL, VERL_MEANS, id="verl"),
        pytest.param(OPENRLHF, OPENRLHF_MEANS, id="openrlhf"),
        pytest.param(OPENRLHF_DOTTED, OPENRLHF_DOTTED_MEANS, id="openrlhf-dotted"),
    ],
)
def test_command_lines_of_others_mean_the_same_here(line: str, means: dict[str, Any]) -> None:
    config = read(line)
    assert {key: value_of(config, key) for key in means} == means


def test_every_foreign_name_has_a_note() -> None:
    assert len(notes_of(OPENRLHF_DOTTED)) == sum(
        w.startswith("--") for w in OPENRLHF_DOTTED.split()
    )
    notes = notes_of(VERL)
    assert "trainer.default_local_dir=/ckpts/p is storage.uri=/ckpts/p" in notes
    assert "algorithm.adv_estimator=gae is how it is here" in notes
    assert any(n.startswith("trainer.nnodes=2 has no meaning here") for n in notes)
    assert (
        "actor_rollout_ref.actor.ppo_mini_batch_size=256 is actor.mini_batch_size=512 "
        "(samples, not prompts)"
    ) in notes
    assert "--load_checkpoint is trainer.resume_mode=auto" in notes_of("--load_checkpoint")
    assert notes_of("trainer.save_freq=5 critic.optim.lr=1e-5 trainer.resume_mode=auto") == ()


def test_no_note_shows_an_api_key() -> None:
    assert not any("topsecret" in note for note in notes_of(OPENRLHF))


def test_foreign_names_are_taken_from_files_too(tmp_path: Path) -> None:
    path = write(
        tmp_path / "verl.yaml",
        "actor_rollout_ref:\n  actor: {ppo_mini_batch_size: 16}\n  rollout: {n: 2}\n"
        "trainer: {experiment_name: e}\n",
    )
    config, _ = read_config(["--config", path, "rollout.n=4", "trainer.experiment_name=f"])
    assert config.actor.mini_batch_size == 64  # in prompts, so the later n counts
    assert config.storage.run == "f"


def test_the_command_line_wins_over_a_foreign_name_in_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "trainer: {total_training_steps: 5, resume_mode: disable}\n")
    config, _ = read_config(["--config", path, "trainer.total_steps=7", "trainer.resume_mode=auto"])
    assert config.trainer.total_steps == 7
    assert config.trainer.resume_mode == "auto"


@pytest.mark.parametrize(
    "line",
    [
        "--save_steps 5 trainer.save_freq=6",
        "trainer.max_actor_ckpt_to_keep=1 trainer.max_critic_ckpt_to_keep=2",
        "--l2 0.1 --actor.adam.weight_decay 0.2",
    ],
)
def test_names_that_contradict_each_other_are_refused(line: str) -> None:
    assert "has two values" in refusal(line)


def test_the_same_name_twice_counts_as_it_stands_last() -> None:
    assert read("trainer.save_freq=5 trainer.save_freq=6").trainer.save_freq == 6
    assert read("--save_steps 5 --ckpt.save_steps 6").trainer.save_freq == 6


@pytest.mark.parametrize(
    ("line", "mode", "start"),
    [
        ("trainer.resume_mode=disable", "none", None),
        ("trainer.resume_mode=disable trainer.resume_from_path=a@5", "none", None),
        ("trainer.resume_mode=auto", "auto", None),
        ("trainer.resume_from_path=null", "auto", None),
        ("trainer.resume_from_path=/c/other@5", "auto", "/c/other@5"),
        # Exactly this checkpoint, each time: one of this run's own.
        ("trainer.resume_mode=resume_path trainer.resume_from_path=/c/global_step_5", "5", None),
        ("trainer.resume_mode=resume_path trainer.resume_from_path=e@5", "e@5", None),
        ("trainer.resume_mode=resume_path trainer.resume_from_path=/c/e@5", "/c/e@5", None),
        (
            "trainer.resume_mode=resume_path trainer.resume_from_path=/c/e/global_step_5",
            "/c/e@5",
            None,
        ),
        # Another run's: a restart goes on with the run's own.
        (
            "trainer.resume_mode=resume_path trainer.resume_from_path=/x/y/global_step_5/",
            "auto",
            "/x/y@5",
        ),
    ],
)  # fmt: skip
def test_verl_resume_modes(line: str, mode: str, start: str | None) -> None:
    config = read(f"trainer.default_local_dir=/c trainer.experiment_name=e {line}")
    assert (config.trainer.resume_mode, config.trainer.resume_from) == (mode, start)


def test_verl_warm_up_counts_steps_of_training() -> None:
    line = (
        "data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=16 "
        "actor_rollout_ref.actor.ppo_epochs=2 trainer.total_training_steps=100 "
    )
    ratio = read(line + "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1")
    assert ratio.actor.optim.warmup_steps == 80  # 10 steps of 4 mini-batches, twice
    steps = read(line + "actor_rollout_ref.actor.optim.lr_warmup_steps=10")
    assert steps.actor.optim.warmup_steps == 80
    unset = read(line + "actor_rollout_ref.actor.optim.lr_warmup_steps=-1")
    assert unset.actor.optim.warmup_steps == 0


@pytest.mark.parametrize(
    ("line", "coefficient", "in_loss"),
    [
        ("algorithm.kl_ctrl.kl_coef=0.5", 0.5, 0.0),
        ("algorithm.kl_ctrl.kl_coef=0.5 algorithm.use_kl_in_reward=False", 0.0, 0.0),
        ("algorithm.use_kl_in_reward=True", 0.001, 0.0),
        ("actor_rollout_ref.actor.use_kl_loss=True", 0.01, 0.001),
        ("--init_kl_coef 0.5", 0.5, 0.0),
        ("--init_kl_coef 0.5 --use_kl_loss", 0.0, 0.5),
    ],
)
def test_kl_goes_where_the_other_program_puts_it(
    line: str, coefficient: float, in_loss: float
) -> None:
    config = read(line)
    assert (config.algorithm.kl_coef, config.actor.kl_loss_coef) == (coefficient, in_loss)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("algorithm.adv_estimator=grpo", "algorithm.adv_estimator=grpo: this trainer has"),
        ("--advantage_estimator rloo", "--advantage_estimator rloo: this trainer has"),
        ("--lr_warmup_ratio 0.03", "give trainer.total_steps"),
        ("--data.max_len 100", "give --rollout.max_new_tokens too"),
        ("--disable_ds_ckpt", "nothing is left to save"),
        ("--remote_rm_url http://host/get_reward", "not from a server"),
        ("--use_kl_loss --kl_target 0.1", "has a fixed weight here"),
        ("--async_train", "--async_train: generating and training take turns here"),
        ("--eps_clip_low_high 0.2 0.3", "one clip range for both sides"),
        ("trainer.logger=['console','mlflow']", "there is no logger mlflow here"),
        ("trainer.resume_mode=resume_path", "trainer.resume_from_path must say which"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size=8", "give ppo_micro_batch_size_per_gpu"),
        ("actor_rollout_ref.rollout.name=sglang", "it must be one of hf, vllm"),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=x", "one of constant, cosine"),
        ("reward_model.enable=True", "reward_model.model.path must say which"),
    ],
)
def test_foreign_values_that_cannot_be_had_are_refused(line: str, sentence: str) -> None:
    assert sentence in refusal(line)


VALUES: tuple[Any, ...] = ("x", "null", "-1", "1e400", "", "a b", ["a"], {"a": "b"}, [["1"]])


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_any_value_of_a_foreign_name_is_taken_or_refused_in_a_sentence(value: Any) -> None:
    for name in VERL_RULES:
        with contextlib.suppress(UsageError):
            merged = Merged()
            merged.add(name, value)
            merged.resolve()
    for flag in RULES if isinstance(value, str) else ():
        with contextlib.suppress(UsageError):
            merged = Merged()
            merged.add_flag(flag, value)
            merged.resolve()


def test_a_key_of_ours_is_not_read_as_a_foreign_one() -> None:
    assert set(VERL_RULES) & KEYS.keys() == {"data.val_batch_size", "trainer.resume_mode"}
    assert set(map(canonical, FLAGS)) == set(RULES)


def test_differences_are_those_that_change_training() -> None:
    old = read("actor.optim.lr=1e-5 storage.run=a trainer.save_freq=7 actor.optim.betas=[0.8,0.9]")
    new = read("actor.optim.lr=2e-5 storage.run=b trainer.save_freq=9 data.val_files=[v]")
    stored = msgspec.json.decode(msgspec.json.encode(to_dict(old)))
    assert differences(stored, new) == [
        ("actor.optim.lr", 1e-5, 2e-5),
        ("actor.optim.betas", [0.8, 0.9], [0.9, 0.999]),
    ]
    assert differences(stored, old) == []
    assert differences(to_dict(old), old) == []


def test_a_stored_configuration_of_another_version_is_compared() -> None:
    stored = to_dict(Config())
    del stored["actor"]["clip_ratio"]
    stored["actor"]["dual_clip"] = 3.0
    stored["storage"]["gone"] = 1
    stored["rollout"] = None
    assert differences(stored, read("actor.clip_ratio=0.1")) == [
        ("actor.clip_ratio", 0.2, 0.1),
        ("actor.dual_clip", 3.0, None),
    ]


def test_the_digest_is_that_of_what_changes_training() -> None:
    base = config_digest(Config())
    assert config_digest(read("storage.run=b trainer.stop_at_step=5")) == base
    assert config_digest(read("actor.optim.lr=2e-6")) != base


def test_check_takes_the_default() -> None:
    check(Config())
