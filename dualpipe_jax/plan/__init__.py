"""What a run would be on accelerators that are not here: compiled by the real compiler, read from its output."""
