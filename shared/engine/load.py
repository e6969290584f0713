"""From a configuration to a running engine. torch is imported only when a real model is asked for."""

from __future__ import annotations

from collections.abc import Callable

from shared.engine.api import Engine, EngineConfig
from shared.engine.torch_threads import sleep_when_idle
from shared.engine.toy.engine import ToyEngine
from shared.protocol.errors import Invalid


def load_engine(config: EngineConfig, progress: Callable[[str, float], None]) -> Engine:
    """Load the model and touch its KV pages. Blocks; `progress(what, fraction)` is called on the same thread.

    Raises Invalid if the model is not there or cannot be served, naming the reason, before weights are loaded
    where the configuration alone tells.
    """
    if config.model.partition(":")[0] == "toy":
        if config.stages > 1:
            raise Invalid("the toy engine has no layers to share out among stages", param="stages")
        engine = ToyEngine(config, lambda done, total: progress("touching the KV pages", done / total))
        progress("ready", 1.0)
        return engine
    sleep_when_idle()
    from shared.engine.model import ModelEngine

    return ModelEngine.load(config, progress)
