"""How a harness is launched and read, as data; and our own small harness."""
