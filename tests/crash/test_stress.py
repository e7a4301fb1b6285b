"""Saves, mirrors, retention on both sides, gc, pulls and marks at once, in processes that die."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from ckptstore.layout import Name
from ckptstore.maintenance import gc, prune
from ckptstore.maintenance.mirror import mirror
from ckptstore.marks import standing
from ckptstore.store import Store
from ckptstore.uri import Ref
from tests.conftest import FULL
from tests.crash.helpers import check_clean, check_store, collect
from tests.crash.stress_actors import (
    ACTORS,
    BEST,
    PLACES,
    POLICIES,
    RUNS,
    SOURCE,
    TARGET,
    THIRD,
    Actor,
    Life,
    World,
    pinned,
    read_log,
)
from tests.crash.stress_oracle import History, commits_of, must_keep

SECONDS = 20.0 if FULL else 10.0
SEEDS = range(20) if FULL else range(1)
CHAIN = ((SOURCE, TARGET), (TARGET, THIRD))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.timeout(300)
def test_all_at_once_nothing_is_lost_that_a_policy_keeps(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, seed, time.monotonic() + SECONDS)
    for place in (*PLACES, "logs", "scratch"):
        (tmp_path / place).mkdir()
    begin(world)
    counts = run_all(world)
    check_logs(world)
    for place in PLACES:
        check_store(tmp_path / place)
    check_nothing_vanished(world)
    settle(world)
    counts += count(world)
    print(f"seed {seed}: " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    # Without these it would have tested nothing.
    for what in ("saved", "mirrored", "pruned", "purged", "pulled", "verified", "killed"):
        assert counts[what] > 0, f"nothing was {what}"


def begin(world: World) -> None:
    """A checkpoint of each run in every store, so that each is a store and knows its mirror."""
    for actor in ACTORS:
        (world.root / "scratch" / actor.name).mkdir()
    for actor in ACTORS:
        if actor.name in ("saver-a0", "saver-b"):
            actor.act(Life(world, actor.name, random.Random(world.seed)))
    for source, target in CHAIN:
        assert mirror(world.store(source), world.store(target)).ok


def run_all(world: World) -> Counter[str]:
    """Run the actors until the end; who was killed begins a new life."""
    counts: Counter[str] = Counter()
    lives: Counter[str] = Counter()
    running: dict[int, tuple[Actor, int]] = {}
    poll = select.poll()

    def start(actor: Actor) -> None:
        pid = actor.start(world, lives[actor.name])
        fd = os.pidfd_open(pid)
        running[fd] = (actor, pid)
        poll.register(fd, select.POLLIN)

    try:
        for actor in ACTORS:
            start(actor)
        while running:
            for fd, _ in poll.poll():
                actor, pid = running.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                status = os.waitpid(pid, 0)[1]
                said = actor.errors(world, lives[actor.name]).read_text()
                killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
                assert status == 0 or (killed and actor.lifetime is not None), (
                    f"{actor.name} ended with {status}: {said}"
                )
                assert "Traceback" not in said, f"{actor.name}: {said}"
                counts["warnings logged"] += said.count("\n")
                lives[actor.name] += 1
                if killed:
                    counts["killed"] += 1
                    start(actor)
    finally:
        for fd, (_, pid) in running.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(fd)
    return counts


def check_logs(world: World) -> None:
    """Nothing failed but what may when others are at work."""
    for event in world.events("mirrored"):
        assert event["failure"] is None, event
        assert not event["skipped"], event
    for event in world.events("pruned"):
        unexpected = [
            w for w in event["warnings"] if "goes although" not in w and " stays: " not in w
        ]
        assert not unexpected, event


def check_nothing_vanished(world: World) -> None:
    """What was committed is there, or a retention has said that it goes; nothing else is gone."""
    going: dict[tuple[str, str], set[str]] = {(p, r): set() for p in PLACES for r in RUNS}
    over = {key: set[str]() for key in going}
    for plan in world.events("plan"):
        going[plan["place"], plan["run"]].update(plan["going"])
        over[plan["place"], plan["run"]].update(plan["over"])
    histories = {(p, r): History.of(world.store(p), r) for p in PLACES for r in RUNS}
    for (place, run), history in histories.items():
        assert history.gone <= going[place, run], f"{place}, {run}: deleted without a plan"
    for run in RUNS:
        saved = {e["name"] for e in world.events("saved") if e["run"] == run}
        lost = saved - histories[SOURCE, run].ever
        assert not lost, f"saved and vanished: {lost}"
        for source, target in CHAIN:
            gone, arrived = histories[source, run].gone, histories[target, run].ever
            owed = gone - arrived - over[source, run]
            assert not owed, f"gone from {source}, owed to {target}: {owed}"
    for place in PLACES:
        for run, name in pinned(read_log(world.log("marker")), place):
            history = histories[place, run]
            assert name in history.there or name in history.trashed, f"{name} was pinned"


def settle(world: World) -> None:
    """With all at rest the mirrors catch up, and each store keeps what its policy says."""
    for place in PLACES:
        for run in RUNS:
            bring_back_pinned(world.store(place), run)
        collect(world.root / place)
    for source, target in CHAIN:
        passed = mirror(world.store(source), world.store(target))
        assert passed.ok, passed
        assert not passed.behind.checkpoints
    for place in PLACES:
        collect(world.root / place)
        check_clean(world.root / place)
    for place in PLACES:
        store, policy = world.store(place), POLICIES[place]
        for run in RUNS:
            before = commits_of(store, run)
            kept = must_keep(policy, before, BEST)
            result = prune(store, run, policy)
            after = set(commits_of(store, run))
            assert kept <= after, f"{place}, {run}: the policy keeps {kept - after}"
            assert after == {str(d.name) for d in result.kept}
            pins = {name for r, name in pinned(read_log(world.log("marker")), place) if r == run}
            assert pins & set(before) <= after
        gc(store, grace=0)
        check_store(world.root / place)
        check_clean(world.root / place)


def bring_back_pinned(store: Store, run: str) -> None:
    """What was pinned while it was being deleted stays in the trash, whole."""
    for name in History.of(store, run).trashed:
        parsed = Name.parse(name)
        assert parsed is not None
        if standing(store.catalog, run, parsed).pinned:
            assert store.undelete(Ref(None, run, name)).quick_check() == ()


def count(world: World) -> Counter[str]:
    """What was done, by kind of event."""
    counts: Counter[str] = Counter()
    for actor in ACTORS:
        counts.update(e["kind"] for e in read_log(world.log(actor.name)))
    counts["mirrored"] = sum(len(e["copied"]) for e in world.events("mirrored"))
    counts["pruned"] = sum(e["count"] for e in world.events("pruned"))
    counts["held for a mirror"] = sum(len(e["held"]) for e in world.events("plan"))
    counts["deleted though owed"] = sum(len(e["over"]) for e in world.events("plan"))
    histories = [History.of(world.store(p), r) for p in PLACES for r in RUNS]
    counts["purged"] = sum(len(h.gone - h.trashed) for h in histories)
    return counts
