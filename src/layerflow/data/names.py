"""What a name given by the user can be: something on this machine, or something on the Hub."""

import re
from pathlib import Path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_LONGEST = 96  # the Hub's own limit


def existing_path(name: str) -> Path | None:
    """Return the file or folder of this name, ``~`` expanded, or None when there is none."""
    if not name:
        return None
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # too long a name, a folder that may not be entered, an unknown ~user
        return None


def is_hub_name(name: str) -> bool:
    """Say whether a name can be one on the Hub: ``name`` or ``owner/name``."""
    return len(name) <= _LONGEST and _HUB_NAME.fullmatch(name) is not None and ".." not in name and "--" not in name
