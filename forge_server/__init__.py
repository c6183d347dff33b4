"""forge-server: train agents inside the real harness they will be deployed in."""

__version__ = "0.1.0"
