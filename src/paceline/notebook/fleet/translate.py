"""Messages of a kernel, as events."""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.notebook.events import Cleared, Event, Failed, Showed, Wrote
from paceline.notebook.fleet.kernel import Message

# A widget needs its own kernel on the other side of its channel. Its text form is shown instead.
WIDGET = "application/vnd.jupyter.widget-view+json"


def from_iopub(rank: int, message: Message, cell: str) -> Event | None:
    """The event in a message that all may hear. An error counts when it comes from the cell that runs."""
    content = message["content"]
    match message["msg_type"]:
        case "stream":
            return Wrote(rank, content["name"], content["text"])
        case "execute_result":
            return _showed(rank, content, is_result=True)
        case "display_data":
            return _showed(rank, content)
        case "update_display_data":
            return _showed(rank, content, updates=True)
        case "clear_output":
            return Cleared(rank, bool(content.get("wait")))
        case "error" if message["parent_header"].get("msg_id") == cell:
            return failed(rank, content)
        case _:
            return None


def failed(rank: int, content: Mapping[str, Any]) -> Failed:
    """The error in a message or a reply."""
    return Failed(
        rank, str(content.get("ename", "")), str(content.get("evalue", "")), tuple(content.get("traceback") or ())
    )


def from_reply(rank: int, content: Mapping[str, Any]) -> Iterator[Event]:
    """What comes at the end of a cell: `len?` opens a page."""
    for payload in content.get("payload") or ():
        if payload.get("source") == "page" and (text := payload.get("data", {}).get("text/plain")):
            yield Showed(rank, {"text/plain": text}, {})


def _showed(rank: int, content: Mapping[str, Any], *, is_result: bool = False, updates: bool = False) -> Showed | None:
    data = {kind: value for kind, value in content.get("data", {}).items() if kind != WIDGET}
    if not data:
        return None
    name = (content.get("transient") or {}).get("display_id")
    return Showed(rank, data, content.get("metadata") or {}, is_result=is_result, display_id=name, updates=updates)
