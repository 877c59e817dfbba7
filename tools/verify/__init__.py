"""Every documented claim that needs no GPU, checked on the real model and data; a file per item."""
