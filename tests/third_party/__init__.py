"""Code as someone outside of the project would write it; tests use it, nothing of it is shipped."""
