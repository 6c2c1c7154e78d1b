"""The data of a run: tables and pictures, their split, and the batch of each step."""
