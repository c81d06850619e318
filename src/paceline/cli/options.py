"""Options of a command from the fields of a dataclass, so that they are written down once."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any

import typer


def command_for(spec: type[Any], about: str, run: Callable[..., None], **extra: Any) -> Callable[..., None]:
    """A function that typer reads: one option per field of `spec`, and the `extra` ones, as name=(type, help).

    It calls `run(settings, **extra)`.
    """
    names = [item.name for item in fields(spec)]
    many = {item.name for item in fields(spec) if isinstance(item.default, tuple)}

    def command(**given: Any) -> None:
        settings = {name: given.pop(name) for name in names}
        for name in many:
            settings[name] = tuple(settings[name].split(","))
        run(settings, **given)

    parameters = []
    for item in fields(spec):
        default: Any = item.default
        if item.name in many:
            default = ",".join(default)
        option = typer.Option(help=item.metadata["about"])
        parameters.append(keyword(item.name, Annotated[type(default), option], default))
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
