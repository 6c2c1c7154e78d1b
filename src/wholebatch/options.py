"""The keyword options of losses, as types: what a loss takes as `**options`.

    def my_loss(x: Tensor, y: Tensor, **options: Unpack[wb.options.KernelOptions]) -> Tensor:
        return wb.functional.clip_loss(encoder(x), encoder(y), 14.3, **options)

Editors complete them, and type checkers check them. Each loss takes one of these sets, or names some of its keywords;
the set's page says what each keyword means, and its default.
"""

from .contract.options import KernelOptions, LossOptions, ProductOptions, SweepOptions

__all__ = ["KernelOptions", "LossOptions", "ProductOptions", "SweepOptions"]
