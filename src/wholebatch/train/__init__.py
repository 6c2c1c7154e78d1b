"""An application of the library: trains a dual encoder through the public API only."""
