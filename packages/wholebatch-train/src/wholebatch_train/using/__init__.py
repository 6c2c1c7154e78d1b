"""A run's model in use: `wholebatch embed`, `search`, `evaluate` and `export`, and the README.md of a run folder."""
