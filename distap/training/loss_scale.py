"""Training in float16, whose gradients would round to zero without a factor on the loss.

describe, rank                     replay                          update
gradient g of each descriptor  ->  backward of <d, scale * g>  ->  / scale, clip, move
"""

import torch
from torch import Tensor

from distap.errors import logger
from distap.training.learner import Learner, Tensors

# As of torch.amp.GradScaler. All are powers of two, so that scaling and unscaling round nothing.
FIRST_SCALE = 2.0**16
LEAST_SCALE = 1.0
GREATEST_SCALE = 2.0**32
GROWS_AFTER = 2000  # steps in a row without an overflow
SCALE = "scale.value"
GOOD_STEPS = "scale.good_steps"


class ScaledLearner(Learner):
    """A learner that finds its gradients `loss_scale` times too large (Micikevicius et al. 2018).

    A step whose gradient is not finite moves nothing on any rank and halves the scale: all ranks
    decide by the norm of the whole gradient. GROWS_AFTER steps without one double it.
    """

    loss_scale = FIRST_SCALE
    good_steps = 0  # in a row, since the scale has changed

    def update(self, learning_rate: float) -> float:
        for parameter in self.network.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 / self.loss_scale)
        norm = super().update(learning_rate)
        if norm < float("inf"):  # False for NaN as well
            self.good_steps += 1
            if self.good_steps == GROWS_AFTER:
                self._rescale(min(2 * self.loss_scale, GREATEST_SCALE))
            return norm
        # At the least scale the gradient is not finite for another reason than the scale.
        self.skip_reason = "gradient" if self.loss_scale == LEAST_SCALE else "overflow"
        self._rescale(max(self.loss_scale / 2, LEAST_SCALE))
        if self.skip_reason == "overflow":
            logger.info(
                "the gradient has overflowed in float16, so the parameters stay as they are; the"
                " loss scale is %g from now on",
                self.loss_scale,
            )
        return norm

    def _rescale(self, scale: float) -> None:
        self.loss_scale = scale
        self.good_steps = 0

    def state_dict(self) -> dict[str, Tensor]:
        scale = {SCALE: torch.tensor(self.loss_scale), GOOD_STEPS: torch.tensor(self.good_steps)}
        return super().state_dict() | scale

    def load_state_dict(self, state: Tensors) -> None:
        super().load_state_dict(state)
        # A checkpoint of another precision has no scale.
        if SCALE in state:
            self.loss_scale = float(state[SCALE])
            self.good_steps = int(state[GOOD_STEPS])
