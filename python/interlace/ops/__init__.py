"""All ops, by family; and ``torch.ops.interlace.*``, the same as custom ops of torch.

An op of torch takes plain data only: tensors, numbers, and a group as name and size (``groups/specs.py``).
It starts and returns tensors that are complete after ``torch.ops._c10d_functional.wait_tensor``, torch's
own op, so that torch's compilers treat the pair as they treat torch's collectives.
"""
