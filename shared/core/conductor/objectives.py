"""The latency objectives, and when requests are refused to meet them."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

AdmissionMode = Literal["none", "baseline", "early", "predictive"]
"""none: nothing is refused for an objective. The others refuse on arrival what would wait too long for its prefill. They
differ in how they test the time between tokens:
baseline: only at the decode node, once the prompt is computed;
early: on arrival too, against the batch that runs then;
predictive: on arrival too, against the batch expected when the prefill ends (arXiv paper, section 7);
prediction/decode_forecast.py says which batch that is."""


class Objectives(Struct, frozen=True):
    """Latency objectives in seconds; 0 means none."""

    ttft_s: float = 0.0
    tbt_s: float = 0.0
    min_samples: int = 8
    """A fitted time model with fewer measurements counts as a guess. A given one never does."""
    idle_refusals: float = 0.5
    """Largest share that fitted time models may refuse of the last `window` requests that arrived while nodes were
    idle."""
    window: int = 20
    max_wait_s: float = 0.0
    """Longest wait for the start of the prefill, whatever the prompt itself takes; 0: any."""
    admission: AdmissionMode = "predictive"
    tbt_fill: float = 0.9
    """Share of the TBT objective that steps may take when a sequence joins the batch. The rest is left to the KVCache
    that its sequences will grow by."""
    shadow: bool = False
    """Judge, count and explain refusals, but refuse nothing."""

    @property
    def refuses(self) -> bool:
        """Whether anything could be refused."""
        return self.admission != "none" and (self.ttft_s > 0 or self.tbt_s > 0 or self.max_wait_s > 0)

    @property
    def tbt_most_s(self) -> float:
        """The longest step that a batch may have when a sequence joins it; 0: any."""
        return self.tbt_fill * self.tbt_s

    @property
    def late_tbt_s(self) -> float:
        """The limit that decode nodes test once more when KVCache has landed; 0: none."""
        return self.tbt_most_s if self.admission != "none" and not self.shadow else 0.0
