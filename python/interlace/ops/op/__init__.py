"""Code that all ops share."""
