"""Tests that run inside User-Mode Linux, on NFS mounts (``tests/servers/nfs.py``)."""
