"""The cache between starts: tables as Arrow files, and results about their pictures."""
