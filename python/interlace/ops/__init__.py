"""``torch.ops.interlace.*``: the collectives and fused ops as custom ops of torch.

An op takes plain data only: tensors, numbers, and a group as name and size (see ``groups/specs.py``). It
starts and returns tensors that are complete after ``torch.ops._c10d_functional.wait_tensor``, torch's own
op, so that torch's compilers treat the pair as they treat torch's collectives::

    library     the schemas, one place; what registers kernels, fake kernels and gradients with torch
    shapes      fake kernels: what comes out, from shapes and the group's size alone
    plain       kernels of the collectives
    fused       kernels of the fused ops
    grouped     kernels and gradients of the grouped matmuls
    norms       the reductions whose rows are normed: kernels in eager/norms, schemas and gradients
    scaled      kernels of the fused ops on scaled (fp8) operands
    gradients   the formulas
    inductor    lowerings: an op in flight reads its inputs until its wait
    local_tensor, simulated   rules for torch's LocalTensorMode, where one process plays all ranks
"""
