"""Pairs: targets and drafts that need no model hub, and servers of them.

`tiny/` has the tiny pairs in this package, and the generator of their text. `smollm2/` makes a real target from a
public package. `servers/` starts servers, sends requests and stops them. This wing imports the engine and the
reference.
"""
