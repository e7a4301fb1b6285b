"""Storage URIs and REFs.

A store is named by a local path or a URI with its options in the query:
``/data/ckpts``, ``file:///data/ckpts?dedupe=link``, ``memory://name``.
A REF names a checkpoint: ``RUN@STEP``, ``RUN@latest``, ``RUN@best``, ``RUN@TAG`` or ``RUN@NAME``,
alone or behind a store and a slash.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlencode

from ckptstore.errors import UsageError, printable
from ckptstore.layout import Name, check_run, check_step, check_tag

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SECRET = re.compile(r"secret|passw|token|credential|access_?key", re.IGNORECASE)


@dataclass(frozen=True)
class StoreURI:
    """Where a store is.

    Attributes:
        scheme: ``file``, ``memory``, …
        path: For ``file`` the absolute path; for others all between the scheme and the query.
        options: The query.
    """

    scheme: str
    path: str
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> StoreURI:
        """The store that ``text`` names.

        A text without a scheme is a local path, taken as it is (it may hold ``?``, ``#``, ``%``).

        Raises:
            UsageError: it is empty, malformed, or carries a secret.
        """
        if not text or "\0" in text:
            raise UsageError("no store given", hint="name one, set CKPT_STORE, or write ckpt.toml")
        match = _SCHEME.match(text)
        if match is None:
            return cls("file", os.path.abspath(os.path.expanduser(text)))
        scheme = match[1].lower()
        rest, _, query = text[match.end() :].partition("?")
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        except ValueError as error:
            raise UsageError(f"the options in {redact(text)} cannot be read: {error}") from error
        options = dict(pairs)
        authority = rest.partition("/")[0]
        if any(_SECRET.search(k) for k in options) or ":" in authority.rpartition("@")[0]:
            raise UsageError(
                f"{redact(text)} carries a secret",
                hint="give secrets by the environment or the storage's own configuration",
            )
        if scheme == "file":
            if authority not in ("", "localhost"):
                raise UsageError(
                    f"{redact(text)} names the host {printable(authority)!r}",
                    hint=f"a local path has three slashes: file:///{rest}",
                )
            path = os.path.abspath(unquote(rest[len(authority) :]) or "/")
            return cls(scheme, path, options)
        if not rest.strip("/"):
            raise UsageError(f"{redact(text)} names no {scheme} location")
        return cls(scheme, rest.rstrip("/"), options)

    def __str__(self) -> str:
        """The shortest text that names this store."""
        query = f"?{urlencode(self.options)}" if self.options else ""
        if self.scheme == "file" and not query:
            return self.path
        path = quote(self.path) if self.scheme == "file" else self.path
        return f"{self.scheme}://{path}{query}"


def redact(text: str) -> str:
    """``text`` for a message: without a password in the authority, without option values."""
    text = re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:…@", text)
    head, mark, query = text.partition("?")
    names = "&".join(f"{part.partition('=')[0]}=…" for part in query.split("&"))
    return printable(head + (mark + names if mark else ""))


@dataclass(frozen=True)
class Ref:
    """A checkpoint as a person names it.

    Attributes:
        store: The store's text before the run, or ``None`` when the REF stood alone.
        run: The run.
        selector: What stood behind the ``@``; ``None`` when there was no ``@``.
    """

    store: str | None
    run: str
    selector: str | None

    @property
    def step(self) -> int | None:
        """The step, when the selector is one."""
        selector = self.selector or ""
        is_number = selector.isascii() and selector.isdigit() and len(selector) <= 18
        return int(selector) if is_number else None

    @property
    def name(self) -> Name | None:
        """The full name, when the selector is one."""
        return Name.parse(self.selector or "")

    def __str__(self) -> str:
        return self.run if self.selector is None else f"{self.run}@{self.selector}"


def is_ref(text: str) -> bool:
    """Whether an argument is a REF: its last segment (before any query) holds an ``@``."""
    return "@" in _split_query(text)[0].rpartition("/")[2]


def parse_ref(text: str, *, selector_optional: bool = False) -> Ref:
    """The checkpoint that ``text`` names.

    Args:
        text: ``RUN@SELECTOR``, alone or behind a store and a slash; options come last.
        selector_optional: Also take ``RUN`` or ``STORE/RUN`` (for a push that finds the step).

    Raises:
        UsageError: there is no run, no selector, or one that cannot be.
    """
    body, query = _split_query(text)
    store, slash, last = body.rpartition("/")
    run, at, selector = last.partition("@")
    form = "RUN@STEP, RUN@latest, RUN@best, RUN@TAG or RUN@NAME, alone or behind a store and a '/'"
    scheme = _SCHEME.match(body)
    if scheme is not None and len(store) < scheme.end():
        raise UsageError(f"{redact(text)!r} names no store before the run", hint=f"a REF is {form}")
    if not run or (not selector and (at or not selector_optional)):
        raise UsageError(f"{redact(text)!r} does not name a checkpoint", hint=f"a REF is {form}")
    check_run(run)
    ref = Ref((store or "/") + query if slash else None, run, selector if at else None)
    if at:
        _check_selector(ref, text, form)
    return ref


def _check_selector(ref: Ref, text: str, form: str) -> None:
    selector = ref.selector or ""
    if re.fullmatch(r"[+-]?\d+", selector) and ref.step is None:
        raise UsageError(
            f"{printable(selector)} cannot be a step: a step is a whole number from 0 on"
        )
    if ref.step is not None:
        check_step(ref.step)
    elif selector not in ("latest", "best") and ref.name is None:
        try:
            check_tag(selector)
        except UsageError:
            raise UsageError(
                f"{redact(text)!r} does not name a checkpoint: {printable(selector)!r} is no step, "
                "name or tag",
                hint=f"a REF is {form}",
            ) from None


def _split_query(text: str) -> tuple[str, str]:
    """The text before its query, and the query with its ``?``; only a URI has a query."""
    if _SCHEME.match(text) is None:
        return text, ""
    body, mark, query = text.partition("?")
    return body, mark + query
