"""What a Redis server's refusals mean and what to do about them. No text holds a password."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from redis import exceptions as refusals

from models.errors import ContractError, UserError

GO_ON = "then the same command again: it goes on from the last flush"


@contextmanager
def in_words(place: str) -> Iterator[None]:
    """Turn the client's exceptions into errors for the user.

    Args:
        place: the server, without its password.

    Raises:
        UserError: the server cannot be reached or refuses.
    """
    try:
        yield
    except refusals.RedisError as error:
        raise _explain(error, place) from error


def _explain(error: refusals.RedisError, place: str) -> UserError:
    explain = next((explain for kind, explain in _KINDS if isinstance(error, kind)), None)
    if explain:
        return explain(_first_line(error), place)
    code, _, rest = _first_line(error).partition(" ")
    return _CODES.get(code, _refused)(rest if code in _CODES else _first_line(error), place)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _no_login(text: str, place: str) -> UserError:
    do = "the right password in the environment's TINY_ONN_REDIS_PASSWORD, the user's name in store.url"
    return UserError(f"the Redis server does not let us in: {text}", where=place, do=do)


def _not_allowed(text: str, place: str) -> UserError:
    do = "a user with +@read +@write +@scripting +info +ping on the keys of store.namespace (ACL SETUSER)"
    return UserError(f"the Redis server's user may not do this: {text}", where=place, do=do)


def _full(_text: str, place: str) -> UserError:
    do = f"raise its maxmemory (redis-cli config set maxmemory 4gb) or delete old namespaces, {GO_ON}"
    return UserError("the Redis server's memory is full (maxmemory)", where=place, do=do)


def _replica(_text: str, place: str) -> UserError:
    return UserError("this Redis server is a read-only replica", where=place, do="store.url= of the primary server")


def _unreachable(text: str, place: str) -> UserError:
    do = f"start it (redis-server) or mend store.url, {GO_ON}"
    return UserError(f"the Redis server cannot be reached: {text}", where=place, do=do)


def _wrong_type(text: str, place: str) -> UserError:
    text, _, key = text.partition(" | key ")
    return UserError(
        f"a Redis key under the scan's namespace is of another type: {key or _without_script(text)}",
        where=place,
        do=f"delete or rename that key, {GO_ON}; or another store.namespace",
    )


def _without_script(text: str) -> str:
    return text.partition(" script: ")[0]


def _gone(key: str, place: str) -> UserError:
    return ContractError(
        f"sums that wait in Redis were deleted by somebody else: {_without_script(key)}",
        where=place,
        do="the same command with fresh=true, which starts the scan over",
    )


def _cannot_save(text: str, place: str) -> UserError:
    do = f"see the server's log (its disk may be full), {GO_ON}"
    return UserError(f"the Redis server does not take writes: {text}", where=place, do=do)


def _refused(text: str, place: str) -> UserError:
    do = f"see the server's log, {GO_ON}; or another store.namespace"
    return UserError(f"the Redis server refuses: {text.removeprefix('ERR ')}", where=place, do=do)


_Explain = Callable[[str, str], UserError]
# The first that fits: the client derives errors of login from errors of connection.
_KINDS: list[tuple[type[Exception], _Explain]] = [
    (refusals.AuthenticationError, _no_login),
    (refusals.AuthorizationError, _no_login),
    (refusals.NoPermissionError, _not_allowed),
    (refusals.OutOfMemoryError, _full),
    (refusals.ReadOnlyError, _replica),
    (refusals.ConnectionError, _unreachable),
    (refusals.TimeoutError, _unreachable),
]
_CODES: dict[str, _Explain] = {
    "WRONGTYPE": _wrong_type,
    "GONE": _gone,
    "OOM": _full,
    "MISCONF": _cannot_save,
    "NOAUTH": _no_login,
}
