"""vLLM's own emulation of NVFP4 on a CPU too, for a server that is started with this folder in PYTHONPATH.

vLLM 0.32 lists the emulation for GPUs alone, though its code for other devices is plain torch. Every process of the server
imports this module when Python starts.
"""

import importlib.util
import sys

KERNELS = "vllm.model_executor.kernels.linear"


class AddEmulation:
    """Finds vLLM's lists of kernels as Python would, and completes them when they are loaded."""

    def find_spec(self, name, path=None, target=None):
        if name != KERNELS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_add(module):
            load(module)
            module._POSSIBLE_NVFP4_KERNELS[module.PlatformEnum.CPU] = [module.EmulationNvFp4LinearKernel]

        spec.loader.exec_module = load_and_add
        return spec


sys.meta_path.insert(0, AddEmulation())
