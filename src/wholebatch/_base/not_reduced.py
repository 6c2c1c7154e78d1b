"""The message about gradients that no engine has reduced, for the audit and for gradient caching."""

TITLE = "ranks end with different gradients"
FIX = (
    "under DDP, parameters must be reached through the wrapped model's forward, not through model.module, and belong "
    "to what is wrapped (unused ones: find_unused_parameters=True)"
)
