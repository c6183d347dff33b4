"""Dialects: the wire formats that harnesses speak, each a set of pure functions around the canonical turn.

A dialect reads a request body into a ``Turn`` and writes a ``Completion`` as a response body or as the events
of a stream that is synthesised from it. It knows no attempt, engine or store, and does no I/O.
"""
