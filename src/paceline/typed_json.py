"""JSON from a file or from another process as values of known types. Anything else raises Malformed, and nothing else.

Anyone who can write to a file, a pipe or a socket decides what `json.loads` returns: a list where a table is expected,
text instead of a number, a tree that is deeper than the stack. So every value is checked here before it is used.
"""

import json
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from paceline.errors import Malformed

T = TypeVar("T")
Text = str | bytes | bytearray

LOWEST, HIGHEST = -(1 << 63), (1 << 64) - 1  # what 64 bits hold, with or without a sign
SHOWN = 80  # characters of a received value in an error
# The errors that Python and torch raise when they read malformed data.
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)


@contextmanager
def read_as(what: str) -> Iterator[None]:
    """Turn errors of reading untrusted data into Malformed; `what` names the data in the error."""
    try:
        yield
    except UNREADABLE as error:
        raise Malformed(f"expected {what}, got something else: {type(error).__name__}: {shown(str(error))}") from error


def parse_json(text: Text, what: str) -> Any:
    """The parsed text, of any type; `what` names it in the error."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"expected {what} as JSON, got {shown(text)} ({error})") from error


def read_json(kind: "type[T]", text: Text, what: str) -> T:
    """The parsed text as a value of this type: see `typed` for the types."""
    return typed(kind, parse_json(text, what), what)


def typed(kind: "type[T]", value: Any, what: str) -> T:
    """`value`, made of what `json.loads` returns, as a value of type `kind`; `what` names it in the error.

    A kind is Any, None, bool, int (of 64 bits), float, str, one of list, tuple, dict and Mapping with the kinds of what
    they hold, several joined by `|`, or a dataclass whose fields are of such kinds.
    """
    try:
        hashable: Any = kind
        found: T = _reader(hashable)(value)
    except (_Other, RecursionError) as error:
        raise Malformed(f"expected {what}, got {shown(value)}: {error}") from error
    return found


def shown(value: object) -> str:
    """The beginning of a received value, for an error."""
    text = value if isinstance(value, str) else repr(value[:SHOWN] if isinstance(value, bytes | bytearray) else value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


class _Other(Exception):
    """The value is of another type; the message says where, and which type was expected."""


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """A function that makes a value of this kind, or raises `_Other`."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if kind is int:
        return _integer
    if kind is float:
        return _number
    if kind in (bool, str, type(None)):
        return lambda value: value if type(value) is kind else _refuse(kind.__name__, value)
    if origin in (Union, types.UnionType):
        return _one_of([_reader(one) for one in inner], str(kind))
    if origin is list or (origin is tuple and inner[1:] == (...,)):
        return _items(origin, _reader(inner[0]))
    if origin is tuple:
        return _row([_reader(one) for one in inner])
    if origin in (dict, Mapping):
        return _table(_reader(inner[1]))
    assert is_dataclass(kind), kind
    return _record(kind)


def _refuse(expected: str, value: Any) -> Any:
    raise _Other(f"{shown(value)} is not {expected}")


def _integer(value: Any) -> int:
    if type(value) is not int or not LOWEST <= value <= HIGHEST:
        _refuse("a whole number of 64 bits", value)
    return int(value)


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    return float(_integer(value))


def _one_of(readers: list[Callable[[Any], Any]], names: str) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        for reader in readers:
            try:
                return reader(value)
            except _Other:
                continue
        return _refuse(names, value)

    return read


def _items(kind: Any, reader: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, list):
            _refuse("a list", value)
        return kind([reader(item) for item in value])

    return read


def _row(readers: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(readers):
            _refuse(f"a list of {len(readers)}", value)
        return tuple(reader(item) for reader, item in zip(readers, value, strict=True))

    return read


def _table(reader: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            _refuse("a table", value)
        return {name: reader(item) for name, item in value.items()}

    return read


def _record(kind: Any) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    readers = {one.name: _reader(hints[one.name]) for one in fields(kind) if one.init}
    needed = {one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}

    def read(value: Any) -> Any:
        if not isinstance(value, dict) or not needed <= value.keys() <= readers.keys():
            _refuse(f"a table with {', '.join(readers)}", value)
        found = {}
        for name, item in value.items():
            try:
                found[name] = readers[name](item)
            except _Other as error:
                raise _Other(f"{name}: {error}") from None
        try:
            return kind(**found)
        except ValueError as error:  # of the right type, but not a valid value
            raise _Other(str(error)) from error

    return read
