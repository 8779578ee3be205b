"""URLs that may hold a password."""

from __future__ import annotations

import re


def without_password(text: str) -> str:
    """Return text with the password of any URL in it hidden."""
    return re.sub(r"(://[^/@\s:]*):[^/\s]*@", r"\1:***@", text)
