"""Figures drawn from tables only; each is saved with its data and its inputs."""
