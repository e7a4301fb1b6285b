"""Which checkpoints of a directory are finished, while a trainer may be writing to it.

Three trainers' ways are known, and a directory that is one checkpoint:

    verl        global_step_N/ (Megatron: iter_N/) beside latest_checkpointed_iteration.txt, which
                is written after a save and names it
    openrlhf    global_stepN/ beside ``latest``, in _actor/, _critic/ or the directory itself
                (DeepSpeed's way); ``latest`` is written after a save and names it
    dcp         directories with a .metadata, which is renamed into place at the end of a save
    plain       all of the directory is one checkpoint

A checkpoint is finished when what is written after a save says so, and nothing in its directory
changed after that. Where a trainer touches it later (an export, a second save of the same step),
and where the tracker does not reach it (verl's asynchronous saves do not write it), it must have
been left alone for a while; in the second case a newer one must exist too. The names of its files
must be complete: all ranks, and whatever the one has that the tracker names.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ckptstore.durations import spell_duration
from ckptstore.errors import NotFoundError, UsageError, printable, translate_os_errors
from ckptstore.layout import check_new_path
from ckptstore.scanning import Scan, ScannedFile, scan
from ckptstore.transfer import SourceIdentity

Layout = Literal["verl", "openrlhf", "dcp", "plain"]
LAYOUTS: tuple[Layout, ...] = ("verl", "openrlhf", "dcp", "plain")

SETTLE_SECONDS = 600.0
"""A checkpoint that nothing vouches for must have been left alone for this long."""

TRACKER = "latest_checkpointed_iteration.txt"
LATEST = "latest"
METADATA = ".metadata"

_PARTS = {"actor", "critic", "data.pt"}
"""What each of verl's checkpoints has if one of them has it."""

_CLOCK_SECONDS = 1.0
"""Times of one save differ by this much without a meaning."""

_VERL = re.compile(r"(?:global_step_|iter_)(\d{1,15})")
_TAG = re.compile(r"global_step(\d{1,15})")
_STEP = re.compile(r"(?:.*[_-])?(?:global_step|step|checkpoint|iter|epoch)?[_-]?(\d{1,15})")
_RANK_FILES = re.compile(r"(.*)_world_size_(\d{1,6})_rank_(\d{1,6})\.pt")
_ZERO_FILES = re.compile(r"(.*zero_pp_rank_)(\d{1,6})(_mp_rank_\d+_.*\.pt)")


@dataclass(frozen=True)
class Finished:
    """A checkpoint that can be pushed.

    Attributes:
        step: Its step; ``None`` for a plain directory, which may say it itself.
        name: What it is called in the directory.
        open: Scans it; what it lacks to be loaded again is written to the directory given to it.
    """

    step: int | None
    name: str
    open: Callable[[Path], Scan]


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint that is left for a later run.

    Attributes:
        step: Its step.
        name: What it is called in the directory.
        reason: Why.
    """

    step: int
    name: str
    reason: str


@dataclass
class Found:
    """What a directory holds.

    Attributes:
        layout: How it is laid out.
        finished: What can be pushed, oldest step first.
        unfinished: What is left.
    """

    layout: Layout
    finished: list[Finished] = field(default_factory=list)
    unfinished: list[Unfinished] = field(default_factory=list)


def find(
    directory: str | os.PathLike[str],
    layout: Layout | None = None,
    *,
    settle: float = SETTLE_SECONDS,
    now: float | None = None,
) -> Found:
    """The checkpoints of a directory.

    Args:
        directory: Where the trainer writes.
        layout: How; ``None`` finds out.
        settle: Seconds that a checkpoint must have been left alone when nothing vouches for it.
        now: Seconds since the epoch, by the clock of the directory's file system.

    Raises:
        NotFoundError: there is no such directory, or it is empty.
        UsageError: its layout cannot be told.
    """
    root = Path(os.path.realpath(directory))
    if not root.is_dir():
        what = "is not a directory" if root.exists() else "does not exist"
        raise NotFoundError(f"the source {printable(os.fspath(directory))} {what}")
    with translate_os_errors(str(root)):
        layout = layout or _layout_of(root)
        now = time.time() if now is None else now
        if layout == "plain":
            return Found(layout, [Finished(None, root.name, lambda _: scan(root))])
        candidates = _CANDIDATES[layout](root)
        return _judge(layout, candidates, settle, now)


def _layout_of(root: Path) -> Layout:
    names = {entry.name for entry in os.scandir(root)}
    if not names:
        raise NotFoundError(f"the source {printable(str(root))} is empty")
    directories = {n for n in names if (root / n).is_dir()}
    if TRACKER in names or any(_VERL.fullmatch(n) for n in directories):
        return "verl"
    if _components(root):
        return "openrlhf"
    if METADATA in names:
        return "plain"
    if any((root / n / METADATA).exists() for n in directories):
        return "dcp"
    steps = sorted(n for n in directories if _STEP.fullmatch(n) and not n.isdigit())
    if steps:
        raise UsageError(
            f"{printable(str(root))} holds {printable(steps[0])}, and nothing that tells whether "
            "it is finished",
            hint='say layout = "dcp" or "verl" when a trainer writes there, else "plain"',
        )
    return "plain"


@dataclass(frozen=True)
class _Candidate:
    """A checkpoint, and what is said of it.

    Attributes:
        step, name: Which it is.
        roots: Its directories.
        open: Scans it.
        vouched: The time at which something said that it is finished; ``None``: nothing does.
        problem: Why it is certainly not finished.
    """

    step: int
    name: str
    roots: tuple[Path, ...]
    open: Callable[[Path], Scan]
    vouched: float | None
    problem: str | None = None


def _judge(layout: Layout, candidates: Sequence[_Candidate], settle: float, now: float) -> Found:
    found = Found(layout)
    for one in sorted(candidates, key=lambda c: (c.step, c.name)):
        problem = one.problem or _problem(one, candidates, settle, now)
        if problem is None:
            found.finished.append(Finished(one.step, one.name, one.open))
        else:
            found.unfinished.append(Unfinished(one.step, one.name, problem))
    return found


def _problem(
    one: _Candidate, candidates: Sequence[_Candidate], settle: float, now: float
) -> str | None:
    try:
        changed = max(_last_change(root) for root in one.roots)
        incomplete = next(filter(None, (_missing(root) for root in one.roots)), None)
    except OSError:
        return "it is being removed"
    if incomplete is not None:
        return incomplete
    if one.vouched is not None and changed <= one.vouched + _CLOCK_SECONDS:
        return None
    if one.vouched is None and all(other.step <= one.step for other in candidates):
        return "nothing says yet that it is finished"
    if now - changed < settle:
        return f"it changed less than {spell_duration(settle)} ago"
    return None


def _last_change(root: Path) -> float:
    """When something in a directory was last written, added or removed."""
    newest = root.stat().st_mtime
    for place, directories, files in os.walk(root, onerror=_raise):
        for name in (*directories, *files):
            newest = max(newest, os.lstat(os.path.join(place, name)).st_mtime)
    return newest


def _raise(error: OSError) -> None:
    raise error


def _missing(root: Path) -> str | None:
    """What the names of the files of all ranks say is not there; an empty file is not, either."""
    files = 0
    for place, _, names in os.walk(root, onerror=_raise):
        ranks: dict[tuple[str, str], set[int]] = {}
        sizes: dict[tuple[str, str], int] = {}
        for name in names:
            files += 1
            if match := _RANK_FILES.fullmatch(name):
                key = (match[1], match[2])
                ranks.setdefault(key, set()).add(int(match[3]))
                sizes[key] = int(match[2])
            elif match := _ZERO_FILES.fullmatch(name):
                key = (match[1], match[3])
                ranks.setdefault(key, set()).add(int(match[2]))
                sizes[key] = max(ranks[key]) + 1
            else:
                continue
            if os.lstat(os.path.join(place, name)).st_size == 0:
                return f"{_shown(root, place, name)} is empty"
        for key, have in ranks.items():
            lacking = sorted(set(range(sizes[key])) - have)
            if lacking:
                what = _shown(root, place, key[0])
                return f"of {what} rank {lacking[0]} of {sizes[key]} is missing"
    return None if files else "it holds no files"


def _shown(root: Path, place: str, name: str) -> str:
    return printable(os.path.relpath(os.path.join(place, name), root))


# verl


def _verl(root: Path) -> list[_Candidate]:
    tracker = root / TRACKER
    last, when = _tracked(tracker, re.compile(r"(\d{1,15})"))
    candidates = []
    for entry in _directories(root):
        match = _VERL.fullmatch(entry.name)
        if match is None:
            continue
        step = int(match[1])
        vouched = when if last is not None and step <= last else None
        candidates.append(_plain_candidate(step, Path(entry.path), vouched))
    whole = next((c for c in candidates if c.step == last), None)
    return [replace(c, problem=_lacks(c, whole)) for c in candidates] if whole else candidates


def _lacks(one: _Candidate, whole: _Candidate) -> str | None:
    """What the one that the tracker names has, and this does not: a save that was killed."""
    try:
        have, need = (set(os.listdir(c.roots[0])) for c in (one, whole))
    except FileNotFoundError:
        return "it is being removed"
    lacking = sorted((need - have) & _PARTS)
    return f"{printable(lacking[0])} is missing, which {whole.name} has" if lacking else None


def _tracked(file: Path, form: re.Pattern[str]) -> tuple[int | None, float]:
    """The step that a tracker names, and when it was written."""
    try:
        with open(file, "rb") as f:
            text = f.read(200).decode("utf-8", "replace").strip()
            when = os.fstat(f.fileno()).st_mtime
    except FileNotFoundError:
        return None, 0.0
    match = form.fullmatch(text)
    return (int(match[1]), when) if match is not None else (None, 0.0)


def _directories(root: Path) -> list[os.DirEntry[str]]:
    with os.scandir(root) as entries:
        return sorted((e for e in entries if e.is_dir()), key=lambda e: e.name)


def _plain_candidate(
    step: int, path: Path, vouched: float | None, problem: str | None = None
) -> _Candidate:
    return _Candidate(step, path.name, (path,), lambda _: scan(path), vouched, problem)


# OpenRLHF


def _components(root: Path) -> list[str]:
    """The parts of a checkpoint, each with a ``latest`` and tags of its own; "" is the root."""
    parts = [e.name for e in _directories(root) if e.name.startswith("_") and _has_tags(root / e)]
    return parts or ([""] if _has_tags(root) else [])


def _has_tags(directory: Path) -> bool:
    return any(_TAG.fullmatch(e.name) for e in _directories(directory))


def _openrlhf(root: Path) -> list[_Candidate]:
    parts = _components(root)
    latest = {part: _tracked(root / part / LATEST, _TAG) for part in parts}
    tags: dict[str, list[str]] = {}
    for part in parts:
        for entry in _directories(root / part):
            if _TAG.fullmatch(entry.name):
                tags.setdefault(entry.name, []).append(part)
    return [_tag(root, tag, having, parts, latest) for tag, having in tags.items()]


def _tag(
    root: Path,
    tag: str,
    having: Sequence[str],
    parts: Sequence[str],
    latest: dict[str, tuple[int | None, float]],
) -> _Candidate:
    step = int(tag.removeprefix("global_step"))
    lacking = [part for part in parts if part not in having]
    times = [when for last, when in latest.values() if last is not None and step <= last]
    problem = f"{lacking[0]} has no {tag}" if lacking else None
    if problem is None and any(last is not None and step > last for last, _ in latest.values()):
        problem = f"{LATEST} does not reach it yet"
    return _Candidate(
        step,
        tag,
        tuple(root / part / tag for part in having),
        lambda scratch: _scan_tag(root, tag, having, scratch),
        min(times) if len(times) == len(parts) else None,
        problem,
    )


def _scan_tag(root: Path, tag: str, parts: Iterable[str], scratch: Path) -> Scan:
    """The tag's directory in each part, under the paths that they have there.

    DeepSpeed loads what ``latest`` names, so each part gets one that names this tag.
    """
    latest = scratch / LATEST
    latest.write_text(tag, encoding="ascii")
    whole = Scan(str(root))
    for part in parts:
        inside = scan(root / part / tag)
        above = f"{part}/" if part else ""
        named = ScannedFile(f"{above}{LATEST}", str(latest), SourceIdentity.now(str(latest)), False)
        moved = [replace(f, path=f"{above}{tag}/{f.path}") for f in inside.files]
        whole.files += [named, *moved]
        whole.empty_directories += [f"{above}{tag}/{path}" for path in inside.empty_directories]
    for file in whole.files:
        check_new_path(file.path)
    whole.files.sort(key=lambda f: f.path.encode())
    whole.empty_directories.sort(key=str.encode)
    return whole


# DCP


def _dcp(root: Path) -> list[_Candidate]:
    candidates = []
    for entry in _directories(root):
        match = _STEP.fullmatch(entry.name)
        if match is None:
            continue
        path = Path(entry.path)
        try:
            status = (path / METADATA).stat()
            vouched, problem = max(status.st_mtime, status.st_ctime), None
            if not status.st_size:
                problem = f"its {METADATA} is empty"
        except FileNotFoundError:
            vouched, problem = 0.0, f"it has no {METADATA} yet"
        candidates.append(_plain_candidate(int(match[1]), path, vouched, problem))
    return candidates


_CANDIDATES: dict[Layout, Callable[[Path], list[_Candidate]]] = {
    "verl": _verl,
    "openrlhf": _openrlhf,
    "dcp": _dcp,
}
