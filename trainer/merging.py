"""Layers of keys and values, our own and foreign, and the configuration they make.

Each file is a layer and the command line is the last; a later layer wins. Within one layer a name
that stands twice counts as it stands last, and two different names that say different things about
one key are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ckptstore.errors import UsageError, printable
from trainer.aliases import Context, Rule, shown, usage
from trainer.aliases_openrlhf import RULES, canonical
from trainer.aliases_verl import VERL, verl_rule
from trainer.config import Config
from trainer.schema import KEYS, convert, display, flatten, is_section, nest, open_key, unknown


@dataclass(frozen=True)
class _Given:
    """A foreign name as it was given."""

    name: str
    value: Any
    rule: Rule
    layer: int


@dataclass(frozen=True)
class _Set:
    """A key's value, and the name that said it."""

    value: Any
    source: str
    layer: int


class Merged:
    """Collects names and values layer by layer."""

    def __init__(self) -> None:
        self._layer = 0
        self._own: dict[str, _Set] = {}
        self._foreign: dict[str, _Given] = {}

    def next_layer(self) -> None:
        """What is added from now on wins over what was added before."""
        self._layer += 1

    def add(self, name: str, value: Any) -> None:
        """A dotted name, of ours or of verl's.

        Raises:
            UsageError: there is no such name, or the value is none for it.
        """
        if "${" in display(value):
            raise UsageError(
                f"{printable(name)}: a reference such as ${{key}} is not resolved here",
                hint="write the value itself",
            )
        rule = verl_rule(name, value)
        if rule is not None:
            self._foreign[name] = _Given(name, value, rule, self._layer)
        elif name in KEYS:
            self._foreign.pop(name, None)
            self._set(name, value, name, self._layer)
        elif (found := open_key(name)) is not None:
            key, rest = found
            before = self._own[key].value if key in self._own else {}
            self._set(key, {**before, **nest({rest: value})}, key, self._layer)
        elif not (is_section(name) and value in ("", {})):
            raise unknown(name, VERL)

    def add_flag(self, flag: str, value: str | None) -> None:
        """A flag of OpenRLHF's with its words, ``None`` for a switch."""
        old = canonical(flag)
        self._foreign[old] = _Given(f"--{flag}", value, RULES[old], self._layer)

    def resolve(self) -> tuple[Config, list[str]]:
        """The configuration, and a note on each foreign name.

        Raises:
            UsageError: a value cannot be translated, or two names contradict each other.
        """
        given = {name: entry.value for name, entry in self._foreign.items()}
        notes: dict[str, str] = {}
        for stage in range(3):
            context = Context(self._config(), given)
            for old, entry in self._foreign.items():
                if entry.rule.stage == stage:
                    notes[old] = self._translate(entry, context)
        return self._config(), [notes[name] for name in self._foreign]

    def _translate(self, entry: _Given, context: Context) -> str:
        what = shown(entry.name, entry.value, entry.rule)
        try:
            found = entry.rule.apply(entry.value, context)
            said = {key: convert(key, value) for key, value in found.items()}
        except ValueError as error:
            raise usage(entry.name, entry.value, entry.rule, error) from error
        except UsageError as error:
            raise UsageError(f"{what}: {error}", hint=error.hint) from error
        for key, value in said.items():
            self._set(key, value, entry.name, entry.layer)
        remark = f" ({entry.rule.remark})" if entry.rule.remark else ""
        if not said:
            return f"{what} {entry.rule.idle}{remark}"
        return f"{what} is {', '.join(f'{k}={display(v)}' for k, v in said.items())}{remark}"

    def _set(self, key: str, value: Any, source: str, layer: int) -> None:
        typed, before = convert(key, value), self._own.get(key)
        if before is not None and before.layer > layer:
            return
        rival = before is not None and before.layer == layer and before.source != source
        if before is not None and rival and before.value != typed:
            raise UsageError(
                f"{key} has two values: {display(before.value)} from {before.source}, and "
                f"{display(typed)} from {source}",
                hint="give one of them",
            )
        self._own[key] = _Set(typed, source, layer)

    def _config(self) -> Config:
        values: Mapping[str, Any] = dict(flatten(msgspec.to_builtins(Config()))) | {
            key: entry.value for key, entry in self._own.items()
        }
        return msgspec.convert(nest(values), Config)
