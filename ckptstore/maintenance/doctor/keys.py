"""Small objects: written and read back, listed, created exclusively, removed if unchanged."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from ckptstore.backends.base import Backend
from ckptstore.backends.findings import Finding
from ckptstore.errors import CkptError, NotFoundError
from ckptstore.maintenance.doctor.bench import Bench

RACERS = 16
TURNS = 5

_LIMIT = 1000


def write(bench: Bench) -> Finding:
    """Small objects are there when they were written, and replaced ones are the new ones."""
    key = bench.key("begun")
    for content in (b"first", b"then another"):
        bench.here.put(key, content)
        for who, client in (("", bench.here), (" by a second client", bench.other)):
            try:
                found = client.read(key, _LIMIT)
            except NotFoundError:
                return Finding.failed("write", f"what was just written is not found{who}")
            if found != content:
                return Finding.failed("write", f"what is read back{who} is not what was written")
    return Finding.ok("write", "an object is written, read back, and replaced")


def listing(bench: Bench) -> Finding:
    """A listing by a client that has looked before shows what another one did since."""
    directory = bench.key("listed")
    kept, key = f"{directory}/kept", f"{directory}/new"

    def shown() -> bool:
        return key in {entry.key for entry in bench.other.list(directory)}

    bench.here.put(kept, b"")
    if shown():
        return Finding.failed("list", "a listing shows what was never written")
    bench.here.put(key, b"x")
    appeared = bench.within_patience(shown)
    bench.here.delete([key])
    vanished = bench.within_patience(lambda: not shown())
    hint = (
        "another host would not see the newest checkpoint for a while; look for a cache of "
        "listings in the mount's options or in a proxy before the server"
    )
    for when, what in ((appeared, "what was just written"), (vanished, "what was just deleted")):
        if when is None:
            state = "is not in a listing" if when is appeared else "is still in a listing"
            return Finding.failed("list", f"{what} {state} {bench.patience:.0f} s later", hint)
    late = max(appeared or 0.0, vanished or 0.0)
    if late:
        detail = f"a listing by a second client is up to {late:.1f} s behind"
        return Finding.warning("list", detail, hint, behind_seconds=round(late, 3))
    return Finding.ok("list", "a second client's listing shows at once what came and what went")


class _Attempt(NamedTuple):
    """What one of the racers saw."""

    won: bool
    seen: bytes


def exclusive_create(bench: Bench) -> Finding:
    """Of many clients that create one key at once exactly one succeeds, and the rest see its."""
    check = "exclusive-create"
    if not bench.here.is_exclusive():  # a race could show no more than that
        return Finding.warning(
            check,
            "creating an object is not exclusive here: a second client replaces it, and is told "
            "that it has created it",
            "saves are safe all the same (each has a name of its own), but collecting dead ones "
            "needs `ckpt gc --force`, when no save is running",
        )
    clients = [bench.make() for _ in range(RACERS)]
    try:
        turns = [_race(clients, bench.key(f"race/{turn}")) for turn in range(TURNS)]
    finally:
        for client in clients:
            client.close()
    winners = [sum(racer.won for racer in racers) for racers in turns]
    numbers = {"racers": RACERS, "turns": TURNS, "most_winners": max(winners)}
    if set(winners) != {1}:
        wrong = next(count for count in winners if count != 1)
        return Finding.failed(
            check,
            f"{wrong} of {RACERS} clients that created one object at once were told that they had",
            "two processes could both commit: do not keep checkpoints here",
            **numbers,
        )
    for racers in turns:
        winner = next(index for index, racer in enumerate(racers) if racer.won)
        if any(racer.seen != _content(winner) for racer in racers):
            return Finding.failed(
                check, "a client that came too late did not find the object of the winner",
                "a record could be overwritten: do not keep checkpoints here", **numbers,
            )  # fmt: skip
    detail = f"{RACERS} clients at once, {TURNS} times over: one creates, the others see its object"
    return Finding.ok(check, detail, **numbers)


def _content(index: int) -> bytes:
    return b"%d" % index * 50


def _race(clients: list[Backend], key: str) -> list[_Attempt]:
    barrier = threading.Barrier(len(clients))

    def run(index: int) -> _Attempt:
        barrier.wait(60)
        try:
            won = clients[index].create_exclusive(key, _content(index))
        except CkptError:  # whether it was created nobody knows: what is there decides
            seen = clients[index].read(key, _LIMIT)
            return _Attempt(seen == _content(index), seen)
        return _Attempt(won, clients[index].read(key, _LIMIT))

    with ThreadPoolExecutor(len(clients)) as pool:
        return list(pool.map(run, range(len(clients))))


def remove_if(bench: Bench) -> Finding:
    """A record that has changed since it was looked at is not removed."""
    check, key = "remove-if", bench.key("removed")
    bench.here.put(key, b"one")
    hint = "a delete could take a checkpoint that someone has just brought back"
    if bench.here.remove_if(key, b"another") or bench.other.stat(key) is None:
        return Finding.failed(check, "an object with other content was removed", hint)
    if bench.other.read(key, _LIMIT) != b"one":
        return Finding.failed(check, "an object that was to be left alone was changed", hint)
    if not bench.here.remove_if(key, b"one") or bench.other.stat(key) is not None:
        return Finding.failed(check, "an object with the expected content was not removed")
    return Finding.ok(check, "an object goes only while it holds what is expected")
