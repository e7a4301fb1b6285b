"""``ckpt show``"""

from __future__ import annotations

from cli.options import JsonOption, QuietOption, RefArgument, StoreOption, command, open_ref


@command
def show(
    ref: RefArgument,
    store: StoreOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show one checkpoint: its record, its metadata and its files."""
    import json as json_module

    from ckptstore.errors import printable
    from cli.output import Output, numbers, plural, size

    out = Output(json, quiet)
    opened, parsed = open_ref(ref, store)
    checkpoint = opened.resolve(parsed)
    commit, standing = checkpoint.commit, checkpoint.standing
    if json:
        out.document(
            {
                "ref": checkpoint.ref,
                "run": checkpoint.run,
                "step": checkpoint.step,
                "seq": checkpoint.seq,
                "name": str(checkpoint.name),
                "created": commit.created,
                "size": checkpoint.size,
                "files": [
                    {"path": e.path, "size": e.size, "digest": e.digest, "exec": e.exec}
                    for e in checkpoint.files
                ],
                "empty_directories": list(checkpoint.manifest.empty_directories),
                "digest": commit.content,
                "manifest_digest": commit.manifest.digest,
                "parent": commit.parent,
                "life": commit.life,
                "state": checkpoint.state,
                "tags": checkpoint.tags,
                "metrics": checkpoint.metrics,
                "pinned": standing.pinned,
                "verified": standing.verified,
                "metadata": checkpoint.metadata,
                "path": checkpoint.path,
            }
        )
        return
    if quiet:
        return
    facts = [
        ("ref", checkpoint.ref),
        ("name", str(checkpoint.name)),
        ("state", checkpoint.state + (", pinned" if standing.pinned else "")),
        ("saved", f"{commit.created} by {commit.writer.host}, process {commit.writer.pid}"),
        ("verified", standing.verified or "never read in full"),
        ("size", f"{size(checkpoint.size)} in {plural(commit.files, 'file')}"),
        ("content", commit.content),
        ("parent", commit.parent or "none"),
        ("tags", " ".join(checkpoint.tags) or "none"),
        ("metrics", numbers(checkpoint.metrics) or "none"),
        ("metadata", json_module.dumps(checkpoint.metadata, ensure_ascii=False)),
    ]
    if commit.life is not None:
        facts.append(("life", str(commit.life)))
    if checkpoint.path is not None:
        facts.append(("path", checkpoint.path))
    for label, value in facts:
        print(f"{label:<9} {printable(value)}")
    for note in standing.damage:
        where = f", bytes {note.offset}-{note.offset + note.length - 1}" if note.length else ""
        print(f"damage    {printable(f'{note.path}{where}: {note.reason}')}")
    print()
    rows = [
        [size(e.size), e.digest[:16], e.path + (" (executable)" if e.exec else "")]
        for e in checkpoint.files
    ]
    out.table(["SIZE", "DIGEST", "PATH"], rows, right=("SIZE",))
