"""Programs of launches: which are interpreted, and which are compiled and their PTX run."""
