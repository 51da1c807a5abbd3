"""Parts that ops share."""
