"""Talking to vLLM: calls, weight swaps, replicas, and the process itself when it is ours to run."""
