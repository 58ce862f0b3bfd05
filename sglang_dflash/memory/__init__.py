"""Memory of a request besides the target's K and V: ring buffers, records, token history, and their sizes."""
