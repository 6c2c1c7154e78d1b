"""A run's model in use: `wholebatch embed`, `search`, `evaluate` and `export`."""
