"""The collectives of torch.distributed under its names, eager."""
