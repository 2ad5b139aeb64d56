"""Base methods: data to theta. Each is one file and can start the calibration (`init`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onptq.methods.rtn import rtn
from onptq.methods.search import search
from onptq.methods.smoothquant import smoothquant
from onptq.models.encoding import EncodedPrompt
from onptq.policy import Policy
from onptq.quantizer.theta import Theta

Method = Callable[[Policy, Sequence[EncodedPrompt], Callable[[int], None]], Theta]

METHODS: dict[str, Method] = {"rtn": rtn, "search": search, "smoothquant": smoothquant}
