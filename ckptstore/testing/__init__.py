"""For authors of backends, and for tests.

The conformance suite, hooks into every storage operation, kills at any of them, and a scheduler
that tries the orders in which concurrent actors can interleave.
"""
