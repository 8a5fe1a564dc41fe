"""An elementwise function of arrays, and their codes, from one reading of them."""
