"""The command `wholebatch plan`: print a plan, and check it on this machine."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from pathlib import Path

import torch
import tyro

from .._processes import RankError
from .._user_error import UserError
from .check import Measured, check, rates_here
from .display import print_measured, print_plan
from .given import given
from .options import plan
from .rates import Rates
from .report import Plan
from .shapes import LossName, Shapes
from .sizes import DTYPES

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_CHECK_S = 15.0  # of each setting


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
    loss: LossName | None = None
    """The loss; by default clip, with --classes partial_fc."""
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
    encoder_bytes: tuple[str, ...] = ()
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
    config = tyro.cli(PlanConfig, args=list(argv), prog=prog)
    _check(config)
    measured: list[Measured] = []
    if config.measure:
        estimated = replace(given("cpu", torch.float32), device=config.device)  # to report mistakes in sizes first
        found = _plan(config, _rates_here(config, _plan(config, estimated)))
        measured = _checks(config, found)
    else:
        found = _plan(config, None if config.rates is None else Rates.from_json(config.rates))
    if config.json:
        of_checks = [{**asdict(one), "shapes": {**asdict(one.shapes), "dtype": found.dtype}} for one in measured]
        print(json.dumps({**found.to_dict(), **({"measured": of_checks} if measured else {})}, indent=1))
    else:
        print_plan(found)
        if measured:
            print_measured(measured)
        elif config.measure:
            print("no option fits, so none was run")
    return 0 if found.chosen is not None else 1


def _check(config: PlanConfig) -> None:
    missing = [
        f"--{name.replace('_', '-')}" for name in ("batch_size", "embedding_size") if getattr(config, name) is None
    ]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} must be given: examples on all ranks, and numbers of a feature; as in "
            "wholebatch plan --batch-size 65536 --embedding-size 768 --ranks 8 --device h200"
        )
    if config.measure and config.device not in ("cpu", "cuda"):
        raise UserError(f"--measure runs on this machine: --device cpu or cuda, got {config.device!r}")
    if config.measure and config.rates is not None:
        raise UserError("--measure measures rates here, --rates reads them from a file: give one of the two")
    if config.save is not None and not config.measure:
        raise UserError("--save writes the rates of --measure: give both")
    if config.save is not None and not config.save.parent.is_dir():
        raise UserError(f"--save: there is no folder {config.save.parent}")
    if config.measure and "WORLD_SIZE" in os.environ:
        raise UserError("--measure starts its own processes: run it without torchrun")
    if config.measure and config.device == "cuda" and torch.cuda.device_count() < config.ranks:
        raise UserError(
            f"--measure needs a GPU for each of {config.ranks} ranks, and there are {torch.cuda.device_count()}"
        )


def _plan(config: PlanConfig, rates: Rates | None) -> Plan:
    assert config.batch_size is not None
    assert config.embedding_size is not None
    return plan(
        batch_size=config.batch_size,
        embedding_size=config.embedding_size,
        ranks=config.ranks,
        loss=config.loss,
        dtype=config.dtype,
        device=config.device,
        memory_limit=None if config.memory_limit is None else number_of_bytes("memory-limit", config.memory_limit),
        model_bytes=number_of_bytes("model-bytes", config.model_bytes),
        gradient_bytes=number_of_bytes("gradient-bytes", config.gradient_bytes),
        encoder_bytes=tuple(number_of_bytes("encoder-bytes", text) for text in config.encoder_bytes) or 0,
        encoder_flops=config.encoder_flops,
        chunk_size=config.chunk_size,
        keep_graphs=config.keep_graphs,
        classes=config.classes,
        sample_rate=config.sample_rate,
        bandwidth=None if config.bandwidth is None else number_of_bytes("bandwidth", config.bandwidth),
        rates=rates,
    )


def _rates_here(config: PlanConfig, sizes: Plan) -> Rates:
    try:
        rates = rates_here((sizes.loss,), sizes.ranks, dtype=DTYPES[sizes.dtype], device=config.device)
    except RankError as error:
        raise UserError(f"the calibration failed: {error}") from error
    if config.save is not None:
        try:
            config.save.write_text(rates.to_json())
        except OSError as error:
            raise UserError(f"--save cannot write {config.save}: {error}") from error
    return rates


def _checks(config: PlanConfig, found: Plan) -> list[Measured]:
    """Run each option that fits, once."""
    shapes = Shapes(
        found.loss, found.batch_size, found.embedding_size, found.ranks, DTYPES[found.dtype], config.device,
        config.classes or 0, 1.0 if config.sample_rate is None else config.sample_rate,
    )  # fmt: skip
    settings = {(option.exchange or "gather", option.memory): None for option in found.options if option.fits}
    try:
        return [
            check(shapes, exchange, memory, found.rates, within_s=_CHECK_S)  # type: ignore[arg-type]
            for exchange, memory in settings
        ]
    except RankError as error:
        raise UserError(f"a check on this machine failed: {error}") from error


def number_of_bytes(name: str, text: str) -> int:
    """Return the number of bytes in a text such as 80GB.

    >>> number_of_bytes("limit", "80GB"), number_of_bytes("limit", "1.5 MiB"), number_of_bytes("limit", "1e3")
    (80000000000, 1572864, 1000)

    Raises:
        UserError: if the text is none.
    """
    found = re.fullmatch(r"\s*([0-9]+[.]?[0-9]*(?:e[0-9]+)?)\s*([a-z]*?)b?\s*", text.lower())
    number = inf if found is None else float(found[1]) * _UNITS.get(found[2], inf)
    if not isfinite(number):
        raise UserError(f"--{name} must be a number of bytes, such as 80GB, 64MiB or 1e9; got {text!r}")
    return int(number)
