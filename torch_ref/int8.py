"""Linear maps whose matrix is rounded to 8 bits, from the definition; knows nothing of adapters.

Row i of W [out, in] gives one output. Its scale is s_i = max_j |W_ij| / 127, its entries are q_ij = W_ij / s_i rounded to the
nearest whole number (half to even), and the output is s_i sum_j q_ij x_j + b_i. Nothing is learnt of any of them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_ref.model import Conv1D, LanguageModel

HEAD = "lm_head"


class RoundedMap(nn.Module):
    """What stands in the place of a linear map; `dtype` is that of the matrix it was made of."""

    scale_O: Tensor
    q_OI: Tensor

    def __init__(self, weight_OI: Tensor, bias_O: nn.Parameter | None):
        super().__init__()
        self.dtype, self.bias = weight_OI.dtype, bias_O
        wide_OI = weight_OI.detach().to(torch.float32)
        scale_O = wide_OI.abs().amax(dim=1) / 127
        # A row of zeros has no scale of its own, nor has one so small that its scale is no normal number.
        scale_O[scale_O < torch.finfo(torch.float32).smallest_normal] = 1
        self.register_buffer("scale_O", scale_O)
        self.register_buffer("q_OI", (wide_OI / scale_O[:, None]).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        product = F.linear(x, self.q_OI.to(x.dtype))  # in the dtype of an autocast, which holds 127 exactly
        wide = torch.promote_types(product.dtype, torch.float32)
        scaled = product.to(wide) * self.scale_O.to(wide)
        return (scaled if self.bias is None else scaled + self.bias.to(wide)).to(product.dtype)


def rounded(model: LanguageModel) -> LanguageModel:
    """The model with such maps in the place of its linear maps but for the head, and bfloat16's values of all else, in place."""
    for name, module in list(model.named_modules()):
        if name == HEAD or not isinstance(module, nn.Linear | Conv1D):
            continue
        weight_OI = module.weight.T if isinstance(module, Conv1D) else module.weight
        model.set_submodule(name, RoundedMap(weight_OI, module.bias))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model
