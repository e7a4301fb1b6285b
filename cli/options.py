"""Options that mean the same in every command, and what they lead to."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec

import typer

from cli.completion import complete_ref

if TYPE_CHECKING:
    from ckptstore.store import Store
    from ckptstore.uri import Ref

P = ParamSpec("P")


RefArgument = Annotated[
    str,
    typer.Argument(
        metavar="REF",
        help="RUN@STEP, @latest, @best, @TAG or @NAME, alone or behind a store and '/'.",
        autocompletion=complete_ref,
        show_default=False,
    ),
]
StoreOption = Annotated[
    str | None,
    typer.Option("--store", metavar="STORE", help="The store, when the REF does not name one."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
NoProgressOption = Annotated[bool, typer.Option("--no-progress", help="No progress bar.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, do it.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Say what would be done, and do nothing.")
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", min=1, max=256, help="Blocks in flight; each costs 16 MiB."),
]


def command(function: Callable[P, None]) -> Callable[P, None]:
    """A command whose errors become a sentence on stderr and an exit code."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        from ckptstore.errors import CkptError, from_os_error
        from cli.output import show_error

        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, _terminate)
        for stream in (sys.stdout, sys.stderr):  # file names need not be text
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            function(*args, **kwargs)
            if sys.stdout is not None:
                sys.stdout.flush()
        except CkptError as error:
            show_error(str(error), error.hint)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            show_error("interrupted")
            raise typer.Exit(130) from None
        except BrokenPipeError:  # `ckpt list | head`
            _drop_stdout()
            raise typer.Exit(141) from None
        except OSError as error:  # all others were translated where they happened
            _drop_stdout()
            translated = from_os_error(error, error.filename or "standard input or output")
            show_error(str(translated))
            raise typer.Exit(translated.exit_code) from None

    return run


def _drop_stdout() -> None:
    """What is still buffered cannot be written; do not try again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _terminate(signum: int, frame: Any) -> NoReturn:
    del signum, frame
    if sys.stderr is not None:
        print("error: terminated", file=sys.stderr)
    raise SystemExit(143)


def configured_store() -> str | None:
    """The store of ``CKPT_STORE``, ``./ckpt.toml`` or the user's configuration."""
    from ckptstore.config import load_settings

    value = load_settings()["store"].value
    return None if value is None else str(value)


def store_uri(*given: str | None) -> str:
    """The store that is named, once at most, else the configured one; nothing is opened.

    Raises:
        UsageError: it is named twice, or there is none.
    """
    from ckptstore.errors import UsageError

    named = [uri for uri in given if uri]
    if len(named) > 1:
        raise UsageError("a store is given twice", hint="give it as an argument or by --store")
    uri = named[0] if named else configured_store()
    if uri is None:
        raise UsageError(
            "no store given",
            hint="put it before the run (STORE/RUN@STEP), or use --store, CKPT_STORE or ckpt.toml",
        )
    return uri


def open_store(given: str | None) -> Store:
    """The store that is named, else the configured one.

    Raises:
        UsageError: there is neither.
    """
    from ckptstore.store import open_store as open_uri

    return open_uri(store_uri(given))


def open_ref(text: str, given: str | None, *, selector_optional: bool = False) -> tuple[Store, Ref]:
    """The store and the checkpoint that a REF names.

    Raises:
        UsageError: it is malformed, or names a store beside ``--store``.
    """
    from ckptstore.errors import UsageError
    from ckptstore.uri import parse_ref

    ref = parse_ref(text, selector_optional=selector_optional)
    if ref.store is not None and given is not None:
        raise UsageError(f"{text!r} names a store, and --store another", hint="give one of them")
    return open_store(ref.store or given), ref


def store_and_run(
    first: str | None, second: str | None, given: str | None
) -> tuple[Store, str | None]:
    """What ``[STORE] [RUN]`` mean, the store opened."""
    uri, run = uri_and_run(first, second, given)
    return open_store(uri), run


def uri_and_run(first: str | None, second: str | None, given: str | None) -> tuple[str, str | None]:
    """What ``[STORE] [RUN]`` mean; nothing is opened.

    A single argument is a store, except that a word without a slash is a run where a store is
    given by option or configuration.
    """
    from ckptstore.errors import UsageError
    from ckptstore.layout import check_run, is_run

    if given is not None:
        if second is not None or (first is not None and not is_run(first)):
            raise UsageError("a store is given twice", hint="give it as an argument or by --store")
        return given, check_run(first) if first is not None else None
    if second is not None:
        return store_uri(first), check_run(second)
    if first is not None and is_run(first) and configured_store() and not os.path.isdir(first):
        return store_uri(None), first
    return store_uri(first), None


def threads(given: int | None) -> int | None:
    """Blocks in flight: the option, else the setting."""
    from ckptstore.config import load_settings

    value = load_settings()["threads"].value
    return given if given is not None else value


def grace(given: str | None) -> float:
    """The grace period in seconds: the option, else the setting."""
    from ckptstore.config import load_settings
    from ckptstore.durations import parse_duration

    return parse_duration(given) if given is not None else float(load_settings()["grace"].value)
