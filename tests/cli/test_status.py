"""``ckpt status``"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ckptstore import open_store
from ckptstore.maintenance.mirror import mirror
from ckptstore.store import Store
from tests.cli.support import HAZARDS, ckpt, ckpt_on_terminal
from tests.unit.support import save

RUN = "gsm8k"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = open_store(str(tmp_path / "store"))
    for step in (100, 200):
        save(made, step, run=RUN)
    return made


@pytest.fixture
def target(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "mirror"))


def samples(path: Path) -> dict[str, dict[tuple[str, ...], float]]:
    """What stands in the file, as a strict reader sees it: by name, then by labels' values."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(path.read_text(encoding="utf-8")):
        for sample in family.samples:
            labels = tuple(sample.labels[k] for k in ("run", "mirror") if k in sample.labels)
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_the_document_tells_all(store: Store, target: Store) -> None:
    mirror(store, target)
    save(store, 250, run=RUN)
    found = ckpt("status", store.uri, "--json").ok().json
    assert set(found) == {
        *("store", "id", "free_bytes", "growth_bytes_per_second", "full_in_seconds"),
        *("mirrors", "runs"),
    }
    assert (found["store"], found["id"]) == (store.uri, store.id)
    (there,) = found["mirrors"]
    assert (there["mirror"], there["asked"], there["answered"]) == (target.uri, True, True)
    (run,) = found["runs"]
    assert set(run) == {
        *("run", "newest", "checkpoints", "bytes", "damaged", "growth_bytes_per_second"),
        *("verified", "trash", "unfinished", "orphans", "loss", "mirrors"),
    }
    size = store.get(RUN, step=250).size
    assert run["newest"]["ref"] == f"{RUN}@250"
    assert (run["checkpoints"], run["bytes"]) == (3, 3 * size)
    (behind,) = run["mirrors"]
    assert (behind["live"], behind["newest_step"]) == (True, 200)
    assert behind["behind"] | {"seconds": 0} == {"checkpoints": 1, "bytes": size, "seconds": 0}
    assert run["loss"] | {"seconds": 0} == {
        "everything": False,
        "checkpoints": 1,
        "steps": 50,
        "seconds": 0,
    }


def test_mirrors_need_not_be_asked(store: Store, target: Store) -> None:
    mirror(store, target)
    os.rename(target.uri, f"{target.uri}-away")
    found = ckpt("status", store.uri, RUN, "--json", "--no-mirrors").ok().json
    assert (found["mirrors"][0]["asked"], found["mirrors"][0]["problem"]) == (False, None)
    assert found["runs"][0]["mirrors"][0]["live"] is False
    found = ckpt("status", store.uri, RUN, "--json").ok().json
    assert "there is no store" in found["mirrors"][0]["problem"]


def test_in_a_pipe_every_line_says_what_it_is_about(store: Store, target: Store) -> None:
    mirror(store, target)
    save(store, 250, run=RUN)
    ran = ckpt("status", store.uri).ok()
    lines = [line.split("\t") for line in ran.out.splitlines()]
    assert [(line[0], len(line)) for line in lines] == [("run", 14), ("mirror", 10), ("store", 5)]
    assert lines[0][1:3] == [RUN, f"{RUN}@250"]
    assert lines[0][-1].startswith("50 steps (")
    assert lines[1][1:5] == [target.uri, RUN, "live", "1"]
    assert lines[2][1] == store.uri
    assert ckpt("status", store.uri, "--quiet").ok().out == ""


@pytest.mark.parametrize("columns", [80, 120])
def test_on_a_terminal_no_line_is_too_long(store: Store, tmp_path: Path, columns: int) -> None:
    far = open_store(str(tmp_path / "a" / "place" / ("long" * 10)))
    mirror(store, far)
    save(store, 250, run=RUN)
    store.delete(store.get(RUN, step=100))
    shown = ckpt_on_terminal("status", store.uri, env={"COLUMNS": str(columns)})
    assert shown.code == 0
    text = re.sub(r"\x1b\[[\d;]*m", "", shown.out)
    runs, mirrors, _ = text.split("\n\n")
    assert max(len(line) for line in (runs + "\n" + mirrors).splitlines()) <= columns
    words = " ".join(text.split())
    assert f"{RUN}@250" in words
    assert "1 in the trash" in words
    assert f"if {store.uri} died now, 50 steps (" in words
    assert f"of {RUN} would be lost" in words


def test_a_lag_over_the_limit_is_exit_3(store: Store, target: Store) -> None:
    ckpt("status", store.uri, "--max-lag", "1h").failed(3, "has no mirror")
    mirror(store, target)
    ckpt("status", store.uri, "--max-lag", "0").ok()
    save(store, 250, run=RUN)
    ckpt("status", store.uri, "--max-lag", "1h").ok()
    ran = ckpt("status", store.uri, "--max-lag", "0", "--quiet")
    ran.failed(3, target.uri, f"lacks 1 checkpoint of {RUN}")
    assert ran.out == ""


def test_prometheus_reads_the_file(store: Store, target: Store, tmp_path: Path) -> None:
    mirror(store, target)
    save(store, 250, run=RUN)
    save(store, 7, run="other")
    file = tmp_path / "metrics" / "ckpt.prom"
    ckpt("status", store.uri, "--quiet", "--prometheus", file).ok()
    found = samples(file)
    assert all(name.startswith("ckptstore_") for name in found)
    assert found["ckptstore_checkpoints"] == {(RUN,): 3, ("other",): 1}
    assert found["ckptstore_newest_step"] == {(RUN,): 250, ("other",): 7}
    assert found["ckptstore_mirror_lag_checkpoints"] == {
        (RUN, target.uri): 1,
        ("other", target.uri): 1,
    }
    assert found["ckptstore_loss_steps"] == {(RUN,): 50, ("other",): 7}
    assert found["ckptstore_loss_is_everything"] == {(RUN,): 0, ("other",): 1}
    assert found["ckptstore_mirror_up"] == {(target.uri,): 1}
    assert found["ckptstore_free_bytes"][()] > 0
    assert "ckptstore_verified_timestamp_seconds" not in found
    assert [p.name for p in file.parent.iterdir()] == ["ckpt.prom"]


def test_a_metrics_file_that_cannot_be_replaced_stays_as_it_was(
    store: Store, tmp_path: Path
) -> None:
    file = tmp_path / "ckpt.prom"
    ckpt("status", store.uri, "--prometheus", file).ok()
    before = file.read_bytes()
    blocked = tmp_path / "blocked"
    blocked.write_bytes(b"")
    ckpt("status", store.uri, "--prometheus", blocked / "ckpt.prom").failed(6, "ckpt.prom")
    assert file.read_bytes() == before


@pytest.mark.parametrize("place", ['a "quoted" \\ place', "no text \udcff", "e\x1b[31m\nvil"])
def test_any_path_is_a_label(tmp_path: Path, place: str) -> None:
    store = open_store(str(tmp_path / place))
    save(store, 1, run=RUN)
    file = tmp_path / "ckpt.prom"
    ran = ckpt("status", store.uri, "--prometheus", file).ok()
    assert not any(hazard in ran.out for hazard in HAZARDS)
    assert samples(file)["ckptstore_checkpoints"] == {(RUN,): 1}


def test_without_the_package_the_extra_is_named(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    ran = ckpt("status", store.uri, "--prometheus", tmp_path / "ckpt.prom")
    ran.failed(2, "ckptstore[backup]")


def test_what_is_not_there(store: Store, tmp_path: Path) -> None:
    ckpt("status", tmp_path / "nothing").failed(4)
    ckpt("status", store.uri, "nothing").failed(4)
    ckpt("status", store.uri, "--max-lag", "soon").failed(2)


def test_a_store_without_a_run(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    store.create()
    assert ckpt("status", store.uri, "--json").ok().json["runs"] == []
    assert "holds no run yet" in ckpt_on_terminal("status", store.uri).err
