"""Routes of the two listeners. Each module gives a function from its dependencies to Litestar handlers."""
