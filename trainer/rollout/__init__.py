"""Generation of responses: one interface, an engine a module."""
