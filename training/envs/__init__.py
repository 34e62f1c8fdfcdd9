"""Environments: one protocol, real engines."""
