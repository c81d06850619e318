"""What a person asks while typing is answered by rank 0: completion and tooltips."""

from collections.abc import Callable
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

from paceline.errors import UsageError
from paceline.notebook.session import Session

# Longer, and the person has typed on.
WITHIN_S = 1.0

# Magics of this kernel.
_OWN = ("%dist", "%sync", "%%rank", "%%local", "%%distributed")

Inspect = Callable[..., Any]


def matcher_of(session: Session) -> Callable[[CompletionContext], Any]:
    """A matcher for IPython's completer, with the names that rank 0 knows."""

    @context_matcher()
    def names_of_rank_0(context: CompletionContext) -> Any:
        found = _complete(session, context)
        if found is None:
            return {"completions": []}
        fragment, completions = found
        return {"completions": completions, "matched_fragment": fragment, "suppress": True}

    matcher: Callable[[CompletionContext], Any] = names_of_rank_0
    return matcher


def _complete(session: Session, context: CompletionContext) -> tuple[str, list[SimpleCompletion]] | None:
    if not (session.mode_on and session.has_ranks):
        return None
    if context.full_text.lstrip().startswith(_OWN) and not context.cursor_line:
        return None
    lines = context.full_text.split("\n")
    cursor = sum(len(line) + 1 for line in lines[: context.cursor_line]) + context.cursor_position
    content = {"code": context.full_text, "cursor_pos": cursor}
    reply = _ask(session, "complete_request", content)
    if not reply or reply.get("status") != "ok" or not reply.get("matches"):
        return None
    typed = reply.get("metadata", {}).get("_jupyter_types_experimental", [])
    kinds = {one.get("text"): one.get("type") for one in typed}
    fragment = context.full_text[reply["cursor_start"] : reply["cursor_end"]]
    return fragment, [SimpleCompletion(text=text, type=kinds.get(text)) for text in reply["matches"]]


def _ask(session: Session, kind: str, content: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return session.fleet.ask(0, kind, content, within_s=WITHIN_S)
    except UsageError:  # a cell runs
        return None


def inspect_of(session: Session, here: Inspect) -> Inspect:
    """`do_inspect` of a kernel that asks rank 0 first, and itself (`here`) where rank 0 knows nothing."""

    def do_inspect(code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        if session.mode_on and session.has_ranks:
            content = {"code": code, "cursor_pos": cursor_pos, "detail_level": detail_level}
            reply = _ask(session, "inspect_request", content)
            if reply and reply.get("found"):
                return reply
        return here(code, cursor_pos, detail_level, omit_sections)

    return do_inspect
