"""Reading the data of a task."""

from __future__ import annotations

from midflight.errors import TaskFieldMissing
from midflight.types import Task


def text_field(task: Task, name: str) -> str:
    """A field that must be there and hold text; `TaskFieldMissing` names the field, the task and what the task has."""
    value = task.data.get(name)
    if isinstance(value, str):
        return value
    has = ", ".join(sorted(task.data)) or "no field at all"
    what = f"holds {value!r} in field {name!r}, which is not text" if name in task.data else f"has no field {name!r}"
    raise TaskFieldMissing(f"task {task.id} of {task.source} {what} (it has: {has}); add the field to the task or use another environment.")
