"""The fused ops: validate, agree, choose, call. No gradients."""
