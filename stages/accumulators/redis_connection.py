"""Connection to the configured Redis server, and checks that it can hold sums."""

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from instruments.errors import ConfigError, ContractError, UserError, redact
from stages.accumulators.config import START_OVER, StoreConfig
from stages.artifacts.job import GO_ON

if TYPE_CHECKING:
    from redis import Redis

URL, PASSWORD = "TINY_ONN_REDIS_URL", "TINY_ONN_REDIS_PASSWORD"
# In seconds; the numbers of tries, with growing waits, take three seconds at the start and a minute during a scan.
ANSWER_WITHIN, LONGEST_WAIT = 30, 2.0
OPENING_TRIES, RUNNING_TRIES = 5, 33

logger = logging.getLogger(__name__)


def connect(store: StoreConfig) -> tuple["Redis", str]:
    """A client of the checked server, and the server's name for messages, without user and password.

    After a lost connection the client retries for about a minute, so that the server may execute a command twice.

    Raises:
        ConfigError: no server is named, its URL is wrong, its settings lose keys, or the package redis is missing.
        UserError: the server cannot be reached or denies access.
    """
    url = store.url or os.environ.get(URL)
    if not url:
        what = "store.kind=redis names no server"
        raise ConfigError(what, where=f"settings store.url and {URL}", do="store.url=redis://localhost:6379/0")
    if store.url and redact(store.url) != store.url:
        what = "the address of the Redis server has a password: others can see command lines, and files with settings"
        do = f"{PASSWORD}=... in the environment, and the address {redact(store.url)}"
        raise ConfigError(what, where="setting store.url", do=do)
    if find_spec("redis") is None:
        what = "store.kind=redis needs the package redis, which is not installed"
        raise ConfigError(what, where="setting store.kind", do="pip install redis, or store=local")
    try:
        client = _client(url, OPENING_TRIES)
        server = client.connection_pool.connection_kwargs
        named = server.get("path") or f"{server.get('host', 'localhost')}:{server.get('port', 6379)}"
        place = f"Redis at {named}, database {server.get('db', 0)}"
        if "path" not in server and not ("0" + urlsplit(url).path.strip("/")).isdecimal():
            raise ValueError("the client would take another word than a number for database 0")
        with in_words(place), client:
            _check_server(client.info(), place)
        return _client(url, RUNNING_TRIES), place
    except (TypeError, ValueError) as error:  # not shown: it may contain a password
        what = "store.url is no Redis address, or has an option that the package redis does not know"
        do = "store.url=redis://localhost:6379/0, or one as redis.Redis.from_url describes them"
        raise ConfigError(what, where="setting store.url" if store.url else f"environment {URL}", do=do) from error


def check_store(store: StoreConfig) -> None:
    """Check that the store is usable, before any weights are loaded. Raises UserError as `connect` does."""
    if store.kind == "redis":
        connect(store)[0].close()


def _client(url: str, tries: int) -> "Redis":
    import redis  # noqa: PLC0415 - an extra
    from redis.backoff import ExponentialBackoff  # noqa: PLC0415
    from redis.retry import Retry  # noqa: PLC0415

    class UnlessDenied(Retry):
        """Another try gives a wrong password no access; the client's nested tries take twenty seconds."""

        def call_with_retry(self, do: Callable[[], Any], *rest: Any, **more: Any) -> Any:  # noqa: ANN401 - any version's
            denials = []

            def once() -> Any:  # noqa: ANN401
                try:
                    return do()
                except (redis.AuthenticationError, redis.exceptions.AuthorizationError) as denial:
                    return denials.append(denial)

            result = super().call_with_retry(once, *rest, **more)
            if denials:
                raise denials[0]
            return result

    client = redis.Redis.from_url(
        url,
        password=os.environ.get(PASSWORD),  # a password in the URL has precedence
        socket_timeout=ANSWER_WITHIN,
        socket_connect_timeout=5,
        health_check_interval=30,
        retry=UnlessDenied(ExponentialBackoff(cap=LONGEST_WAIT, base=0.05), tries),
        retry_on_error=[redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError],
    )
    # Answers hold packed numbers, which are no text, even if the URL asks for text.
    client.connection_pool.connection_kwargs["decode_responses"] = False
    return client


def _check_server(info: dict[str, Any], place: str) -> None:
    policy = str(info.get("maxmemory_policy"))
    if info.get("maxmemory") and policy.startswith("allkeys"):
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
    except (RedisError, RecursionError) as error:  # the client reads nested answers by recursion
        raise _explain(error, place) from error


# What Redis 6 puts before the error of a command in a script; Redis 7 names the script behind it.
_IN_SCRIPT = re.compile(r"(ERR )?(Error running script \(.*?\): )?@user_script: ?\d+: -?")


def _explain(error: Exception, place: str) -> UserError:
    line = (str(error).splitlines() or [type(error).__name__])[0].partition(" script: ")[0]
    line = _IN_SCRIPT.sub("", line).removeprefix("ERR ")
    # By class name, because the package is an extra; by the server's own words where the class says nothing.
    classes = {base.__name__ for base in type(error).__mro__}
    what, do = next((what, do) for kinds, what, do in _REFUSALS if kinds & classes or line.startswith((*kinds,)))
    make = ContractError if do == START_OVER else UserError
    return make(f"{what}: {line}", where=place, do=do)


_REFUSALS: list[tuple[set[str], str, str]] = [
    (
        {"AuthenticationError", "AuthorizationError"},
        "the Redis server denies access",
        "the right password in the environment's TINY_ONN_REDIS_PASSWORD, the user's name in store.url",
    ),
    (
        {"ConnectionError", "TimeoutError"},
        "the Redis server cannot be reached",
        f"start it (redis-server) or correct store.url, {GO_ON}",
    ),
    (
        {"OutOfMemoryError", "OOM"},
        "the Redis server's memory is full",
        f"raise its maxmemory (redis-cli config set maxmemory 4gb) or delete old namespaces, {GO_ON}",
    ),
    ({"WRONGTYPE", "hash value is not a float"}, "sums in Redis were changed by somebody else", START_OVER),
    ({"RecursionError"}, "the server's answer is nested too deeply for Redis", "store.url of a Redis server"),
    (
        {"RedisError"},
        "the Redis server refuses",
        f"see its log and the rights of its user (+@read +@write +@scripting +info +ping), {GO_ON}",
    ),
]
