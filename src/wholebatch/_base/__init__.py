"""The base of every layer: checks of arguments, precision, trees, files and autograd."""
