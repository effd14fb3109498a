"""The name by which users' functions import `slime.data.rows.tokenizer`."""

from slime.data.rows.tokenizer import load_tokenizer

__all__ = ["load_tokenizer"]
