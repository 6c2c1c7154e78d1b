"""The report of a run: one HTML file without scripts that needs no network, made from the contents of a dataclass."""
