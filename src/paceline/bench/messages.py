"""What the conductor and its workers send each other: JSON. Nothing that arrives is unpickled, on either side."""

import json
import re
from dataclasses import fields, is_dataclass
from multiprocessing.connection import Connection
from typing import Any

from paceline.bench.loading import load_named
from paceline.errors import Malformed
from paceline.stored.value_tree import MARK, TreeEncoder, decode_tree
from paceline.typed_json import parse_json, shown

LONGEST = 64 << 20  # bytes of one message
SETTINGS = re.compile(r"paceline\.bench(\.[a-z_]+)+:[A-Za-z]+")  # the dataclasses that a worker may construct


def send(connection: Connection, message: Any) -> None:
    """Send plain values, and settings of measurements. Raises UsageError for anything else."""
    connection.send_bytes(json.dumps(_MessageEncoder().encode(message, ("message",))).encode())


def receive(connection: Connection, *, settings: bool = False) -> Any:
    """The next message. It may hold `settings` if the worker asks. Raises Malformed if it is invalid, and EOFError or
    OSError
    if the other side has ended."""
    return message_in(connection.recv_bytes(LONGEST), settings=settings)


def message_in(data: bytes, *, settings: bool = False) -> Any:
    return decode_tree(parse_json(data, "a message of a measurement"), _settings if settings else _nothing)


class _MessageEncoder(TreeEncoder):
    refusal = "cannot be sent between a conductor and its workers"
    instead = "send what it is made of"

    def leaf(self, value: Any, path: tuple[str, ...]) -> dict[str, Any] | None:
        if not is_dataclass(value) or isinstance(value, type):
            return None
        said = {one.name: self.encode(getattr(value, one.name), (*path, one.name)) for one in fields(value) if one.init}
        return {MARK: "scalar", "of": f"{type(value).__module__}:{type(value).__qualname__}", "fields": said}


def _settings(tree: dict[str, Any]) -> Any:
    kind: Any = None
    if SETTINGS.fullmatch(str(tree["of"])):
        try:
            kind = load_named(tree["of"])
        except ImportError as error:
            raise Malformed(f"a measurement has no settings named {shown(tree['of'])}") from error
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise Malformed(f"expected the settings of a measurement, got a {shown(tree['of'])}")
    return kind(**{name: decode_tree(item, _settings) for name, item in tree["fields"].items()})


def _nothing(tree: dict[str, Any]) -> Any:
    raise Malformed(f"expected plain values, got a {shown(tree.get('of'))}")
