"""Rates without a measurement on this machine: those of one CPU, and of cards by their data sheets."""

from __future__ import annotations

import torch

from .._base.user_error import UserError
from ..losses.catalog import CATALOG
from .cards import CARDS, card_named
from .rates import Rates
from .sizes import LOSSES, MAX_SIM, PARTIAL_FC, WINNERS

_WITHOUT_BFLOAT16 = ("t4", "v100")
_SHARE, _OF_ENCODERS = 0.7, 0.4  # of a data sheet's figures that are assumed
# Bytes of tiles in memory for each entry.
_ENTRY_BYTES = {0: 88, 2: 72, 4: 76, 8: 152}
_ENTRY_BYTES_OF_HALVES = {0: 66, 2: 58, 4: 62, 8: 152}  # the product scales, and dS has two bytes
_ENTRY_BYTES_OF_TOKENS = {0: 16, WINNERS: 8}  # a product is written, and read for its maximum; twice, or once
# Measured on one rank with two cores of an AMD EPYC, torch 2.13, rounded.
_CPU_PRODUCTS = {16: 90e9, 64: 120e9, 256: 150e9, 1024: 150e9}
_CPU_ENTRY = {
    "clip": {0: 3e-9, 2: 3e-9, 4: 3.2e-9},
    "info_nce": {0: 2e-9, 2: 2.2e-9, 4: 2.4e-9},
    "siglip": {0: 2.5e-9},
    "nt_xent": {0: 4e-9, 2: 3e-9, 4: 4e-9},
    "sup_con": {0: 6e-9, 4: 6e-9},
    PARTIAL_FC: {0: 3e-9, 2: 2.5e-9, 4: 3.5e-9},
    MAX_SIM: {0: 2.2e-9, WINNERS: 1.6e-9},
}
_UNMEASURED = {"towers": "clip", "views": "nt_xent", "labeled": "sup_con"}  # a loss without an entry counts as this one


def given(device: str, dtype: torch.dtype) -> Rates:
    """Return the rates of a device of `DEVICES`.

    Raises:
        UserError: for "cuda" where there is no GPU, or an unknown one.
    """
    wide = dtype == torch.float64
    if device == "cpu":
        slower = 2.0 if wide else 1.0
        products = {d: rate / slower for d, rate in _CPU_PRODUCTS.items()}
        measured = {loss: loss if loss in _CPU_ENTRY else _UNMEASURED[CATALOG[loss].kind] for loss in LOSSES}
        entry = {loss: {kept: slower * s for kept, s in _CPU_ENTRY[known].items()} for loss, known in measured.items()}
        source = "given, of two cores of an AMD EPYC for each rank; --measure measures those of this machine"
        return Rates(
            source, products, products, entry, call=2e-3, memory=2e9, wire=1e9, message=1e-3, encoders=products[1024]
        )
    name = _local_card() if device == "cuda" else device
    card = CARDS[name]
    tensor_cores = dtype == torch.float16 or (dtype == torch.bfloat16 and name not in _WITHOUT_BFLOAT16)
    products = {512: _SHARE * (card.half if tensor_cores else card.float64 if wide else card.float32)}
    of_pairs = _ENTRY_BYTES_OF_HALVES if tensor_cores else _ENTRY_BYTES
    seconds_of_byte = (2 if wide else 1) / (_SHARE * card.memory)
    in_memory = {loss: _ENTRY_BYTES_OF_TOKENS if loss == MAX_SIM else of_pairs for loss in LOSSES}
    name_of_products = str(dtype).removeprefix("torch.") if tensor_cores or wide else "float32"
    return Rates(
        f"given, {_SHARE:.0%} of the data sheet of {card.name}, products in {name_of_products}",
        products,
        products,
        {loss: {kept: size * seconds_of_byte for kept, size in sizes.items()} for loss, sizes in in_memory.items()},
        call=2e-3,
        memory=_SHARE * card.memory,
        wire=_SHARE * card.wire,
        message=2e-5,
        encoders=_OF_ENCODERS * (card.half if tensor_cores else card.float64 if wide else card.float32),
        capacity=card.capacity,
        device="cuda",
    )


def _local_card() -> str:
    """Return the name of this machine's GPU in `CARDS`."""
    if not torch.cuda.is_available():
        raise UserError(f"there is no GPU here; name one of {', '.join(CARDS)} to plan for it, or --device cpu")
    name = card_named(torch.cuda.get_device_name())
    if name is None:
        raise UserError(f"rates of {torch.cuda.get_device_name()!r} are not known: measure them with --measure")
    return name
