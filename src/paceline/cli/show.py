"""Tables on a terminal."""

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from paceline.bench.tables import Table, render


def show_table(console: Console, table: Table) -> None:
    """With colours and rules where someone looks, else as plain text that other programs can read."""
    if not console.is_terminal:
        console.print(Text(render(table)), soft_wrap=True)
        console.print()
        return
    drawn = RichTable(title=Text(table.title, style="bold"), title_justify="left")
    for number, name in enumerate(table.header):
        drawn.add_column(name, justify="left" if number == 0 else "right", no_wrap=number == 0)
    for row in table.rows:
        ours = row[0].startswith("paceline")
        drawn.add_row(*(Text(cell, style=_style(cell)) for cell in row), style="bold" if ours else "")
    console.print(drawn)
    for note in table.notes:
        console.print(Text(note, style="dim"))
    console.print()


def _style(cell: str) -> str:
    return "red" if cell.startswith("NO") else ""
