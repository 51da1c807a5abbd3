"""Memory of the threads of a PTX program: variables of functions, and parameters."""
