"""Processes of this machine and of a launcher: who they are, how they start, which CPUs they have."""
