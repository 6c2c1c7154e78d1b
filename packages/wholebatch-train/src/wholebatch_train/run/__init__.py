"""The folder of a run: what it holds, and how a run is stopped, resumed and extended."""
