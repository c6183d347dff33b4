"""Traces of attempts for an OpenTelemetry collector. Nothing of OpenTelemetry is loaded unless one is set."""
