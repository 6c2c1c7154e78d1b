"""Shared by command lines: tables, and the names that they offer."""
