"""How the ranks come to be: in this process, by torchrun, or as Ray actors."""
