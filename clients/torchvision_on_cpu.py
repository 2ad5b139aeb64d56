"""Operators that torchvision needs, declared on every start of Python in the server's environment.

PyPI's torchvision is built for CUDA. On the CPU build of torch it lacks its operators and does not import. None of them
is used here, but their schemas must exist before the import.
"""

import importlib.abc
import sys

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class DeclareOperators(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                self.library = torch.library.Library("torchvision", "FRAGMENT")
                for schema in SCHEMAS:
                    self.library.define(schema)
                torch.onptq_torchvision_library = self.library  # the schemas live as long as this object


sys.meta_path.insert(0, DeclareOperators())
