"""URLs that may hold a password."""

from __future__ import annotations

import re


def without_password(text: str) -> str:
    """Return text with the password of any URL in it hidden."""
    text = re.sub(r"(://[^/@\s:]*):\S*@", r"\1:***@", text)
    return re.sub(r"(?i)\b(password|passwd|pwd)=[^&\s]*", r"\1=***", text)
