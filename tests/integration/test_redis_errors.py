"""Messages when the server cannot be reached, refuses access, or cannot be trusted."""

import socketserver
import sys
import threading

import pytest
from integration.redis_parts import assert_equal, close_stores, flush, make_part, open_store
from integration.redis_server import running

from instruments.errors import ConfigError, UserError
from stages.accumulators.config import StoreConfig
from stages.accumulators.redis_connection import _warn_of_loss, check_store, connect


@pytest.fixture
def own_server(tmp_path):
    """A server that a test may stop, or whose settings it may change."""
    with running(tmp_path) as server:
        yield server
        close_stores()


@pytest.fixture(scope="module")
def locked_server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("locked"), "--requirepass", "s3same") as server:
        yield server


def refusal(url, **settings):
    with pytest.raises(UserError) as caught:
        check_store(StoreConfig("redis", url=url, **settings))
    return caught


def test_a_local_store_asks_no_server(monkeypatch):
    monkeypatch.setattr(
        "stages.accumulators.redis_connection.connect", lambda _store: pytest.fail("a server was asked")
    )
    check_store(StoreConfig())


@pytest.mark.parametrize(
    "url", ["localhost:6379", "http://me:s3same@host/0", "redis://me:s3same@host:many/0", "redis://[::1",
            "redis://127.0.0.1?socket_timeout=soon", "redis://127.0.0.1/one", "redis://127.0.0.1/1/2", None]
)  # fmt: skip
def test_no_address(url, monkeypatch):
    monkeypatch.delenv("TINY_ONN_REDIS_URL", raising=False)
    caught = refusal(url)
    assert caught.type is ConfigError
    assert caught.value.where == ("setting store.url" if url else "settings store.url and TINY_ONN_REDIS_URL")
    assert "s3same" not in str(caught.value)


def test_options_of_a_url_change_neither_numbers_nor_keys(server):
    store = open_store(f"{server.url}?decode_responses=true&db=3")
    flush(store, 0, 1)
    assert_equal(store.collect(), make_part(0, 1))
    assert store.place.startswith(f"Redis at 127.0.0.1:{server.port}, database 3, ")
    assert store.client.info("keyspace").keys() == {"db3"}


def test_an_option_that_is_none(server):
    assert refusal(f"{server.url}?ssl_ca_cert=ca.pem").type is ConfigError


def test_the_package_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    caught = refusal("redis://localhost")
    assert caught.type is ConfigError
    assert caught.value.do == "pip install redis, or store=local"


def test_nobody_answers(monkeypatch):
    monkeypatch.setattr("redis.retry.sleep", lambda _seconds: None)
    error = refusal("redis://me@127.0.0.1:9/2").value
    assert error.what.startswith("the Redis server cannot be reached: ")
    assert error.where == "Redis at 127.0.0.1:9, database 2"
    assert "without fresh=true: it goes on from the last flush" in error.do


def test_an_answer_that_is_nested_without_end():
    class Nest(socketserver.BaseRequestHandler):
        def handle(self):
            while self.request.recv(4096):
                self.request.sendall(b"*1\r\n" * 50_000 + b":1\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Nest) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        error = refusal(f"redis://127.0.0.1:{server.server_address[1]}/0").value
        server.shutdown()
    assert error.what.startswith("the server's answer is nested too deeply")
    assert error.do == "store.url of a Redis server"


def test_the_server_goes_away_for_good(own_server, monkeypatch):
    monkeypatch.setattr("stages.accumulators.redis_connection.RUNNING_TRIES", 2)
    store = open_store(own_server.url)
    own_server.stop()
    store.sums.add(make_part(0))
    with pytest.raises(UserError) as caught:
        store.flush()
    assert caught.value.what.startswith("the Redis server cannot be reached: Error 111 connecting to 127.0.0.1:")
    own_server.start()
    store.flush()
    assert_equal(store.collect(), make_part(0))


@pytest.mark.parametrize("login", ["", ":s3sama@"])
def test_no_password_or_a_wrong_one(locked_server, login, monkeypatch):
    monkeypatch.delenv("TINY_ONN_REDIS_PASSWORD", raising=False)
    monkeypatch.setattr("redis.retry.sleep", lambda _seconds: pytest.fail("a wrong password was tried again"))
    monkeypatch.setenv("TINY_ONN_REDIS_URL", f"redis://{login}127.0.0.1:{locked_server.port}")
    error = refusal(None).value
    assert error.what.startswith("the Redis server denies access: ")
    assert "TINY_ONN_REDIS_PASSWORD" in error.do
    assert "s3sam" not in str(error)


@pytest.mark.parametrize(("url_in_environment", "login"), [(True, ""), (True, ":s3same@"), (False, "")])
def test_the_right_password(locked_server, monkeypatch, url_in_environment, login):
    url = f"redis://{login}127.0.0.1:{locked_server.port}/1"
    if not login:
        monkeypatch.setenv("TINY_ONN_REDIS_PASSWORD", "s3same")
    if url_in_environment:
        monkeypatch.setenv("TINY_ONN_REDIS_URL", url)
    client, place = connect(StoreConfig("redis", url=None if url_in_environment else url))
    assert client.ping()
    assert place == f"Redis at 127.0.0.1:{locked_server.port}, database 1"
    client.close()


def follow(client, remedy):
    """Run the redis-cli command of a remedy."""
    client.execute_command(*remedy.partition("redis-cli ")[2].partition(")")[0].split())


def test_memory_is_full(own_server):
    store = flush(open_store(own_server.url), 0)
    store.collect()
    client = own_server.client()
    client.config_set("maxmemory", "1kb")
    store.sums.add(make_part(1))
    with pytest.raises(UserError) as caught:
        store.flush()
    assert caught.value.what.startswith("the Redis server's memory is full: ")
    assert caught.value.where == f"Redis at 127.0.0.1:{own_server.port}, database 0, namespace t:"
    follow(client, caught.value.do)
    store.flush()
    assert_equal(store.collect(), make_part(0, 1))


def test_memory_that_fills_up_between_commit_and_sums_loses_nothing(own_server):
    store = open_store(own_server.url)
    store.commit(make_part(0))
    own_server.client().config_set("maxmemory", "1kb")
    with pytest.raises(UserError, match="memory is full"):
        store.collect()
    own_server.client().config_set("maxmemory", "0")
    assert_equal(store.collect(), make_part(0))


def test_a_server_that_drops_keys(own_server):
    client = own_server.client()
    client.config_set("maxmemory", "100mb")
    for policy in ("noeviction", "volatile-lru"):
        client.config_set("maxmemory-policy", policy)
        check_store(StoreConfig("redis", url=own_server.url))
    client.config_set("maxmemory-policy", "allkeys-lfu")
    caught = refusal(own_server.url)
    assert caught.type is ConfigError
    assert "maxmemory-policy allkeys-lfu" in caught.value.what
    follow(client, caught.value.do)
    check_store(StoreConfig("redis", url=own_server.url))


def test_a_server_that_keeps_nothing_is_used_with_one_warning_and_a_cluster_is_not(tmp_path, caplog):
    with running(tmp_path, append_only=False) as server:
        _warn_of_loss.cache_clear()
        for _ in range(2):
            check_store(StoreConfig("redis", url=server.url))
    (message,) = caplog.messages
    assert message.startswith(f"Redis at 127.0.0.1:{server.port}, database 0 keeps no append-only file: ")
    with running(tmp_path / "cluster", "--cluster-enabled", "yes") as server:
        caught = refusal(server.url)
    assert caught.type is ConfigError
    assert "is a cluster" in caught.value.what


def test_a_user_with_just_the_rights_that_the_message_names_or_fewer(own_server, monkeypatch):
    monkeypatch.setenv("TINY_ONN_REDIS_PASSWORD", "pw")
    reading, keys = {"categories": ["+@read"], "commands": ["+info", "+ping"], "passwords": ["+pw"]}, ["t:*"]
    own_server.client().acl_setuser("guest", enabled=True, **reading)
    with pytest.raises(UserError, match=r"the Redis server refuses: .*permission"):
        open_store(own_server.url.replace("//", "//guest@"))
    reading["categories"] += ["+@write", "+@scripting"]
    own_server.client().acl_setuser("scan", enabled=True, keys=keys, **reading)
    store = flush(open_store(own_server.url.replace("//", "//scan@")), 0)
    assert_equal(store.collect(), make_part(0))
