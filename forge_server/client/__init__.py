"""The public HTTP API as seen from outside: schemas and a typed client. Imports only ``domain``."""
