"""Bodies of the command line. Each prints for a person, or JSON with ``--json``; errors are ForgeErrors."""
