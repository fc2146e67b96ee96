"""What the ring gives its processes of a machine's GPUs, which are made up here."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from midflight.config.load import load_config
from midflight.errors import ConfigError
from midflight.run.launcher.ring import Ring
from midflight.run.parts import ProcessKind
from midflight.run.places.port import ChildOrder


class Began(Exception):
    """Nothing is started in these tests."""


class Remembering:
    """A place that keeps the environment of what is to be started there."""

    def child(self, order: ChildOrder, **_: Any) -> Any:
        raise Began(order.environ.get("CUDA_VISIBLE_DEVICES"))


def seen(ring: Ring, part: ProcessKind, name: str) -> str | None:
    """What the process of that name sees of the devices."""
    with pytest.raises(Began) as began:
        asyncio.run(ring.children.start(part, name, Remembering()))  # pyright: ignore[reportArgumentType]
    return began.value.args[0]


def ring_of(*options: str) -> Ring:
    return Ring(load_config(None, options), on_message=lambda message: None, control_token="")


def test_every_process_sees_its_own_devices_alone_and_the_others_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "10,11,12,13,14,15")
    ring = ring_of(
        "engine.kind=vllm", "engine.device=cuda", "trainer.device=cuda", "trainer.ranks=2", "engine.servers=[{tensor_parallel=2}, {}]"
    )
    ring.children.lay_out(ranks=True, teacher=True)
    assert [seen(ring, ProcessKind.TRAINER, name) for name in ("trainer", "trainer1")] == ["10", "11"]
    assert [seen(ring, ProcessKind.ENGINE, name) for name in ("engine0", "engine1")] == ["12,13", "14"]
    assert seen(ring, ProcessKind.ROLLOUT, "rollout") is None


def test_a_run_without_gpus_is_started_as_before() -> None:
    ring = ring_of("engine.count=4")
    ring.children.lay_out(ranks=True, teacher=True)
    assert [seen(ring, ProcessKind.ENGINE, f"engine{i}") for i in range(4)] == [None] * 4


def test_a_machine_with_too_few_devices_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match="engine1 asks for 1 GPU"):
        ring_of("engine.device=cuda", "trainer.device=cuda", "engine.count=2").children.lay_out(ranks=True, teacher=True)
