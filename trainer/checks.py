"""What a configuration must fulfil beyond the types of its values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import msgspec

from ckptstore.errors import UsageError
from ckptstore.layout import check_run
from ckptstore.sizes import parse_size
from ckptstore.uri import Ref, StoreURI, is_ref, parse_ref, redact
from trainer.config import Config, StorageConfig, TrainerConfig
from trainer.schema import display, flatten

Test = tuple[Callable[[Any], bool], str]

_POSITIVE: Test = (lambda v: v > 0, "greater than 0")
_NOT_NEGATIVE: Test = (lambda v: v >= 0, "0 or greater")
_SHARE: Test = (lambda v: 0 <= v <= 1, "from 0 to 1")
_POSITIVE_SHARE: Test = (lambda v: 0 < v <= 1, "greater than 0 and at most 1")
_EVERY: Test = (lambda v: v == -1 or v > 0, "greater than 0, or -1 for never")
_BETAS: Test = (lambda v: all(0 <= b < 1 for b in v), "two numbers from 0 to below 1")
_SOME: Test = (bool, "not empty")
_CONTENTS: Test = (lambda v: 0 < len(v) == len(set(v)), "one or more, each once")

_OPTIM: Mapping[str, Test] = {
    "lr": _NOT_NEGATIVE,
    "betas": _BETAS,
    "eps": _POSITIVE,
    "weight_decay": _NOT_NEGATIVE,
    "warmup_steps": _NOT_NEGATIVE,
    "min_lr_ratio": _SHARE,
    "grad_clip": _NOT_NEGATIVE,
}

_TESTS: Mapping[str, Test] = {
    "model.path": _SOME,
    "model.lora.rank": _NOT_NEGATIVE,
    "model.lora.alpha": _POSITIVE,
    "data.train_files": _SOME,
    "data.max_prompt_length": _POSITIVE,
    "data.batch_size": _POSITIVE,
    "data.val_batch_size": _POSITIVE,
    "rollout.n": _POSITIVE,
    "rollout.max_new_tokens": _POSITIVE,
    "rollout.temperature": _POSITIVE,
    "rollout.top_p": _POSITIVE_SHARE,
    "rollout.top_k": _NOT_NEGATIVE,
    "rollout.val_temperature": _NOT_NEGATIVE,
    "rollout.micro_batch_size": _NOT_NEGATIVE,
    "rollout.tensor_parallel_size": _POSITIVE,
    "rollout.gpu_memory_utilization": _POSITIVE_SHARE,
    "rollout.max_num_batched_tokens": _POSITIVE,
    "rollout.max_num_seqs": _POSITIVE,
    "actor.mini_batch_size": _NOT_NEGATIVE,
    "actor.micro_batch_size": _NOT_NEGATIVE,
    "actor.epochs": _POSITIVE,
    "actor.clip_ratio": _POSITIVE,
    "actor.kl_loss_coef": _NOT_NEGATIVE,
    "critic.mini_batch_size": _NOT_NEGATIVE,
    "critic.micro_batch_size": _NOT_NEGATIVE,
    "critic.epochs": _NOT_NEGATIVE,
    "critic.clip_value": _POSITIVE,
    "critic.warmup_steps": _NOT_NEGATIVE,
    "algorithm.gamma": _SHARE,
    "algorithm.lam": _SHARE,
    "algorithm.kl_coef": _NOT_NEGATIVE,
    "algorithm.kl_target": _POSITIVE,
    "algorithm.kl_horizon": _POSITIVE,
    "reward.micro_batch_size": _POSITIVE,
    "storage.threads": (lambda v: 0 <= v <= 256, "from 0 to 256"),
    "storage.save_contents": _CONTENTS,
    "storage.load_contents": _CONTENTS,
    "storage.keep_last": _POSITIVE,
    "storage.keep_every": _POSITIVE,
    "storage.keep_best": _POSITIVE,
    "storage.owed_limit": _NOT_NEGATIVE,
    "trainer.total_steps": _POSITIVE,
    "trainer.total_epochs": _POSITIVE,
    "trainer.stop_at_step": _POSITIVE,
    "trainer.save_freq": _EVERY,
    "trainer.save_every_epochs": _EVERY,
    "trainer.save_every_minutes": _EVERY,
    "trainer.grace_seconds": _POSITIVE,
    "trainer.expires_margin": _NOT_NEGATIVE,
    "trainer.test_freq": _EVERY,
    "trainer.log_dir": (
        lambda v: bool(v) and "{" not in v.replace("{run}", ""),
        "a directory; {run} in it is the run's name, and no other braces stand for anything",
    ),
    "trainer.seed": (lambda v: 0 <= v < 2**32, "from 0 to 4294967295"),
    "trainer.nccl_timeout": _POSITIVE,
    "trainer.alert_mirror_lag": _POSITIVE,
    "ray.workers": _POSITIVE,
    "ray.cpus_per_worker": _NOT_NEGATIVE,
    "ray.gpus_per_worker": _NOT_NEGATIVE,
    "ray.init_timeout": _POSITIVE,
    **{f"actor.optim.{name}": test for name, test in _OPTIM.items()},
    **{f"critic.optim.{name}": test for name, test in _OPTIM.items()},
}  # fmt: skip

_BEST = re.compile(r"[^\s:]+(:[^\s:]+)*:(max|min)")
_NUMBER = re.compile(r"\d+(\.\d+)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check(config: Config) -> None:
    """Refuse a configuration whose values cannot be, alone or together.

    Raises:
        UsageError: the first problem found; the message names the key.
    """
    values = dict(flatten(msgspec.to_builtins(config)))
    for key, (good, what) in _TESTS.items():
        if values[key] is not None and not good(values[key]):
            raise UsageError(f"{key} is {display(values[key])}; it must be {what}")
    _check_batches(config)
    _check_engine(config)
    _check_storage(config.storage)
    _check_course(config.trainer)


@contextmanager
def _about(key: str) -> Iterator[None]:
    """Names the key in a refusal that does not know it."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{key}: {error}", hint=error.hint) from error


def _check_batches(config: Config) -> None:
    samples = config.data.batch_size * config.rollout.n
    for key, size in (
        ("actor.mini_batch_size", config.actor.mini_batch_size),
        ("critic.mini_batch_size", config.critic.mini_batch_size),
    ):
        if size and samples % size:
            raise UsageError(
                f"{key} is {size}, which does not divide the {samples} samples of a step "
                f"(data.batch_size {config.data.batch_size} × rollout.n {config.rollout.n})"
            )


def _check_engine(config: Config) -> None:
    shards, engine = config.rollout.tensor_parallel_size, config.rollout.engine
    if shards > 1 and engine != "vllm":
        raise UsageError(
            f"rollout.tensor_parallel_size is {shards}, and rollout.engine={engine} generates on "
            "each rank alone",
            hint="set rollout.engine=vllm, or leave out rollout.tensor_parallel_size",
        )
    if config.runtime == "ray":
        check_ranks(config, config.ray.workers)


def check_ranks(config: Config, ranks: int) -> None:
    """Refuse a configuration that so many ranks cannot train.

    Raises:
        UsageError: they do not form whole groups for ``rollout.tensor_parallel_size``.
    """
    shards = config.rollout.tensor_parallel_size
    if ranks % shards:
        raise UsageError(
            f"rollout.tensor_parallel_size is {shards}, and the number of ranks, {ranks}, is no "
            "multiple of it: so many ranks share an engine",
            hint="start another number of ranks, or set rollout.tensor_parallel_size=1",
        )


def _check_storage(storage: StorageConfig) -> None:
    with _about("storage.run"):
        check_run(storage.run)
    with _about("storage.uri"):
        store = StoreURI.parse(storage.uri)
    for mirror in storage.mirrors:
        with _about("storage.mirrors"):
            if StoreURI.parse(mirror) == store:
                raise UsageError("a store cannot mirror itself")
    if "hf_model" in storage.load_contents or "model" not in storage.load_contents:
        raise UsageError(
            f"storage.load_contents is {display(storage.load_contents)}; it must hold model, and "
            "optimizer and extra on request",
            hint="trainer.resume_mode=none loads nothing",
        )
    if storage.best_metric is not None and not _BEST.fullmatch(storage.best_metric):
        raise UsageError(
            f"storage.best_metric is {display(storage.best_metric)}; "
            "it must be NAME:max or NAME:min"
        )
    if storage.max_size is not None:
        with _about("storage.max_size"):
            parse_size(storage.max_size)
    if storage.keep_best is not None and storage.best_metric is None:
        raise UsageError("storage.keep_best needs storage.best_metric, which says what best is")


def _check_course(trainer: TrainerConfig) -> None:
    mode, start, expires = trainer.resume_mode, trainer.resume_from, trainer.expires_at
    if mode.isascii() and mode.isdigit():
        with _about("trainer.resume_mode"):
            parse_ref(f"run@{mode}")
    elif mode not in ("auto", "latest", "none"):
        if not is_ref(mode):
            raise UsageError(
                f"trainer.resume_mode is {redact(mode)}; it must be auto, latest, none, a step, "
                "RUN@STEP or STORE/RUN@STEP"
            )
        with _about("trainer.resume_mode"):
            _check_store_of(parse_ref(mode))
    if start is not None:
        with _about("trainer.resume_from"):
            _check_store_of(parse_ref(start, selector_optional=True))
    if expires is not None and not _is_time(expires) and not _VARIABLE.fullmatch(expires):
        raise UsageError(
            f"trainer.expires_at is {display(expires)}; it must be a time such as "
            "2026-01-31T18:00:00+00:00, seconds since the epoch, or the name of an environment "
            "variable that holds one"
        )


def _check_store_of(ref: Ref) -> None:
    if ref.store is not None:
        StoreURI.parse(ref.store)


def _is_time(text: str) -> bool:
    if _NUMBER.fullmatch(text):
        return True
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True
