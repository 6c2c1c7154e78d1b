"""The processes of a run: how they start, agree, share weights, hear signals and end."""
