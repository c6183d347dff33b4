"""Evaluation rounds: the live policy measured on fixed tasks, never trained on."""
