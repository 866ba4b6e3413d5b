"""Whether the Hugging Face hub answers, found out once and quickly."""

from functools import cache
from threading import Thread
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from huggingface_hub import constants

# Remedy when the hub does not answer.
CONNECT = "connect once, or HF_ENDPOINT=https://<mirror> before the command"
# Seconds to wait for the hub; its own client would retry for half a minute.
HUB_TIMEOUT = 2.5
_UNREACHABLE_HUBS: set[str] = set()  # hubs that did not answer


def hub_answers() -> bool:
    """Whether the hub answers: tried once per process, and never if HF_HUB_OFFLINE is set."""
    if constants.HF_HUB_OFFLINE:
        return False
    if not _answers(constants.ENDPOINT):
        _UNREACHABLE_HUBS.add(constants.ENDPOINT)
        constants.HF_HUB_OFFLINE = True  # otherwise its client would try again by itself and wait 5 s
    return not constants.HF_HUB_OFFLINE


@cache
def _answers(address: str) -> bool:
    answers: list[bool] = []
    # In a thread, since socket timeouts do not end a DNS look-up.
    thread = Thread(target=lambda: answers.append(_ask(address)), daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT)
    return any(answers)


def _ask(address: str) -> bool:
    """Whether a server answers; an error of a gateway (5xx) is no answer."""
    try:
        urlopen(Request(address, method="HEAD"), timeout=HUB_TIMEOUT).close()
    except HTTPError as answer:
        answer.close()
        return answer.code < 500
    except (OSError, ValueError):
        return False
    return True


def offline_by_choice() -> bool:
    """Whether the user set offline mode, and not `hub_answers` because the hub did not answer."""
    return bool(constants.HF_HUB_OFFLINE) and constants.ENDPOINT not in _UNREACHABLE_HUBS
