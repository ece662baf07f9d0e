"""One optimiser step: plain, or replayed as a CUDA graph, which makes one launch of thousands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

Inputs = tuple[Tensor, ...]
Losses = dict[str, Tensor]
PLAIN_STEPS = 2  # of each input shape before it is captured: they compile kernels and make the optimiser's state


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    losses: Losses


class Step:
    """Forward, backward, clipping and optimiser, on inputs from the host.

    With `graphs` a shape of inputs is captured when it comes for the third time; rare shapes stay plain. Both forms run
    the same functions on the same inputs. No form waits for the device: reading a returned loss does.

    Args:
        model: whose parameters that require a gradient are trained.
        optimiser: of them; for `graphs` with `capturable` and its rate in a tensor.
        losses_of: inputs on the model's device -> losses, of which `loss` is minimised. No host sync, nothing random.
        clip: largest gradient norm.
        graphs: CUDA only.
    """

    def __init__(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        losses_of: Callable[..., Losses],
        clip: float,
        graphs: bool,
    ) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.device = self.parameters[0].device
        self.optimiser, self.losses_of, self.clip = optimiser, losses_of, clip
        self.graphs = graphs
        self._seen: Counter[tuple[torch.Size, ...]] = Counter()
        self._captured: dict[tuple[torch.Size, ...], _Captured] = {}
        if graphs:
            # everything of a graph has to happen on one stream that is not the default one, plain steps included
            self._stream = torch.cuda.Stream()
            # one pool for all: replays follow each other, and a step leaves nothing for the next but the weights
            self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, inputs: Inputs) -> Losses:
        """Take the step; the losses before it and `grad_norm`, valid until the next call.

        Raises:
            RuntimeError: the step cannot be captured; the message names `--eager`.
        """
        if not self.graphs:
            return self.run(tuple(x.to(self.device) for x in inputs))
        caller = torch.cuda.current_stream()
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            losses = self._graphed(tuple(x.pin_memory() for x in inputs))
        caller.wait_stream(self._stream)
        return losses

    def run(self, inputs: Inputs) -> Losses:
        """The step itself."""
        for parameter in self.parameters:
            parameter.grad = None
        losses = self.losses_of(*inputs)
        losses["loss"].backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimiser.step()
        # detached: what is kept of a graph's output would keep its activations
        return {key: value.detach() for key, value in losses.items()} | {"grad_norm": norm}

    def _graphed(self, pinned: Inputs) -> Losses:
        shape = tuple(x.shape for x in pinned)
        captured = self._captured.get(shape)
        if captured is None:
            self._seen[shape] += 1
            inputs = tuple(x.to(self.device, non_blocking=True) for x in pinned)
            if self._seen[shape] <= PLAIN_STEPS:
                return self.run(inputs)
            captured = self._captured[shape] = self._capture(inputs)
        else:
            for static, given in zip(captured.inputs, pinned, strict=True):
                static.copy_(given, non_blocking=True)
        captured.graph.replay()
        return captured.losses

    def _capture(self, inputs: Inputs) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                losses = self.run(inputs)
        except RuntimeError as error:
            shapes = ", ".join(str(list(x.shape)) for x in inputs)
            raise RuntimeError(
                f"a training step on inputs {shapes} cannot be captured as a CUDA graph: train with --eager ({error})"
            ) from error
        return _Captured(graph, inputs, losses)
