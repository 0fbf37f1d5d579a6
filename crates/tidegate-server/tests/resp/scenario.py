"""The scenario of the tests with redis-py and valkey-py: scenario.py PORT MODULE [PROTOCOL]

Without a protocol, the client chooses one.
"""

import importlib
import sys

port, name, protocol = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
redis = importlib.import_module(name)
options = {"protocol": int(protocol[0])} if protocol else {}


def connect(**more):
    return redis.Redis(port=port, decode_responses=True, socket_timeout=20, **options, **more)


try:
    connect().ping()
    raise AssertionError("no token is needed")
except redis.AuthenticationError as error:
    assert "auth.api_token" in str(error), error
try:
    connect(password="wrong").ping()
    raise AssertionError("a wrong token is accepted")
except redis.AuthenticationError as error:
    assert "WRONGPASS" in str(error) or "invalid username-password" in str(error), error

client = connect(password="secret", client_name="scenario")
assert client.ping()
assert client.client_getname() == "scenario"
assert client.readonly() and client.client_tracking_on()
assert client.execute_command("TG.ACQUIRE", "per-user", "ann")[:3] == [1, 3, 2]
assert client.execute_command("TG.PEEK", "per-user", "ann")[:3] == [1, 3, 1]
assert client.execute_command("TG.REFUND", "per-user", "ann", "AGE", 9000)[:3] == [1, 3, 3]
named = client.execute_command("TG.PEEK", "per-user", "ann", "WITHNAMES")
if isinstance(named, list):
    named = dict(zip(named[::2], named[1::2]))
assert (named["allowed"], named["limit"], named["remaining"]) == (1, 3, 2), named
assert client.execute_command("TG.REPORT", "per-user", "ann", "COST", 9)[:3] == [0, 3, 0]
denied = client.execute_command("TG.ACQUIRE", "per-user", "ann")
assert denied[0] == 0 and denied[3] > 0, denied
assert client.execute_command("TG.RESET", "per-user", "ann")[:3] == [1, 3, 3]
assert client.execute_command("CL.THROTTLE", "u", 1, 1, 3600) == [0, 2, 1, -1, 3600]
assert client.execute_command("THROTTLE", "w", 1, 1, 3600) == [1, 1, 0, 3600, 0]
assert "tg.acquire" in client.command(), "descriptions of the commands are read"
try:
    client.execute_command("TG.ACQUIRE", "per-usr", "ann")
    raise AssertionError("an unknown policy is accepted")
except redis.ResponseError as error:
    assert "per-user" in str(error), error

# A transaction is the default of a pipeline.
for options_of_pipeline in [{}, {"transaction": False}]:
    with client.pipeline(**options_of_pipeline) as pipeline:
        for number in range(1000):
            pipeline.execute_command("TG.ACQUIRE", "wide", f"pipeline {options_of_pipeline}")
        replies = pipeline.execute()
    assert len(replies) == 1000 and all(reply[0] == 1 for reply in replies)
    left = [reply[2] for reply in replies]
    assert left == sorted(left, reverse=True) and left[-1] == 1_000_000 - 1000, left
with client.pipeline() as pipeline:
    pipeline.execute_command("TG.ACQUIRE", "per-user", "aborted")
    pipeline.get("a")
    try:
        pipeline.execute()
        raise AssertionError("an unknown command is accepted")
    except redis.ResponseError as error:
        assert "unknown command" in str(error), error
assert client.execute_command("TG.PEEK", "per-user", "aborted")[2] == 2, "nothing was charged"

# Reconnects: every connection of the pool is closed in between.
for round in range(20):
    client.connection_pool.disconnect()
    assert client.execute_command("TG.ACQUIRE", "wide", "reconnect")[0] == 1
client.close()
print("ok")
