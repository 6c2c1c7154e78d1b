"""Few types for many: Arrow has several for the same texts, bytes and lists, of which the application reads some."""

from __future__ import annotations

from typing import Any

from .table import need_pyarrow


def plain_type(kind: Any) -> Any:
    """Return a type of the same values that is read here; other types, such as numbers, are returned as they are.

    Dictionaries become their values, views and fixed sizes of bytes the usual types; also inside of lists and structs.
    Bytes of views become `large_binary`, because those of a batch may be more than 2 GiB.
    """
    pa = need_pyarrow()
    is_type = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if is_type.is_dictionary(kind):
        return plain_type(kind.value_type)
    if is_type.is_string_view(kind):
        return pa.string()
    if is_type.is_binary_view(kind):
        return pa.large_binary()
    if is_type.is_fixed_size_binary(kind):
        return pa.binary()
    if is_type.is_struct(kind):
        return pa.struct([_plain_field(kind.field(place)) for place in range(kind.num_fields)])
    if is_type.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    if is_type.is_large_list(kind):
        return pa.large_list(_plain_field(kind.value_field))
    if is_type.is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    return kind


def plain_schema(schema: Any) -> Any:
    """Return the schema with plain types, and the same metadata."""
    return need_pyarrow().schema([_plain_field(field) for field in schema], schema.metadata)


def _plain_field(field: Any) -> Any:
    return field.with_type(plain_type(field.type))


def is_text(kind: Any) -> bool:
    """Return whether a plain type is one of texts."""
    is_type = need_pyarrow().types
    return bool(is_type.is_string(kind) or is_type.is_large_string(kind))


def is_bytes(kind: Any) -> bool:
    """Return whether a plain type is one of bytes."""
    is_type = need_pyarrow().types
    return bool(is_type.is_binary(kind) or is_type.is_large_binary(kind))


def is_number(kind: Any) -> bool:
    """Return whether a plain type is one of integers or of floats."""
    is_type = need_pyarrow().types
    return bool(is_type.is_integer(kind) or is_type.is_floating(kind))
