"""What goes wrong between here and the Hugging Face Hub: what is worth another try, and how to say the rest."""

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from layerflow.errors import InputError
from layerflow.progress import say

T = TypeVar("T")

# Opening is tried quickly, since a wrong name or no network should show soon; a stream that has already given rows is
# worth waiting for.
OPEN_WAITS = (0.5, 1.0, 2.0)
STREAM_WAITS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0)

_UNREACHABLE = (
    "ConnectError",
    "ConnectionError",
    "ConnectTimeout",
    "LocalEntryNotFoundError",
    "NetworkError",
    "OfflineModeIsEnabled",
    "TimeoutException",
    "TimeoutError",
    "TransportError",
    "ClientError",
)


def retried(action: Callable[[], T], waits: tuple[float, ...] | None = None) -> T:
    """Call a function again, after growing waits, while it fails for a passing reason."""
    for wait in OPEN_WAITS if waits is None else waits:
        try:
            return action()
        except Exception as error:
            if not is_passing(error):
                raise
        time.sleep(wait)
    return action()


def resumed(open_at: Callable[[int], Iterator[T]], *, what: str) -> Iterator[T]:
    """Yield the items of a stream, reopening it where it broke off when the network fails.

    Args:
        open_at: opens the stream, passing over so many items; the order must be the same each time.
        what: names the stream in the lines that say it is being retried.
    """
    n_done = n_failures = 0
    while True:
        try:
            for item in open_at(n_done):
                yield item
                n_done += 1
                n_failures = 0
            return
        except Exception as error:
            if not is_passing(error) or n_failures == len(STREAM_WAITS):
                raise
            wait = STREAM_WAITS[n_failures]
            n_failures += 1
            say(f"{what}: the connection failed after {n_done:,} records; trying again in {wait:.0f} s")
            time.sleep(wait)


def is_passing(error: BaseException) -> bool:
    """Say whether trying again may help: the Hub was out of reach, overloaded or broke off, and not offline by wish."""
    status = _status(error)
    if status is not None:
        return status >= 500 or status in (408, 429)
    return is_unreachable(error) and "OfflineModeIsEnabled" not in _kinds(error)


def is_unreachable(error: BaseException) -> bool:
    """Say whether the Hub gave no useful answer at all, so that what is on this machine may stand in."""
    status = _status(error)
    return status >= 500 if status is not None else not _kinds(error).isdisjoint(_UNREACHABLE)


def explained(error: Exception, *, kind: str, name: str, revision: str | None) -> InputError | None:
    """Turn an error of the Hub's libraries into one line for the user, or None when it is not about the Hub.

    Args:
        error: what was raised; its causes are looked at too.
        kind: ``model`` or ``data set``.
        name: the name on the Hub.
        revision: the revision asked for.
    """
    kinds, status = _kinds(error), _status(error)
    # datasets drops the cause of its own error, and keeps it in words.
    if "GatedRepoError" in kinds or status == 403 or "is a gated" in str(error):
        return InputError(
            f"{kind} {name} is gated: ask for access on its page on the Hub, then log in with `hf auth login` "
            "(or set HF_TOKEN)"
        )
    if "RevisionNotFoundError" in kinds or "RevisionResolutionError" in kinds:
        return InputError(f"{kind} {name} has no revision {revision!r}; give a branch, tag or commit it has")
    if not kinds.isdisjoint(("RepositoryNotFoundError", "DatasetNotFoundError")) or status in (401, 404):
        return InputError(
            f"there is no {kind} {name} on the Hub that you can read; check the name, or log in with "
            "`hf auth login` if it is private"
        )
    if status is not None and is_passing(error):
        return InputError(f"the Hub answered {status} for {kind} {name}, several times; try again later")
    if not kinds.isdisjoint(_UNREACHABLE):
        return InputError(
            f"the Hub cannot be reached for {kind} {name}; check the network, or give something on this machine"
        )
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then what caused it, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _kinds(error: BaseException) -> set[str]:
    # By name: the Hub's client has changed its HTTP library twice, and is not installed with the analysis alone.
    return {kind.__name__ for link in _chain(error) for kind in type(link).__mro__}


def _status(error: BaseException) -> int | None:
    for link in _chain(error):
        response = getattr(link, "response", None)
        status = getattr(response, "status_code", None) or getattr(link, "status", None)
        if isinstance(status, int):
            return status
    return None
