"""The tasks of training: pairs to be found, or classes; their networks, losses, batches and figures."""
