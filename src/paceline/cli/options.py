"""Options of a command from the fields of a dataclass, so that they are written down once."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup


class _FlagsTakeNoValue:
    """Shows flags without `<bool>` in the help, because they take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in found:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return found


class PlainCommand(_FlagsTakeNoValue, TyperCommand):
    """One command."""


class PlainGroup(_FlagsTakeNoValue, TyperGroup):
    """A command with subcommands."""


def command_for(
    spec: type[Any], about: str, run: Callable[..., None], order: Callable[[str], Any] = lambda _: 0, /, **extra: Any
) -> Callable[..., None]:
    """A function that typer reads: an option for each field of `spec`, in the `order` of their names, and the `extra`
    ones, as name=(type, help).

    It calls `run(settings, **extra)`, with the settings that were given on the command line.
    """
    kinds = get_type_hints(spec)
    parameters = [_parameter(name, kind, text) for name, (kind, text) in extra.items()]
    for item in sorted(fields(spec), key=lambda item: order(item.name)):
        default: Any = item.default
        text = item.metadata["about"] + (f" (default {default})" if default not in ("", None) else "")
        kind = str if item.metadata.get("text") else kinds[item.name]
        parameters.append(_parameter(item.name, kind | None, text, item.metadata["group"]))

    def command(**given: Any) -> None:
        others = {name: given.pop(name) for name in extra}
        settings = {name: value for name, value in given.items() if value is not None}
        run(settings, **others)

    # What typer reads, as if the function were written with these parameters.
    command.__doc__ = about
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _parameter(name: str, kind: Any, text: str, group: str = "") -> inspect.Parameter:
    # A flag of its own, unlike a setting, has no opposite (`--no-…`), and is false when it is not given.
    is_flag = kind is bool
    names = (f"--{name.replace('_', '-')}",) if is_flag else ()
    annotation = Annotated[kind, typer.Option(*names, help=text, rich_help_panel=group or None)]
    default = False if is_flag else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
