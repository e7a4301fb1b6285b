"""For authors of backends and for tests: the conformance suite, hooks into every storage operation,
and a scheduler that tries the orders in which concurrent actors can interleave.
"""
