-- Fixed window from the first request on, as rate-limiter-flexible documents it: each request, also
-- a denied one, increments a counter, and the client compares. Our own script.
-- KEYS: the counter. ARGV: points, window in seconds. Returns the count and its time to live.
redis.call('SET', KEYS[1], 0, 'EX', ARGV[2], 'NX')
local count = redis.call('INCRBY', KEYS[1], ARGV[1])
return {count, redis.call('PTTL', KEYS[1])}
