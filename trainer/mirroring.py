"""Mirrors of a training run's store: started, watched and ended by rank 0."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from ckptstore.errors import CkptError, ConflictError, NotFoundError
from ckptstore.maintenance.mirror import Lag
from ckptstore.maintenance.mirror.beside import MirrorBeside
from ckptstore.maintenance.mirror.pairing import where
from ckptstore.mirrors import expect_mirror, known_mirrors, owed
from ckptstore.runview import RunView
from ckptstore.store import Store, open_store
from trainer.alerts import MirrorLag
from trainer.config import Config
from trainer.loop import Metrics
from trainer.tracking import Tracker


class Mirrors:
    """Keeps the mirrors of a run in step, from a process of its own that cannot slow training.

    Args:
        config: Names the mirrors.
        store: Where the run saves to.
        log_dir: Where the process leaves its state and its log.
        tracker: Where what happens is told.
        alert: What the alert for lag remembers from an earlier life.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        log_dir: Path,
        tracker: Tracker,
        alert: Mapping[str, Any] | None,
    ) -> None:
        self._run = config.storage.run
        self._wait = config.storage.mirror_on_exit
        self._grace = config.trainer.grace_seconds
        self._store = store
        self._tracker = tracker
        self._alert = MirrorLag(config.trainer.alert_mirror_lag, alert)
        self._lag: dict[str, Lag] = {}
        self._problems: dict[str, str | None] = {}
        self._look: threading.Thread | None = None
        self._uris = {where(uri): uri for uri in config.storage.mirrors}
        for uri in self._uris:
            expect_mirror(store.catalog, uri, [self._run])
        self._beside = MirrorBeside(
            config.storage.uri, config.storage.mirrors, log_dir, runs=[self._run]
        )
        tracker.note(f"mirrored to {', '.join(self._uris)}; see {self._beside.log}")

    @property
    def alert_state(self) -> dict[str, Any]:
        """What the alert remembers, for the checkpoint."""
        return self._alert.state

    @property
    def metrics(self) -> Metrics:
        """How far the mirror that is farthest behind is, as of the last look."""
        if not self._lag:
            return {}
        lags = self._lag.values()
        return {
            "mirror/behind": float(max(lag.checkpoints for lag in lags)),
            "mirror/behind_seconds": max(lag.seconds for lag in lags),
        }

    def saved(self) -> None:
        """A checkpoint has been committed: mirror it, and look how far the mirrors are."""
        self._beside.wake()
        if self._look is None or not self._look.is_alive():
            self._look = threading.Thread(target=self._watch, name="trainer-mirrors", daemon=True)
            self._look.start()

    def _watch(self) -> None:
        try:
            if self._beside.revive():
                self._tracker.warn(
                    "the process that mirrors had ended, and was started again",
                    f"see {self._beside.log}",
                )
            self._lag = self._lags()
        except CkptError as error:
            self._say("", f"how far the mirrors are is not known: {error}")
            return
        self._say("", None)
        for uri, lag in self._lag.items():
            text = self._alert.check(uri, lag.checkpoints)
            if text is not None:
                self._tracker.warn(text)
        states = self._beside.states
        for uri, state in (states.mirrors if states is not None else {}).items():
            self._say(uri, state.problem)

    def _lags(self) -> dict[str, Lag]:
        catalog = self._store.catalog
        commits = dict(RunView.of(catalog, self._run).commits)
        lacking: dict[str, list[Any]] = {uri: [] for uri in self._uris}
        for name, mirrors in owed(catalog, self._run, commits).items():
            for mirror in mirrors:
                if mirror.uri in lacking:
                    lacking[mirror.uri].append(commits[name])
        return {uri: Lag.of(these) for uri, these in lacking.items()}

    def _say(self, uri: str, problem: str | None) -> None:
        """What is wrong, once until it has changed: not at every checkpoint."""
        before = self._problems.get(uri)
        self._problems[uri] = problem
        if problem is not None and before is None:
            self._tracker.warn(problem, f"training goes on; see {self._beside.log}")
        elif problem is None and before is not None:
            self._tracker.note("what was wrong with the mirrors is over: " + before)

    def finish(self, *, hurry: bool) -> None:
        """Training has ended: wait for the mirrors if ``storage.mirror_on_exit`` says so.

        Args:
            hurry: The scheduler grants ``trainer.grace_seconds`` only.
        """
        if not self._wait:
            self._beside.close()
            return
        self._tracker.note("waiting for the mirrors (storage.mirror_on_exit)")
        if self._beside.finish(self._grace / 2 if hurry else None):
            self._tracker.note("the mirrors hold all checkpoints")
            return
        states = self._beside.states
        known = states.mirrors if states is not None else {}
        for uri in self._uris.values():
            state = known.get(uri)
            if state is not None and state.is_in_step:
                continue
            problem = state.problem if state is not None else None
            lag = state.behind if state is not None else None
            lacks = (
                f"; it lacks {lag.checkpoints} checkpoints ({decimal(lag.bytes)})"
                if lag is not None
                else ""
            )
            self._tracker.warn(
                f"{problem or f'the mirror {uri} is behind'}{lacks}; see {self._beside.log}",
                f"later: ckpt mirror {self._store.uri} '{uri}'",
            )

    def leave(self) -> None:
        """Training has failed: the process copies what is lacking and ends by itself."""
        self._beside.leave()


def check_not_lost(config: Config, store: Store) -> list[str]:
    """Refuse to start a run from nothing that a mirror holds: the disk may not be mounted.

    Returns:
        What could not be made sure of, for the log.

    Raises:
        ConflictError: a mirror holds checkpoints of the run, and the store holds none.
    """
    run = config.storage.run
    wanted = list(config.storage.mirrors)
    if store.exists:
        if store.catalog.record_names(run):
            return []
        wanted += [m.uri for m in known_mirrors(store.catalog) if m.wants(run) and m.note]
        if config.trainer.resume_mode == "none":
            return []
    notes = []
    for uri in dict.fromkeys(wanted):
        try:
            mirror = open_store(uri)
            there = mirror.exists and mirror.catalog.record_names(run)
        except NotFoundError:
            continue
        except CkptError as error:
            notes.append(f"whether the mirror {uri} holds run {run} is not known: {error}")
            continue
        if there:
            what = "holds none of it" if store.exists else "is no store"
            raise ConflictError(
                f"the mirror {mirror.uri} holds run {run!r}, and {store.uri} {what}: nothing is "
                "started from scratch",
                hint="is the disk mounted? if it was lost: "
                f"ckpt mirror {mirror.uri} {store.uri} --run {run}",
            )
    return notes
