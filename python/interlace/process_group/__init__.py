"""interlace as a backend of torch.distributed."""
