"""How every command reads its command line and refuses bad input."""

import contextlib
import io
import re
import sys
from typing import Any, NoReturn

import tyro


def error(message: str) -> NoReturn:
    """Refuse bad input: one line on standard error, exit status 2."""
    print("error:", " ".join(message.split()), file=sys.stderr)
    raise SystemExit(2)


def parse(
    cls: type, description: str | None = None, arguments: list[str] | None = None, default: Any = None
) -> Any:
    """The arguments, or the command line's, as an instance of a dataclass; default has what they do not say.

    What tyro has to say of bad ones it puts in a box; here it is one line.
    """
    output, defaults = io.StringIO(), {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(output):
            return tyro.cli(cls, args=arguments, description=description, **defaults)
    except SystemExit as stopped:
        if stopped.code:
            error(re.sub(r"[^ -~]+", " ", output.getvalue()))
        raise
