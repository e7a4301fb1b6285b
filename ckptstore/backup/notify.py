"""Telling others how a job went: pings (healthchecks.io and what works like it), notifications.

Neither ever changes how the job ends. What goes wrong is a sentence for stderr that names the
environment variable, and never the URL, which is a secret.
"""

from __future__ import annotations

import http.client
import logging
import os
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit, urlunsplit

from ckptstore.version import __version__

PING_SECONDS = 10.0
"""A ping that takes longer has failed."""

_TRIES = 3
_PAUSE_SECONDS = 1.0


def ping(
    variable: str,
    suffix: str = "",
    body: str = "",
    *,
    environment: Mapping[str, str] | None = None,
    pause: float = _PAUSE_SECONDS,
) -> str | None:
    """Ping the URL that a variable holds.

    Args:
        variable: The environment variable.
        suffix: ``start``, an exit code, or nothing for success; added to the URL's path.
        body: What is sent along, without secrets.
        environment: Instead of this process's.
        pause: Seconds before another try, and twice as long before the third.

    Returns:
        What went wrong, as a sentence; ``None`` when nothing did.
    """
    environment = os.environ if environment is None else environment
    url = environment.get(variable, "").strip()
    if not url:
        return f"nothing is pinged: {variable} is not set"
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            return f"nothing is pinged: what {variable} holds is no http URL"
        path = f"{parts.path.rstrip('/')}/{suffix}" if suffix else parts.path
        request = urllib.request.Request(  # noqa: S310 - the scheme was looked at
            urlunsplit(parts._replace(path=path)),
            data=body.encode("utf-8", "replace")[:10_000],
            headers={"User-Agent": f"ckptstore/{__version__}", "Content-Type": "text/plain"},
        )
    except ValueError:
        return f"nothing is pinged: what {variable} holds is no http URL"
    problem = None
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(pause * attempt)
        problem, again = _send(request)
        if problem is None or not again:
            break
    return f"the ping by {variable} failed: {problem}" if problem else None


def _send(request: urllib.request.Request) -> tuple[str | None, bool]:
    """What went wrong, and whether another try may help. A reason never holds the URL."""
    try:
        with urllib.request.urlopen(request, timeout=PING_SECONDS) as answer:  # noqa: S310
            answer.read(1000)
    except urllib.error.HTTPError as error:
        error.close()
        return f"the server said {error.code}", error.code >= 500 or error.code == 429
    except urllib.error.URLError as error:
        reason = error.reason
        said = reason.strerror if isinstance(reason, OSError) and reason.strerror else None
        return said or f"no connection ({type(reason).__name__})", True
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"no answer ({type(error).__name__})", True
    return None, False


def notify(
    variables: Sequence[str],
    title: str,
    body: str,
    *,
    failed: bool,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Send a message to every URL that the variables hold, in Apprise's spelling.

    A variable may hold several URLs, with spaces between them: ``json://host/hook`` (a webhook),
    ``mailto://user:password@example.org``, ``slack://…`` and a hundred others.

    Returns:
        What went wrong, a sentence for each variable.
    """
    environment = os.environ if environment is None else environment
    problems = []
    for variable in variables:
        urls = environment.get(variable, "").strip()
        if not urls:
            problems.append(f"nobody is notified: {variable} is not set")
            continue
        problem = _notify_one(urls, title, body, failed)
        if problem is not None:
            problems.append(f"the notification by {variable} failed: {problem}")
    return problems


def _notify_one(urls: str, title: str, body: str, failed: bool) -> str | None:
    with _silent("apprise"):
        try:
            import apprise

            sender = apprise.Apprise()
            if not sender.add(urls) or not len(sender):
                return "it holds no URL that Apprise understands"
            kind = apprise.NotifyType.FAILURE if failed else apprise.NotifyType.SUCCESS
            form = apprise.NotifyFormat.TEXT
            sent = sender.notify(body=body, title=title, notify_type=kind, body_format=form)
        except ImportError:
            return "the package apprise is missing (pip install 'ckptstore[backup]')"
        except Exception as error:  # noqa: BLE001 - plugins raise what they like
            return type(error).__name__  # its text may hold the URL
    return None if sent else "it was not sent"


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """A package whose messages may name URLs says nothing meanwhile."""
    logger = logging.getLogger(name)
    before = logger.disabled
    logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = before
