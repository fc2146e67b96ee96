"""`POST /midflight/v1/tasks`: tasks that join the stream while the run goes on."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from midflight.run.api.service import PREFIX
from midflight.wire.routes import StrictBody, body_of, json_answer, route


class TasksBody(StrictBody, frozen=True):
    tasks: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    """Each row is an object of columns, of which the source makes a task."""


class TasksTaken(msgspec.Struct, frozen=True):
    first: int
    """The number of the first task, counted from 0 in the whole run; the others follow. A task's
    number is its id, unless a column is.
    """
    taken: int
    waiting: int
    """Posted tasks that were not drawn yet, these and earlier ones."""


def tasks_route(
    post: Callable[[Sequence[dict[str, Any]]], tuple[range, int]], *, token: str
) -> BaseRoute:
    """`POST /midflight/v1/tasks`: all of them join the stream, or none does."""

    async def tasks(request: Request) -> Response:
        body = await body_of(request, TasksBody)
        places, waiting = post(body.tasks)
        return json_answer(TasksTaken(places.start, len(places), waiting))

    return route(PREFIX + "/tasks", tasks, token=token)
