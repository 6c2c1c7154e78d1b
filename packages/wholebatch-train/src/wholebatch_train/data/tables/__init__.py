"""Tables of `--data`: files of rows, folders of pictures and shards, and which column is what."""
