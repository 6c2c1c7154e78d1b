"""What `--data` names as a table: files of rows, folders of pictures and shards, and which column is what."""
