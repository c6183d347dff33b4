"""Runs only in vLLM's environment."""
