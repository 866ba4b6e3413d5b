"""Connection to the configured Redis server, and checks that it can hold sums."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from instruments.errors import ConfigError, ContractError, UserError
from stages.accumulators.config import START_OVER, StoreConfig, find_password
from stages.artifacts.job import GO_ON

if TYPE_CHECKING:
    from redis import Redis

URL, PASSWORD = "TINY_ONN_REDIS_URL", "TINY_ONN_REDIS_PASSWORD"
# In seconds; the numbers of tries, with growing waits, take three seconds at the start and a minute during a scan.
ANSWER_WITHIN, LONGEST_WAIT = 30, 2.0
OPENING_TRIES, RUNNING_TRIES = 5, 33

logger = logging.getLogger(__name__)


def connect(store: StoreConfig) -> tuple["Redis", str]:
    """A client of the checked server, and the server's name for messages.

    After a lost connection the client retries for about a minute, so that the server may execute a command twice.

    Raises:
        ConfigError: no server is named, its URL is wrong, its settings lose keys, or the package redis is missing.
        UserError: the server cannot be reached or denies access.
    """
    url = _find_url(store)
    place = place_of(url)
    if find_spec("redis") is None:
        what = "store.kind=redis needs the package redis, which is not installed"
        raise ConfigError(what, where="setting store.kind", do="pip install -e '.[redis]', or store=local")

    try:
        with in_words(place):
            _check_server(url, place)
        return _client(url, RUNNING_TRIES), place
    except (TypeError, ValueError) as error:  # a query option of the URL
        what = f"store.url has an option that the package redis does not know: {error}"
        raise ConfigError(
            what, where="setting store.url", do="its options as redis.Redis.from_url describes them"
        ) from error


def check_store(store: StoreConfig) -> None:
    """Check that the store is usable, before any weights are loaded. Raises UserError as `connect` does."""
    if store.kind == "redis":
        connect(store)[0].close()


def place_of(url: str) -> str:
    """The server's name for messages, without user and password."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"Redis at {parts.path}"
    # The option db has precedence over the path.
    database = parse_qs(parts.query).get("db", [parts.path.strip("/") or "0"])[0]
    return f"Redis at {parts.hostname or 'localhost'}:{parts.port or 6379}, database {database}"


def _find_url(store: StoreConfig) -> str:
    url = store.url or os.environ.get(URL)
    if not url:
        what = "store.kind=redis names no server"
        raise ConfigError(what, where=f"settings store.url and {URL}", do="store.url=redis://localhost:6379/0")
    if not _is_address(url):
        what = "store.url is no Redis address"  # not shown: it may contain a password
        where = "setting store.url" if store.url else f"environment {URL}"
        raise ConfigError(
            what, where=where, do="store.url=redis://localhost:6379/0, or one that begins with rediss:// or unix://"
        )
    return url


def _is_address(url: str) -> bool:
    try:
        # An open bracket raises ValueError, and so does a port that is no number.
        parts = urlsplit(url)
        if parts.scheme == "unix":
            return bool(parts.path)
        database = parts.path.strip("/")
        named = parts.port is not None or bool(parts.hostname)
        return parts.scheme in {"redis", "rediss"} and named and (not database or database.isdecimal())
    except ValueError:
        return False


def _client(url: str, tries: int) -> "Redis":
    from redis import Redis  # noqa: PLC0415 - an extra
    from redis import exceptions as refusals  # noqa: PLC0415
    from redis.backoff import ExponentialBackoff  # noqa: PLC0415
    from redis.retry import Retry  # noqa: PLC0415

    client = Redis.from_url(
        url,
        password=find_password(url) or os.environ.get(PASSWORD),  # a password in the URL has precedence
        socket_timeout=ANSWER_WITHIN,
        socket_connect_timeout=5,
        health_check_interval=30,
        retry=Retry(ExponentialBackoff(cap=LONGEST_WAIT, base=0.05), tries),
        retry_on_error=[refusals.ConnectionError, refusals.TimeoutError, refusals.BusyLoadingError],
    )
    # Answers hold packed numbers, which are no text, even if the URL asks for text.
    client.connection_pool.connection_kwargs["decode_responses"] = False
    return client


def _check_server(url: str, place: str) -> None:
    from redis import exceptions as refusals  # noqa: PLC0415 - an extra

    # A wrong password fails at once; only errors that may be temporary are retried.
    try:
        info = _info(url, 0)
    except (refusals.AuthenticationError, refusals.AuthorizationError):
        raise
    except refusals.BusyLoadingError:
        logger.info("%s is loading its data", place)
        info = _info(url, RUNNING_TRIES)
    except refusals.ConnectionError:
        info = _info(url, OPENING_TRIES)
    policy, limit = str(info.get("maxmemory_policy", "noeviction")), int(str(info.get("maxmemory", 0)))
    if limit and policy.startswith("allkeys"):
        what = f"the Redis server drops keys when its memory is full (maxmemory-policy {policy}): sums would vanish"
        raise ConfigError(what, where=place, do="redis-cli config set maxmemory-policy noeviction")
    if info.get("cluster_enabled"):
        what = "the Redis server is a cluster: a flush must be one transaction on one server"
        raise ConfigError(what, where=place, do="store.url= of a single server")
    if not info.get("aof_enabled"):
        _warn_of_loss(place)


@cache  # one warning per server
def _warn_of_loss(place: str) -> None:
    what = "%s keeps no append-only file: if it stops, batches since its last snapshot are scanned again. %s"
    # The first command lasts until the server restarts, the second writes it to the server's configuration file.
    logger.warning(what, place, "To change that: redis-cli config set appendonly yes; redis-cli config rewrite")


def _info(url: str, tries: int) -> dict[str, object]:
    with _client(url, tries) as client:
        return dict(client.info())


@contextmanager
def in_words(place: str) -> Iterator[None]:
    """Turn the client's exceptions into errors for the user; `place` is the server, without its password.

    Raises:
        UserError: the server cannot be reached or refuses.
    """
    from redis import exceptions as refusals  # noqa: PLC0415 - an extra

    try:
        yield
    except refusals.RedisError as error:
        raise _explain(error, place) from error


def _explain(error: Exception, place: str) -> UserError:
    line = (str(error).splitlines() or [type(error).__name__])[0]
    code, _, rest = line.partition(" ")
    names = {base.__name__ for base in type(error).__mro__}
    kind = next((code for name, code in _KINDS.items() if name in names), code)
    text = (rest if kind == code and code in _REFUSALS else line).partition(" script: ")[0]
    if kind == "WRONGTYPE":  # errors of the scripts name the key
        text = text.partition(" | key ")[2] or text
    what, do = _REFUSALS.get(kind, _UNKNOWN)
    make = ContractError if kind in {"GONE", "CHANGED"} else UserError  # somebody else changed the sums
    return make(what.format(text.removeprefix("ERR ")), where=place, do=do)


# By class name, because the package is an extra; the first match counts, because authentication errors are subclasses
# of connection errors.
_KINDS = {
    "AuthenticationError": "NOAUTH",
    "AuthorizationError": "NOAUTH",
    "NoPermissionError": "NOPERM",
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "ConnectionError": "GONE AWAY",
    "TimeoutError": "GONE AWAY",
}
_REFUSALS = {
    "NOAUTH": (
        "the Redis server denies access: {}",
        "the right password in the environment's TINY_ONN_REDIS_PASSWORD, the user's name in store.url",
    ),
    "NOPERM": (
        "the Redis server's user may not do this: {}",
        "a user with +@read +@write +@scripting +info +ping on the keys of store.namespace (ACL SETUSER)",
    ),
    "OOM": (
        "the Redis server's memory is full (maxmemory)",
        f"raise its maxmemory (redis-cli config set maxmemory 4gb) or delete old namespaces, {GO_ON}",
    ),
    "READONLY": ("this Redis server is a read-only replica", "store.url= of the primary server"),
    "GONE AWAY": ("the Redis server cannot be reached: {}", f"start it (redis-server) or correct store.url, {GO_ON}"),
    "MISCONF": ("the Redis server does not take writes: {}", f"see the server's log (its disk may be full), {GO_ON}"),
    "WRONGTYPE": (
        "a Redis key under the scan's namespace is of another type: {}",
        f"{START_OVER}; or another store.namespace",
    ),
    "GONE": ("sums that wait in Redis were deleted by somebody else: {}", START_OVER),
    "CHANGED": ("sums in Redis were changed by somebody else: {}", START_OVER),
}
_UNKNOWN = "the Redis server refuses: {}", f"see the server's log, {GO_ON}; or another store.namespace"
