"""Parse the options of a command; an error about a whole number says how one is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

_Config = TypeVar("_Config")
_registry = ConstructorRegistry()


def parse(config: type[_Config], argv: Sequence[str], prog: str) -> _Config:
    """Return the options of a command.

    Raises:
        SystemExit: 0 after --help, 2 for options that cannot be parsed.
    """
    with _registry:
        return tyro.cli(config, args=list(argv), prog=prog)


@_registry.primitive_rule
def _whole_number(type_info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    if type_info.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda texts: _parsed(texts[0]),
        is_instance=lambda value: type(value) is int,
        str_from_instance=lambda value: [str(value)],
    )


def _parsed(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"write a whole number with digits alone, as in 65536; got {text!r}") from None
