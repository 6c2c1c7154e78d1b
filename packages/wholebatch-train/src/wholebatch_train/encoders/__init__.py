"""The networks of a run: what each reads, and the rows that it makes."""
