"""TieredTensor: a torch tensor over a tiered range, and what happens around an operation on one."""

from h3store.tensor import regions, saving
from h3store.tensor.pickling import on_reference, plain_copy, python_state
from h3store.tensor.subclass import TieredTensor, byte_span, in_operation, operands, over_range, range_of

__all__ = [
    "TieredTensor",
    "byte_span",
    "in_operation",
    "on_reference",
    "operands",
    "over_range",
    "plain_copy",
    "python_state",
    "range_of",
]

saving.install()
regions.install()
