"""The decorators of the package grad_cache, which `wholebatch.gradcache` has under the same names."""

from ...gradcache import cached, cat_input_tensor, gather_input_tensor

__all__ = ["cached", "cat_input_tensor", "gather_input_tensor"]
