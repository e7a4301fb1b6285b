"""From YAML files and a command line to the configuration, and back.

Every value is read as text (or a list or mapping of texts) and turned into what its key's type
asks for, so ``lr=1e-6`` is a number and ``storage.run=007`` a name, wherever they stand. Files
merge from left to right, and the command line comes last. Names of verl and OpenRLHF
(``trainer.aliases``) are translated after merging, since what one means can depend on another.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import yaml  # type: ignore[import-untyped]
from blake3 import blake3

from ckptstore.errors import UsageError, printable, translate_os_errors
from trainer.aliases_openrlhf import FLAGS
from trainer.checks import check
from trainer.config import Config
from trainer.merging import Merged
from trainer.schema import KEYS, flatten

__all__ = [
    "Options",
    "check",
    "config_digest",
    "differences",
    "load_config",
    "read_config",
    "to_dict",
    "to_yaml",
]

NOT_TRAINING = frozenset({
    "data.val_batch_size", "data.val_files", "rollout.val_temperature",
    "model.trust_remote_code", "actor.offload_optimizer",
    "rollout.gpu_memory_utilization", "rollout.sleep",
    "runtime",
    "trainer.alert_mirror_lag", "trainer.expires_at", "trainer.expires_margin",
    "trainer.grace_seconds", "trainer.log_digest", "trainer.log_dir", "trainer.loggers",
    "trainer.nccl_timeout", "trainer.project", "trainer.resume_from", "trainer.resume_mode",
    "trainer.resume_strict", "trainer.save_every_epochs", "trainer.save_every_minutes",
    "trainer.save_freq", "trainer.save_on_signal", "trainer.stop_at_step", "trainer.test_freq",
    "trainer.val_before_train",
})  # fmt: skip
"""Keys that a run may change between two starts without training differently."""

NOT_TRAINING_SECTIONS = ("ray.", "storage.")

_DESCRIPTION = """\
Train a language model with PPO; kill it anywhere, start the same command again, and it goes on.
Values come from the files, then from key=value: dotted keys, such as trainer.save_freq=10.
Names of verl (trainer.default_local_dir=…) and OpenRLHF (--ckpt_path …) are taken too."""
_EPILOG = "Example: ckpt-train --config gsm8k.yaml storage.uri=/data/ckpts trainer.save_freq=10"


@dataclass(frozen=True)
class Options:
    """What a command line says beside the configuration.

    Attributes:
        print_config: Print the configuration and end.
        dry_run: Check everything that can be checked without training, and end.
        notes: What each foreign name became, a sentence each, to be logged.
    """

    print_config: bool = False
    dry_run: bool = False
    notes: tuple[str, ...] = ()


def load_config(argv: Sequence[str]) -> tuple[Config, Options]:
    """The configuration that a command line asks for, checked.

    Args:
        argv: The arguments without the program's name. ``-h`` prints help and ends the program.

    Raises:
        NotFoundError: a configuration file is missing.
        UsageError: a key, a value or their combination cannot be; the message names it.
    """
    config, options = read_config(argv)
    check(config)
    return config, options


def read_config(argv: Sequence[str]) -> tuple[Config, Options]:
    """As `load_config`, but a combination of values may still be one that cannot be."""
    parser = _parser()
    found, rest = parser.parse_known_args(list(argv))
    merged = Merged()
    for path in found.config:
        for name, value in _read(path):
            merged.add(name, value)
        merged.next_layer()
    for name, words in found.flags:
        merged.add_flag(name, " ".join(words) if words else None)
    for word in [*found.overrides, *rest]:
        merged.add(*_override(word))
    config, notes = merged.resolve()
    return config, Options(found.print_config, found.dry_run, tuple(notes))


def to_dict(config: Config) -> dict[str, Any]:
    """``config`` as nested plain values, as a checkpoint stores it."""
    return _plain(config)


def to_yaml(config: Config) -> str:
    """``config`` with every key, as a file that ``--config`` takes."""
    text: str = yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)
    return text


def config_digest(config: Config) -> str:
    """BLAKE3 over the keys that change training: the same exactly if `differences` finds none."""
    training = {k: v for k, v in flatten(to_dict(config)) if _changes_training(k)}
    return blake3(msgspec.json.encode(training, order="deterministic")).hexdigest()


def differences(old: Mapping[str, Any], new: Config) -> list[tuple[str, Any, Any]]:
    """What makes ``new`` train differently than a stored configuration.

    Args:
        old: From `to_dict`, perhaps of another version: a key it lacks had today's default; one
            that is not known any more is reported with the new value ``None``.
        new: What training goes on with.

    Returns:
        ``(key, old value, new value)`` in the order of the keys.
    """
    before = dict(flatten(to_dict(Config()))) | dict(flatten(_plain(old)))
    after = dict(flatten(to_dict(new)))
    return [
        (key, value, after.get(key))
        for key, value in before.items()
        if _changes_training(key) and value != after.get(key)
    ]


def _plain(tree: Config | Mapping[str, Any]) -> dict[str, Any]:
    """``tree`` as it comes back from JSON: with lists for tuples."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(tree))
    return plain


def _changes_training(key: str) -> bool:
    return key not in NOT_TRAINING and not key.startswith(NOT_TRAINING_SECTIONS)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint="ckpt-train --help shows how it is called")


class _Flag(argparse.Action):
    """Keeps a foreign flag with its words; a ``key=value`` behind an open-ended one is no word."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        words = [values] if isinstance(values, str) else list(values or [])
        if self.nargs == "*":
            namespace.overrides += [w for w in words if "=" in w]
            words = [w for w in words if "=" not in w]
            if not words:
                raise argparse.ArgumentError(self, "expected at least one argument")
        namespace.flags.append(((option_string or "").removeprefix("--"), words))


def _parser() -> _Parser:
    parser = _Parser(
        prog="ckpt-train",
        usage="ckpt-train [--config FILE]... [key=value]...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="YAML; the last file wins"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the configuration as YAML and end"
    )
    parser.add_argument("--dry-run", action="store_true", help="check what can be checked and end")
    parser.set_defaults(flags=[], overrides=[])
    for name, nargs in FLAGS.items():
        parser.add_argument(
            f"--{name}",
            action=_Flag,
            nargs=nargs,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
    return parser


def _override(word: str) -> tuple[str, Any]:
    """The key and value of ``key=value``; Hydra's ``+`` before a key says nothing here."""
    if word.startswith("-"):
        flag = word.partition("=")[0]
        if flag.lstrip("-") in KEYS:
            raise UsageError(f"a key is given without dashes: {flag.lstrip('-')}=VALUE")
        known = ["config", "print-config", "dry-run", "help", *FLAGS]
        near = difflib.get_close_matches(flag.lstrip("-"), known, n=1)
        raise UsageError(
            f"{printable(flag)}: no such option" + (f"; did you mean --{near[0]}?" if near else "")
        )
    key, equals, text = word.lstrip("+").partition("=")
    if not equals or not key:
        raise UsageError(
            f"{printable(word)!r} is neither an option nor key=value",
            hint="a file is given as --config FILE",
        )
    # Text without brackets or quotes is taken as it is: a path may hold ': ' and '#'.
    return key, _yaml(text, key) if text.startswith(("[", "{", '"', "'")) else text


def _read(path: str) -> Iterator[tuple[str, Any]]:
    with translate_os_errors(path):
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"{printable(path)} is not UTF-8: {error}") from error
    tree = _yaml(text, path)
    if not isinstance(tree, Mapping) and tree:
        raise UsageError(f"{printable(path)} holds no keys with values")
    return flatten(tree or {})


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # noqa: S506 (it builds texts, lists and mappings)
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{printable(where)} is not valid YAML: {reason}") from error


class _Loader(yaml.BaseLoader):  # type: ignore[misc]
    """Leaves every value the text it is, and refuses a key that stands twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {name} stands here twice", node.start_mark
                )
        return super().construct_mapping(node, deep)
