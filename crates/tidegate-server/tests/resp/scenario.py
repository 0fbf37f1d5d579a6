"""The scenario of the test with redis-py: scenario.py PORT PROTOCOL"""

import sys

import redis

port, protocol = int(sys.argv[1]), int(sys.argv[2])


def connect(**options):
    return redis.Redis(
        port=port, protocol=protocol, decode_responses=True, socket_timeout=20, **options
    )


def numbers(reply):
    return list(reply.values()) if isinstance(reply, dict) else reply


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
reply = client.execute_command("TG.ACQUIRE", "per-user", "ann")
assert isinstance(reply, dict) == (protocol == 3), reply
assert numbers(reply)[:3] == [1, 3, 2], reply
assert numbers(client.execute_command("TG.PEEK", "per-user", "ann"))[:3] == [1, 3, 1]
assert numbers(client.execute_command("TG.REFUND", "per-user", "ann", "AGE", 9000))[:3] == [1, 3, 3]
assert numbers(client.execute_command("TG.REPORT", "per-user", "ann", "COST", 9))[:3] == [0, 3, 0]
denied = numbers(client.execute_command("TG.ACQUIRE", "per-user", "ann"))
assert denied[0] == 0 and denied[3] > 0, denied
assert numbers(client.execute_command("TG.RESET", "per-user", "ann"))[:3] == [1, 3, 3]
assert client.execute_command("CL.THROTTLE", "u", 1, 1, 3600) == [0, 2, 1, -1, 3600]
assert client.execute_command("THROTTLE", "w", 1, 1, 3600) == [1, 1, 0, 3600, 0]
try:
    client.execute_command("TG.ACQUIRE", "per-usr", "ann")
    raise AssertionError("an unknown policy is accepted")
except redis.ResponseError as error:
    assert "per-user" in str(error), error
try:
    client.pipeline().execute_command("PING").execute()
    raise AssertionError("there are no transactions")
except redis.ResponseError as error:
    assert "transaction=False" in str(error), error

with client.pipeline(transaction=False) as pipeline:
    for number in range(1000):
        pipeline.execute_command("TG.ACQUIRE", "wide", "pipeline")
    replies = [numbers(reply) for reply in pipeline.execute()]
assert all(reply[0] == 1 for reply in replies)
assert [reply[2] for reply in replies] == sorted((reply[2] for reply in replies), reverse=True)

# Reconnects: every connection of the pool is closed in between.
for round in range(20):
    client.connection_pool.disconnect()
    assert numbers(client.execute_command("TG.ACQUIRE", "wide", "reconnect"))[0] == 1
client.close()
print("ok")
