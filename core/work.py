"""What one forward is to compute: planned by an engine, run by the model, committed by the engine.

A plan changes nothing that a commit relies on: work that is not run is planned again. Knows nothing of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pdctl.core.attention import TokenRun
from pdctl.core.model import Model


@dataclass(frozen=True, kw_only=True)
class Work:
    """Tokens of any number of rows, packed. See `Model.forward`.

    Attributes:
        alone: of a row whose last owner died over it: nobody else's tokens may be in this forward.
        planned_ns: when the plan was made (monotonic).
    """

    tokens: list[int]
    runs: list[TokenRun]
    logit_rows: list[int]
    alone: bool
    planned_ns: int

    def run(self, model: Model) -> Tensor | None:
        """The logits that are wanted, float32 [len(logit_rows), vocab_size]; None if none are."""
        return model.forward(self.tokens, self.runs, self.logit_rows)
