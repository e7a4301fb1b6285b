"""``ckpt-train`` and ``python -m trainer``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from ckptstore.errors import CkptError
from cli.output import show_error
from trainer.settings import load_config, to_yaml


def main(arguments: Sequence[str] | None = None) -> int:
    """Train. Returns the exit code, which is that of ``ckpt`` for the same kind of error."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        config, options = load_config(sys.argv[1:] if arguments is None else arguments)
        if options.print_config:
            print(to_yaml(config), end="")
            return 0
        config.storage.uri = _absolute(config.storage.uri)
        config.storage.mirrors = [_absolute(uri) for uri in config.storage.mirrors]
        if config.runtime == "ray":
            from trainer.runtime.ray import train
        else:
            from trainer.runtime.local import train
        train(config, notes=options.notes, dry_run=options.dry_run)
    except CkptError as error:
        if not error.on_all_ranks or os.environ.get("RANK", "0") == "0":
            show_error(str(error), error.hint)
        return error.exit_code
    except KeyboardInterrupt:
        show_error("interrupted")
        return 130
    return 0


def _absolute(uri: str) -> str:
    """A path is meant from where the command was given, on every host."""
    return uri if "://" in uri else os.path.abspath(uri)


def command() -> None:
    """The installed command."""
    sys.exit(main())


if __name__ == "__main__":
    command()
