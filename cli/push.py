"""``ckpt push``"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cli.options import (
    DryRunOption,
    JsonOption,
    NoProgressOption,
    QuietOption,
    StoreOption,
    ThreadsOption,
    command,
    open_ref,
)
from cli.options import threads as threads_or_setting


@command
def push(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="The directory to store.", show_default=False)
    ],
    ref: Annotated[
        str,
        typer.Argument(
            metavar="REF",
            help="RUN@STEP, alone or behind a store and '/'. Without @STEP the step is read from "
            "the directory (trainer_state.json, or a name such as global_step_500).",
            show_default=False,
        ),
    ],
    tag: Annotated[
        list[str] | None, typer.Option("--tag", metavar="TAG", help="A tag. Repeatable.")
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", metavar="K=V", help="A metric. Repeatable.")
    ] = None,
    meta: Annotated[
        list[str] | None,
        typer.Option("--meta", metavar="K=V", help="Metadata (a text). Repeatable."),
    ] = None,
    best: Annotated[
        str | None,
        typer.Option(
            "--best",
            metavar="METRIC:max|min",
            help="From now on the run's best has the highest (lowest) METRIC.",
        ),
    ] = None,
    store: StoreOption = None,
    threads: ThreadsOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    no_progress: NoProgressOption = False,
) -> None:
    """Store a directory as a checkpoint.

    The commit is atomic: it is there whole, or not at all. A push that was interrupted goes on
    where it was when it is repeated; files that the store has already are not sent again.
    """
    from ckptstore.errors import UsageError
    from ckptstore.saveoptions import SaveOptions
    from ckptstore.scanning import scan, step_of
    from cli.output import Output, plural, size

    out = Output(json, quiet, not no_progress)
    opened, parsed = open_ref(ref, store, selector_optional=True)
    if parsed.selector is not None and parsed.step is None:
        raise UsageError(f"a push needs a step, not {parsed.selector!r}", hint="RUN@STEP")
    metrics = {k: _number(k, v) for k, v in _pairs("--metric", metric).items()}
    metadata: dict[str, Any] = dict(_pairs("--meta", meta))
    source = scan(directory)
    step = step_of(source) if parsed.step is None else parsed.step
    what = f"{parsed.run}@{step}"
    if dry_run:
        text = f"{plural(len(source.files), 'file')}, {size(source.size)}"
        out.line(f"would push {source.root} as {what} into {opened.uri}: {text}")
        if json:
            out.document({"ref": what, "files": len(source.files), "bytes": source.size})
        return
    with out.bar(what, source.size) as progress:
        options = SaveOptions(
            metadata=metadata,
            metrics=metrics,
            best=_rule(best),
            tags=tag or (),
            threads=threads_or_setting(threads),
            progress=progress,
            keep_partial=True,
        )
        result = opened.push(source, parsed.run, step, options)
    checkpoint = result.checkpoint
    if json:
        out.document(
            {
                "ref": checkpoint.ref,
                "name": str(checkpoint.name),
                "digest": checkpoint.commit.content,
                "files": checkpoint.commit.files,
                "bytes": checkpoint.size,
                "sent_bytes": result.sent,
                "seconds": round(result.seconds, 3),
            }
        )
    elif result.created:
        out.line(
            f"pushed {what} ({checkpoint.name}): {plural(checkpoint.commit.files, 'file')}, "
            f"{size(checkpoint.size)}, sent {size(result.sent)} in {result.seconds:.1f} s"
        )
    else:
        out.line(f"{what} holds this already ({checkpoint.name}): nothing was sent")


def _pairs(option: str, given: list[str] | None) -> dict[str, str]:
    from ckptstore.errors import UsageError

    pairs = {}
    for text in given or []:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"{option} {text!r} is not of the form KEY=VALUE")
        pairs[key] = value
    return pairs


def _number(key: str, text: str) -> float:
    import math

    from ckptstore.errors import UsageError

    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"the metric {key}={text} is no finite number")
    return value


def _rule(text: str | None) -> Any:
    from ckptstore.errors import UsageError
    from ckptstore.records import BestRule

    if text is None:
        return None
    metric, colon, mode = text.rpartition(":")
    if not colon:
        metric, mode = text, "max"
    if not metric or mode not in ("max", "min"):
        raise UsageError(f"--best {text!r} is not of the form METRIC:max or METRIC:min")
    return BestRule(metric=metric, mode="max" if mode == "max" else "min")
