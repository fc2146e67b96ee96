"""The failures of rollouts: the class of an error, how often each was seen, and the frames of a
traceback that are the user's own code.
"""

import re
import sysconfig
from collections import Counter
from pathlib import Path

MAX_CLASSES = 16
"""The number of classes that are told apart. Without this bound, code that makes up a class for
each failure would fill logs and metrics.
"""
OTHER = "other"
NO_REWARD = "no reward"
"""The class of a rollout that its environment gave no reward, without an error."""
_NAME = re.compile(r"([A-Za-z_][\w.]*)(?::|$)")


class Failures:
    """Counts failures by class."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, error: str | None) -> str:
        """Counts a rollout without reward; returns its class."""
        name = failure_class(error)
        if name not in self.counts and len(self.counts) >= MAX_CLASSES:
            name = OTHER
        self.counts[name] += 1
        return name


def failure_class(error: str | None) -> str:
    """`ZeroDivisionError` of "ZeroDivisionError: division by zero"."""
    if error is None:
        return NO_REWARD
    found = _NAME.match(error)
    return found[1] if found else OTHER


def most_common(counts: Counter[str]) -> str:
    """`30 ZeroDivisionError, 2 RolloutTimeout`."""
    left = counts.total()
    shown: list[str] = []
    for name, count in counts.most_common(4):
        shown.append(f"{count} {name}")
        left -= count
    if left:
        shown.append(f"{left} more")
    return ", ".join(shown)


MAX_FRAMES = 3
MAX_WIDTH = 160
_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>[^\n]+)\n(?:[ |]*(?!File ")(?P<code>[^\n]+))?'
)
_PACKAGES = ("site-packages", "dist-packages", "<frozen")
_OURS = str(Path(__file__).parents[1])
_STANDARD = sysconfig.get_path("stdlib")


def own_frames(trace: str) -> list[str]:
    """Returns the last places of a formatted traceback in the user's own files, such as
    `score.py:12 in score: return 1 / 0`. If no frame is the user's, it returns the last place of
    all.
    """
    frames = list(_FRAME.finditer(trace))
    users = [frame for frame in frames if _is_users(frame["file"])]
    return [_place(frame) for frame in users[-MAX_FRAMES:] or frames[-1:]]


def _is_users(file: str) -> bool:
    if file.startswith((_OURS, _STANDARD)):
        return False
    return not any(part in file for part in _PACKAGES)


def _place(found: re.Match[str]) -> str:
    path = Path(found["file"])
    file = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    code = f": {found['code'].strip()}" if found["code"] else ""
    return shortened(f"{file}:{found['line']} in {found['name']}{code}")


def shortened(text: str) -> str:
    """The first line, within a line's width."""
    first = text.partition("\n")[0]
    return first if len(first) <= MAX_WIDTH else f"{first[: MAX_WIDTH - 1]}…"
