"""A pipeline stage with a sharded module, for the schedules of `torch.distributed.pipelining`.

A step of a schedule has several micro-batches. With torch's own stage, a sharded module gathers its
units and reduces its gradients for each micro-batch. Zero-bubble schedules do not work at all: they
ask for the gradients of ``submod.parameters()``, which are shards that no forward has used. With
this stage::

    first forward of a unit       gather it; it stays gathered
    backward, for inputs          compute only the gradients of the stage's inputs
    backward, for weights         add to the whole gradients of the gathered parameters
    the last backward             reduce and free each unit as soon as it is complete
    end of the step               reduce and free the remaining units (zero-bubble: all units)

A step therefore holds a stage's parameters and gradients whole, as with ``strategy="zero2"``.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.distributed import pipelining

from shardwise._private import (
    can_divide_backwards,
    next_node_number,
    node_number,
    stage_backwards,
    stage_forward,
)
from shardwise.errors import PlanError, StepError
from shardwise.features.fsdp_module import FSDPModule
from shardwise.features.transaction import TRANSACTION
from shardwise.runtime.module import runtime_of_root, runtimes_in
from shardwise.runtime.scheduler import Scheduler

__all__ = ["PipelineStage"]


class PipelineStage(pipelining.PipelineStage):
    """torch's `PipelineStage`, with one gather and one reduction per step for a sharded module.

    It takes the same arguments as torch's class. Call `fully_shard` on the stage's module itself,
    over the ranks that hold the same stage.
    """

    _first_node = 0  # of the graph of this step

    @property
    def _schedulers(self) -> list[Scheduler]:
        """The schedulers of the module and of separately sharded models inside it.

        Empty if the module is not sharded.

        Raises:
            PlanError: only modules inside the stage's module are sharded.
        """
        if isinstance(self.submod, FSDPModule):
            runtime_of_root(self.submod)
            return [runtime.scheduler for runtime in runtimes_in(self.submod)]
        for name, module in self.submod.named_modules():
            if isinstance(module, FSDPModule):
                raise PlanError(
                    f"stage {self.stage_index}: {name} is sharded and {type(self.submod).__name__} "
                    "around it is not; also call fully_shard on the stage's module"
                )
        return []

    def clear_runtime_states(self) -> None:
        """Begin a step."""
        super().clear_runtime_states()
        for scheduler in self._schedulers:
            if scheduler.sequencer.steps_in_backward:
                raise PlanError(
                    f"stage {self.stage_index}: sw.optimizer_in_backward would step before the "
                    "schedule divides gradients by the number of micro-batches; call "
                    "optimizer.step() after the schedule's step instead"
                )
            if TRANSACTION in scheduler.forbids_conversion and self.group_size > 1:
                raise PlanError(
                    f"stage {self.stage_index}: sw.transaction around a step of the pipeline would "
                    "undo the step of this stage alone, and other stages could keep it; after an "
                    "exception, load a checkpoint"
                )
            if scheduler.call_observer is not None:
                raise PlanError(
                    f"stage {self.stage_index}: sw.join around a pipeline: a rank without batches "
                    "could not send anything to other stages; give all ranks as many batches"
                )
            if scheduler.sequencer.has_unreduced_gradients:
                scheduler.abandon(StepError("the last step of the pipeline did not reach its end"))
                scheduler.drop_accumulated()
        self._accumulate(True)
        self._first_node = next_node_number()

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run the forward of one micro-batch."""
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        if not self.has_backward and fwd_chunk_id + 1 == len(self.args_recv_info):
            self._end_step()
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run the backward of one micro-batch, or only the half that reaches the inputs.

        Raises:
            StepError: ``loss`` is of an earlier step, which raised: torch's schedules keep it.
        """
        node = None if loss is None else loss.grad_fn
        if node is not None and node_number(node) < self._first_node:
            raise StepError(
                f"stage {self.stage_index}: the schedule still has losses of an earlier step, "
                "which raised; after an exception in a step, create the schedule anew"
            )
        if self.has_backward and not full_backward:
            self._is_divisible = can_divide_backwards() and _all_reach(
                *stage_forward(self, bwd_chunk_id)
            )
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """Run the backward of one micro-batch, or one of its halves."""
        schedulers = self._schedulers
        if not schedulers:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        backwards = stage_backwards()
        if backward_type == "weight":
            with contextlib.ExitStack() as stack:
                for scheduler in schedulers:
                    stack.enter_context(scheduler.taking_gradients())
                # The graph is kept until the groups are dropped, because the backward of a tied
                # weight may pass through the parts of others.
                weights, groups = _trained(schedulers), bwd_kwargs["param_groups"]
                backwards.stage_backward_weight(weights, groups, retain_graph=True)
            return (), None
        outputs, inputs = bwd_kwargs["stage_output"], bwd_kwargs["input_values"]
        gradients = bwd_kwargs["output_grads"]
        if backward_type == "input" and self._is_divisible:
            of_inputs, groups = backwards.stage_backward_input(
                outputs, gradients, inputs, _trained(schedulers)
            )
            return of_inputs, groups
        if backward_type == "full" and last_backward:
            self._accumulate(False)
        if backward_type == "input" and self.is_last:
            (outputs,) = outputs  # the loss
        # There is nothing left for the second half to do.
        return backwards.stage_backward(outputs, gradients, inputs), []

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # torch 2.11 connects a stage to its neighbors first. In V schedules, one of them is on this
        # rank, and Gloo cannot send to its own rank.
        here = dist.get_rank()
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != here]

    def scale_grads(self, grad_scale_factor: int) -> None:
        """End a step and divide its gradients; an evaluation has none."""
        if self.has_backward:
            self._end_step()
            super().scale_grads(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """End a step and divide its gradients."""
        if self._schedulers:
            self.scale_grads(grad_scale_factor)
        else:
            super().perform_reduce_grad(grad_scale_factor)

    def _end_step(self) -> None:
        self._accumulate(False)
        for scheduler in self._schedulers:
            scheduler.finish_accumulation()

    def _accumulate(self, accumulates: bool) -> None:
        """Set whether units stay gathered and gradients stay whole after a backward."""
        if isinstance(self.submod, FSDPModule):
            self.submod.set_reshard_after_forward(False)
            self.submod.set_reshard_after_backward(not accumulates)
            self.submod.set_requires_gradient_sync(not accumulates)


def _trained(schedulers: Iterable[Scheduler]) -> Iterator[nn.Parameter]:
    """The gathered, trainable parameters, which forward computed with."""
    units = (unit for scheduler in schedulers for unit in scheduler.units)
    for unit in units:
        for gradients in unit.gradients:
            for parameter in gradients.parameters:
                if parameter.dense.requires_grad:
                    yield parameter.dense


def _all_reach(outputs: Sequence[Tensor | GradientEdge], inputs: Sequence[Any]) -> bool:
    """Whether all ``outputs`` depend on ``inputs``.

    torch finds the weights' part of a backward at the nodes where it branches off the path from
    outputs to inputs. An output that depends on parameters alone has no such path, so its backward
    cannot be divided.
    """
    leaves = {id(x) for x in inputs if isinstance(x, Tensor) and x.requires_grad}
    ends = [
        output.node if isinstance(output, GradientEdge) else output.grad_fn
        for output in outputs
        if isinstance(output, GradientEdge) or (isinstance(output, Tensor) and output.requires_grad)
    ]
    return all(
        any(id(getattr(node, "variable", None)) in leaves for node in _nodes(end)) for end in ends
    )


def _nodes(output: Node | None) -> Iterator[Node]:
    """All nodes of the autograd graph that ends in ``output``."""
    visited: set[Node] = set()
    pending: list[Node | None] = [output]
    while pending:
        node = pending.pop()
        if node is not None and node not in visited:
            visited.add(node)
            yield node
            pending += [following for following, _ in node.next_functions]
