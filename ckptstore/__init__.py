"""ckptstore: a checkpoint store that does not lose checkpoints.

    import ckptstore

    store = ckptstore.open_store("/data/ckpts")
    with store.save(run="gsm8k", step=500, metrics={"reward": 0.41}) as save:
        save.add_file("tokenizer.json", "out/tokenizer.json")
        with save.open("actor/weights.bin") as f:
            f.write(weights)
    checkpoint = store.latest("gsm8k")
    checkpoint.open("actor/weights.bin").read()

Importing it is cheap: what is named here is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptstore.version import __version__

if TYPE_CHECKING:
    from ckptstore import maintenance
    from ckptstore.errors import (
        AccessDeniedError,
        CancelledError,
        CkptError,
        ConflictError,
        Damage,
        IntegrityError,
        NoSpaceError,
        NotFoundError,
        PartialError,
        PlaceNotFoundError,
        SourceChangedError,
        SupersededError,
        TemporaryError,
        UsageError,
        VoidedError,
    )
    from ckptstore.pushing import PushResult
    from ckptstore.reading import Checkpoint
    from ckptstore.records import BestRule
    from ckptstore.resume import ResumePlan, plan_resume
    from ckptstore.saveoptions import SaveOptions
    from ckptstore.saving import Save
    from ckptstore.store import Store, open_store

_WHERE = {
    "AccessDeniedError": "errors",
    "BestRule": "records",
    "CancelledError": "errors",
    "Checkpoint": "reading",
    "CkptError": "errors",
    "ConflictError": "errors",
    "Damage": "errors",
    "IntegrityError": "errors",
    "NoSpaceError": "errors",
    "NotFoundError": "errors",
    "PlaceNotFoundError": "errors",
    "PartialError": "errors",
    "PushResult": "pushing",
    "ResumePlan": "resume",
    "Save": "saving",
    "SaveOptions": "saveoptions",
    "SourceChangedError": "errors",
    "Store": "store",
    "SupersededError": "errors",
    "TemporaryError": "errors",
    "UsageError": "errors",
    "VoidedError": "errors",
    "open_store": "store",
    "plan_resume": "resume",
}

__all__ = [
    "AccessDeniedError",
    "BestRule",
    "CancelledError",
    "Checkpoint",
    "CkptError",
    "ConflictError",
    "Damage",
    "IntegrityError",
    "NoSpaceError",
    "NotFoundError",
    "PartialError",
    "PlaceNotFoundError",
    "PushResult",
    "ResumePlan",
    "Save",
    "SaveOptions",
    "SourceChangedError",
    "Store",
    "SupersededError",
    "TemporaryError",
    "UsageError",
    "VoidedError",
    "__version__",
    "maintenance",
    "open_store",
    "plan_resume",
]


def __getattr__(name: str) -> Any:
    if name == "maintenance":
        return import_module("ckptstore.maintenance")
    if name not in _WHERE:
        raise AttributeError(f"module 'ckptstore' has no attribute {name!r}")
    return getattr(import_module(f"ckptstore.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
