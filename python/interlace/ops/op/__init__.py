"""What all ops share, whatever they do."""
