"""Shell completion of REFs, in a bash that takes ``RUN@STEP`` for three words."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import MutableMapping
from typing import TextIO


def rejoin_words(environment: MutableMapping[str, str] = os.environ) -> None:
    """Undo bash's splitting at ``@``.

    Bash breaks words at the characters of COMP_WORDBREAKS, ``@`` among them, and puts what we
    answer in place of the last piece, which begins with the ``@``. So the pieces are joined here,
    and what stands before the ``@`` is left out of the answers on their way out.
    """
    if environment.get("_CKPT_COMPLETE") != "complete_bash" or "COMP_WORDS" not in environment:
        return
    words = environment["COMP_WORDS"].split("\n")
    current = int(environment.get("COMP_CWORD", "0"))
    joined: list[str] = []
    place, prefix = current, ""
    for index, word in enumerate(words):
        continues = bool(joined) and index > 1 and (word == "@" or words[index - 1] == "@")
        if not continues:
            joined.append(word)
        else:
            joined[-1] += word
        if index == current:
            place = len(joined) - 1
            prefix = joined[-1].rpartition("@")[0]
    environment["COMP_WORDS"] = "\n".join(joined)
    environment["COMP_CWORD"] = str(place)
    if prefix:
        sys.stdout = _WithoutPrefix(sys.stdout, prefix)


class _WithoutPrefix(io.TextIOBase):
    """Standard output whose lines lose a prefix."""

    def __init__(self, inner: TextIO, prefix: str) -> None:
        super().__init__()
        self._inner = inner
        self._prefix = prefix

    def write(self, text: str) -> int:
        lines = text.split("\n")
        self._inner.write("\n".join(line.removeprefix(self._prefix) for line in lines))
        return len(text)

    def flush(self) -> None:
        self._inner.flush()


def complete_ref(incomplete: str) -> list[str]:
    """REFs of the configured store that begin with what was typed."""
    from ckptstore.errors import CkptError
    from cli.options import open_store

    try:
        store = open_store(None)
        run, at, typed = incomplete.partition("@")
        if not at:
            return [f"{name}@" for name in store.runs() if name.startswith(run)]
        steps = sorted({name.step for name in store.catalog.record_names(run)}, reverse=True)
    except (CkptError, OSError):
        return []
    selectors = ["latest", "best", *map(str, steps)]
    return [f"{run}@{s}" for s in selectors if s.startswith(typed)]
