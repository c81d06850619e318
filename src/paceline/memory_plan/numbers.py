"""Numbers and sizes as people write them. Needs no torch."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import UsageError

COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BYTES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
HIGHEST = 10**18


class PlanError(UsageError):
    """Something that cannot be planned; the message names the setting and what it accepts."""


def parse_count(field: str, value: Any) -> int:
    """`124M` → 124000000. A number must be whole and above 0; 124e6 is one too."""
    return _scaled(field, value, COUNTS, "a count such as 124M, 1.3B or 124439808")


def parse_bytes(field: str, value: Any) -> int:
    """`24GiB` → 25769803776; a number is taken as bytes."""
    return _scaled(field, value, BYTES, "a size such as 24GiB, 80GB or 141GB")


def parse_list(field: str, value: str | int | Sequence[Any]) -> tuple[int, ...]:
    """`1,2,4` → (1, 2, 4); a number is a list of one."""
    if not isinstance(value, str):
        given = tuple(value) if isinstance(value, Sequence) else (value,)
        if not given:
            raise PlanError(f"{field}=(): expected one or more whole numbers above 0")
        return tuple(parse_count(field, item) for item in given)
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and len(part) <= 18 and int(part) > 0 for part in parts):
        raise PlanError(f"{field}={value!r}: expected whole numbers above 0, such as 1,2,4,8")
    return tuple(int(part) for part in parts)


def parse_positive(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise PlanError(f"{field}={value!r}: expected a number above 0")
    return float(value)


def _scaled(field: str, value: Any, units: Mapping[str, int], expected: str) -> int:
    if isinstance(value, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)", value.strip().replace("_", ""))
        if found is None or found[2].upper() not in units:
            raise PlanError(f"{field}={value!r}: expected {expected}")
        number = float(found[1]) * units[found[2].upper()]
        value = round(number) if math.isfinite(number) else number
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not whole or isinstance(value, bool) or not 1 <= value <= HIGHEST:
        raise PlanError(f"{field}={value!r}: expected a whole number, at least 1 and at most 10^18")
    return int(value)


def show_bytes(count: float) -> str:
    """65536 → `64 KiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            break
        size /= 1024
    if unit == "B":
        return f"{size:.0f} B"
    return f"{size:,.0f} {unit}" if abs(size) >= 100 else f"{size:.3g} {unit}"


def show_count(count: int) -> str:
    """124439808 → `124.4 M`."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)


def show_seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
