"""The command `wholebatch doctor`: options, and the report that it prints."""
