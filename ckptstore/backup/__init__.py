"""Backup jobs: what ``[jobs.NAME]`` of ckpt.toml says, done once by ``ckpt backup NAME``.

:mod:`jobs` reads what a job is, :mod:`run` does it; :mod:`sources` tells which checkpoints of a
directory that a trainer is writing to are finished; :mod:`crontab` and :mod:`systemd` have it done
again and again.
"""
