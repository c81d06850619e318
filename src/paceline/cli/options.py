"""Options of a command from the fields of a dataclass, so that they are written down once."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup


class _FlagsTakeNoValue:
    """Help without `<bool>` beside options that are flags: there is nothing to write after them."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in found:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return found


class PlainCommand(_FlagsTakeNoValue, TyperCommand):
    """One command."""


class PlainGroup(_FlagsTakeNoValue, TyperGroup):
    """A command with commands."""


def command_for(spec: type[Any], about: str, run: Callable[..., None], **extra: Any) -> Callable[..., None]:
    """A function that typer reads: one option per field of `spec`, and the `extra` ones, as name=(type, help).

    It calls `run(settings, **extra)`.
    """
    kinds = get_type_hints(spec)
    names = [item.name for item in fields(spec)]
    many = {item.name for item in fields(spec) if isinstance(item.default, tuple)}

    def command(**given: Any) -> None:
        settings = {name: given.pop(name) for name in names}
        for name in many:
            settings[name] = tuple(part.strip() for part in settings[name].split(","))
        run(settings, **given)

    parameters = []
    for item in fields(spec):
        default: Any = item.default
        kind = kinds[item.name]
        if item.name in many:
            default, kind = ",".join(default), str
        parameters.append(keyword(item.name, Annotated[kind, typer.Option(help=item.metadata["about"])], default))
    for name, (kind, text) in extra.items():
        parameters.append(keyword(name, Annotated[kind, typer.Option(help=text)], None))
    describe(command, about, parameters)
    return command


def describe(command: Callable[..., None], about: str, parameters: list[inspect.Parameter]) -> None:
    """Have `command` look to typer as if it were written with these parameters."""
    command.__doc__ = about
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]


def keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
