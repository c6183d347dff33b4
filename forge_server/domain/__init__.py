"""Pure types and rules: no I/O, no clock, no import of the rest of the package."""
