"""From a configuration to a running engine. torch is imported only when a real model is asked for."""

from __future__ import annotations

from collections.abc import Callable

from shared.engine.api import Engine, EngineConfig, Progress
from shared.engine.torch_threads import sleep_when_idle
from shared.engine.toy.engine import ToyEngine
from shared.io.plugins.classes import register
from shared.protocol.errors import Invalid

"""Told what is being done, and which fraction of it is."""
Load = Callable[[EngineConfig, Progress], Engine]


def load_engine(config: EngineConfig, progress: Progress) -> Engine:
    """Load the model and touch its KV pages. Blocks; `progress` is called on the same thread.

    Raises Invalid, with the reason, if the engine or the model does not exist or cannot be served. If the configuration
    alone shows that, it raises before any weights are loaded.
    """
    loaders: dict[str, Load] = {"auto": _built_in}
    register(loaders, config.engine, param="engine", adapt=lambda engine: engine.load)
    return loaders[config.engine](config, progress)


def _built_in(config: EngineConfig, progress: Progress) -> Engine:
    if config.model.partition(":")[0] == "toy":
        if config.stages > 1:
            raise Invalid("the toy engine cannot be divided into stages", param="stages")
        engine = ToyEngine(config, lambda done, total: progress("touching the KV pages", done / total))
        progress("ready", 1.0)
        return engine
    sleep_when_idle()
    from shared.engine.model import ModelEngine

    return ModelEngine.load(config, progress)
