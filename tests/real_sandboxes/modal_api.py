"""Modal's API, by the messages and services that its client ships: gRPC without TLS, which that takes from a server on this machine alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import grpc
from modal_proto import api_pb2 as api
from modal_proto import task_command_router_pb2 as router
from modal_proto.api_pb2_grpc import ModalClientServicer, add_ModalClientServicer_to_server
from modal_proto.task_command_router_pb2_grpc import TaskCommandRouterServicer, add_TaskCommandRouterServicer_to_server

from .machines import Makers


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
        told = dict(context.invocation_metadata())
        if (told.get("x-modal-token-id"), told.get("x-modal-token-secret")) != ("right", "right"):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "Token ID is malformed")
        return api.ClientHelloResponse()

    def AuthTokenGet(self, request: Any, context: grpc.ServicerContext) -> Any:
        return api.AuthTokenGetResponse(token="a.eyJleHAiOjk5OTk5OTk5OTl9.b")

    def AppGetOrCreate(self, request: Any, context: grpc.ServicerContext) -> Any:
        return api.AppGetOrCreateResponse(app_id="ap-1")

    def EnvironmentGetOrCreate(self, request: Any, context: grpc.ServicerContext) -> Any:
        settings = api.EnvironmentSettings(image_builder_version="2025.06")
        return api.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=api.EnvironmentMetadata(name="main", settings=settings))

    def ImageGetOrCreate(self, request: Any, context: grpc.ServicerContext) -> Any:
        succeeded = api.GenericResult(status=api.GenericResult.GENERIC_STATUS_SUCCESS)
        return api.ImageGetOrCreateResponse(image_id="im-1", result=succeeded)

    def SandboxCreate(self, request: Any, context: grpc.ServicerContext) -> Any:
        if self.is_down:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no capacity")
        return api.SandboxCreateResponse(sandbox_id=self.make(request.definition, f"sb-{len(self.made)}"))

    def SandboxGetTaskId(self, request: Any, context: grpc.ServicerContext) -> Any:
        return api.SandboxGetTaskIdResponse(task_id=f"ta-{request.sandbox_id}")

    def TaskGetCommandRouterAccess(self, request: Any, context: grpc.ServicerContext) -> Any:
        return api.TaskGetCommandRouterAccessResponse(url=f"http://{self.address}", jwt="a.eyJleHAiOjk5OTk5OTk5OTl9.b")

    def SandboxTerminate(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.end(request.sandbox_id)
        return api.SandboxTerminateResponse()

    def SandboxWait(self, request: Any, context: grpc.ServicerContext) -> Any:
        return api.SandboxWaitResponse()

    # --- The worker ---------------------------------------------------------------------------------------------------

    def TaskExecStart(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.ran[request.exec_id] = self.boxes[request.task_id.removeprefix("ta-")].run(list(request.command_args), dict(request.env))
        return router.TaskExecStartResponse()

    def TaskExecStdioRead(self, request: Any, context: grpc.ServicerContext) -> Any:
        ran = self.ran[request.exec_id]
        is_error = request.file_descriptor == router.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDERR
        yield router.TaskExecStdioReadResponse(data=(ran.stderr if is_error else ran.stdout)[request.offset :])

    def TaskExecWait(self, request: Any, context: grpc.ServicerContext) -> Any:
        return router.TaskExecWaitResponse(code=self.ran[request.exec_id].returncode)
