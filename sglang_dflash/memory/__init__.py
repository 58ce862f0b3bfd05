"""What a request takes beside the target's K and V: rings and records, and their sizes."""
