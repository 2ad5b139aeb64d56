"""Which of PyTorch's attention kernels may run."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch.nn.attention import SDPBackend, sdpa_kernel

TRUSTED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def trusted_attention() -> AbstractContextManager[None]:
    """All but cuDNN's, which PyTorch 2.11 and later prefer on Hopper GPUs.

    It makes a plan for every new shape, and here each token and each batch has a shape of its own. With 64 keys, and small
    pictures have 64 patches, its gradient is NaN where a row's logsumexp is below -88.7, minus the log of the largest float:
    keys beyond the last count as exp(0 - logsumexp) times 0 (pytorch/pytorch#196678).
    """
    trusted: AbstractContextManager[None] = sdpa_kernel(TRUSTED)
    return trusted
