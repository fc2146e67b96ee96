"""Stands in for a vLLM server: says what it was started with, answers what attaching asks, ends by SIGTERM. Nothing is generated.

Words of its own, given by `engine.arguments`: `--fail` ends at once, `--hang` never answers, `--load=SECONDS` computes for so long before it answers, `--child` starts a process that
outlives it, `--stubborn` ignores SIGTERM, `--die` ends on GET /die.
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ROUTES = ["/health", "/version", "/inference/v1/generate", "/pause", "/resume", "/collective_rpc", "/update_weight_version"]
ANSWERS = {
    "/health": "",
    "/openapi.json": {"paths": {path: {} for path in ROUTES}},
    "/version": {"version": "0.32.0"},
    "/v1/models": {"data": [{"max_model_len": 256, "root": sys.argv[sys.argv.index("--model") + 1]}]},
    "/is_paused": {"is_paused": False},
    "/weight_info": {"weight_version": "default"},
    "/inference/v1/generate": {"choices": [{"logprobs": {"content": [{"logprob": 0.0}]}}]},
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/die":
            print("the fake was told to die", flush=True)
            os._exit(3)
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = json.dumps(ANSWERS.get(self.path, {})).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


print("environment:", json.dumps(dict(os.environ)), flush=True)
if "--fail" in sys.argv:
    sys.exit("the fake has no model")
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--child" in sys.argv:
    print("child:", subprocess.Popen(["sleep", "60"]).pid, flush=True)
print("process:", os.getpid(), flush=True)
for word in sys.argv:
    if word.startswith("--load="):
        while time.process_time() < float(word.removeprefix("--load=")):
            pass
if "--hang" in sys.argv:
    signal.pause()
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
