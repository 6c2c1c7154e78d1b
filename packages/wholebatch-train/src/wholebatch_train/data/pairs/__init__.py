"""Pairs of two sides: their groups, right answers and mined negatives."""
