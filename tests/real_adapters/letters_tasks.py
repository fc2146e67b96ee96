"""A taskset as its author would ship it: verifiers and nothing of Midflight."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    letter: str


class Letter(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def even(self, trace: vf.Trace) -> float:
        return float(sum(map(ord, trace.last_reply)) % 2 == 0)

    @vf.reward(weight=0.5)
    async def has(self, trace: vf.Trace) -> float:
        return float(self.data.letter in trace.last_reply)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class LettersConfig(vf.TasksetConfig):
    count: int = 26


class Letters(vf.Taskset[Letter, LettersConfig]):
    def load(self):
        for n in range(self.config.count):
            letter = chr(97 + n % 26)
            yield Letter(Data(prompt=f"Say {letter}{n}.", letter=letter), self.config.task)


__all__ = ["Letters"]
