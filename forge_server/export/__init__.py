"""A run's recordings as files: samples for other trainers, the drift report, the data check. Reads only."""
