"""The command `wholebatch plan`: options, checked before torch is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Annotated, Any

import tyro

from .._base.user_error import UserError, option
from .._cli.parse import parse
from .rates import Rates, check_rates
from .sizes import LOSSES, Sizes

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True)
class PlanConfig:
    """Predict memory, time and bytes sent of a loss in each configuration, and print the call and the largest batch.

    For example: wholebatch plan --batch-size 65536 --embedding-size 768 --ranks 8 --dtype bfloat16 --device h200. Sizes
    in bytes may have a unit, as in 80GB or 64MiB. Exit code 0: something fits; 1: nothing does; 2: a mistake in the
    options.
    """

    batch_size: int | None = None
    """B, examples on all ranks together."""
    embedding_size: int | None = None
    """d, numbers of a feature."""
    ranks: int = 1
    """W, number of ranks."""
    loss: Annotated[str | None, tyro.conf.arg(metavar=f"{{{','.join(LOSSES)}}}|FILE.py:NAME")] = None
    """The loss; by default clip, with --classes partial_fc. A declared loss by the file and the name of a wb.PairLoss,
    or of a function of (rows, embedding_size) that returns one and the further arguments of its call."""
    dtype: str = "float32"
    """Precision of the features: float32, bfloat16, float16, float64."""
    device: str = "cpu"
    """cpu, cuda (the GPU here), or a card: t4, v100, l4, rtx4090, a100, h100, h200, b200."""
    memory_limit: str | None = None
    """Bytes that a rank may take; by default nine tenths of a card's memory, or its share of the free memory here."""
    model_bytes: str = "0"
    """Bytes of parameters, optimizer and all else that a rank holds throughout."""
    gradient_bytes: str = "0"
    """Bytes of the parameters' gradients, which appear in the backward pass."""
    encoder_bytes: tuple[str, ...] = ("0",)
    """Bytes of activations that an encoder keeps of one row; one number for all encoders, or one for each. With it,
    gradient caching is planned, too."""
    encoder_flops: float = 0.0
    """Operations of the forward pass of one example through all encoders; then times are of the whole step."""
    chunk_size: int | None = None
    """Rows of a chunk of gradient caching; by default small enough that four chunks fit."""
    keep_graphs: int | None = None
    """Chunks that are not encoded again; by default none, and as many as fit."""
    classes: int | None = None
    """C, classes of PartialFC."""
    sample_rate: float | None = None
    """The part of the classes without an example that PartialFC samples; by default 1."""
    query_tokens: float | None = None
    """Tokens of a query of max_sim, without padding, on average."""
    document_tokens: float | None = None
    """Tokens of a document of max_sim, without padding, on average."""
    documents_per_query: int | None = None
    """Documents of a query of max_sim; by default 1."""
    bandwidth: str | None = None
    """Bytes per second that a rank sends, instead of the device's: 50GB for 400 Gbit/s."""
    measure: bool = False
    """Calibrate on this machine with as many processes, run each setting, and print predictions and errors."""
    rates: Path | None = None
    """A file of rates that an earlier --measure has saved."""
    save: Path | None = None
    """File into which --measure writes its rates."""
    json: bool = False
    """Print JSON instead of tables."""


def main(argv: Sequence[str], *, prog: str) -> int:
    """Print the plan that `argv` describes; return 1 if nothing fits.

    Raises:
        UserError: for a mistake in the options.
        SystemExit: 0 after --help, 2 for options that cannot be parsed.
    """
    config = parse(PlanConfig, argv, prog)
    _check(config)
    sizes = Sizes.from_arguments(**_arguments(config), spelled=option)
    sizes.check()
    rates = None if config.rates is None else _rates(config.rates)
    if rates is not None:
        check_rates(rates.with_wire(sizes.bandwidth), sizes.dtype, sizes.device, sizes.ranks)
    from .command import run

    return run(sizes, rates, measure=config.measure, save=config.save, as_json=config.json)


def _check(config: PlanConfig) -> None:
    missing = [option(name) for name in ("batch_size", "embedding_size") if getattr(config, name) is None]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} must be given: examples on all ranks, and numbers of a feature; as in "
            "wholebatch plan --batch-size 65536 --embedding-size 768 --ranks 8 --device h200"
        )
    if config.measure and config.device.lower() not in ("cpu", "cuda"):
        raise UserError(f"--measure runs on this machine: --device cpu or cuda, got {config.device!r}")
    if config.measure and config.rates is not None:
        raise UserError("--measure measures rates here, --rates reads them from a file: give one of the two")
    if config.save is not None and not config.measure:
        raise UserError("--save writes the rates of --measure: give both")
    if config.save is not None and not config.save.parent.is_dir():
        raise UserError(f"--save: there is no folder {config.save.parent}")
    if config.save is not None and config.save.is_dir():
        raise UserError(f"--save must be a file, {config.save} is a folder; as in --save {config.save / 'rates.json'}")
    if config.measure and "WORLD_SIZE" in os.environ:
        raise UserError("--measure starts its own processes: run it without torchrun")


def _rates(path: Path) -> Rates:
    if not path.exists():
        raise UserError(f"--rates: there is no file {path}; --measure --save {path} writes one")
    return Rates.from_json(path)


def _arguments(config: PlanConfig) -> dict[str, Any]:
    """Return the arguments of :func:`wholebatch.plan`, without rates."""
    values = {name: value for name, value in vars(config).items() if name not in ("measure", "rates", "save", "json")}
    for name in ("memory_limit", "bandwidth", "model_bytes", "gradient_bytes"):
        values[name] = _bytes(name, values[name], positive=name in ("memory_limit", "bandwidth"))
    encoder_bytes = tuple(_bytes("encoder_bytes", text) for text in config.encoder_bytes)
    return {**values, "encoder_bytes": encoder_bytes}


def _bytes(name: str, text: str | None, *, positive: bool = False) -> int | None:
    number = None if text is None else number_of_bytes(option(name), text)
    if number == 0 and positive:
        raise UserError(f"{option(name)} must be above 0, such as 80GB; got {text!r}")
    return number


def number_of_bytes(name: str, text: str) -> int:
    """Return the number of bytes in a text such as 80GB; `name` is the option's.

    >>> number_of_bytes("--x", "80GB"), number_of_bytes("--x", "1.5 MiB"), number_of_bytes("--x", "1e3")
    (80000000000, 1572864, 1000)

    Raises:
        UserError: if the text is none.
    """
    match = re.fullmatch(r"\s*([0-9]+[.]?[0-9]*(?:e[0-9]+)?)\s*([a-z]*?)b?\s*", text.lower())
    number = inf if match is None else float(match[1]) * _UNITS.get(match[2], inf)
    if not isfinite(number):
        raise UserError(f"{name} must be a number of bytes, such as 80GB, 64MiB or 1e9; got {text!r}")
    return int(number)
