"""Images of classes, and their split."""
