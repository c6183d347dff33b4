"""One run as a report for people: gathered from its rows, drawn as one HTML page that needs nothing else."""
