"""Tables, the one writer, and queries. Token blobs are opaque here: ``trajectory.codec`` knows them."""
