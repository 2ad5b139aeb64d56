"""The paper's tables, figures and analyses, run by name: one module for each, over the cycle and the one harness."""

from onptq.reproduce.catalog import NAMES, run

__all__ = ["NAMES", "run"]
