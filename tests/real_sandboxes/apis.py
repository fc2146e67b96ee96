"""The APIs of Docker, E2B and Daytona, as far as their clients ask them for a box, a script and an end."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any, ClassVar

from .machines import Api, Asked


class DockerEngine(Api):
    """The Engine API, without its version in the path."""

    routes = (
        ("GET", r"(?:/v[\d.]+)?/version", "version"),
        ("HEAD", r"(?:/v[\d.]+)?/_ping", "ping"),
        ("POST", r"/v[\d.]+/images/create", "pull"),
        ("POST", r"/v[\d.]+/build", "build"),
        ("GET", r"/v[\d.]+/images/(.+)/json", "image"),
        ("POST", r"/v[\d.]+/containers/create", "create"),
        ("POST", r"/v[\d.]+/containers/([\w-]+)/start", "start"),
        ("GET", r"/v[\d.]+/containers/([\w-]+)/json", "inspect"),
        ("DELETE", r"/v[\d.]+/containers/([\w-]+)", "remove"),
        ("POST", r"/v[\d.]+/containers/([\w-]+)/exec", "prepare"),
        ("POST", r"/v[\d.]+/exec/([\w-]+)/start", "execute"),
        ("GET", r"/v[\d.]+/exec/([\w-]+)/json", "executed"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.images, self.execs, self.built = set[str](), dict[str, dict[str, Any]](), list[bytes]()

    def version(self, asked: Asked) -> None:
        asked.answer(200, {"ApiVersion": "1.47", "MinAPIVersion": "1.24", "Version": "27.0"})

    def ping(self, asked: Asked) -> None:
        asked.answer(200)

    def pull(self, asked: Asked) -> None:
        self.images.add("python:3.12-slim")
        asked.answer(200, {"status": "Pull complete"})

    def build(self, asked: Asked) -> None:
        self.built.append(asked.body)
        self.images.add("b" * 12)
        asked.answer(200, {"stream": f"Successfully built {'b' * 12}\n"})

    def image(self, asked: Asked, name: str) -> None:
        is_there = name in self.images
        asked.answer(200 if is_there else 404, {"Id": name, "RepoTags": [name]} if is_there else {"message": f"No such image: {name}"})

    def create(self, asked: Asked) -> None:
        name = asked.json["Image"]
        if name not in self.images:
            return asked.answer(404, {"message": f"No such image: {name}"})
        return asked.answer(201, {"Id": self.make(asked.json, asked.path.partition("name=")[2].partition("&")[0]), "Warnings": []})

    def start(self, asked: Asked, name: str) -> None:
        asked.answer(204)

    def inspect(self, asked: Asked, name: str) -> None:
        asked.answer(200, {"Id": name, "Name": f"/{name}", "State": {"Status": "running"}, "Config": {"Image": "x"}})

    def remove(self, asked: Asked, name: str) -> None:
        is_there = name in self.boxes
        self.end(name)
        asked.answer(204 if is_there else 404, None if is_there else {"message": f"No such container: {name}"})

    def prepare(self, asked: Asked, name: str) -> None:
        self.execs[number := f"e{len(self.execs)}"] = {"box": name, "words": asked.json["Cmd"]}
        asked.answer(201, {"Id": number})

    def execute(self, asked: Asked, number: str) -> None:
        """Frames of streams, until the connection ends: a byte for the stream, three of nothing, four for the length."""
        asked.close_connection = True
        asked.send_response(200)
        asked.send_header("Content-Type", "application/vnd.docker.multiplexed-stream")
        asked.end_headers()
        ran = self.boxes[self.execs[number]["box"]].run(self.execs[number]["words"])
        self.execs[number]["status"] = ran.returncode
        for stream, data in ((1, ran.stdout), (2, ran.stderr)):
            asked.wfile.write(struct.pack(">BxxxL", stream, len(data)) + data if data else b"")

    def executed(self, asked: Asked, number: str) -> None:
        asked.answer(200, {"ID": number, "Running": False, "ExitCode": self.execs[number]["status"]})


class E2bApi(Api):
    """Its control plane, and the daemon in each box, which speaks Connect: messages with five bytes before each."""

    env: ClassVar = {"E2B_EVENTS_ADDRESS": "http://192.0.2.1"}
    routes = (
        ("POST", "/v2/sandboxes", "create"),
        ("DELETE", r"/sandboxes/(\w+)", "remove"),
        ("GET", "/health", "health"),
        ("POST", "/process.Process/Start", "execute"),
    )

    def create(self, asked: Asked) -> None:
        if asked.headers["X-API-KEY"] != "right":
            return asked.answer(401, {"code": 401, "message": "Invalid API key"})
        name = self.make(asked.json)
        return asked.answer(201, {"sandboxID": name, "templateID": "base", "clientID": "c", "envdVersion": "0.5.7", "envdAccessToken": "t"})

    def remove(self, asked: Asked, name: str) -> None:
        self.end(name)
        asked.answer(204)

    def health(self, asked: Asked) -> None:
        asked.answer(204)

    def execute(self, asked: Asked) -> None:
        process = json.loads(asked.body[5:])["process"]
        ran = self.boxes[asked.headers["E2b-Sandbox-Id"]].run([process["cmd"], *process["args"]], process.get("envs"))
        events: list[dict[str, Any]] = [{"start": {"pid": 1}}]
        events += [
            {"data": {name: base64.b64encode(data).decode()}} for name, data in (("stdout", ran.stdout), ("stderr", ran.stderr)) if data
        ]
        events.append({"end": {"exitCode": ran.returncode, "exited": True, "status": f"exit status {ran.returncode}"}})
        messages = [(0, json.dumps({"event": event}).encode()) for event in events]
        said = b"".join(struct.pack(">BL", flag, len(data)) + data for flag, data in [*messages, (2, b"{}")])
        asked.answer(200, said, kind="application/connect+json")


class DaytonaApi(Api):
    env: ClassVar = {"DAYTONA_SANDBOX_ID": "secret"}
    routes = (
        ("POST", "/api/sandbox", "create"),
        ("GET", r"/api/sandbox/(\w+)", "shown"),
        ("DELETE", r"/api/sandbox/(\w+)", "remove"),
        ("POST", r"/toolbox/(\w+)/process/execute", "execute"),
    )

    def create(self, asked: Asked) -> None:
        if asked.headers["Authorization"] != "Bearer right":
            return asked.answer(401, {"statusCode": 401, "message": "Unauthorized"})
        return asked.answer(200, self._shown(self.make(asked.json)))

    def _shown(self, name: str, state: str = "started") -> dict[str, Any]:
        told = {"id": name, "name": name, "organizationId": "o", "user": "root", "env": {}, "labels": {"code-toolbox-language": "python"}}
        sizes = {"cpu": 1, "gpu": 0, "memory": 1, "disk": 1, "public": False, "networkBlockAll": True, "kvm": False, "target": "us"}
        return {**told, **sizes, "state": state, "desiredState": state, "toolboxProxyUrl": f"http://{self.address}/toolbox"}

    def shown(self, asked: Asked, name: str) -> None:
        asked.answer(200, self._shown(name))

    def remove(self, asked: Asked, name: str) -> None:
        self.end(name)
        asked.answer(200, self._shown(name, "destroyed"))

    def execute(self, asked: Asked, name: str) -> None:
        ran = self.boxes[name].run(["sh", "-c", asked.json["command"]])
        asked.answer(200, {"exitCode": ran.returncode, "result": ran.stdout.decode(errors="replace")})
