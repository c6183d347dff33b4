"""Screens, each of which answers one question."""
