"""The sentences on the terminal for messages that are not drawn there."""

from pathlib import Path

from midflight.run.parts import Alarm, Message, Notice, Restarted, Stalled


def sentence(message: Message) -> str | None:
    """Returns the line that the terminal shows for a message, or None if the message says nothing
    or is drawn.
    """
    match message:
        case Restarted(part, error, left, seconds):
            remaining = "" if left is None else f"; {left} restarts are left"
            return f"{error}\n{part} is started again{after(seconds)}{remaining}."
        case Stalled(report):
            return f"stall: {report}"
        case Alarm(text):
            return f"alarm: {text}"
        case Notice(text):
            return text
        case _:
            return None


def where_gateway(url: str, folder: Path) -> str:
    return f"gateway: {url}, with its token in {folder / 'endpoint.json'}"


def after(seconds: float) -> str:
    return f" in {seconds:.0f} s" if seconds else ""
