"""A transformers model whose attention works on a shared KV pool: load it, run packed tokens through it.

Called by the zygote (load) and the engines (forward). Knows nothing of rows, states or processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pdctl.core import attention
from pdctl.core.activations import replace_activations
from pdctl.core.attention import PagedKV, TokenRun
from pdctl.core.numerics import MIN_FORWARD_ROWS, Numerics
from pdctl.core.weights.fingerprint import ModelFile, check_config
from pdctl.core.weights.private_copy import read_weights
from pdctl.transport.errors import IncompatibleError

_NAME = "pdctl"
# Tokens that go through the layers together. More give no speed, since matrices of so many rows are wide enough, and
# would take memory and time between two ticks without bound. A power of two, and a multiple of every block size.
SLICE_TOKENS = 256


class WidenedLinear(nn.Module):
    """A bfloat16 linear layer on a CPU without bfloat16 matrix kernels: multiplied in float32, rounded once.

    Args:
        rounded: False leaves the result in float32 (logits: rounding them would make ties of close calls).
    """

    def __init__(self, linear: nn.Linear, *, rounded: bool) -> None:
        super().__init__()
        self._rounded = rounded
        self.weight = nn.Parameter(linear.weight.detach().float(), requires_grad=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().float(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out = nn.functional.linear(x.float(), self.weight, self.bias)
        return out.to(x.dtype) if self._rounded else out


class Model:
    """Weights, and one forward for all.

    Attributes:
        vocab_size: number of logits.
    """

    def __init__(self, module: Any, numerics: Numerics) -> None:
        self._decoder = module.model
        self._head = module.lm_head
        self._softcap: float | None = getattr(module.config, "final_logit_softcapping", None)
        self.numerics = numerics
        self.vocab_size = int(module.config.vocab_size)
        self.dtype: torch.dtype = getattr(torch, numerics.dtype)
        self.paged: PagedKV | None = None
        # Called within a forward, whenever a bounded part of it is done: see P.TICKS.
        self.on_tick: Callable[[], None] = _nobody_counts

    def use_pages(self, pages: Tensor) -> None:
        """Attend over these pages: [num_blocks, layers, 2, kv_heads, block_tokens, head_dim]."""
        self.paged = PagedKV(pages, lambda: self.on_tick())
        attention.use(self.paged)

    @torch.inference_mode()
    def forward(self, tokens: list[int], runs: list[TokenRun], logit_rows: list[int]) -> Tensor | None:
        """Run packed tokens; their KV is in the pages when this returns.

        Args:
            tokens: ids of all runs, one after the other.
            runs: where each part of `tokens` belongs.
            logit_rows: indices into `tokens` whose logits are wanted; empty for prefill.

        Returns:
            float32 [len(logit_rows), vocab_size]; None if none are wanted.
        """
        wanted = []
        for first, part in _slices(runs):
            last = first + sum(run.length for run in part)
            hidden = self._hidden(tokens[first:last], part)
            wanted += [hidden[row - first] for row in logit_rows if first <= row < last]
            self.on_tick()
        if not wanted:
            return None
        wanted += wanted[-1:] * max(0, MIN_FORWARD_ROWS - len(wanted))
        logits: Tensor = self._head(torch.stack(wanted))[: len(logit_rows)].float()
        self.on_tick()
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap

    def _hidden(self, tokens: list[int], runs: list[TokenRun]) -> Tensor:
        """What the layers make of one slice: [len(tokens) or more, hidden size]."""
        if self.paged is None:
            raise RuntimeError("model: no KV pages in use")
        self.paged.prepare(runs)
        positions = [position for run in runs for position in range(run.start, run.start + run.length)]
        padding = max(0, MIN_FORWARD_ROWS - len(tokens))
        hidden: Tensor = self._decoder(
            input_ids=torch.tensor([tokens + tokens[-1:] * padding]),
            position_ids=torch.tensor([positions + positions[-1:] * padding]),
            use_cache=False,
        ).last_hidden_state[0]
        return hidden


def _nobody_counts() -> None:
    pass


def _slices(runs: list[TokenRun]) -> Iterator[tuple[int, list[TokenRun]]]:
    """The runs in parts of at most SLICE_TOKENS tokens, each with the place of its first token.

    A run's later tokens come in later slices, whose attention finds the KV of those before it in the pages.
    """
    first, number, part = 0, 0, list[TokenRun]()
    for run in runs:
        start, end = run.start, run.start + run.length
        while start < end:
            length = min(end - start, SLICE_TOKENS - number)
            part.append(TokenRun(block_table=run.block_table, start=start, length=length))
            start, number = start + length, number + length
            if number == SLICE_TOKENS:
                yield first, part
                first, number, part = first + number, 0, []
    if part:
        yield first, part


def _check_loaded(path: Path, info: dict[str, Any]) -> None:
    missing = sorted(info["missing_keys"])
    if missing:
        raise IncompatibleError(f"{path}: tensor {missing[0]} is missing (1 of {len(missing)} so)")
    mismatched = sorted(info["mismatched_keys"])
    if mismatched:
        name, found, expected = mismatched[0]
        raise IncompatibleError(f"{path}: tensor {name} has shape {list(found)}, expected {list(expected)}")


def load(
    path: Path,
    numerics: Numerics,
    progress: Callable[[int, int], None] | None = None,
    files: Sequence[ModelFile] = (),
) -> Model:
    """Load a checkpoint for pool attention. Nothing of it stays tied to its files.

    Args:
        progress: called with (layers done, layers in all) while linear layers are prepared.
        files: what the checkpoint's files must be; empty: nothing is compared.

    Raises:
        IncompatibleError: a tensor is missing or of another shape; a file is damaged, or not what it must be.
        UsageError: a file cannot be read.
        OSError, ValueError: transformers' own, for a configuration it cannot read.
    """
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AutoConfig
    from transformers.masking_utils import AttentionMaskInterface

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    AttentionInterface.register(_NAME, attention.attention_function)
    AttentionMaskInterface.register(_NAME, attention.no_mask)
    dtype = getattr(torch, numerics.dtype)
    # Before, for the better message of the two; after, because only then nothing can have changed meanwhile.
    check_config(path, files)
    config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    check_config(path, files)
    module, info = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None,
        config=config,
        state_dict=read_weights(path, dtype, files),
        dtype=dtype,
        attn_implementation=_NAME,
        trust_remote_code=False,
        # transformers fills what is missing with random numbers and goes on: we do not.
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    _check_loaded(path, info)
    module.eval()
    replace_activations(module)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    if numerics.linear == "widened":
        linears = [
            (parent, name, child)
            for parent in module.modules()
            for name, child in parent.named_children()
            if isinstance(child, nn.Linear)
        ]
        for done, (parent, name, child) in enumerate(linears):
            setattr(parent, name, WidenedLinear(child, rounded=child is not module.lm_head))
            if progress is not None:
                progress(done + 1, len(linears))
    return Model(module, numerics)
