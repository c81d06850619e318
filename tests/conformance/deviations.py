"""Reads tests/conformance/DEVIATIONS.md."""

from dataclasses import dataclass

from tests.conformance.suites import HERE, UpstreamTest

COLUMNS = 4


@dataclass(frozen=True)
class Deviation:
    """One row: an upstream test that our class does not pass, and why."""

    method: str
    variants: tuple[str, ...]
    message: str  # a part of what it fails with
    reason: str

    def covers(self, test: UpstreamTest) -> bool:
        return test.method == self.method and test.variant in self.variants


def read_deviations() -> list[Deviation]:
    rows = [line.strip().strip("|").split("|") for line in (HERE / "DEVIATIONS.md").read_text().splitlines()]
    cells = [[cell.strip() for cell in row] for row in rows if len(row) == COLUMNS]
    return [
        Deviation(name.strip("`"), tuple(variants.split(", ")), message.strip("`"), reason)
        for name, variants, message, reason in cells
        if name.startswith("`test_")
    ]
