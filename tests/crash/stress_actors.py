"""Actors that do everything at once to three stores, each a process, and the log of each."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ckptstore
from ckptstore.errors import ConflictError, NotFoundError
from ckptstore.layout import Name
from ckptstore.maintenance import Policy, carry_out, gc, plan_prune, verify
from ckptstore.maintenance.mirror import How, Memory, mirror
from ckptstore.pulling import pull
from ckptstore.records import BestRule
from ckptstore.saveoptions import SaveOptions
from ckptstore.store import Store
from ckptstore.testing.kills import Countdown, start_child
from tests.crash.stress_oracle import commits_of, must_keep

SOURCE, TARGET, THIRD = PLACES = ("source", "target", "third")
RUNS = ("a", "b")
BEST = BestRule(metric="reward", mode="max")
POLICIES = {
    SOURCE: Policy(keep_last=2, keep_best=1, owed_limit=6),
    TARGET: Policy(keep_last=5, keep_every=7, keep_best=1, owed_limit=2),
    THIRD: Policy(keep_last=9, keep_best=3, keep_every=5),
}
TRASHED_FOR = (0.0, 0.0, 0.3)
"""Grace periods in seconds; most of what is pruned may go at once."""

PINS = 3
"""As many pins of this test a store has at most."""


def content(seed: int) -> dict[str, bytes]:
    """The files of the checkpoint that was saved with a seed; neighbours share some."""
    rng = random.Random(seed)
    shared = random.Random(seed % 3).randbytes(40_000)
    own = rng.randbytes(rng.choice((0, 10, 70_000)))
    return {"model/base.bin": shared, "model/own.bin": own, "state.json": b"%d" % seed}


@dataclass(frozen=True)
class World:
    """Where it all happens, and until when (by the monotonic clock)."""

    root: Path
    seed: int
    end: float

    def store(self, place: str) -> Store:
        return ckptstore.open_store(str(self.root / place))

    def log(self, actor: str) -> Path:
        return self.root / "logs" / f"{actor}.jsonl"

    def events(self, kind: str) -> Iterator[dict[str, Any]]:
        """What all actors noted of a kind, each one's in order."""
        for path in sorted((self.root / "logs").glob("*.jsonl")):
            yield from (e for e in read_log(path) if e["kind"] == kind)


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


@dataclass
class Life:
    """One life of an actor: the process that it is until it is killed."""

    world: World
    actor: str
    rng: random.Random
    memories: dict[tuple[str, str], Memory] = field(default_factory=dict)

    def note(self, kind: str, **what: object) -> None:
        """Note an event; it is there when this returns, whenever the process is killed."""
        line = json.dumps({"kind": kind, **what}).encode() + b"\n"
        fd = os.open(self.world.log(self.actor), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)

    @property
    def scratch(self) -> Path:
        return self.world.root / "scratch" / self.actor


@dataclass(frozen=True)
class Actor:
    """Something that is done again and again.

    Attributes:
        name: What it is called.
        act: Does it once.
        lifetime: Of how many changing system calls one life is at most, if it is ever killed.
    """

    name: str
    act: Callable[[Life], None]
    lifetime: int | None = None

    def start(self, world: World, life: int) -> int:
        """Begin a life in a process of its own; returns its id."""
        return start_child(partial(self._live, world, life))

    def errors(self, world: World, life: int) -> Path:
        """What the life wrote to stderr."""
        return world.root / "logs" / f"{self.name}.{life}.err"

    def _live(self, world: World, life: int) -> None:
        sys.stderr = self.errors(world, life).open("w", buffering=1)
        logging.basicConfig(stream=sys.stderr, level=logging.WARNING, force=True)
        rng = random.Random(f"{world.seed}/{self.name}/{life}")
        here = Life(world, self.name, rng)
        if self.lifetime is not None:
            Countdown(rng.randrange(self.lifetime)).install()
        while time.monotonic() < world.end:
            self.act(here)


def saver(run: str, first: int, life: Life) -> None:
    """Save the next step, or, after a death, the step that was under way, with the same bytes.

    Then prune the run, as a trainer does.
    """
    log = read_log(life.world.log(life.actor))
    begun = [e for e in log if e["kind"] == "begun"]
    if log and log[-1]["kind"] == "begun":
        step, seed = log[-1]["step"], log[-1]["seed"]
    else:
        again = bool(begun) and life.rng.random() < 0.1
        step = begun[-1]["step"] if again else first + 2 * len({e["step"] for e in begun})
        seed = life.rng.randrange(1_000_000_000)
        life.note("begun", step=step, seed=seed)
    tree = life.scratch / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for path, data in content(seed).items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(data)
    options = SaveOptions(
        metadata={"seed": seed},
        metrics={"reward": random.Random(seed).random()},
        best=BEST,
        threads=2,
        keep_partial=True,
    )
    result = life.world.store(SOURCE).push(tree, run, step, options)
    life.note("saved", run=run, name=str(result.checkpoint.name), created=result.created)
    prune_run(life, SOURCE, run)


def mirrorer(source: str, target: str, life: Life) -> None:
    """One pass of a mirror."""
    world = life.world
    how = How(newest_first=life.rng.random() < 0.3, threads=2)
    memory = life.memories.setdefault((source, target), Memory())
    result = mirror(world.store(source), world.store(target), how, memory)
    life.note(
        "mirrored",
        target=target,
        copied=result.copied,
        skipped=[f"{s.ref}: {s.reason}" for s in result.skipped],
        failure=None if result.failure is None else repr(result.failure),
    )


def pruner(place: str, life: Life) -> None:
    """Prune any run of a store."""
    prune_run(life, place, life.rng.choice(RUNS))


def prune_run(life: Life, place: str, run: str) -> None:
    """Prune a run; what is planned is noted before it is done."""
    store = life.world.store(place)
    policy = replace(POLICIES[place], grace=life.rng.choice(TRASHED_FOR))
    plan = plan_prune(store, run, policy)
    going = [str(d.name) for d in plan.deleted]
    if going:
        # What a policy keeps can only be joined by newer or better ones: none of it may go.
        kept = must_keep(policy, commits_of(store, run) | planned(plan.deleted), BEST)
        assert not kept.intersection(going), f"{place}, {run}: {plan} would delete of {kept}"
    over = [str(d.name) for d in plan.deleted if d.warning]
    held = [str(d.name) for d in plan.kept if d.reasons[0].startswith("owed to")]
    assert not over or len(held) == policy.owed_limit, plan
    life.note("plan", place=place, run=run, going=going, over=over, held=held)
    result = carry_out(store, plan, collect=life.rng.random() < 0.7)
    life.note("pruned", place=place, warnings=result.warnings, count=len(result.deleted))


def planned(decisions: Any) -> dict[str, tuple[int, float]]:
    """What is to go, as the oracle looks at it."""
    return {
        str(d.name): (d.name.step, d.candidate.metrics.get(BEST.metric, 0.0)) for d in decisions
    }


def collector(life: Life) -> None:
    place = life.rng.choice(PLACES)
    result = gc(life.world.store(place), grace=0)
    life.note("collected", place=place, count=len(result.removed))


def puller(life: Life) -> None:
    """Pull the newest or any: it comes whole and as it was saved, or was deleted meanwhile."""
    store = life.world.store(life.rng.choice(PLACES))
    run = life.rng.choice(RUNS)
    dest = life.scratch / "pulled"
    shutil.rmtree(dest, ignore_errors=True)
    try:
        newest = store.latest(run)
        checkpoint = newest if life.rng.random() < 0.4 else life.rng.choice(store.list(run))
        assert newest is not None
        assert checkpoint is not None
        seed = checkpoint.metadata["seed"]
        pull(checkpoint, dest, threads=2)
    except NotFoundError:
        life.note("gone")
        return
    found = {p.relative_to(dest).as_posix(): p.read_bytes() for p in dest.rglob("*") if p.is_file()}
    assert found == content(seed), f"{checkpoint} came as {sorted(found)}"
    life.note("pulled")


def marker(life: Life) -> None:
    """Pin, unpin, tag or verify something."""
    place, run = life.rng.choice(PLACES), life.rng.choice(RUNS)
    store = life.world.store(place)
    pins = pinned(read_log(life.world.log(life.actor)), place)
    what = life.rng.choice(("pin", "unpin", "tag", "verify", "verify"))
    if what == "unpin" or len(pins) > PINS:
        if pins:
            run, name = life.rng.choice(sorted(pins))
            life.note("unpin", place=place, run=run, name=name)
            try:
                store.unpin(store.get(run, name=name))
            except NotFoundError:  # a delete that had looked for pins before this one came
                assert Name.parse(name) in store.catalog.trash_names(run), f"{name} was pinned"
        return
    try:
        checkpoint = life.rng.choice(store.list(run))
        if what == "pin" and store.pin(checkpoint):
            life.note("pin", place=place, run=run, name=str(checkpoint.name))
        elif what == "tag":
            store.tag(checkpoint, f"t{life.rng.randrange(9)}")
        elif what == "verify":
            result = verify(checkpoint, deep=True, threads=2)
            assert result.ok, result
            life.note("verified")
    except (ConflictError, NotFoundError):
        life.note("gone")


def pinned(log: list[dict[str, Any]], place: str) -> set[tuple[str, str]]:
    """The pins that stand: run and name."""
    pins: set[tuple[str, str]] = set()
    for event in log:
        if event["kind"] in ("pin", "unpin") and event["place"] == place:
            one = (event["run"], event["name"])
            pins = pins | {one} if event["kind"] == "pin" else pins - {one}
    return pins


ACTORS = (
    Actor("saver-a0", partial(saver, "a", 0)),
    Actor("saver-a1", partial(saver, "a", 1), lifetime=600),
    Actor("saver-b", partial(saver, "b", 0), lifetime=400),
    Actor("mirror", partial(mirrorer, SOURCE, TARGET)),
    Actor("mirror-mortal", partial(mirrorer, SOURCE, TARGET), lifetime=500),
    Actor("mirror-third", partial(mirrorer, TARGET, THIRD), lifetime=2000),
    Actor("pruner-source", partial(pruner, SOURCE), lifetime=1500),
    Actor("pruner-target", partial(pruner, TARGET), lifetime=1500),
    Actor("pruner-third", partial(pruner, THIRD)),
    Actor("collector", collector, lifetime=300),
    Actor("puller", puller),
    Actor("marker", marker),
)
