"""The autograd functions under the layers."""
