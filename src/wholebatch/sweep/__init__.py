"""What happens to a tile of S = scale * X Y^T. This layer knows no ranks and no loss."""

from .softmax import SoftmaxSweep

__all__ = ["SoftmaxSweep"]
