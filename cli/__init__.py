"""``ckpt``: the command line of ckptstore."""
