"""All ops, by family; and ``torch.ops.interlace.*``, the same as custom ops of torch.

An op of torch takes plain data only: tensors, numbers, and a group as name and size (``groups/specs.py``).
It starts and returns tensors that are complete after ``torch.ops._c10d_functional.wait_tensor``, torch's
own op, so that torch's compilers treat the pair as they treat torch's collectives::

    op            parts that ops share: the record, async tensors, how a call is recorded for autograd and
                  registered with torch; lowerings for Inductor: an op in flight reads its inputs until its
                  wait
    collectives, matmul, experts, attention      the families, and how each is launched
    library       the list of all ops, which registers them with torch
    local_tensor  rules for torch's LocalTensorMode, where one process plays all ranks
"""
