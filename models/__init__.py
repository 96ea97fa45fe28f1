"""Decoder families and their checkpoints."""
