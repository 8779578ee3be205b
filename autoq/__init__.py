"""autoq: search the number format of every weight, key and value of a language model under one memory budget."""

__version__ = "0.1.0"
