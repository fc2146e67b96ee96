"""`midflight serve` over engines that are killed again and again: it goes on, and no request is lost. Real processes."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from pathlib import Path

import pytest

from .processes import Command, free_port, gone

pytestmark = pytest.mark.timeout(900)
SIZES = ("hidden_size=32", "intermediate_size=64", "num_layers=1", "num_heads=2", "num_kv_heads=1")


class Clients:
    """Each asks for one answer after the other, and waits for each as long as it takes."""

    def __init__(self, url: str, *, number: int) -> None:
        self._url = url
        self._stop = threading.Event()
        self.num_answered = 0
        self.failures: list[Exception] = []
        self._answered = threading.Condition()
        self._threads = [threading.Thread(target=self._ask_on) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def _ask_on(self) -> None:
        body = json.dumps({"model": "policy", "prompt": "a", "max_tokens": 20}).encode()
        asking = urllib.request.Request(f"{self._url}/v1/completions", body, {"Content-Type": "application/json"})
        while not self._stop.is_set():
            try:
                with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asking, timeout=150) as answer:
                    assert json.load(answer)["choices"][0]["finish_reason"] in ("length", "stop")
            except Exception as error:
                with self._answered:
                    self.failures.append(error)
                    self._answered.notify_all()
                return
            with self._answered:
                self.num_answered += 1
                self._answered.notify_all()

    def until_answered(self, number: int) -> None:
        """Waits until so many more answers have come."""
        with self._answered:
            goal = self.num_answered + number
            assert self._answered.wait_for(lambda: self.num_answered >= goal or self.failures, timeout=150)
        assert not self.failures

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize("num_engines", [1, 2])
def test_serve_answers_every_request_though_its_engines_are_killed_five_times(tmp_path: Path, num_engines: int) -> None:
    """With two, the first that is up answers and is killed while the other still loads, which is killed too."""
    made = Command("new-model", "model", *(x for size in SIZES for x in ("--set", f"model.{size}")), folder=tmp_path)
    assert made.wait() == 0, made.said
    port = free_port()
    command = Command("serve", "--model", "model", "--engines", num_engines, "--port", port, folder=tmp_path)
    clients: Clients | None = None
    try:
        command.until(lambda: "ready: " in command.said, "announcement of the address")
        clients = Clients(f"http://127.0.0.1:{port}", number=3)
        for _ in range(5):
            clients.until_answered(6)
            for pid in command.parts()["engine"]:
                os.kill(pid, signal.SIGKILL)
        clients.until_answered(6)
        assert command.process.poll() is None, command.said
        clients.stop()
        assert not clients.failures, command.said
        parts = [pid for found in command.parts().values() for pid in found]
        command.process.send_signal(signal.SIGINT)
        assert command.wait(20) == 130 and gone(parts, seconds=2)
    finally:
        command.end()
        if clients is not None:
            clients.stop()
