"""The arithmetic that undoes a step of SGD, Adam and AdamW in place (appendix C of the paper; SGD is ours).

Each parameter comes back first, then the moments. What the forward arithmetic rounded away stays away: the drift is in
docs/post-validation.md.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Any

import torch

from zerobubble.errors import OptionError
from zerobubble.optim.sharded import is_sharded

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer


def reverse(optimizer: Optimizer, gradients: Mapping[nn.Parameter, Tensor], first: Collection[nn.Parameter]) -> None:
    """Undo the last step, which took `gradients`; it was the first one for the parameters in `first`."""
    undo = _reverse_sgd if type(optimizer) is torch.optim.SGD else _reverse_adam
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in gradients:
                gradient = gradients[parameter]
                undo(group, optimizer.state[parameter], parameter, -gradient if group["maximize"] else gradient)
                if parameter in first:
                    del optimizer.state[parameter]


def _reverse_sgd(group: dict[str, Any], state: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
    lr, momentum, decay = float(group["lr"]), group["momentum"], group["weight_decay"]
    moved = state.get("momentum_buffer") if momentum else None
    if moved is None:
        parameter.add_(gradient, alpha=lr).div_(1 - lr * decay)
    elif group["nesterov"]:
        parameter.add_(gradient, alpha=lr).add_(moved, alpha=lr * momentum).div_(1 - lr * decay)
    else:
        parameter.add_(moved, alpha=lr)
    if moved is not None:
        moved.sub_(gradient.add(parameter, alpha=decay), alpha=1 - group["dampening"]).div_(momentum)


def _reverse_adam(group: dict[str, Any], state: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
    lr, decay, (beta1, beta2) = float(group["lr"]), group["weight_decay"], map(float, group["betas"])
    mean, square, step = state["exp_avg"], state["exp_avg_sq"], state["step"]
    count = float(step)
    denominator = square.sqrt().div_(sqrt(1 - beta2**count)).add_(group["eps"])
    parameter.addcdiv_(mean, denominator, value=lr / (1 - beta1**count))
    if group["decoupled_weight_decay"]:
        parameter.div_(1 - lr * decay)
    elif decay:
        gradient = gradient.add(parameter, alpha=decay)
    mean.sub_(gradient, alpha=1 - beta1).div_(beta1)
    square.addcmul_(gradient, gradient, value=beta2 - 1).div_(beta2).clamp_(min=0)
    step.sub_(1)


def check_reversible(optimizer: Optimizer) -> None:
    """Raise `OptionError` where a step of `optimizer`, with its present settings, cannot be undone by arithmetic."""
    if is_sharded(optimizer):
        raise OptionError("undo='reverse' needs the state of every parameter, which a sharded optimizer does not keep")
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        raise OptionError(
            f"undo='reverse' knows SGD, Adam and AdamW; got {type(optimizer).__name__}: take undo='snapshot'"
        )
    for number, group in enumerate(optimizer.param_groups):
        if trouble := _irreversible(group):
            raise OptionError(f"undo='reverse' cannot undo {trouble} (parameter group {number}): take undo='snapshot'")


def _irreversible(group: dict[str, Any]) -> str | None:
    """What in these settings cannot be undone."""
    on_cpu = all(parameter.device.type == "cpu" for parameter in group["params"])
    cases = {
        "amsgrad: the largest second moment forgets": group.get("amsgrad"),
        "a step that autograd follows": group.get("differentiable"),
        "a captured step": group.get("capturable"),
        "a beta of 0: the moment before is forgotten": 0 in map(float, group.get("betas", ())),
        "weight decay by the whole weight (lr * weight_decay = 1)": float(group["lr"]) * group["weight_decay"] == 1,
        "complex parameters": any(parameter.is_complex() for parameter in group["params"]),
        "Nesterov momentum with foreach, which writes to the gradients (set foreach=False)": group.get("nesterov")
        and (group["foreach"] or (group["foreach"] is None and not on_cpu)),
    }
    return next((trouble for trouble, there in cases.items() if there), None)
