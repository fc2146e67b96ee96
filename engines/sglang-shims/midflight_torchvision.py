"""Lets a CPU build of torch import the torchvision of PyPI, whose compiled operators want CUDA.

torchvision does without its operators, but describes two of them to torch while it is imported, which fails if their schemas
are missing. A `.pth` file beside this one imports this module at the interpreter's start; the schemas are defined when, and
only if, torchvision is about to be imported, so that programs without it do not pay for torch.
"""

from __future__ import annotations

import sys

SCHEMAS = ("nms", "qnms")
ARGUMENTS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class DefineSchemas:
    """Finds no module: it only sees the import coming."""

    library: object = None
    """Kept: the schemas live as long as the library that defined them."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name != "torchvision" or self.library is not None:
            return
        import torch

        self.library = library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in SCHEMAS:
            library.define(schema + ARGUMENTS)


sys.meta_path.insert(0, DefineSchemas())
