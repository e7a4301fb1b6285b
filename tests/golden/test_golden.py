"""Stores of every format so far can be read, and docs/format.md says how."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import ckptstore
from ckptstore import mirrors
from ckptstore.hashing import BLOCK_SIZE, block_digest, content_digest, file_digest
from ckptstore.layout import Name, RunKeys
from ckptstore.maintenance import gc, verify
from ckptstore.pulling import pull
from ckptstore.uri import parse_ref

HERE = Path(__file__).parent
FORMAT_PAGE = HERE.parent.parent / "docs" / "format.md"
RUN = "golden"


@pytest.fixture
def store(tmp_path: Path) -> ckptstore.Store:
    """A copy of the golden store; git keeps neither empty directories nor times."""
    root = tmp_path / "store"
    shutil.copytree(HERE / "v1" / "store", root, symlinks=True)
    return ckptstore.open_store(str(root))


def test_every_state_is_listed_as_it_was_written(store: ckptstore.Store) -> None:
    rows = {row.step: row for row in store.rows(everything=True)}
    states = {step: row.state for step, row in rows.items()}
    assert states == {
        100: "ok",
        200: "ok",
        300: "trashed",
        400: "damaged",
        500: "ok",
        600: "unfinished",
    }
    assert rows[100].pinned
    assert rows[100].tags == ()
    assert rows[200].tags == ("candidate",)
    assert rows[200].metrics == {"reward": 0.25, "eval": 0.75}
    assert rows[100].created == "2026-11-30T17:23:41.050Z"
    assert store.catalog.find(RUN, Name(7, "dxaiytmm", 700)) is not None, "the void"


def test_references_resolve(store: ckptstore.Store) -> None:
    for selector, step in (("latest", 500), ("best", 100), ("candidate", 200), ("200", 200)):
        assert store.resolve(parse_ref(f"{RUN}@{selector}")).step == step


def test_content_and_metadata_come_back(store: ckptstore.Store, tmp_path: Path) -> None:
    checkpoint = store.get(RUN, step=100)
    assert verify(checkpoint, deep=True).ok
    assert checkpoint.metadata == {"note": "ünïcode", "nested": {"list": [1, 2.5, None, True]}}
    pull(checkpoint, tmp_path / "out")
    assert (tmp_path / "out/actor/weights.bin").read_bytes() == bytes(range(256)) * 8
    assert (tmp_path / "out/naïve name [1].txt").read_text(encoding="utf-8") == "text\n"
    assert (tmp_path / "out/zero").read_bytes() == b""
    assert os.access(tmp_path / "out/run.sh", os.X_OK)
    assert (tmp_path / "out/empty directory").is_dir()


def test_damage_trash_and_unfinished_saves_are_understood(store: ckptstore.Store) -> None:
    damaged = store.get(RUN, step=400)
    assert [(d.path, d.offset, d.length) for d in damaged.standing.damage] == [("zero", 0, 4)]
    plan = ckptstore.plan_resume(store, RUN)
    assert plan.require().step == 500
    assert [(p.name.step, p.reason) for p in plan.passed_over] == [(600, "was never committed")]
    assert verify(store.undelete(parse_ref(f"{RUN}@300")), deep=True).ok
    removed = {a.key for a in gc(store, RUN, grace=0).removed}
    assert f"{RUN}/00006-step-00000600-cuglmvwy" in removed
    assert [row.step for row in store.rows(RUN)] == [100, 200, 300, 400, 500]


def test_a_save_continues_the_run(store: ckptstore.Store) -> None:
    with store.save(RUN, 800) as save:
        save.add_bytes("x", b"x")
    assert save.name.seq == 8
    newest = store.latest(RUN)
    assert newest is not None
    assert newest.commit.parent == "00005-step-00000500-hukzdsnq"


def test_the_vectors_in_the_format_page() -> None:
    page = FORMAT_PAGE.read_text(encoding="utf-8")
    size = 2 * BLOCK_SIZE + 7
    contents = {
        "empty": b"",
        "`hello` and a line feed": b"hello\n",
        "`0` × 16777216": bytes(BLOCK_SIZE),
        "`0` × 16777217": bytes(BLOCK_SIZE + 1),
        f"`i mod 251`, {size} bytes": (bytes(range(251)) * (size // 251 + 1))[:size],
    }
    for label, data in contents.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| {label} |"))
        digests = re.findall(r"`([0-9a-f]{64})`", row)
        blocks = [block_digest(data[i : i + BLOCK_SIZE]) for i in range(0, len(data), BLOCK_SIZE)]
        assert digests == [*blocks, file_digest(len(data), blocks)]
    greeting = ("greeting", 6, file_digest(6, [block_digest(b"hello\n")]), False)
    assert content_digest([greeting], []) in page
    assert content_digest([greeting], ["e"]) in page


def test_the_page_is_enough_to_verify_by_hand(store: ckptstore.Store) -> None:
    """The shell function in docs/format.md, run with b3sum and jq on golden and new checkpoints."""
    if not (shutil.which("b3sum") and shutil.which("jq")):
        if os.environ.get("CKPT_REQUIRE_TOOLS") == "1":
            pytest.fail("b3sum and jq are required here")
        pytest.skip("b3sum and jq are not installed")
    page = FORMAT_PAGE.read_text(encoding="utf-8")
    function = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)[-1]
    with store.save(RUN, 900) as save:
        save.add_bytes("two blocks", os.urandom(BLOCK_SIZE + 5))
    (Path(store.uri) / RUN / str(save.name) / "empty").mkdir(exist_ok=True)

    def check(step: int) -> str:
        name = store.get(RUN, step=step).name
        command = f'{function}\ncheck "$@"'
        arguments = ["bash", "-c", command, "check", store.uri, RUN, str(name)]
        return subprocess.run(arguments, capture_output=True, text=True, check=False).stdout.strip()

    assert check(100) == "ok"
    assert check(900) == "ok"
    assert check(400) == "DAMAGED: zero: block 0"
    path = Path(store.uri) / RUN / "commits" / f"{store.get(RUN, step=200).name}.json"
    good = path.read_text(encoding="utf-8")
    path.chmod(0o644)
    path.write_text(good.replace('"created":"2026-', '"created":"2025-'), encoding="utf-8")
    command = f'{function}\ncheck "{store.uri}" {RUN} {path.stem}'
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert found.stdout.strip() == "DAMAGED: record"


def test_lives_are_counted_and_what_an_older_one_had_begun_is_void(tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(HERE / "v1-lives" / "store", root, symlinks=True)
    store = ckptstore.open_store(str(root))
    assert {c.step: c.commit.life for c in store.list(RUN)} == {100: 1, 200: 2}
    voids = [n for n in store.catalog.record_names(RUN) if n.step in (150, 250)]
    assert len(voids) == 2
    assert all(store.catalog.find(RUN, name).is_void for name in voids)  # type: ignore[union-attr]
    with pytest.raises(ckptstore.SupersededError):
        store.save(RUN, 300, life=2)
    assert store.begin_life(RUN) == 4


def test_mirrors_and_half_a_copy_are_understood(tmp_path: Path) -> None:
    shutil.copytree(HERE / "v1-mirrors" / "store", tmp_path / "store", symlinks=True)
    store = ckptstore.open_store(str(tmp_path / "store"))
    (mirror,) = mirrors.known_mirrors(store.catalog)
    assert mirror.id == mirrors.mirror_id("s3://bucket/ckpts") == "96599806febb7510"
    assert mirror.note is not None
    assert (mirror.note.store, mirror.note.problem) == ("abcdefghijklmnop", "no space left")
    names = [c.name for c in store.list(RUN)]
    assert mirrors.owed(store.catalog, RUN, names) == {names[1]: (mirror,)}
    gc(store, grace=0)
    copy = RunKeys(RUN).file(Name(3, "zyxwvuts", 300), "state")
    assert store.backend.stat(copy) is not None, "gc leaves it to the mirror's next pass"
