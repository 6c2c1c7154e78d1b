"""A user's pictures: read, compared, and left out where they cannot be read."""
