"""``ckpt verify``"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.completion import complete_ref
from cli.options import (
    JsonOption,
    NoProgressOption,
    QuietOption,
    StoreOption,
    ThreadsOption,
    command,
    open_ref,
    store_and_run,
)
from cli.options import threads as threads_or_setting

if TYPE_CHECKING:
    from ckptstore.maintenance import CheckResult, VerifyPlan
    from ckptstore.maintenance.verify import Look
    from ckptstore.reading import Checkpoint
    from ckptstore.store import Store
    from ckptstore.transfer import ProgressCallback
    from cli.output import Output


@command
def verify(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[STORE | RUN | REF]...",
            help="Stores, runs and checkpoints; the configured store when there is none.",
            autocompletion=complete_ref,
            show_default=False,
        ),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte and compare its digest.")
    ] = False,
    sample: Annotated[
        str | None,
        typer.Option(
            "--sample",
            metavar="SHARE",
            help="Read this share of the bytes, for example 5%; implies --deep.",
        ),
    ] = None,
    max_duration: Annotated[
        str | None,
        typer.Option(
            "--max-duration",
            metavar="TIME",
            help="Read for this long, for example 30min; implies --deep.",
        ),
    ] = None,
    max_age: Annotated[
        str | None,
        typer.Option(
            "--max-age",
            metavar="TIME",
            help="Leave out what was read within this time, for example 7d; implies --deep.",
        ),
    ] = None,
    store: StoreOption = None,
    threads: ThreadsOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    no_progress: NoProgressOption = False,
) -> None:
    """Verify checkpoints: records, manifests and sizes, and with --deep every byte.

    Damage is named by file and byte range, remembered in the store (list and resume see it), and
    makes the exit code 5. With --sample, --max-duration or --max-age what was never read comes
    first, then what was read least recently; what was cut short counts as not read.
    """
    from ckptstore.durations import parse_duration, spell_duration
    from ckptstore.sizes import parse_share
    from cli.output import Output, plural

    out = Output(json, quiet, not no_progress)
    targets = list(_targets(what or [], store))
    planned = sample is not None or max_duration is not None or max_age is not None
    plan = (
        _plan(
            targets,
            sample=parse_share(sample) if sample is not None else None,
            max_duration=parse_duration(max_duration) if max_duration is not None else None,
            max_age=parse_duration(max_age) if max_age is not None else None,
            threads=threads_or_setting(threads),
        )
        if planned
        else None
    )
    total = plan.size if plan is not None else sum(t.size for t in targets) if deep else 0
    told = _Told(out)
    with out.bar("verifying", total) as progress:
        if plan is not None:
            plan.report_to(progress)
            for result in plan:
                told.tell(result, deep=True)
        else:
            for target in targets:
                for result in target.check(deep, threads_or_setting(threads), progress):
                    told.tell(result, deep=deep)
    if json:
        out.document({"ok": not told.bad, "checkpoints": [_as_json(r) for r in told.results]})
    elif not told.results and plan is None:
        out.note("nothing to verify")
    if plan is not None and not plan.due:
        out.note("nothing is due")
    if plan is not None and plan.unread and max_duration is not None:
        limit = spell_duration(parse_duration(max_duration))
        out.note(
            f"the {limit} are over: {plural(len(plan.unread), 'checkpoint')} of "
            f"{len(plan.due):,} that are due were not read to the end; they are first next time"
        )
    if told.bad:
        _advise(told.bad, targets)
        raise typer.Exit(5)


class _Told:
    """Says of each checkpoint, as soon as it is known, how it is."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self.results: list[CheckResult] = []

    @property
    def bad(self) -> list[CheckResult]:
        """Those that are damaged."""
        return [r for r in self.results if not r.ok]

    def tell(self, result: CheckResult, *, deep: bool) -> None:
        """A line for one that is intact; for a damaged one its first 20 damaged places."""
        from cli.output import plural, show_error, size

        self.results.append(result)
        if result.ok:
            extra = f", beside {plural(len(result.extra), 'unknown file')}" if result.extra else ""
            read = f", {size(result.checked_bytes)} read" if deep else ""
            self._out.line(f"{result.ref} is intact{read}{extra}")
            return
        places = [str(d) for d in result.damage[:20]]
        if len(result.damage) > 20:
            places.append(f"and {len(result.damage) - 20} more places")
        for place in places:
            show_error(f"{result.ref} is damaged: {place}")


def _advise(bad: list[CheckResult], targets: list[_Target]) -> None:
    """The commands that repair what was found, a line for each store."""
    from ckptstore.advice import repair_all_command, repair_command
    from cli.output import show_hint

    for target in {t.uri: t for t in targets}.values():
        here = [r for r in bad if any(t.uri == target.uri and t.holds(r) for t in targets)]
        runs = sorted({r.run for r in here})
        if len(here) == 1:
            show_hint(repair_command(target.catalog, here[0].ref))
        elif here:
            show_hint(repair_all_command(target.catalog, runs[0] if len(runs) == 1 else None))
        if len(runs) == 1:
            latest = f"{runs[0]}@latest"
            show_hint(f"the newest intact one: ckpt resume-info {latest} --store {target.uri}")


def _plan(targets: list[_Target], **limits: Any) -> VerifyPlan:
    from ckptstore.maintenance import VerifyPlan

    looks = [target.look() for target in targets]
    checkpoints = {(c.catalog.uri, c.run, c.name): c for look in looks for c in look.checkpoints}
    return VerifyPlan(
        list(checkpoints.values()), [p for look in looks for p in look.problems], **limits
    )


def _as_json(result: CheckResult) -> dict[str, Any]:
    return {
        "ref": result.ref,
        "name": result.name,
        "ok": result.ok,
        "checked_bytes": result.checked_bytes,
        "damaged": [
            {"path": d.path, "offset": d.offset, "length": d.length, "reason": d.reason}
            for d in result.damage
        ],
        "extra": list(result.extra),
    }


class _Target:
    """A checkpoint, or a run of a store, to verify."""

    def __init__(self, opened: Store, checkpoint: Checkpoint | None, run: str) -> None:
        self.uri = opened.uri
        self.catalog = opened.catalog
        self._store = opened
        self._checkpoint = checkpoint
        self._run = run

    @property
    def size(self) -> int:
        """Bytes to read for a deep verification."""
        if self._checkpoint is not None:
            return self._checkpoint.size
        return sum(row.size for row in self._store.rows(self._run))

    def holds(self, result: CheckResult) -> bool:
        """Whether the result can be of this target."""
        if self._checkpoint is not None:
            return (result.run, result.name) == (self._run, str(self._checkpoint.name))
        return result.run == self._run

    def look(self) -> Look:
        """What there is to verify."""
        from ckptstore.maintenance.verify import Look, look_at

        if self._checkpoint is not None:
            return Look([self._checkpoint], [])
        return look_at(self._store, self._run)

    def check(
        self, deep: bool, threads: int | None, progress: ProgressCallback | None
    ) -> Iterator[CheckResult]:
        """Verify it."""
        from ckptstore.maintenance.verify import verify as check
        from ckptstore.maintenance.verify import verify_run, with_bad_marks

        if self._checkpoint is None:
            yield from verify_run(
                self._store, self._run, deep=deep, threads=threads, progress=progress
            )
            return
        before = self._checkpoint.standing
        result = check(self._checkpoint, deep=deep, threads=threads, progress=progress)
        yield with_bad_marks(result, before)


def _targets(what: list[str], given: str | None) -> Iterator[_Target]:
    from ckptstore.uri import is_ref

    arguments: list[str | None] = [*what] or [None]
    for text in arguments:
        if text is not None and is_ref(text):
            opened, ref = open_ref(text, given)
            yield _Target(opened, opened.resolve(ref), ref.run)
        else:
            opened, run = store_and_run(text, None, given)
            for one in [run] if run is not None else opened.runs():
                opened.catalog.require_run(one)
                yield _Target(opened, None, one)
