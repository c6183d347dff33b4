"""Keeps attempts in flight: the dispatcher, the clocks, and the backends that run attempts."""
