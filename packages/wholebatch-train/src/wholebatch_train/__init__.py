"""An application of the library: trains a dual encoder through the public API only.

A mistake of the user's is a `UserError`, wherever it is found, and one line on the command line. Docstrings name it
where ranks or files depend on it.
"""
