"""The scenario of the test with valkey-glide, whose protocol is its default: PORT"""

import asyncio
import sys

from glide import Batch, GlideClient, GlideClientConfiguration, NodeAddress, ServerCredentials


async def main():
    addresses = [NodeAddress("127.0.0.1", int(sys.argv[1]))]
    credentials = ServerCredentials("secret")
    configuration = GlideClientConfiguration(
        addresses, credentials=credentials, request_timeout=20_000
    )
    client = await GlideClient.create(configuration)
    assert await client.ping() == b"PONG"
    for allowed, remaining in [(1, 2), (1, 1), (1, 0), (0, 0)]:
        reply = await client.custom_command(["TG.ACQUIRE", "per-user", "ann"])
        assert reply[:3] == [allowed, 3, remaining], reply
    named = await client.custom_command(["TG.PEEK", "per-user", "bob", "WITHNAMES"])
    assert named[b"remaining"] == 2, named
    for is_atomic in [True, False]:
        batch = Batch(is_atomic=is_atomic)
        for number in range(100):
            batch.custom_command(["TG.ACQUIRE", "wide", f"batch {is_atomic}"])
        replies = await client.exec(batch, raise_on_error=True)
        assert [reply[0] for reply in replies] == [1] * 100, replies
        assert replies[-1][2] == 1_000_000 - 100, replies
    await client.close()
    print("ok")


asyncio.run(main())
