"""Dispatch of tokens to experts, and their way back: the launch sides, and the torch algorithms."""
