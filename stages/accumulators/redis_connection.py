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
    place = _place_of(url)
    if find_spec("redis") is None:
        what = "store.kind=redis needs the package redis, which is not installed"
        raise ConfigError(what, where="setting store.kind", do="pip install -e '.[redis]', or store=local")
    try:
        with in_words(place):
            _check_server(url, place)
        return _client(url, RUNNING_TRIES), place
    except (TypeError, ValueError) as error:  # a query option of the URL
        what = f"store.url has an option that the package redis does not know: {error}"
        do = "its options as redis.Redis.from_url describes them"
        raise ConfigError(what, where="setting store.url", do=do) from error


def check_store(store: StoreConfig) -> None:
    """Check that the store is usable, before any weights are loaded. Raises UserError as `connect` does."""
    if store.kind == "redis":
        connect(store)[0].close()


def _place_of(url: str) -> str:
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
    try:
        # An open bracket raises ValueError, and so does a port that is no number.
        parts = urlsplit(url)
        database = parts.path.strip("/")
        named = bool(parts.port is not None or parts.hostname) and (not database or database.isdecimal())
        usable = bool(parts.path) if parts.scheme == "unix" else named and parts.scheme in {"redis", "rediss"}
    except ValueError:
        usable = False
    if not usable:
        what = "store.url is no Redis address"  # not shown: it may contain a password
        do = "store.url=redis://localhost:6379/0, or one that begins with rediss:// or unix://"
        raise ConfigError(what, where="setting store.url" if store.url else f"environment {URL}", do=do)
    return url


def _client(url: str, tries: int) -> "Redis":
    import redis  # noqa: PLC0415 - an extra
    from redis.backoff import ExponentialBackoff  # noqa: PLC0415
    from redis.retry import Retry  # noqa: PLC0415

    client = redis.Redis.from_url(
        url,
        password=find_password(url) or os.environ.get(PASSWORD),  # a password in the URL has precedence
        socket_timeout=ANSWER_WITHIN,
        socket_connect_timeout=5,
        health_check_interval=30,
        retry=Retry(ExponentialBackoff(cap=LONGEST_WAIT, base=0.05), tries),
        retry_on_error=[redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError],
    )
    # Answers hold packed numbers, which are no text, even if the URL asks for text.
    client.connection_pool.connection_kwargs["decode_responses"] = False
    return client


def _check_server(url: str, place: str) -> None:
    import redis  # noqa: PLC0415 - an extra

    def ask(tries: int) -> dict[str, object]:
        with _client(url, tries) as client:
            return dict(client.info())

    # A wrong password fails at once; only errors that may be temporary are retried.
    try:
        info = ask(0)
    except (redis.AuthenticationError, redis.exceptions.AuthorizationError):
        raise
    except redis.BusyLoadingError:
        logger.info("%s is loading its data", place)
        info = ask(RUNNING_TRIES)
    except redis.ConnectionError:
        info = ask(OPENING_TRIES)
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


@contextmanager
def in_words(place: str) -> Iterator[None]:
    """Turn the client's exceptions into errors for the user; `place` is the server, without its password.

    Raises:
        UserError: the server cannot be reached or refuses.
    """
    from redis import RedisError  # noqa: PLC0415 - an extra

    try:
        yield
    except RedisError as error:
        raise _explain(error, place) from error


def _explain(error: Exception, place: str) -> UserError:
    line = (str(error).splitlines() or [type(error).__name__])[0].partition(" script: ")[0].removeprefix("ERR ")
    text, _, key = line.partition(" | key ")  # errors of the scripts name the key
    # By class name, because the package is an extra; the server's own words where the class says nothing.
    names = [*(base.__name__ for base in type(error).__mro__), text.partition(" ")[0], text]
    kind = next((name for name in names if name in _REFUSALS), "")
    what, do = _REFUSALS.get(kind, _UNKNOWN)
    make = ContractError if kind == _NO_NUMBER else UserError
    return make(what.format(key or line.removeprefix(f"{kind} ")), where=place, do=do)


_DENIED = (
    "the Redis server denies access: {}",
    "the right password in the environment's TINY_ONN_REDIS_PASSWORD, the user's name in store.url",
)
_UNREACHABLE = ("the Redis server cannot be reached: {}", f"start it (redis-server) or correct store.url, {GO_ON}")
_UNKNOWN = ("the Redis server refuses: {}", f"see the server's log, {GO_ON}; or another store.namespace")
_NO_NUMBER = "hash value is not a float"
_REFUSALS = {
    "AuthenticationError": _DENIED,
    "AuthorizationError": _DENIED,
    "ConnectionError": _UNREACHABLE,
    "TimeoutError": _UNREACHABLE,
    "NoPermissionError": (
        "the Redis server's user may not do this: {}",
        "a user with +@read +@write +@scripting +info +ping on the keys of store.namespace (ACL SETUSER)",
    ),
    "OutOfMemoryError": (
        "the Redis server's memory is full (maxmemory)",
        f"raise its maxmemory (redis-cli config set maxmemory 4gb) or delete old namespaces, {GO_ON}",
    ),
    "ReadOnlyError": ("this Redis server is a read-only replica", "store.url= of the primary server"),
    "MISCONF": ("the Redis server does not take writes: {}", f"see the server's log (its disk may be full), {GO_ON}"),
    "WRONGTYPE": (
        "a Redis key under the scan's namespace is of another type: {}",
        f"{START_OVER}; or another store.namespace",
    ),
    _NO_NUMBER: ("sums in Redis were changed by somebody else: a field of {} is not a number", START_OVER),
}
