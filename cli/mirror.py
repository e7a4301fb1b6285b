"""``ckpt mirror``"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import (
    DryRunOption,
    JsonOption,
    NoProgressOption,
    QuietOption,
    ThreadsOption,
    command,
)
from cli.options import threads as threads_or_setting

if TYPE_CHECKING:
    from ckptstore.maintenance.mirror import Follower, How, Outcome
    from ckptstore.store import Store
    from cli.output import Output


@command
def mirror(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="The store to copy from.", show_default=False)
    ],
    targets: Annotated[
        list[str],
        typer.Argument(metavar="DST...", help="The stores to copy to.", show_default=False),
    ],
    run: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="GLOB", help="Only these runs. Repeatable."),
    ] = None,
    newest_first: Annotated[
        bool, typer.Option("--newest-first", help="Begin with the newest, not the oldest.")
    ] = False,
    limit: Annotated[
        str | None,
        typer.Option("--limit", metavar="SIZE", help="Bytes a second at most, such as 50MB."),
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Also delete in DST what was deleted in SRC.")
    ] = False,
    max_delete: Annotated[
        int,
        typer.Option("--max-delete", min=0, metavar="N", help="If it were more, delete none."),
    ] = 10,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on for ever: SIGTERM or Ctrl-C ends it.")
    ] = False,
    interval: Annotated[
        str, typer.Option("--interval", metavar="TIME", help="Pause between passes of --follow.")
    ] = "30s",
    status: Annotated[
        str | None,
        typer.Option("--status", metavar="FILE", help="Keep the state of each mirror in FILE."),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Expect DST no longer; nothing is copied or deleted.")
    ] = False,
    threads: ThreadsOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    no_progress: NoProgressOption = False,
) -> None:
    """Copy to other stores what they lack of a store.

    Everything is verified while it is copied, and a mirror shows a checkpoint whole or not at all.
    Nothing is deleted there, and what a mirror has pruned is not copied back. An interrupted mirror
    goes on where it was, inside a file too.
    """
    from ckptstore.durations import parse_duration
    from ckptstore.errors import UsageError
    from ckptstore.maintenance.mirror import How
    from ckptstore.sizes import parse_size
    from ckptstore.store import open_store
    from ckptstore.transfer.throttle import Throttle
    from cli.output import Output

    out = Output(json, quiet, not no_progress)
    if len(set(targets)) < len(targets):
        raise UsageError("a mirror is given twice")
    if follow and (dry_run or json):
        raise UsageError("--follow goes on for ever: it has no --dry-run and no --json document")
    pause = parse_duration(interval)
    if forget:
        _forget(out, open_store(source), targets)
        return
    stop, cancel = threading.Event(), threading.Event()
    how = How(
        runs=tuple(run or ()),
        newest_first=newest_first,
        throttle=Throttle(parse_size(limit), cancel) if limit is not None else None,
        delete=delete,
        max_delete=max_delete,
        dry_run=dry_run,
        threads=threads_or_setting(threads),
        stop=stop,
        cancel=cancel,
    )
    signals = _Signals(out, stop, cancel)
    with signals:
        if follow:
            _follow(out, source, targets, how, pause, status, signals)
        else:
            _once(out, source, targets, how, status)
    if signals.received is not None and not follow:
        raise typer.Exit(128 + signals.received)


class _Signals:
    """SIGTERM and Ctrl-C: the first ends the work after the current file, the second now."""

    def __init__(self, out: Output, stop: threading.Event, cancel: threading.Event) -> None:
        self._out = out
        self._stop = stop
        self._cancel = cancel
        self.followers: Sequence[Follower] = ()
        self.received: int | None = None

    def __enter__(self) -> None:
        self._before = {
            number: signal.signal(number, self._receive)
            for number in (signal.SIGTERM, signal.SIGINT)
        }

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: Any) -> None:
        del frame
        if self._stop.is_set():
            self._cancel.set()
            return
        self.received = number
        self._stop.set()
        for follower in self.followers:
            follower.wake()
        self._out.note("ending after the current file; once more ends it now")


def _once(out: Output, source: str, targets: Sequence[str], how: How, status: str | None) -> None:
    from dataclasses import replace

    from ckptstore.errors import CkptError, UsageError
    from ckptstore.maintenance.mirror import Outcome, mirror_each, runs_to_mirror
    from ckptstore.store import open_store

    store = open_store(source)
    try:
        runs_to_mirror(store, how)
    except CkptError as error:  # the source's own: it is told once, not for each target
        _keep_status(status, store, [Outcome(uri, None, error) for uri in targets])
        raise
    pairs = [(uri, partial(open_store, uri)) for uri in targets]
    with out.busy(f"mirroring {store.uri}") as busy:
        progress = _counter(busy) if busy is not None else None
        outcomes = mirror_each(store, pairs, replace(how, progress=progress))
    _keep_status(status, store, outcomes)
    for outcome in outcomes:
        if isinstance(outcome.failure, UsageError):
            raise outcome.failure
    if out.json:
        out.document([_document(o) for o in outcomes])
    _tell(out, outcomes, how)
    _exit(outcomes)


def _counter(busy: Any) -> Any:
    from cli.output import size

    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        busy(size(done))

    return advance


def _follow(
    out: Output,
    source: str,
    targets: Sequence[str],
    how: How,
    interval: float,
    status: str | None,
    signals: _Signals,
) -> None:
    import logging
    from concurrent.futures import ThreadPoolExecutor

    from ckptstore.maintenance.mirror import Follower
    from ckptstore.maintenance.mirror.statusfile import StatusFile
    from ckptstore.store import open_store

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    file = StatusFile(status, source) if status is not None else None

    def told(outcome: Outcome) -> None:
        if outcome.result is not None and outcome.result.copied:
            _tell_copies(out, outcome)
        if file is not None:
            file.update(outcome)

    followers = [
        Follower(
            uri,
            partial(open_store, source),
            partial(open_store, uri),
            how,
            interval=interval,
            told=told,
        )
        for uri in targets
    ]
    signals.followers = followers
    with ThreadPoolExecutor(len(followers)) as pool:
        futures = [pool.submit(f.run) for f in followers]
        try:
            for future in futures:
                future.result()
        except BaseException:
            how.stop.set()
            for follower in followers:
                follower.wake()
            raise


def _forget(out: Output, source: Store, targets: Sequence[str]) -> None:
    from ckptstore import mirrors
    from ckptstore.errors import NotFoundError
    from ckptstore.store import open_store

    for text in targets:
        uri = open_store(text).uri
        if not mirrors.forget_mirror(source.catalog, mirrors.mirror_id(uri)):
            known = ", ".join(m.uri for m in mirrors.known_mirrors(source.catalog)) or "none"
            raise NotFoundError(f"{uri} is no mirror of {source.uri}", hint=f"known: {known}")
        out.line(f"{source.uri} does not expect {uri} any more; nothing was deleted there")


def _tell(out: Output, outcomes: Sequence[Outcome], how: How) -> None:
    from cli.output import show_error

    told: set[tuple[str, str | None]] = set()
    for outcome in outcomes:
        if outcome.result is not None:
            _tell_copies(out, outcome, dry_run=how.dry_run)
        for problem in _problems(outcome):
            if problem not in told:  # damage in the source is the same for every target
                show_error(*problem)
            told.add(problem)


def _problems(outcome: Outcome) -> list[tuple[str, str | None]]:
    """Sentences and hints that name what they are about, once: URIs are long."""
    problems = []
    for skipped in outcome.result.skipped if outcome.result is not None else ():
        ref, reason = skipped.ref, skipped.reason
        known = reason.startswith(f"{ref} ")
        text = f"{reason}; it was not copied" if known else f"{ref} was not copied: {reason}"
        problems.append((text, skipped.hint))
    if outcome.failure is not None:
        text = str(outcome.failure)
        if outcome.target.partition("?")[0] not in text:
            text = f"{outcome.target}: {text}"
        problems.append((text, outcome.failure.hint))
    return problems


def _tell_copies(out: Output, outcome: Outcome, *, dry_run: bool = False) -> None:
    from cli.output import plural, size

    result = outcome.result
    assert result is not None
    copied = plural(len(result.copied), "checkpoint")
    if dry_run:
        text = f"would copy {copied}"
    else:
        text = f"copied {copied}, sent {size(result.sent_bytes)} in {result.seconds:.1f} s"
    if result.deleted:
        text += f", {'would delete' if dry_run else 'deleted'} {len(result.deleted)}"
    if result.behind.checkpoints and not dry_run:
        behind = plural(result.behind.checkpoints, "checkpoint")
        text += f"; {behind} behind ({size(result.behind.bytes)})"
    out.line(f"{outcome.target}: {text}")


def _exit(outcomes: Sequence[Outcome]) -> None:
    """0 if all mirrors hold all; the error's code if one failed before anything; else 3."""
    if all(o.ok for o in outcomes):
        return
    failures = [o.failure for o in outcomes if o.failure is not None]
    nothing_done = not any(o.result is not None and o.result.copied for o in outcomes)
    if nothing_done and len(failures) == len(outcomes):
        raise typer.Exit(failures[0].exit_code)
    raise typer.Exit(3)


def _document(outcome: Outcome) -> dict[str, Any]:
    result = outcome.result
    document: dict[str, Any] = {
        "mirror": outcome.target,
        "ok": outcome.ok,
        "copied": list(result.copied) if result is not None else [],
        "sent_bytes": result.sent_bytes if result is not None else 0,
        "deleted": list(result.deleted) if result is not None else [],
        "skipped": [
            {"ref": s.ref, "reason": s.reason, "hint": s.hint}
            for s in (result.skipped if result is not None else ())
        ],
        "behind": _behind(outcome),
        "error": str(outcome.failure) if outcome.failure is not None else None,
    }
    return document


def _behind(outcome: Outcome) -> dict[str, float] | None:
    if outcome.result is None:
        return None
    lag = outcome.result.behind
    return {
        "checkpoints": lag.checkpoints,
        "bytes": lag.bytes,
        "seconds": round(lag.seconds, 1),
    }


def _keep_status(path: str | None, source: Store, outcomes: Sequence[Outcome]) -> None:
    if path is None:
        return
    from ckptstore.maintenance.mirror.statusfile import StatusFile

    file = StatusFile(path, source.uri)
    for outcome in outcomes:
        file.update(outcome)
