"""What a step takes, before it runs."""
