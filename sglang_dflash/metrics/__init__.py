"""What a server tells of its steps."""
