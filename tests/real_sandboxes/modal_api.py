"""Modal's API, by the messages and services that its client ships: gRPC without TLS, which that takes from a server on this machine alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar
from uuid import uuid4

import grpc
from modal_proto import api_pb2 as api
from modal_proto import task_command_router_pb2 as router
from modal_proto.api_pb2_grpc import ModalClientServicer, add_ModalClientServicer_to_server
from modal_proto.task_command_router_pb2_grpc import TaskCommandRouterServicer, add_TaskCommandRouterServicer_to_server

from .machines import Makers

JWT = "a.eyJleHAiOjk5OTk5OTk5OTl9.b"
"""It expires in the year 2286."""


class ModalApi(Makers, ModalClientServicer, TaskCommandRouterServicer):
    """Control plane and worker in one."""

    env: ClassVar = {"MODAL_IDENTITY_TOKEN": "secret"}

    def __init__(self) -> None:
        super().__init__()
        self.ran: dict[str, Any] = {}

    def __enter__(self) -> ModalApi:
        self._server = grpc.server(ThreadPoolExecutor(16))
        add_ModalClientServicer_to_server(self, self._server)
        add_TaskCommandRouterServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()
        self.close()

    # --- The control plane --------------------------------------------------------------------------------------------

    def ClientHello(self, request: Any, context: grpc.ServicerContext) -> Any:
        return api.ClientHelloResponse()

    def AppGetOrCreate(self, request: Any, context: grpc.ServicerContext) -> Any:
        told = dict(context.invocation_metadata())
        if (told.get("x-modal-token-id"), told.get("x-modal-token-secret")) != ("right", "right"):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "Token ID is malformed")
        return api.AppGetOrCreateResponse(app_id="ap-1")

    def AuthTokenGet(self, request: Any, context: grpc.ServicerContext) -> Any:
        return api.AuthTokenGetResponse(token=JWT)

    def EnvironmentGetOrCreate(self, request: Any, context: grpc.ServicerContext) -> Any:
        settings = api.EnvironmentSettings(image_builder_version="2025.06")
        return api.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=api.EnvironmentMetadata(name="main", settings=settings))

    def ImageGetOrCreate(self, request: Any, context: grpc.ServicerContext) -> Any:
        succeeded = api.GenericResult(status=api.GenericResult.GENERIC_STATUS_SUCCESS)
        return api.ImageGetOrCreateResponse(image_id="im-1", result=succeeded)

    def SandboxCreateV2(self, request: Any, context: grpc.ServicerContext) -> Any:
        if self.is_down:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no capacity")
        name = self.make(request.definition, f"sb-{uuid4().hex}")
        access = api.CommandRouterAccess(url=f"http://{self.address}", jwt=JWT)
        return api.SandboxCreateV2Response(sandbox_id=name, task_id=f"ta-{name}-V", command_router_access=access)

    def SandboxTerminateV2(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.end(request.sandbox_id)
        return api.SandboxTerminateResponse()

    # --- The worker ---------------------------------------------------------------------------------------------------

    def TaskExecStart(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.ran[request.exec_id] = self.boxes[request.task_id[3:-2]].run(list(request.command_args))
        return router.TaskExecStartResponse()

    def TaskExecStdioRead(self, request: Any, context: grpc.ServicerContext) -> Any:
        ran = self.ran[request.exec_id]
        is_error = request.file_descriptor == router.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDERR
        if data := (ran.stderr if is_error else ran.stdout)[request.offset :]:
            yield router.TaskExecStdioReadResponse(data=data)

    def TaskExecWait(self, request: Any, context: grpc.ServicerContext) -> Any:
        return router.TaskExecWaitResponse(code=self.ran[request.exec_id].returncode)
