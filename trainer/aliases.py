"""Names of verl and OpenRLHF, and the keys they become.

A name maps to a `Rule`: a function from the value as text, and what else was given, to keys and
their values. Only what is given is translated: the defaults are this trainer's own. A name that
only concerns how the other program runs is accepted and has no meaning here; one that would change
the training is accepted with the one value that is true here, and refused with any other.

Batches are counted differently. verl: ``data.train_batch_size`` and ``ppo_mini_batch_size`` count
prompts, each with ``rollout.n`` samples. OpenRLHF: ``rollout_batch_size`` counts prompts,
``train_batch_size`` samples per optimizer step. Here ``data.batch_size`` counts prompts, and
mini-batches count samples. verl's learning rate moves once a step, OpenRLHF's and ours once an
optimizer step.

verl's ``resume_mode=resume_path`` starts from exactly ``resume_from_path`` each time. When that is
a checkpoint of this run it becomes ``trainer.resume_mode``; when it is another run's it becomes
``trainer.resume_from``, so that a restart goes on instead of starting there again. A path
``…/RUN/global_step_N`` means ``…/RUN@N``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptstore.errors import UsageError
from ckptstore.uri import StoreURI, is_ref, parse_ref
from trainer.config import ActorConfig, Config, CriticConfig
from trainer.schema import NULLS, display


@dataclass(frozen=True)
class Context:
    """What a rule may look at.

    Attributes:
        config: Everything that earlier stages said.
        given: The foreign names that were given, by their oldest spelling, and their values.
    """

    config: Config
    given: Mapping[str, Any]


Apply = Callable[[Any, Context], Mapping[str, Any]]


@dataclass(frozen=True)
class Rule:
    """What a foreign name becomes.

    Attributes:
        apply: From the value to keys and values; none when it has no meaning here. Raises
            ValueError with the rest of a sentence for a value that cannot be.
        stage: Rules of a later stage see what the earlier ones said: 1 counts batches, 2 steps.
        remark: Added to the note about it.
        idle: What the note says when no key comes of it.
        secret: The value is never shown.
    """

    apply: Apply
    stage: int = 0
    remark: str = ""
    idle: str = "has no meaning here"
    secret: bool = False


def to(*keys: str, by: Callable[[Any], Any] | None = None, remark: str = "") -> Rule:
    """The value, converted by ``by``, is that of each of ``keys``."""

    def apply(value: Any, _: Context) -> Mapping[str, Any]:
        return dict.fromkeys(keys, value if by is None else by(value))

    return Rule(apply, remark=remark)


def table(key: str, words: Mapping[str, Any]) -> Rule:
    """Words that mean other words."""

    def by(value: Any) -> Any:
        if not isinstance(value, str) or value not in words:
            raise ValueError(f"it must be one of {', '.join(words)}")
        return words[value]

    return to(key, by=by)


def only(*values: str, have: str) -> Rule:
    """Accepted with one of ``values``, which is what happens here anyway."""

    def apply(value: Any, _: Context) -> Mapping[str, Any]:
        if str(value).lower() not in values:
            raise ValueError(f"this trainer {have}")
        return {}

    return Rule(apply, idle="is how it is here")


def refused(sentence: str) -> Rule:
    """Never accepted."""

    def apply(_value: Any, _context: Context) -> Mapping[str, Any]:
        raise ValueError(sentence)

    return Rule(apply)


def nothing(remark: str = "") -> Rule:
    """Accepted, without meaning here."""
    return Rule(lambda _value, _context: {}, remark=remark)


def is_null(value: Any) -> bool:
    """Whether the text says that there is no value."""
    return value is None or (isinstance(value, str) and value in NULLS)


def is_true(value: Any) -> bool:
    """Whether the text is a true one."""
    return str(value).lower() in ("true", "1", "yes", "on")


def number(value: Any) -> float:
    """The number that the text says."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError("it must be a number") from None


def whole(value: Any) -> int:
    """The whole number that the text says."""
    amount = number(value)
    if not amount.is_integer():
        raise ValueError("it must be a whole number")
    return int(amount)


def unless_null(rule: Rule) -> Rule:
    """The rule, which null does not reach."""

    def apply(value: Any, context: Context) -> Mapping[str, Any]:
        return {} if is_null(value) else rule.apply(value, context)

    return replace(rule, apply=apply)


def optimizer_steps(config: Config, role: ActorConfig | CriticConfig) -> int:
    """How many optimizer steps a step of training has for a role."""
    samples = config.data.batch_size * config.rollout.n
    mini = role.mini_batch_size or config.actor.mini_batch_size or samples
    return -(-samples // mini) * (role.epochs or config.actor.epochs)


ROLES = ("actor", "critic")


def warmup(role: str, *, ratio: bool, of_steps: bool) -> Rule:
    """A warm-up of the learning rate.

    Args:
        role: ``actor`` or ``critic``.
        ratio: The value is a share of all steps, not a number of them.
        of_steps: It counts steps of training (verl), not optimizer steps (OpenRLHF).
    """

    def apply(value: Any, context: Context) -> Mapping[str, Any]:
        config, amount = context.config, number(value)
        if amount <= 0:
            return {} if amount < 0 else {f"{role}.optim.warmup_steps": 0}
        if not amount <= (1 if ratio else 1e15):
            raise ValueError(
                "it must be a share from 0 to 1" if ratio else "it is no number of steps"
            )
        steps = optimizer_steps(config, getattr(config, role))
        if ratio:
            total = config.trainer.total_steps
            if total is None:
                raise ValueError(
                    "a share of all steps needs their number: give trainer.total_steps, or "
                    f"{role}.optim.warmup_steps instead"
                )
            # verl rounds steps of training down, OpenRLHF optimizer steps up.
            amount = int(amount * total) if of_steps else math.ceil(amount * total * steps)
        return {f"{role}.optim.warmup_steps": int(amount) * (steps if of_steps else 1)}

    return Rule(apply, stage=2)


def mini_batch(role: str) -> Rule:
    """A mini-batch of verl's, which counts prompts."""

    def apply(value: Any, context: Context) -> Mapping[str, Any]:
        return {f"{role}.mini_batch_size": whole(value) * context.config.rollout.n}

    return Rule(apply, stage=1, remark="samples, not prompts")


def both(*rules: Rule) -> Rule:
    """All of the rules."""

    def apply(value: Any, context: Context) -> Mapping[str, Any]:
        return {k: v for rule in rules for k, v in rule.apply(value, context).items()}

    return Rule(apply, max(r.stage for r in rules), rules[0].remark)


_STEP = re.compile(r"(?:(?P<run>.*)/)?global_step_(?P<step>\d+)/*")


def resume(_: Any, context: Context) -> Mapping[str, Any]:
    """What ``resume_mode`` and ``resume_from_path`` of verl's mean together."""
    mode = context.given.get("trainer.resume_mode")
    path = context.given.get("trainer.resume_from_path")
    if mode == "disable":
        return {"trainer.resume_mode": "none"}
    if is_null(path):
        if mode == "resume_path":
            raise ValueError("trainer.resume_from_path must say which")
        return {}
    text, own = _checkpoint(str(path), context.config)
    if mode != "resume_path":
        return {"trainer.resume_from": text}
    if own:
        return {"trainer.resume_mode": text}
    return {"trainer.resume_mode": "auto", "trainer.resume_from": text}


def _checkpoint(text: str, config: Config) -> tuple[str, bool]:
    """The REF for a path or REF, and whether it is one of this run."""
    storage = config.storage
    match = _STEP.fullmatch(text)
    if match is not None:
        run, step = match["run"], match["step"]
        if not run or StoreURI.parse(run) == StoreURI.parse(storage.uri):
            return step, True
        text = f"{run}@{step}"
    if text.isdigit():
        return text, True
    if not is_ref(text):
        return text, False
    ref = parse_ref(text)
    store = storage.uri if ref.store is None else ref.store
    own = ref.run == storage.run and StoreURI.parse(store) == StoreURI.parse(storage.uri)
    return text, own


def loggers(value: Any) -> list[str]:
    """Names of loggers without those that are always on."""
    names = value if isinstance(value, list) else [value]
    unknown = [n for n in names if n not in ("console", "file", "tensorboard", "wandb")]
    if unknown:
        raise ValueError(f"there is no logger {display(unknown[0])} here")
    return [n for n in names if n in ("tensorboard", "wandb")]


def size(value: Any) -> str | None:
    """OpenRLHF's limit on disk space, in GiB; its default of 1e8 is none."""
    gib = number(value)
    return None if gib >= 1e8 else f"{math.floor(gib)}GiB"


def function_in(path: str, name: str) -> str:
    """A reward function in a file."""
    if re.match(r"https?://", path):
        raise ValueError("a reward comes from a function in a file here, not from a server")
    return f"{path}:{name}"


def usage(name: str, value: Any, rule: Rule, sentence: object) -> UsageError:
    """The refusal of a foreign name's value."""
    return UsageError(f"{shown(name, value, rule)}: {sentence}")


def shown(name: str, value: Any, rule: Rule) -> str:
    """A foreign name with its value, as it was written; a switch has none."""
    if value is None:
        return name
    joint = " " if name.startswith("--") else "="
    return f"{name}{joint}{'…' if rule.secret else display(value)}"
