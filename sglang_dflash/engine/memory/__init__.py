"""Memory of requests in addition to the target's K and V: ring buffers, records, token histories, and their sizes."""
